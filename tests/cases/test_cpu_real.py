"""The CPU device: its threads, and models that need more range than float16 has."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests import realmodels
from tests.cases.conftest import EOS, LINE_BREAK, SAID, SAID_IDS
from tests.cases.real import Real
from tests.cases.successor import write_successor

LOAD = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from octavo import LLM, SamplingParams
with LLM(sys.argv[1], kv_cache_memory_bytes="8MiB", threads=int(sys.argv[2]) or None) as llm:
    [output] = llm.generate({"prompt_token_ids": [198]}, SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)
    assert output.outputs[0].text == sys.argv[3]
    print("\\n".join(llm.info.notes))
"""


@pytest.mark.parametrize(
    ("threads", "environment", "words"),
    [
        (0, None, "1 thread because the process may run on 1 CPU"),
        (0, "2", "2 threads because it was asked for"),
        (3, "2", "3 threads because it was asked for"),
    ],
)
def test_cpu_01_threads_are_those_the_process_may_use(
    tmp_path: Path, threads: int, environment: str | None, words: str
) -> None:
    """On one CPU of the machine: one thread, unless the user or the environment says otherwise."""
    model = write_successor(tmp_path, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf())
    changed = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if environment is not None:
        changed["OMP_NUM_THREADS"] = environment
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model), str(threads), SAID],
        text=True,
        capture_output=True,
        timeout=60,
        env=changed,
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.split("\n")
    assert words in notes
    assert ("OMP_NUM_THREADS sets the number of threads" in notes) == (environment is not None and not threads)


def test_cpu_01_start_up_prints_the_threads(real: Real) -> None:
    printed = real.log.read_text()
    assert " thread" in printed and "because" in printed


def test_cpu_05_gemma_in_float16_is_computed_in_float32(gemma: LLM) -> None:
    """The very numbers of a float32 run: hidden states of Gemma do not fit in float16."""
    prompts = ["The capital of France is", "def add(a, b):", "日本の首都は"]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
    with LLM(
        str(realmodels.gemma_gguf()),
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes="256MiB",
    ) as llm:
        exact = llm.generate(prompts, params, use_tqdm=False)
    for half, full in zip(gemma.generate(prompts, params, use_tqdm=False), exact, strict=True):
        assert half.outputs[0].token_ids == full.outputs[0].token_ids
        assert len(set(half.outputs[0].token_ids)) > 1
        assert half.outputs[0].logprobs == full.outputs[0].logprobs
        assert all(math.isfinite(entry.logprob) for step in half.outputs[0].logprobs for entry in step.values())


def test_cpu_05_large_activations_in_float16(tmp_path: Path) -> None:
    """Hidden states of about 10^5, which float16 cannot hold."""
    model = write_successor(tmp_path, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf(), size=1e6)
    with LLM(str(model), dtype="float16", kv_cache_memory_bytes="8MiB") as llm:
        [output] = llm.generate(
            {"prompt_token_ids": [LINE_BREAK]}, SamplingParams(temperature=0, max_tokens=50, logprobs=1), use_tqdm=False
        )
    assert output.outputs[0].text == SAID and output.outputs[0].finish_reason == "stop"
    assert all(math.isfinite(entry.logprob) for step in output.outputs[0].logprobs for entry in step.values())
