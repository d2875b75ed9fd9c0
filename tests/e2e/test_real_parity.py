"""Real models, float32 throughout: greedy tokens and logprobs equal transformers' on the very same weights.

Greedy generation is checked by one forward of the oracle over prompt + output: every output token must be its argmax
given the tokens before it, which is what greedy decoding means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import LLM, SamplingParams
from tests import realmodels
from tests.e2e.prompts import PROMPTS

MODELS = {
    "smollm2-gguf": (realmodels.smollm2_gguf, realmodels.smollm2_hf),
    "smollm2-hf": (realmodels.smollm2_hf, realmodels.smollm2_hf),
    "gemma3-gguf": (realmodels.gemma_gguf, realmodels.gemma_hf),
}


@pytest.fixture(scope="module", params=MODELS)
def outputs(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, Any]]:
    """(our outputs, the oracle, its tokenizer)."""
    ours, oracle = MODELS[request.param]
    with LLM(model=str(ours()), dtype="float32", max_model_len=2048, kv_cache_memory_bytes="1G") as llm:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=3)
        got = llm.generate(list(PROMPTS), params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(oracle(), dtype=torch.float32).eval()
    yield got, model, AutoTokenizer.from_pretrained(oracle())


def test_sixty_four_greedy_tokens_and_their_logprobs(outputs) -> None:
    got, model, tokenizer = outputs
    long = 0
    for text, output in zip(PROMPTS, got, strict=True):
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        # BOS included. (That all ids are right is tested with the tokenizers: transformers' conversion of this GGUF
        # loses SmolLM2's splitting of digits.)
        assert prompt[:1] == tokenizer(text)["input_ids"][:1]
        assert len(tokens) == 64
        long += len(prompt) > 700
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        assert logits.argmax(-1).tolist() == tokens, text[:40]
        want = logits.log_softmax(-1).numpy()
        for step, entry in enumerate(output.outputs[0].logprobs):
            for token, logprob in entry.items():
                np.testing.assert_allclose(logprob.logprob, want[step, token], atol=1e-4)
            assert entry[tokens[step]].rank == 1
    assert long >= 2
