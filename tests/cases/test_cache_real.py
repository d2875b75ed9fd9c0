"""A KV cache of 8 bits, as users ask for one: with the flag of the server, and in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from tests import realmodels
from tests.cases.real import serving

PROMPT = "The capital of France is"
SIZE = "32MiB"


@pytest.mark.parametrize(("asked", "made"), [("int8", "int8"), ("fp8", "fp8_e4m3")])
def test_a_server_with_a_cache_of_8_bits(asked: str, made: str, tmp_path: Path) -> None:
    model = realmodels.smollm2_gguf()
    with serving(
        model,
        tmp_path,
        "--kv-cache-dtype",
        asked,
        "--kv-cache-memory-bytes",
        SIZE,
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "4",
    ) as server:
        answers = [server.complete(PROMPT, max_tokens=24, ignore_eos=True, logprobs=0)["choices"][0] for _ in range(2)]
        page = server.http.get("/metrics").text
        said = server.log.read_text()
    assert f" in {made}: " in said
    assert f'cache_dtype="{made}"' in page
    assert answers[0] == answers[1]  # the second one reads its prompt from the cache
    texts, logprobs = {}, {}
    for dtype in (asked, "float16"):
        with LLM(str(model), kv_cache_dtype=dtype, kv_cache_memory_bytes=SIZE, max_model_len=512) as llm:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        texts[dtype] = output.outputs[0].text
        logprobs[dtype] = [
            entry[token].logprob
            for entry, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
        ]
    assert answers[0]["text"] == texts[asked] and "Paris" in texts[asked]
    assert answers[0]["logprobs"]["token_logprobs"] == pytest.approx(logprobs[asked], abs=1e-6)
    assert logprobs[asked] != logprobs["float16"]  # it is another cache indeed
    assert logprobs[asked][0] == pytest.approx(logprobs["float16"][0], abs=0.1)
