"""The ways to ask for several choices, for the prompt beside the answer, for its times; streamed or not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from octavo.types import Request
from tests.api.conftest import Api
from tests.api.harness import GREEDY, ScriptEngine, events_of, parts_of, running, until

COMPLETIONS = "/v1/completions"
PROMPTS: dict[str, Any] = {
    "text": "Hi é",
    "ids": [72, 105],
    "texts": ["Hi é", "you"],
    "lists of ids": [[72, 105], [106]],
}
JOINED = ("text", "token_ids")
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    found: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        whole = found.setdefault(part["index"], part)
        if whole is part:
            continue
        for name in JOINED:
            if name in part:
                whole[name] += part[name]
        if part["logprobs"]:
            for name in LISTS:
                whole["logprobs"][name] += part["logprobs"][name]
        assert "prompt_logprobs" not in part and "prompt_token_ids" not in part
        whole["finish_reason"], whole["stop_reason"] = part["finish_reason"], part["stop_reason"]
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"prompt_logprobs": 1, "return_token_ids": True}], ids=["", "all"])
def test_a_stream_says_what_a_whole_answer_says(
    api: Api, prompt: Any, echo: bool, logprobs: int | None, n: int, extra: dict[str, Any]
) -> None:
    body = {"prompt": prompt, "echo": echo, "logprobs": logprobs, "n": n, "temperature": 1, "seed": 4, **extra}
    body["max_tokens"] = 9
    whole = api.completion(**body).json()
    chunks = api.stream(COMPLETIONS, stream_options={"include_usage": True}, **body)
    assert joined(chunks) == whole["choices"]
    assert chunks[-1]["usage"] == whole["usage"]
    prompts = prompt if isinstance(prompt[0], (list, str)) and isinstance(prompt, list) else [prompt]
    assert [choice["index"] for choice in whole["choices"]] == list(range(n * len(prompts)))
    assert whole["usage"]["completion_tokens"] == 9 * n * len(prompts)
    for choice in whole["choices"]:
        given = prompts[choice["index"] // n]
        size = len(given.encode()) if isinstance(given, str) else len(given)
        text = given if isinstance(given, str) else bytes(given).decode()
        assert choice["text"].startswith(text) == echo
        if logprobs is not None:
            scored = choice["logprobs"]["token_logprobs"]
            assert len(scored) == 9 + (size if echo else 0) and (scored[0] is None) == echo
        assert (choice["logprobs"] is None) == (logprobs is None)
        if extra:
            assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"]) == size


def _longer_and_longer(request: Request, choice: int) -> list[int]:
    """Choice 0 is the longest, so the least probable one; the last is the shortest."""
    return [ord("a") + choice] * (4 - choice)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_returns_the_most_probable_choices(api: Api, logprobs: int | None) -> None:
    api.engine.script = _longer_and_longer
    body = {
        "prompt": ["x", "y"],
        "best_of": 4,
        "n": 2,
        "temperature": 1,
        "logprobs": logprobs,
        "return_token_ids": True,
    }
    answer = api.completion(**body).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "d"), (1, "cc"), (2, "d"), (3, "cc")]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [[120], [120], [121], [121]]
    assert answer["usage"]["completion_tokens"] == 2 * (4 + 3 + 2 + 1 + 4)  # all of them, and their ends
    for choice in answer["choices"]:
        assert (choice["logprobs"] is None) == (logprobs is None)
    assert len(api.engine.seen) == 2 and {request.n for request in api.engine.seen} == {4}


def test_best_of_as_many_as_are_returned_puts_them_in_order(api: Api) -> None:
    api.engine.script = _longer_and_longer
    body = {"prompt": "x", "best_of": 3, "n": 3, "temperature": 1, "echo": True, "prompt_logprobs": 0}
    choices = api.completion(**body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["xcc", "xbbb", "xaaaa"]
    assert all(choice["prompt_logprobs"] == [None] for choice in choices)


@pytest.mark.parametrize(
    "body, status",
    [
        ({"best_of": 1}, 200),
        ({"best_of": None}, 200),
        ({"best_of": 1, "stream": True}, 200),
        ({"best_of": 2}, 400),  # greedy
        ({"best_of": 2, "n": 3, "temperature": 1}, 400),
        ({"best_of": 0, "temperature": 1}, 400),
        ({"best_of": "2", "temperature": 1}, 400),
        ({"best_of": 2, "temperature": 1, "stream": True}, 400),
        ({"best_of": 100, "temperature": 1, "prompt": ["a"] * 1000}, 400),
    ],
)
def test_best_of_where_it_cannot_be(api: Api, body: dict[str, Any], status: int) -> None:
    response = api.completion(**{"max_tokens": 1, **body})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == "best_of"
    api.alive()


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
@pytest.mark.parametrize("as_option", [False, True])
def test_an_answer_that_takes_too_long_ends(path: str, as_option: bool) -> None:
    engine = ScriptEngine(pause=0.01)
    body: dict[str, Any] = {**GREEDY, "prompt": ["a", "b"], "max_tokens": 400, "ignore_eos": True}
    if path != COMPLETIONS:
        body = {**body, "prompt": None, "messages": [{"role": "user", "content": "a"}]}
    body["timeout"] = None if as_option else 0.25
    with running(parts_of(engine), request_timeout=0.25 if as_option else 60) as url:
        answer = httpx.post(url + path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 408
        assert (error["type"], error["code"], error["param"]) == ("TimeoutError", "timeout", "timeout")
        tokens = int(error["message"].split(", when ")[1].split()[0])
        assert 0 < tokens < 300 and "0.25 seconds" in error["message"]
        assert answer.headers["x-should-retry"] == "false"
        until(lambda: not engine.live)
        assert len(engine.aborts) == len(engine.seen)

        streamed = httpx.post(url + path, json={**body, "stream": True})
        events = events_of(streamed.text.split("\n"))
        assert streamed.status_code == 200 and "[DONE]" not in events and len(events) > 3
        last = httpx.Response(200, text=events[-1]).json()
        assert last["error"]["code"] == "timeout"
        until(lambda: not engine.live)
        assert httpx.get(f"{url}/load").json() == {"server_load": 0}
        done = httpx.post(url + path, json={**body, "max_tokens": 2})
        assert done.status_code == 200


def test_a_request_may_only_shorten_the_time_of_the_server() -> None:
    engine = ScriptEngine(pause=0.01)
    with running(parts_of(engine), request_timeout=0.2) as url:
        body = {**GREEDY, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "timeout": 100}
        answer = httpx.post(url + COMPLETIONS, json=body)
    assert answer.status_code == 408 and "0.2 seconds" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_usage_can_be_forced(path: str, options: Any) -> None:
    body = {**GREEDY, "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    del body["messages" if path == COMPLETIONS else "prompt"]
    with running(parts_of(ScriptEngine()), enable_force_include_usage=True) as url:
        text = httpx.post(url + path, json={**body, "stream": True, "stream_options": options}).text
        events = [httpx.Response(200, text=event).json() for event in events_of(text.split("\n"))[:-1]]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 2
    assert all(event["usage"] is None for event in events[:-1])


def test_times_of_a_request() -> None:
    engine = ScriptEngine(pause=0.02)
    with running(parts_of(engine), enable_per_request_metrics=True) as url:
        body = {**GREEDY, "prompt": "a", "max_tokens": 5, "ignore_eos": True}
        times = httpx.post(url + COMPLETIONS, json=body).json()["metrics"]
        one = httpx.post(url + COMPLETIONS, json={**body, "max_tokens": 1}).json()["metrics"]
        none = httpx.post(url + COMPLETIONS, json={**body, "max_tokens": 0, "echo": True}).json()["metrics"]
    assert times["generation_time_ms"] == pytest.approx(4 * times["mean_itl_ms"])
    total = times["time_to_first_token_ms"] + times["generation_time_ms"]
    assert times["tokens_per_second"] == pytest.approx(5 / total * 1000)
    assert times["mean_itl_ms"] >= 20 and times["time_to_first_token_ms"] >= 20
    assert one["mean_itl_ms"] is None and one["generation_time_ms"] == 0
    assert none["tokens_per_second"] is None


@pytest.mark.parametrize("asked, shown", [(None, "token_id:256"), (True, "token_id:256"), (False, "Alpha")])
def test_tokens_as_ids_can_be_the_default(asked: bool | None, shown: str) -> None:
    with running(parts_of(ScriptEngine()), return_tokens_as_token_ids=True) as url:
        body = {**GREEDY, "prompt": "a", "max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": asked}
        answer = httpx.post(url + COMPLETIONS, json=body).json()
    assert answer["choices"][0]["logprobs"]["tokens"] == [shown]
