"""The HTTP layer: errors, limits, headers."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import pytest

from tests.api.conftest import Api
from tests.api.harness import GREEDY, MAX_MODEL_LEN, MODEL, ScriptEngine, parts_of, running, until

BOTH = ("/v1/completions", "/v1/chat/completions")
JSON = {"Content-Type": "application/json"}


def error_of(response: httpx.Response) -> dict[str, object]:
    """The error of a response, which has OpenAI's form."""
    error: dict[str, object] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def test_http_01_unknown_models(api: Api) -> None:
    for response in (
        api.completion(model="no-such"),
        api.chat(model="no-such", stream=True),
        api.http.get("/v1/models/no-such"),
    ):
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "model_not_found" and MODEL in str(error["message"])
    for model in (None, ""):
        assert api.completion(model=model, max_tokens=1).json()["model"] == MODEL


def test_http_01_models(api: Api) -> None:
    [card] = api.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 512)
    assert api.http.get(f"/v1/models/{MODEL}").json() == card


@pytest.mark.parametrize("path", [*BOTH, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"\xff\xfe",
        b"{}x",
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
def test_http_03_malformed_bodies(api: Api, path: str, raw: bytes) -> None:
    response = api.http.post(path, content=raw, headers=JSON)
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
def test_http_03_deep_bodies(api: Api, opening: str, closing: str) -> None:
    def ask(levels: int, field: str) -> httpx.Response:
        deep = opening * levels + "1" + closing * levels
        message = '{"role": "user", "content": "<eos>", "name": "\\ud83d\\ude42"}'
        raw = f'{{"messages": [{message}], "max_tokens": 1, "{field}": {{"x": {deep}}}}}'
        return api.http.post(BOTH[1], content=raw, headers=JSON)

    for field in ("chat_template_kwargs", "metadata", "unknown"):
        assert ask(120, field).status_code == 200
        for levels in (127, 500, 900, 960):
            response = ask(levels, field)
            assert response.status_code == 400 and "nested too deeply" in str(error_of(response)["message"])


def test_http_03_errors_repeat_only_a_part_of_what_was_sent(api: Api) -> None:
    for response in (
        api.completion(model="m" * 100_000),
        api.completion(logit_bias={"9" * 4000: 1}),
        api.http.post(BOTH[0], content=b'{"' + b"k" * 50_000 + b'\\ud800": 1}', headers=JSON),
    ):
        error = error_of(response)
        assert len(response.content) < 8000
        assert "[…]" in str(error["message"])


def test_http_03_other_content_types(api: Api) -> None:
    raw = json.dumps({**GREEDY, "prompt": "a", "max_tokens": 1})
    response = api.http.post(BOTH[0], content=raw, headers={"Content-Type": "text/plain"})
    assert response.status_code == 400 and "application/json" in str(error_of(response)["message"])
    charset = api.http.post(BOTH[0], content=raw, headers={"Content-Type": "application/json; charset=utf-8"})
    assert charset.status_code == 200


def test_http_03_a_body_that_never_comes(api: Api) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST {BOTH[0]} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
            "Content-Type: application/json\r\n\r\n{".encode()
        )
    api.alive()


def test_http_03_unknown_paths_and_methods(api: Api) -> None:
    response = api.http.get("/v2/nothing")
    assert response.status_code == 404 and "/v1/completions" in str(error_of(response)["message"])
    response = api.http.get(BOTH[0])
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    error_of(response)


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"max_tokens": 100_000}, {"n": 0}, {"messages": [], "prompt": ""}]
)
def test_http_05_before_the_first_token_errors_are_plain_json(api: Api, path: str, wrong: dict[str, object]) -> None:
    body = {"stream": True, **wrong}
    response = api.completion(**body) if path == BOTH[0] else api.chat(**body)
    assert response.status_code == 400 and response.headers["content-type"] == "application/json"
    error_of(response)


@pytest.mark.parametrize("path", BOTH)
def test_http_05_after_the_first_token_an_error_is_an_event(api: Api, path: str) -> None:
    api.engine.fail_after = 3
    body = (
        {**GREEDY, "prompt": "a", "stream": True}
        if path == BOTH[0]
        else {**GREEDY, "messages": [{"role": "user", "content": "a"}], "stream": True}
    )
    response = api.http.post(path, json=body)
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert response.status_code == 200 and "[DONE]" not in events
    assert "not finite" in json.loads(events[-1])["error"]["message"]
    assert all("error" not in json.loads(event) for event in events[:-1])
    api.engine.fail_after = None
    api.alive()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BOTH)
def test_http_05_a_failed_row_is_a_500(api: Api, path: str, stream: bool) -> None:
    api.engine.fail_after = 0
    response = api.completion(stream=stream) if path == BOTH[0] else api.chat(stream=stream)
    assert response.status_code == 500 and "not finite" in str(error_of(response)["message"])


def test_http_07_max_completion_tokens_wins(api: Api) -> None:
    for body in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 9}):
        assert api.chat(ignore_eos=True, **body).json()["usage"]["completion_tokens"] == 5


def test_http_09_bodies_over_the_limit(api: Api) -> None:
    with running(parts_of(ScriptEngine()), max_request_bytes=1000) as url:
        for content in (b"x" * 1001, (b"x" * 500 for _ in range(3))):
            response = httpx.post(f"{url}{BOTH[0]}", content=content, headers=JSON)
            assert response.status_code == 413 and error_of(response)["code"] == "request_too_large"
        fits = httpx.post(f"{url}{BOTH[0]}", json={**GREEDY, "prompt": "a", "max_tokens": 1})
        assert fits.status_code == 200


@pytest.mark.parametrize("path", BOTH)
def test_http_09_other_requests_are_answered_while_a_huge_one_is_read(api: Api, path: str) -> None:
    text = "lorem ipsum " * 400_000
    body = {**GREEDY, "prompt": text, "messages": [{"role": "user", "content": text}]}
    del body["messages" if path == BOTH[0] else "prompt"]
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{api.url}{path}", json=body, timeout=60)))
    thread.start()
    while thread.is_alive():
        assert api.http.get("/health", timeout=5).status_code == 200
        thread.join(0.02)
    assert answers[0].status_code == 400 and "512" in str(error_of(answers[0])["message"])


def test_http_10_request_ids(api: Api) -> None:
    response = api.http.post(BOTH[0], json={**GREEDY, "prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine" and response.json()["id"] == "cmpl-mine"
    assert len(api.http.get("/health").headers["x-request-id"]) == 32
    long = "x" * 20_000
    response = api.http.post(
        BOTH[1],
        json={**GREEDY, "messages": [{"role": "user", "content": "a"}], "stream": True},
        headers={"X-Request-Id": long},
    )
    assert response.headers["x-request-id"] == "x" * 256 and len(response.content) < 50_000


def test_http_10_the_longest_request_id_is_not_in_every_chunk(api: Api) -> None:
    body = {**GREEDY, "prompt": "a", "stream": True, "max_tokens": 50, "ignore_eos": True}
    response = api.http.post(BOTH[0], json=body, headers={"X-Request-Id": "x" * 65536})
    assert response.status_code in (200, 400, 431) and len(response.content) < 50_000
    api.alive()


def test_sched_08_two_requests_may_have_one_id(api: Api) -> None:
    api.engine.pause = 0.002
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(
            httpx.post(
                f"{api.url}{BOTH[0]}",
                headers={"X-Request-Id": "id"},
                json={**GREEDY, "prompt": "a", "max_tokens": 20, "request_id": "id"},
            )
        )

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.json()["id"] for answer in answers] == ["cmpl-id"] * 2
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


def test_http_api_keys_close_everything_but_health() -> None:
    with running(parts_of(ScriptEngine()), api_key=("secret", "other")) as url, httpx.Client(base_url=url) as http:
        for path in ("/health", "/ping", "/version"):
            assert http.get(path).status_code == 200
        for path in (
            "/v1/models",
            "/metrics",
            "/nothing",
            "/load",
            "/docs",
            "/openapi.json",
            "/health/",
            "/v1/version",
        ):
            response = http.get(path)
            assert response.status_code == 401 and error_of(response)["code"] == "invalid_api_key"
        for wrong in ("Bearer wrong", "Bearer", "Basic secret", "secret", "Bearer sécret"):
            assert http.get("/v1/models", headers={"Authorization": wrong.encode()}).status_code == 401
        for header in ({"Authorization": "Bearer secret"}, {"Authorization": "bearer other"}, {"X-Api-Key": "secret"}):
            assert http.get("/v1/models", headers=header).status_code == 200


def test_http_api_keys_may_be_any_text() -> None:
    with running(parts_of(ScriptEngine()), api_key=("clé",)) as url:
        for key, status in (("clé".encode(), 200), ("clé".encode("latin-1"), 401), (b"x", 401)):
            response = httpx.get(f"{url}/v1/models", headers={"Authorization": b"Bearer " + key})
            assert response.status_code == status


def test_http_health_says_503_while_loading() -> None:
    loaded = threading.Event()
    with running(parts_of(ScriptEngine(), loaded), wait=False) as url, httpx.Client(base_url=url) as http:
        response = http.get("/health")
        assert response.status_code == 503 and "loading" in str(error_of(response)["message"])
        assert http.post(BOTH[0], json={}).status_code == 503 and "retry-after" in response.headers
        assert http.get("/version").status_code == 200
        loaded.set()
        until(lambda: http.get("/health").status_code == 200)


def test_http_busy_servers_say_503() -> None:
    engine = ScriptEngine(pause=0.01)
    with running(parts_of(engine), max_num_queued_reqs=1) as url, httpx.Client(base_url=url) as http:
        body = {**GREEDY, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", BOTH[0], json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert http.get("/load").json() == {"server_load": 1}
            second = httpx.post(f"{url}{BOTH[0]}", json={**body, "stream": False})
            assert second.status_code == 503 and "retry-after" in second.headers
        until(lambda: http.get("/load").json() == {"server_load": 0})


def test_http_cross_origin() -> None:
    with running(parts_of(ScriptEngine()), allowed_origins=("http://a.example",), api_key=("k",)) as url:
        preflight = httpx.options(
            f"{url}{BOTH[0]}", headers={"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        )
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "http://a.example"
        other = httpx.get(f"{url}/health", headers={"Origin": "http://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_text_of_any_length_is_not_tokenized(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    most = MAX_MODEL_LEN * len("<|endoftext|>") * 4
    monkeypatch.setattr("octavo.api.tokenize.MAX_CHARACTERS", most + 1)
    assert api.http.post("/tokenize", json={"prompt": "a" * (most + 1)}).json()["count"] == most + 1
    refused = api.http.post("/tokenize", json={"prompt": "a" * (most + 2)})
    assert refused.status_code == 400 and "in parts" in refused.json()["error"]["message"]
