"""Who may ask, and from where: API keys and their limits, browsers."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx
import pytest

from octavo.config import ConfigError, EngineConfig
from tests.api.harness import GREEDY, ScriptEngine, parts_of, running, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDLESS = {**GREEDY, "prompt": "a", "max_tokens": 400, "ignore_eos": True}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_keys_have_so_many_requests_at_once() -> None:
    engine = ScriptEngine(pause=0.01)
    options = {"api_key": ("a", "b"), "max_num_reqs_per_key": 2}
    with running(parts_of(engine), **options) as url, httpx.Client(base_url=url, timeout=20) as http:
        opened = [http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}, headers=key("a")) for _ in "12"]
        lines = [stream.__enter__().iter_lines() for stream in opened]
        assert all(list(map(next, lines)))
        for body in ({**ENDLESS}, {**ENDLESS, "stream": True}):
            refused = http.post(COMPLETIONS, json=body, headers=key("a"))
            error = refused.json()["error"]
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "RateLimitError")
            assert "--max-num-reqs-per-key" in error["message"]
        small = {**GREEDY, "prompt": "a", "max_tokens": 1}
        assert http.post(COMPLETIONS, json=small, headers=key("b")).status_code == 200
        assert http.post("/tokenize", json={"prompt": "a"}, headers=key("a")).status_code == 200
        opened[0].__exit__(None, None, None)  # a client that goes away
        until(lambda: http.post(COMPLETIONS, json=small, headers={"X-Api-Key": "a"}).status_code == 200)
        opened[1].__exit__(None, None, None)


def test_no_way_out_of_a_request_is_counted_for_ever() -> None:
    engine = ScriptEngine(pause=0.005)
    options = {"api_key": ("a",), "max_num_reqs_per_key": 1}
    with running(parts_of(engine), **options) as url, httpx.Client(base_url=url, headers=key("a")) as http:
        chat = {**GREEDY, "messages": [{"role": "system", "content": "forbidden"}]}
        ends: list[tuple[str, dict[str, Any], int]] = [
            (COMPLETIONS, {**ENDLESS, "timeout": 0.05}, 408),
            (COMPLETIONS, {**ENDLESS, "prompt": [5] * 300, "max_tokens": 1}, 400),  # refused by the engine
            (COMPLETIONS, {**ENDLESS, "prompt": [5] * 300, "max_tokens": 1, "stream": True}, 400),
            (COMPLETIONS, {**ENDLESS, "prompt": ""}, 400),
            (CHAT, chat, 400),
            (CHAT, {**chat, "stream": True}, 400),
            (COMPLETIONS, {**ENDLESS, "max_tokens": 1}, 200),
        ]
        for path, body, status in ends * 2:
            assert http.post(path, json=body).status_code == status
        engine.fail_after = 1
        assert http.post(COMPLETIONS, json=ENDLESS).status_code == 500
        assert http.post(COMPLETIONS, json={**ENDLESS, "stream": True}).status_code == 200
        engine.fail_after = None
        with pytest.raises(httpx.ReadTimeout):
            http.post(COMPLETIONS, json=ENDLESS, timeout=0.05)
        until(lambda: not engine.live)
        with http.stream("POST", COMPLETIONS, json={**ENDLESS, "stream": True}) as response:
            next(response.iter_lines())
        until(lambda: http.post(COMPLETIONS, json={**ENDLESS, "max_tokens": 1}).status_code == 200)
        assert http.get("/load").json() == {"server_load": 0}


def test_many_at_once_never_get_past_the_limit() -> None:
    engine = ScriptEngine(pause=0.01)
    statuses: list[int] = []
    most = 0
    with running(parts_of(engine), api_key=("a",), max_num_reqs_per_key=3) as url:

        def ask() -> None:
            body = {**ENDLESS, "prompt": "a" * 200, "max_tokens": 30}
            statuses.append(httpx.post(url + COMPLETIONS, json=body, headers=key("a"), timeout=20).status_code)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, len(engine.live))
    assert set(statuses) == {200, 429} and most == 3


def test_limits_by_key_need_keys() -> None:
    with pytest.raises(ConfigError, match="max_num_reqs_per_key.*api_key"):
        EngineConfig(max_num_reqs_per_key=3)


ORIGIN = "http://a.example"


def preflight(url: str, path: str = COMPLETIONS, **headers: str) -> httpx.Response:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", **headers}
    return httpx.options(url + path, headers=asked)


def test_browsers_may_ask_before_they_have_a_key() -> None:
    with running(parts_of(ScriptEngine()), allowed_origins=(ORIGIN,), api_key=("k",)) as url:
        for path in (COMPLETIONS, "/v1/models", "/nothing"):
            answer = preflight(url, path, **{"Access-Control-Request-Headers": "authorization,content-type"})
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert httpx.options(url + COMPLETIONS).status_code == 401  # no browser's question
        assert httpx.options(url + COMPLETIONS, headers=key("k")).headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path, body, status, headers",
    [
        (COMPLETIONS, {"prompt": "a"}, 401, {}),
        (COMPLETIONS, {"prompt": ""}, 400, key("k")),
        (COMPLETIONS, {"prompt": "a" * 3000}, 413, key("k")),
        (COMPLETIONS, {"prompt": "a", "model": "x"}, 404, key("k")),
        ("/nothing", {}, 404, key("k")),
        ("/health", {}, 405, key("k")),
        (COMPLETIONS, {"prompt": "a"}, 500, key("k")),
        (COMPLETIONS, {"prompt": "a", "stream": True}, 500, key("k")),
    ],
)
def test_browsers_can_read_errors(path: str, body: dict[str, Any], status: int, headers: dict[str, str]) -> None:
    options = {"allowed_origins": (ORIGIN,), "api_key": ("k",), "max_request_bytes": 2000}
    with running(parts_of(ScriptEngine(fail_after=0)), **options) as url:
        answer = httpx.post(url + path, json=body, headers={"Origin": ORIGIN, **headers})
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    exposed = re.split(r",\s*", answer.headers["access-control-expose-headers"])
    assert {"X-Request-Id", "X-Octavo-Warnings", "Retry-After"} <= set(exposed)


def test_methods_headers_and_cookies_of_browsers() -> None:
    options: dict[str, Any] = {
        "allowed_origins": ("*",),
        "allowed_methods": ("GET", "POST"),
        "allowed_headers": ("X-Mine",),
        "allow_credentials": True,
    }
    with running(parts_of(ScriptEngine()), **options) as url:
        fine = preflight(url, **{"Access-Control-Request-Headers": "x-mine"})
        assert fine.status_code == 200 and fine.headers["access-control-allow-methods"] == "GET, POST"
        assert fine.headers["access-control-allow-credentials"] == "true"
        assert fine.headers["access-control-allow-origin"] == ORIGIN  # never * with cookies
        assert preflight(url, **{"Access-Control-Request-Headers": "x-other"}).status_code == 400
        assert preflight(url, **{"Access-Control-Request-Method": "DELETE"}).status_code == 400
        simple = httpx.get(f"{url}/health", headers={"Origin": ORIGIN, "Cookie": "a=b"})
        assert simple.headers["access-control-allow-origin"] == ORIGIN


def test_without_origins_browsers_get_nothing() -> None:
    with running(parts_of(ScriptEngine())) as url:
        assert "access-control-allow-origin" not in httpx.get(f"{url}/health", headers={"Origin": ORIGIN}).headers
        assert preflight(url).status_code == 204


@pytest.mark.parametrize(
    "method, path, status, allow",
    [
        ("HEAD", "/health", 200, None),
        ("HEAD", "/v1/models/tiny", 200, None),
        ("HEAD", COMPLETIONS, 405, "POST"),
        ("OPTIONS", "/health", 204, "GET, HEAD"),
        ("OPTIONS", "/ping", 204, "GET, HEAD, POST"),
        ("OPTIONS", "/nothing", 404, None),
        ("DELETE", "/v1/models/tiny", 405, "GET, HEAD"),
        ("PUT", CHAT, 405, "POST"),
        ("NONSENSE", "/docs", 405, "GET, HEAD"),
    ],
)
def test_methods(method: str, path: str, status: int, allow: str | None) -> None:
    with running(parts_of(ScriptEngine())) as url:
        answer = httpx.request(method, url + path)
    assert answer.status_code == status and answer.headers.get("allow") == allow
    if method != "HEAD" and status >= 400:
        assert answer.json()["error"]["code"] == status
    if method == "HEAD":
        assert not answer.content
