"""Every kind of cache and of positions through the whole engine: chunks, a shared beginning, preemption, two steps in
flight, blocks behind windows given back. Each request's tokens are those of the model driven by hand, one at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.devices import make_device
from tests.models.tiny import Loaded, make
from tests.runtime.rig import Rig, request

KINDS = {
    "mistral-window": "sliding windows",
    "gemma3": "windows and full attention in two groups",
    "llama4": "chunked attention and layers without RoPE",
    "gpt-oss": "sinks, windows, experts",
    "deepseek-v3": "latent attention, groups of experts",
    "gemma3n": "layers that read the KV of others",
    "bloom": "ALiBi",
    "gpt2": "learned positions",
    "mixtral": "experts",
}


def prompts() -> list[list[int]]:
    """Some with a long beginning in common, longer than every window."""
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 199, 70).tolist()
    return [
        *([*shared, *rng.integers(3, 199, n).tolist()] for n in (1, 20, 45)),
        *(rng.integers(3, 199, n).tolist() for n in (3, 33, 90)),
        shared[:50],
    ]


def by_hand(loaded: Loaded, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, one step each."""
    blocks = [list(range(-(-(len(prompt) + count) // loaded.block_size)))]
    out = list(prompt)
    logits = loaded.compiled.raw_logits(loaded.batch([(out, 0)], blocks))
    for _ in range(count):
        out.append(int(np.argmax(logits[-1])))
        logits = loaded.compiled.raw_logits(loaded.batch([(out[-1:], len(out) - 1)], blocks))
    return out[len(prompt) :]


@pytest.mark.parametrize("variant", KINDS)
def test_the_engine_gives_the_tokens_of_the_model_alone(variant: str, tmp_path: Path) -> None:
    path, _ = make(variant, tmp_path)
    loaded = Loaded(path, make_device("cpu"))
    wanted = [by_hand(loaded, prompt, 20) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in wanted}) > len(wanted) // 2, "the prompts must lead to different answers"
    rig = Rig(path, blocks=26, max_num_seqs=4, max_num_batched_tokens=48, depth=2, witness=False)
    for _ in range(2):  # the second time most of the prompts are found in the cache
        got = rig.tokens([request(f"r{i}", p, max_tokens=20) for i, p in enumerate(prompts())])
        assert [got[f"r{i}", 0] for i in range(len(wanted))] == wanted
    rig.close()
