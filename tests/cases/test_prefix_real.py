"""The prefix cache with real models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from tests.cases.real import Real

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)


def prompt(seed: int, length: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(100, 40_000, length).tolist()
    return found


def answer(llm: LLM, ids: list[int]) -> Any:
    [output] = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
    return output


@pytest.mark.parametrize("length", [16, 32, 48])
def test_prefix_01_a_prompt_cached_whole(smol: LLM, length: int) -> None:
    ids = prompt(length, length)
    first, second = answer(smol, ids), answer(smol, ids)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.outputs[0].cumulative_logprob == first.outputs[0].cumulative_logprob
    assert first.num_cached_tokens == 0 and 0 < second.num_cached_tokens <= length - 1


def test_prefix_05_the_same_prompt_at_the_same_time(real: Real) -> None:
    ids = prompt(5, 100)

    def text(tokens: list[int]) -> str:
        found: str = real.complete(tokens, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
        return found

    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(text, [ids] * 3))
    for seed in range(2):
        text(prompt(50 + seed, 60))
    assert together == [text(ids)] * 3


def test_prefix_06_prompts_that_leave_a_cached_one_anywhere(smol: LLM) -> None:
    base = prompt(6, 40)
    for length in (30, 33):
        answer(smol, base[:length])
        for leave in range(length - 16, length, 4):
            ids = [*base[:leave], *prompt(1000 * length + leave, 4)]
            cached = answer(smol, ids)
            fresh = smol.generate({"prompt_token_ids": ids, "cache_salt": f"{length}/{leave}"}, GREEDY, use_tqdm=False)
            assert cached.num_cached_tokens > 0 and fresh[0].num_cached_tokens == 0
            assert cached.outputs[0].token_ids == fresh[0].outputs[0].token_ids
            assert cached.outputs[0].cumulative_logprob == fresh[0].outputs[0].cumulative_logprob
