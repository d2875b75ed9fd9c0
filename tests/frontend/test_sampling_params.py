"""Every parameter's range, and that parameters survive the way to another process."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling_params import (
    BeamSearchParams,
    ParameterError,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from octavo.types import Request

WRONG: list[tuple[str, Any, str]] = [
    ("n", 0, "n must be at least 1, got 0"),
    ("n", True, "n must be an integer, got True"),
    ("n", 1.0, "n must be an integer"),
    ("n", 16385, "n must be at most 16384"),
    ("presence_penalty", 2.1, r"presence_penalty must be in \[-2, 2\], got 2.1"),
    ("frequency_penalty", -2.1, r"frequency_penalty must be in \[-2, 2\], got -2.1"),
    ("repetition_penalty", 0, "repetition_penalty must be greater than zero, got 0"),
    ("repetition_penalty", math.inf, "repetition_penalty must be finite"),
    ("temperature", -0.1, r"temperature must be in \[0, 2\], got -0.1"),
    ("temperature", 2.1, r"temperature must be in \[0, 2\], got 2.1"),
    ("temperature", math.nan, "temperature must be finite"),
    ("temperature", "hot", "temperature must be a number"),
    ("temperature", True, "temperature must be a number"),
    ("temperature", 10**400, "temperature must be finite"),
    ("top_p", 0, r"top_p must be in \(0, 1\], got 0"),
    ("top_p", 1.1, r"top_p must be in \(0, 1\], got 1.1"),
    ("top_k", -2, r"top_k must be 0 \(disable\), or at least 1, got -2"),
    ("top_k", 1.5, "top_k must be an integer"),
    ("min_p", 1.1, r"min_p must be in \[0, 1\], got 1.1"),
    ("seed", "7", "seed must be an integer"),
    ("seed", 1 << 64, "seed must fit in 64 bits"),
    ("stop", "", "stop cannot contain an empty string"),
    ("stop", ["a", ""], "stop cannot contain an empty string"),
    ("stop", ["a", 1], "stop must be a list of strings"),
    ("stop_token_ids", [1, "2"], "stop_token_ids must contain only integers"),
    ("stop_token_ids", "12", "stop_token_ids must be a list of integers"),
    ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
    ("min_tokens", -1, "min_tokens must be at least 0"),
    ("min_tokens", 17, "min_tokens must be less than or equal to max_tokens=16"),
    ("logprobs", -2, "logprobs must be at least 0"),
    ("logprobs", True, "logprobs must be an integer"),
    ("prompt_logprobs", -2, "prompt_logprobs must be at least 0"),
    ("stream_interval", 0, "stream_interval must be at least 1"),
    ("output_kind", 9, "output_kind must be a RequestOutputKind"),
    ("ignore_eos", 1, "ignore_eos must be true or false"),
    ("logit_bias", {"1": 2.0}, "logit_bias must contain only integers"),
    ("logit_bias", {1: math.nan}, "logit_bias must be finite"),
    ("logit_bias", [1], "logit_bias must map token ids"),
    ("allowed_token_ids", [], "allowed_token_ids is not None and empty!"),
    ("bad_words", [""], "bad_words cannot contain an empty string"),
    ("bad_words", "word", "bad_words must be a list of strings"),
    ("bad_words", ["w"] * 129, "bad_words may hold at most 128"),
    ("logprob_token_ids", list(range(129)), "at most 128"),
    ("logprob_token_ids", ["a"], "only integers"),
    ("prompt_logprob_token_ids", [1], "must be a list of integers"),
    ("prompt_logprob_start", -1, "prompt_logprob_start"),
    ("extra_args", {"a": 1}, "not built yet"),
    ("thinking_token_budget", -2, "thinking_token_budget must be at least 0"),
    ("thinking_token_budget", 5, "thinking budgets are not built yet"),
    ("repetition_detection", 3, "repetition_detection must be"),
    ("structured_outputs", "json", "structured_outputs must be"),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG, ids=lambda value: str(value)[:20])
def test_wrong_values_are_named(name: str, value: Any, text: str) -> None:
    with pytest.raises(ParameterError, match=text) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name
    assert isinstance(caught.value, ValueError)


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert params.detokenize and params.skip_special_tokens and not params.greedy


def test_greedy_turns_the_filters_off() -> None:
    for temperature in (0, 0.0, 9e-6):
        params = SamplingParams(temperature=temperature, top_p=0.5, top_k=3, min_p=0.2)
        assert params.greedy
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    with pytest.raises(ParameterError, match="n must be 1 when using greedy sampling, got 2"):
        SamplingParams(temperature=0, n=2)


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 0.001, 0.01])
def test_tiny_temperatures_are_kept(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.5)
    assert (params.temperature, params.top_p, params.greedy) == (temperature, 0.5, False)


def test_other_spellings() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(stop=("x", "y")).stop == ["x", "y"]  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids={3, 1}).stop_token_ids == [1, 3]  # type: ignore[arg-type]
    assert SamplingParams(max_tokens=None, min_tokens=99).min_tokens == 99
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget == -1
    with pytest.raises(ParameterError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(ParameterError, match="must be the number of logprob_token_ids"):
        SamplingParams(logprob_token_ids=[1, 2], logprobs=3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("best_of", "`n`"),
        ("use_beam_search", "LLM.beam_search"),
        ("guided_decoding", "structured_outputs"),
        ("length_penalty", "BeamSearchParams"),
        ("max_token", "max_tokens"),
        ("logits_processors", "logit_bias"),
        ("truncate_prompt_tokens", "cut"),
    ],
)
def test_arguments_that_do_not_exist(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        SamplingParams(**{name: 1})


def test_from_optional() -> None:
    params = SamplingParams.from_optional(n=None, temperature=None, logit_bias={"5": 200, "6": -200.0}, max_tokens=None)
    assert (params.n, params.temperature, params.max_tokens) == (1, 1.0, None)
    assert params.logit_bias == {5: 100.0, 6: -100.0}
    with pytest.raises(ParameterError, match="integer token ids") as caught:
        SamplingParams.from_optional(logit_bias={"five": 1})
    assert caught.value.parameter == "logit_bias"


def test_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0})
    copy = params.clone()
    assert copy == params
    assert isinstance(copy.stop, list) and copy.logit_bias is not None
    copy.stop.append("b")
    copy.logit_bias[2] = 2.0
    assert (params.stop, params.logit_bias) == (["a"], {1: 1.0})


def test_verify_against_a_model() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={0: 1}, logprobs=20).verify(vocab_size=10)
    for wrong in ({"stop_token_ids": [10]}, {"allowed_token_ids": [-1]}, {"logit_bias": {10: 1.0}}):
        with pytest.raises(ParameterError, match="out of vocabulary: ids are 0 to 9") as caught:
            SamplingParams(**wrong).verify(vocab_size=10)
        assert caught.value.parameter in wrong
    with pytest.raises(ParameterError, match="Requested sample logprobs of 21, which is greater than max allowed: 20"):
        SamplingParams(logprobs=21).verify(vocab_size=100)
    with pytest.raises(ParameterError, match="Requested prompt logprobs of 100"):
        SamplingParams(prompt_logprobs=-1).verify(vocab_size=100)
    SamplingParams(logprobs=-1).verify(vocab_size=100, max_logprobs=-1)
    SamplingParams(logprobs=-1).verify(vocab_size=100, max_logprobs=100)


def test_structured_outputs_are_checked_then_refused() -> None:
    with pytest.raises(ParameterError, match="only use one kind"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(ParameterError, match="must use one kind"):
        StructuredOutputsParams()
    with pytest.raises(ParameterError, match="cannot be an empty list"):
        StructuredOutputsParams(choice=[])
    with pytest.raises(ParameterError, match="NUL"):
        StructuredOutputsParams(regex="a\0")
    with pytest.raises(ParameterError, match="not JSON"):
        StructuredOutputsParams(json="{")
    StructuredOutputsParams(json="[" * 64 + "]" * 64)
    with pytest.raises(ParameterError, match="deeper than 64"):
        StructuredOutputsParams(json="[" * 65 + "]" * 65)
    with pytest.raises(ParameterError):
        StructuredOutputsParams(json="[" * 100_000 + "]" * 100_000)
    with pytest.raises(ParameterError, match="structured outputs are not built yet") as caught:
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    assert caught.value.parameter == "structured_outputs"


def test_beam_search_and_repetition() -> None:
    assert BeamSearchParams(2, 5) == BeamSearchParams(beam_width=2, max_tokens=5)
    for wrong in (
        {"beam_width": 0, "max_tokens": 1},
        {"beam_width": 1, "max_tokens": 0},
        {"beam_width": 1, "max_tokens": 1, "length_penalty": math.nan},
        {"beam_width": 1, "max_tokens": 1, "length_penalty": 1e308},
        {"beam_width": 1, "max_tokens": 1, "length_penalty": -400},
        {"beam_width": 16385, "max_tokens": 1},
    ):
        with pytest.raises(ParameterError):
            BeamSearchParams(**wrong)
    with pytest.raises(ParameterError, match="min_count must be at least 2"):
        RepetitionDetectionParams(max_pattern_size=3, min_count=1)
    with pytest.raises(ParameterError, match="max_pattern_size must be at least 4"):
        RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=4)
    with pytest.raises(ParameterError, match="max_pattern_size must be at most 1024"):
        RepetitionDetectionParams(max_pattern_size=1025)


@given(
    st.builds(
        SamplingParams,
        n=st.just(1),
        temperature=st.floats(0, 2),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(-1, 99),
        min_p=st.floats(0, 1),
        seed=st.none() | st.integers(-(2**63), 2**64 - 1),
        stop=st.none() | st.lists(st.text(min_size=1), max_size=3),
        max_tokens=st.none() | st.integers(1, 2**40),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=4),
        bad_words=st.none() | st.lists(st.text(min_size=1), max_size=3),
        logprobs=st.none() | st.integers(-1, 9),
        repetition_detection=st.none() | st.builds(RepetitionDetectionParams, max_pattern_size=st.integers(1, 5)),
        output_kind=st.sampled_from(RequestOutputKind),
    )
)
def test_parameters_cross_processes_unchanged(params: SamplingParams) -> None:
    request = Request(id="r", prompt=(1, 2), sampling=params, seed=2**64 - 1, max_tokens=4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


@pytest.mark.parametrize("value", [1e-300, 1e-45, 2e-38, 9e-21, 1.1e20, 1e308])
def test_penalties_that_leave_no_finite_logits_are_refused(value: float) -> None:
    with pytest.raises(ParameterError, match="repetition_penalty must be in") as caught:
        SamplingParams(repetition_penalty=value)
    assert caught.value.parameter == "repetition_penalty"


def test_extreme_numbers_that_are_taken() -> None:
    assert SamplingParams(repetition_penalty=1e-20).repetition_penalty == 1e-20
    assert SamplingParams(logit_bias={1: -1e308, 2: 1e39, 3: -5}).logit_bias == {1: -1e20, 2: 1e20, 3: -5}
    assert SamplingParams(top_k=2**64 - 1).top_k == 2**64 - 1
    with pytest.raises(ParameterError, match="top_k must fit in 64 bits, got one of 65 bits"):
        SamplingParams(top_k=2**64)
