"""Perplexity of real models on a text of 5,000 tokens: equal to transformers' in its first four digits and more.

The text is the standard library's own prose, so both sides read the same whatever the Python version.
"""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from tests import realmodels

TOKENS = 5000
MODELS = {
    "smollm2": (realmodels.smollm2_gguf, realmodels.smollm2_hf),
    "gemma3": (realmodels.gemma_gguf, realmodels.gemma_hf),
}


def oracle_nll(folder: Path, ids: list[int]) -> float:
    """Mean negative log-likelihood of ids[1:], the head computed in pieces: 5,000 x 262,144 logits would be 5 GB."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = 0.0
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        for start in range(0, len(hidden), 250):
            logits = model.lm_head(hidden[start : start + 250]).double()
            wanted = torch.tensor(ids[1:][start : start + 250])
            total += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
    return total / (len(ids) - 1)


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_equals_transformers(name: str) -> None:
    ours, folder = MODELS[name]
    with LLM(model=str(ours()), dtype="float32", max_model_len=TOKENS + 1, kv_cache_memory_bytes="2G") as llm:
        text = "\n".join(topics[key] for key in sorted(topics))[: 8 * TOKENS]
        ids = llm.get_tokenizer().encode(text)[:TOKENS]
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    scored = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    assert len(scored) == TOKENS - 1
    # transformers' conversion of the GGUF file does not say that the model has these positions.
    assert json.loads((folder() / "config.json").read_text())["max_position_embeddings"] >= TOKENS
    got, want = float(np.exp(-np.mean(scored))), float(np.exp(oracle_nll(folder(), ids)))
    assert 2 < want < 200, "the text should neither be known by heart nor be noise"
    assert abs(got / want - 1) < 2e-5, (got, want)
