"""Sampling parameters with a real model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from tests import realmodels
from tests.cases.conftest import EOS, LINE_BREAK, SAID_IDS
from tests.cases.real import Real
from tests.cases.successor import write_successor

PROMPTS = (
    "Paris Paris Paris",
    "The capital of France is",
    "one two one two one",
    "Hello, hello, hello,",
    "a b c a b c a b",
    "the the the the",
)
STORY = "Once upon a time there was a little girl who"


def first(real: Real, prompt: object, **body: Any) -> int:
    answer = real.complete(prompt, max_tokens=1, return_token_ids=True, ignore_eos=True, **body)
    found: int = answer["choices"][0]["token_ids"][0]
    return found


def firsts(real: Real, **body: Any) -> list[int]:
    """The first token after each of `PROMPTS`."""
    choices = real.complete(list(PROMPTS), max_tokens=1, return_token_ids=True, ignore_eos=True, **body)["choices"]
    return [choice["token_ids"][0] for choice in choices]


def test_sample_01_what_penalties_count(real: Real, oracle: Any) -> None:
    ids = [real.tokens(prompt) for prompt in PROMPTS]
    logits = [oracle(each)[-1] for each in ids]
    plain = firsts(real)
    assert plain == [each.argmax() for each in logits]
    assert firsts(real, presence_penalty=2.0) == plain, "a prompt is no output"
    assert firsts(real, frequency_penalty=2.0) == plain
    for penalty in (1.5, 3.0):
        expected = []
        for each, scores in zip(map(np.unique, ids), logits, strict=True):
            changed = scores.copy()
            changed[each] = np.where(scores[each] > 0, scores[each] / penalty, scores[each] * penalty)
            expected.append(int(changed.argmax()))
        assert firsts(real, repetition_penalty=penalty) == expected != plain


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-9])
def test_sample_03_tiny_temperatures_are_greedy(real: Real, temperature: float) -> None:
    body = {"max_tokens": 10, "ignore_eos": True}
    greedy = real.complete(STORY, **body)["choices"][0]["text"]
    assert real.complete(STORY, temperature=temperature, top_p=0.9, **body)["choices"][0]["text"] == greedy


def test_sample_03_a_small_temperature_is_no_error(real: Real) -> None:
    assert len(real.complete(STORY, temperature=1e-3, top_p=0.9, max_tokens=4)["choices"][0]["text"]) > 0


def test_sample_05_biases(real: Real) -> None:
    [wanted] = real.tokens(" banana")
    answer = real.complete(STORY, max_tokens=4, logit_bias={str(wanted): 100}, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == [wanted] * 4
    greedy = first(real, STORY)
    assert first(real, STORY, logit_bias={str(greedy): -100}) != greedy


def test_sample_07_allowed_ids_hold_for_their_request_only(real: Real) -> None:
    [wanted] = real.tokens(" banana")
    alone = real.complete(STORY, max_tokens=8, return_token_ids=True)["choices"][0]["token_ids"]

    def ask(allowed: object) -> list[int]:
        answer = real.complete(STORY, max_tokens=8, return_token_ids=True, allowed_token_ids=allowed)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, ([wanted], None, [wanted]))) == [[wanted] * 8, alone, [wanted] * 8]
    assert real.refused(prompt=STORY, allowed_token_ids=[])["param"] == "allowed_token_ids"


def test_sample_09_bad_words_do_not_occur(real: Real) -> None:
    body = {"prompt": "The four seasons are spring, summer,", "max_tokens": 12}
    text = real.complete(**body)["choices"][0]["text"]
    assert text.startswith(" fall, and winter."), text
    without = real.complete(**body, bad_words=["winter"])["choices"][0]["text"]
    assert without.startswith(" fall, and") and "winter" not in without, "nothing changes before the first ban"
    assert len(real.tokens(" winter.")) == 2
    without = real.complete(**body, bad_words=["winter."])["choices"][0]["text"]
    assert without.startswith(" fall, and winter") and "winter." not in without


@pytest.mark.parametrize(("word", "status"), [("", 400), ("\u0001", 200), (" ", 400)])
def test_sample_10_bad_words_without_tokens(real: Real, word: str, status: int) -> None:
    response = real.http.post("/v1/completions", json={"prompt": STORY, "max_tokens": 1, "bad_words": [word]})
    assert response.status_code == status, response.text
    real.alive()


def test_sample_11_no_end_before_min_tokens(tmp_path: Path) -> None:
    """Two ends in the generation config, a third as stop token; each is pushed by a bias."""
    ends, stop = (17, 19), 23
    model = write_successor(
        tmp_path, (LINE_BREAK, *SAID_IDS, 40, 41, 42), realmodels.smollm2_hf(), generation={"eos_token_id": list(ends)}
    )
    with LLM(str(model), kv_cache_memory_bytes="8MiB") as llm:
        for pushed in (*ends, stop):
            params = SamplingParams(
                temperature=0, max_tokens=12, min_tokens=5, stop_token_ids=[stop], logit_bias={pushed: 100.0}
            )
            [output] = llm.generate({"prompt_token_ids": [LINE_BREAK]}, params, use_tqdm=False)
            ids = list(output.outputs[0].token_ids)
            assert ids[:5] == list(SAID_IDS[:5]) and ids[5:] == [pushed], (pushed, ids)
            assert output.outputs[0].finish_reason == "stop"


def test_sample_13_top_k(real: Real) -> None:
    body = {"temperature": 1.0, "seed": 3, "max_tokens": 8}
    plain = real.complete(STORY, **body)["choices"][0]["text"]
    for off in (0, -1, 49152 + 5):
        assert real.complete(STORY, top_k=off, **body)["choices"][0]["text"] == plain
    greedy = real.complete(STORY, max_tokens=8)["choices"][0]["text"]
    assert real.complete(STORY, top_k=1, **body)["choices"][0]["text"] == greedy != plain
    assert real.refused(prompt=STORY, top_k=-2)["param"] == "top_k"


@pytest.mark.parametrize("top_k", [0, -1, 1])
def test_sample_13_top_k_of_the_generation_config(tmp_path: Path, top_k: int) -> None:
    model = write_successor(
        tmp_path, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf(), generation={"top_k": top_k, "temperature": 1.0}
    )
    with LLM(str(model), kv_cache_memory_bytes="8MiB") as llm:
        assert llm.get_default_sampling_params().top_k == max(top_k, 0)


def test_sample_13_a_wrong_top_k_of_the_generation_config(tmp_path: Path) -> None:
    model = write_successor(tmp_path, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf(), generation={"top_k": -2})
    with pytest.raises(ValueError, match="top_k .*-2"):
        LLM(str(model))
    with LLM(str(model), generation_config="vllm", kv_cache_memory_bytes="8MiB") as llm:
        assert llm.get_default_sampling_params().top_k == 0


def test_sample_17_ids_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    """A vocabulary 64 larger than the tokenizer's, a flat distribution: any id may come, and may be sent back."""
    model = write_successor(tmp_path, (), realmodels.smollm2_hf(), vocab_size=49152 + 64)
    padding = list(range(49152, 49152 + 64))
    with LLM(str(model), kv_cache_memory_bytes="8MiB", max_model_len=512) as llm:
        for allowed in (None, padding):
            params = SamplingParams(
                temperature=2.0, seed=1, max_tokens=200, ignore_eos=True, logprobs=2, allowed_token_ids=allowed
            )
            [output] = llm.generate({"prompt_token_ids": [LINE_BREAK]}, params, use_tqdm=False)
            ids = list(output.outputs[0].token_ids)
            assert len(ids) == 200 and (allowed is None or output.outputs[0].text == "")
            [again] = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1), use_tqdm=False)
            assert len(again.outputs[0].token_ids) == 1
        assert set(ids) <= set(padding)
        assert json.dumps(output.outputs[0].text) == '""'
