"""max_tokens and the context length (512 here)."""

from __future__ import annotations

import pytest

from tests.api.conftest import Api
from tests.api.harness import MAX_MODEL_LEN


def test_len_01_the_error_names_all_three_numbers(api: Api) -> None:
    response = api.completion(prompt="abcdefgh", max_tokens=510)
    error = response.json()["error"]
    assert response.status_code == 400
    assert all(number in error["message"] for number in ("512", "8", "510"))
    assert error["code"] and error["param"]


@pytest.mark.parametrize("length, status", [(511, 200), (512, 400), (513, 400)])
def test_len_02_prompts_around_the_limit(api: Api, length: int, status: int) -> None:
    response = api.chat(messages=[{"role": "user", "content": "x" * (length - 19)}], ignore_eos=True)
    assert response.status_code == status, response.text
    if status == 200:
        assert response.json()["usage"]["prompt_tokens"] == length
        assert response.json()["usage"]["completion_tokens"] == 1
        assert response.json()["choices"][0]["finish_reason"] == "length"
    else:
        assert str(length) in response.json()["error"]["message"]
    api.alive()


@pytest.mark.parametrize("length, status", [(511, 200), (512, 400), (513, 400)])
def test_len_02_ids_around_the_limit(api: Api, length: int, status: int) -> None:
    response = api.completion(prompt=[65] * length, ignore_eos=True)
    assert response.status_code == status, response.text
    if status == 200:
        assert response.json()["usage"]["completion_tokens"] == 1
        assert response.json()["choices"][0]["finish_reason"] == "length"
    api.alive()


def test_len_04_chat_fills_the_context_and_completions_give_16(api: Api) -> None:
    chat = api.chat(ignore_eos=True).json()
    assert chat["usage"]["total_tokens"] == MAX_MODEL_LEN and chat["choices"][0]["finish_reason"] == "length"
    assert api.completion(ignore_eos=True).json()["usage"]["completion_tokens"] == 16


def test_len_06_one_prompt_too_long_refuses_the_call(api: Api) -> None:
    assert api.chat(messages=[{"role": "user", "content": "x" * 1600}]).status_code == 400
    assert api.completion(prompt=["ok", "y" * 1600]).status_code == 400
    assert not api.engine.seen
    api.alive()


@pytest.mark.parametrize("stream", [False, True])
def test_len_06_what_the_engine_cannot_fit_is_a_400(api: Api, stream: bool) -> None:
    response = api.completion(prompt=["ok", "y" * 300], max_tokens=4, stream=stream)
    assert response.status_code == 400 and "never fit" in response.json()["error"]["message"]
    api.alive()


@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_len_07_completion_tokens_are_counted_exactly(api: Api, path: str, count: int) -> None:
    body = {"max_tokens": count, "ignore_eos": True}
    answer = (api.completion(**body) if path.endswith("/v1/completions") else api.chat(**body)).json()
    assert answer["usage"]["completion_tokens"] == count and answer["choices"][0]["finish_reason"] == "length"
    chunks = api.stream(path, stream_options={"include_usage": True}, **body)
    assert chunks[-1]["usage"] == answer["usage"]


@pytest.mark.parametrize("cut, status", [(16, 200), (-1, 400), (512, 400), (513, 400), (-2, 400)])
def test_len_09_truncation_keeps_the_end(api: Api, cut: int, status: int) -> None:
    prompt = "".join(chr(97 + i % 26) for i in range(600))
    response = api.completion(prompt=prompt, truncate_prompt_tokens=cut, max_tokens=10, return_token_ids=True)
    assert response.status_code == status, response.text
    if status == 200:
        ids = response.json()["choices"][0]["prompt_token_ids"]
        assert bytes(ids).decode() == prompt[-16:]
    api.alive()


def test_len_09_as_much_as_fits_leaves_room_for_one_token(api: Api) -> None:
    answer = api.completion(prompt="x" * 600 + "end", truncate_prompt_tokens=-1, echo=True).json()
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 1 and answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["text"] == "x" * (MAX_MODEL_LEN - 4) + "endAlpha"


@pytest.mark.parametrize("value", [0, -5])
def test_len_max_tokens_must_be_positive(api: Api, value: int) -> None:
    for response in (api.completion(max_tokens=value), api.chat(max_tokens=value)):
        assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"
