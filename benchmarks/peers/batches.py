"""Tokens per second of Octavo without a server: `apart` runs this module."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from benchmarks.formats.apart import Figures, answer
from benchmarks.peers.workloads import CONTEXT
from octavo import LLM, SamplingParams

LIMITS = {"kv_cache_memory_bytes": "1GiB", "max_model_len": 1024, "enable_prefix_caching": False}


def batch(path: str, rows: int, steps: int) -> Figures:
    """With 0 rows, of a prompt of 512. The time of decoding is the difference between answers of two lengths, of which
    each has the prompts' time in it."""
    rng = np.random.default_rng(rows)
    with LLM(path, **LIMITS) as llm:

        def seconds(count: int, length: int, tokens: int) -> float:
            prompts: Any = [rng.integers(1000, 40000, length).tolist() for _ in range(count)]
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begun

        seconds(1, 64, 2)
        if not rows:
            return {"tok_s": 512 / median(seconds(1, 512, 1) for _ in range(3))}
        least = steps // 2 + 1  # more tokens than steps in which some prompts are not read yet
        long, brief = (seconds(rows, CONTEXT, tokens) for tokens in (least + steps, least))
        return {"tok_s": rows * steps / (long - brief)}


if __name__ == "__main__":
    answer(batch)
