"""Seconds to load, memory and tokens per second of a model with default options: `apart` runs this module."""

from __future__ import annotations

import time

import psutil

from benchmarks.formats.apart import Figures, answer
from octavo import LLM, SamplingParams

STREAMS = (1, 32)
SMALL = {
    "kv_cache_memory_bytes": "128MiB",
    "max_model_len": 512,
    "enable_prefix_caching": False,
    "converted_cache_bytes": 0,
}
"""Options of the engine whose speed is measured; every load is a first one."""


def speed(path: str, rule: str | None, steps: int) -> Figures:
    """`rule` is what quantizes the matrices while they are loaded; `steps` the tokens of a stream."""
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    with LLM(path, quantization=rule, **SMALL) as llm:
        out = {"load_s": time.perf_counter() - began}
        out["rss_mib"] = (psutil.Process().memory_info().rss - before) / 2**20
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        llm.generate([[1]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        for streams in STREAMS:
            prompts = [[1000 + i] for i in range(streams)]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            taken = time.perf_counter() - began
            assert all(len(output.outputs[0].token_ids) == steps for output in outputs)
            out[f"tok_s_{streams}"] = streams * steps / taken
    return out


if __name__ == "__main__":
    answer(speed)
