"""Sampling parameters as they come in JSON."""

from __future__ import annotations

import pytest

from tests.api.conftest import Api

BOTH = ("/v1/completions", "/v1/chat/completions")


def post(api: Api, path: str, raw: str) -> tuple[int, str]:
    """(status, param) of a request whose body has `raw` among its fields."""
    extra = '"prompt": "Hello"' if path == BOTH[0] else '"messages": [{"role": "user", "content": "Hello"}]'
    response = api.http.post(
        path, content=f'{{"model": "tiny", {extra}, {raw}}}', headers={"Content-Type": "application/json"}
    )
    return response.status_code, response.json().get("error", {}).get("param")


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize(
    "raw",
    [
        '"temperature": -1',
        '"temperature": 1e400',
        '"temperature": NaN',
        '"temperature": -Infinity',
        '"top_p": -0.5',
        '"top_p": 0',
        '"presence_penalty": 9',
        '"frequency_penalty": -9',
        '"repetition_penalty": 0',
        '"min_p": 2',
        '"top_k": -2',
        '"top_k": 1.5',
        '"seed": "x"',
        '"min_tokens": -1',
        '"temperature": "hot"',
        '"temperature": true',
        '"repetition_penalty": Infinity',
        '"stop_token_ids": [1.5]',
        '"stop_token_ids": [99999]',
    ],
)
def test_sample_15_wrong_values_are_refused_by_name(api: Api, path: str, raw: str) -> None:
    name = raw.split('"')[1]
    assert post(api, path, raw) == (400, name)
    api.alive()


@pytest.mark.parametrize("value", ['{"191222": -100}', '{"-1": 5}', '{"abc": 1}', '{"5": NaN}', '{"5": "x"}', "[1]"])
def test_sample_04_wrong_biases_are_refused(api: Api, value: str) -> None:
    status, param = post(api, BOTH[0], f'"logit_bias": {value}')
    assert status == 400 and str(param).startswith("logit_bias")
    api.alive()


def test_sample_04_large_biases_are_cut(api: Api) -> None:
    assert post(api, BOTH[0], '"logit_bias": {"5": 1000}')[0] == 200
    assert api.engine.seen[-1].sampling.logit_bias == {5: 100.0}


def test_sample_07_allowed_tokens(api: Api) -> None:
    assert post(api, BOTH[0], '"allowed_token_ids": []') == (400, "allowed_token_ids")
    assert post(api, BOTH[0], '"allowed_token_ids": null')[0] == 200
    assert post(api, BOTH[0], '"allowed_token_ids": [5]')[0] == 200
    assert api.engine.seen[-1].sampling.allowed_token_ids == [5]


@pytest.mark.parametrize("words, status", [('[""]', 400), ('["\\u0001"]', 200), ('[" "]', 400), ('["ab"]', 200)])
def test_sample_10_bad_words_never_fail(api: Api, words: str, status: int) -> None:
    found, param = post(api, BOTH[0], f'"bad_words": {words}')
    assert found == status and param == ("bad_words" if status == 400 else None)


def test_sample_11_min_tokens_above_max_tokens(api: Api) -> None:
    assert post(api, BOTH[0], '"min_tokens": 9, "max_tokens": 4') == (400, "min_tokens")
    assert post(api, BOTH[1], '"min_tokens": 9, "max_completion_tokens": 4') == (400, "min_tokens")


@pytest.mark.parametrize("value, kept", [(0, 0), (-1, 0), (300, 300), (1, 1)])
def test_sample_13_top_k(api: Api, value: int, kept: int) -> None:
    assert post(api, BOTH[0], f'"top_k": {value}, "temperature": 1')[0] == 200
    assert api.engine.seen[-1].sampling.top_k == kept


@pytest.mark.parametrize("path", BOTH)
def test_sample_null_means_the_default(api: Api, path: str) -> None:
    fields = (
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "logit_bias",
        "max_tokens",
        "min_tokens",
        "stream",
        "stream_options",
        "logprobs",
        "echo",
        "user",
    )
    assert post(api, path, ", ".join(f'"{name}": null' for name in fields))[0] == 200
    assert api.engine.seen[-1].sampling.temperature == 1.0


def test_sample_parameters_reach_the_engine(api: Api) -> None:
    raw = (
        '"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1, "seed": 9, '
        '"repetition_penalty": 1.2, "frequency_penalty": -1, "min_tokens": 2, "stop_token_ids": [7]'
    )
    assert post(api, BOTH[1], raw)[0] == 200
    request = api.engine.seen[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.2)
    assert (request.seed, sampling.min_tokens, request.stop_ids) == (9, 2, (7,))


@pytest.mark.parametrize("field, value", [("vllm_xargs", '{"a": 1}'), ("thinking_token_budget", "5")])
def test_sample_what_is_not_built_is_refused(api: Api, field: str, value: str) -> None:
    assert post(api, BOTH[0], f'"{field}": {value}')[0] == 400
