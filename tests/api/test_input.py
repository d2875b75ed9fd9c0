"""Prompts of every kind."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from octavo.text.output import RequestOutputBuilder
from octavo.text.request import RequestFactory
from octavo.types import Request
from tests.api.conftest import Api


@pytest.mark.parametrize("prompt", [[200000], [[1, 2], [999999]], [-1], [[1], [-7]]])
def test_input_01_ids_outside_the_vocabulary_are_refused(api: Api, prompt: object) -> None:
    assert api.completion(prompt=[100, 200], max_tokens=1).status_code == 200
    response = api.completion(prompt=prompt)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
    assert api.completion(prompt=[100, 200], max_tokens=1).status_code == 200


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None, ["ok", ""], [[1], []]])
def test_input_03_empty_prompts_are_refused(api: Api, prompt: object) -> None:
    response = api.completion(prompt=prompt)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
    api.alive()


@pytest.mark.parametrize("prompt", [["x", [1]], ["x", 1], [[1], 2], [1, "x"], {"a": 1}, 5, [1.5], [True], [[1], ["a"]]])
def test_input_05_mixed_prompts_are_refused(api: Api, prompt: object) -> None:
    response = api.completion(prompt=prompt)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"


def test_input_05_ids_are_taken_as_they_are(api: Api) -> None:
    ids = list(b"Hello world")
    by_ids = api.completion(prompt=ids, max_tokens=3).json()
    by_text = api.completion(prompt="Hello world", max_tokens=3).json()
    assert by_ids["usage"] == by_text["usage"] and by_ids["usage"]["prompt_tokens"] == len(ids)
    assert by_ids["choices"] == by_text["choices"]
    assert api.engine.seen[0].prompt == api.engine.seen[1].prompt == tuple(ids)
    two = api.completion(prompt=[ids, ids], max_tokens=3).json()
    assert [c["text"] for c in two["choices"]] == [by_ids["choices"][0]["text"]] * 2
    assert two["usage"]["prompt_tokens"] == 2 * len(ids)


def test_input_echo_of_ids_is_their_text(api: Api) -> None:
    answer = api.completion(prompt=list("né".encode()), echo=True, max_tokens=1).json()
    assert answer["choices"][0]["text"] == "néAlpha"


def test_input_at_most_1024_prompts(api: Api) -> None:
    response = api.completion(prompt=["a"] * 1025)
    assert response.status_code == 400 and "1024" in response.json()["error"]["message"]


def test_input_half_a_surrogate_pair_is_refused(api: Api) -> None:
    raw = b'{"model": "tiny", "prompt": "a\\ud800b"}'
    response = api.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
    whole = b'{"model": "tiny", "prompt": "\\ud83d\\ude42", "echo": true, "max_tokens": 1}'
    response = api.http.post("/v1/completions", content=whole, headers={"Content-Type": "application/json"})
    assert response.json()["choices"][0]["text"].startswith("🙂")


@pytest.mark.parametrize(
    "field, value", [("suffix", "end"), ("use_beam_search", True), ("prompt_embeds", "abc"), ("vllm_xargs", {"a": 1})]
)
def test_input_what_is_not_built_is_refused(api: Api, field: str, value: object) -> None:
    response = api.completion(**{field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field


def test_input_cache_salt_and_priority_reach_the_engine(api: Api) -> None:
    api.completion(max_tokens=1, cache_salt="mine", priority=3)
    assert (api.engine.seen[0].salt, api.engine.seen[0].priority) == ("mine", 3)
    assert api.completion(cache_salt="").status_code == 400


@pytest.mark.parametrize("field", ["priority", "top_k", "seed", "max_tokens", "min_tokens", "n", "logprobs"])
@pytest.mark.parametrize("value", [2**64, 10**30, -(2**63) - 1, 10**4000], ids=("64", "30", "least", "4000"))
def test_input_integers_that_no_engine_can_hold_are_refused(api: Api, field: str, value: int) -> None:
    raw = f'{{"prompt": "a", "{field}": {value}}}'
    response = api.http.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["param"] == field
    assert "64 bits" in response.json()["error"]["message"] and len(response.content) < 300


@pytest.mark.parametrize("field", ["bad_words", "stop"])
def test_input_long_strings_are_worked_on_beside_the_event_loop(
    api: Api, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    make, output = RequestFactory.make, RequestFactory.output

    def seen_make(self: RequestFactory, *args: Any, **kwargs: Any) -> Request:
        threads.add(threading.current_thread().name)
        return make(self, *args, **kwargs)

    def seen_output(self: RequestFactory, request: Request) -> RequestOutputBuilder:
        threads.add(threading.current_thread().name)
        return output(self, request)

    monkeypatch.setattr(RequestFactory, "make", seen_make)
    monkeypatch.setattr(RequestFactory, "output", seen_output)
    assert api.completion(max_tokens=1).status_code == 200
    loop = set(threads)
    threads.clear()
    assert len(loop) == 1
    assert api.completion(max_tokens=1, **{field: ["x" * 10_000 + str(i) for i in range(3)]}).status_code == 200
    assert threads and not threads & loop
