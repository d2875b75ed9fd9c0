"""Several choices, and seeds."""

from __future__ import annotations

import pytest

from tests.api.conftest import Api, text_of


def test_seed_03_without_a_seed_each_request_gets_its_own(api: Api) -> None:
    for _ in range(4):
        assert api.completion(temperature=1, max_tokens=2).status_code == 200
    assert len({request.seed for request in api.engine.seen}) == 4


def test_seed_03_a_seed_makes_choices_repeatable_and_different(api: Api) -> None:
    body = {"temperature": 1, "seed": 7, "n": 4, "max_tokens": 8}
    first = [choice["text"] for choice in api.completion(**body).json()["choices"]]
    again = [choice["text"] for choice in api.completion(**body).json()["choices"]]
    assert first == again and len(set(first)) > 1
    assert {request.seed for request in api.engine.seen} == {7}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_seed_04_streamed_choices_carry_their_index(api: Api, path: str) -> None:
    body = {"temperature": 1, "seed": 5, "n": 2, "max_tokens": 30}
    whole = (api.completion(**body) if path.endswith("/v1/completions") else api.chat(**body)).json()["choices"]
    chunks = api.stream(path, **body)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1}
    for index in range(2):
        choice = whole[index]
        assert choice["index"] == index
        assert text_of(chunks, index) == (choice["text"] if "text" in choice else choice["message"]["content"])


def test_seed_04_choices_of_several_prompts_are_numbered_through(api: Api) -> None:
    answer = api.completion(prompt=["a", "b", "c"], n=2, temperature=1, seed=1, max_tokens=2, echo=True).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"][0] for choice in answer["choices"]] == list("aabbcc")


@pytest.mark.parametrize("n", [1_000_000, 0, -1, "2", 1.5, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_seed_06_impossible_counts_are_refused(api: Api, path: str, n: object) -> None:
    body = {"n": n, "temperature": 1, "stream": False}
    response = api.completion(**body) if path.endswith("/v1/completions") else api.chat(**body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "n"
    api.alive()


def test_seed_06_choices_of_all_prompts_together_are_capped(api: Api) -> None:
    response = api.completion(prompt=["a"] * 100, n=1000, temperature=1)
    assert response.status_code == 400 and response.json()["error"]["param"] == "n"
