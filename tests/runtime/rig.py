"""A real engine on a real model, with a witness that keeps the raw logits behind every drawn token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.engine import Engine, build_engine
from octavo.ops.contract import BatchArrays, Drawn, Sampling
from octavo.runtime.executor import Local
from octavo.runtime.runner import Runner
from octavo.sampling_params import SamplingParams
from octavo.types import Delta, Request
from tests.devices import make_device
from tests.models.tiny import Loaded

Key = tuple[int, int, int]
"""(seed, choice, position of the token drawn)."""


class Witness:
    """A `CompiledModel` that also computes, and keeps, the raw logits of every row that draws."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.logits: dict[Key, np.ndarray] = {}  # type: ignore[type-arg]
        self.steps: list[BatchArrays] = []

    def run(self, batch: BatchArrays, sampling: Sampling) -> Drawn:
        self.steps.append(batch)
        drawn = self.inner.run(batch, sampling)
        if batch.rows.size:
            logits = self.inner.raw_logits(batch)
            for r in range(batch.rows.size):
                if sampling.target[r] < 0:
                    key = (int(sampling.seed[r]), int(sampling.choice[r]), int(sampling.position[r]))
                    self.logits[key] = logits[r].copy()
        return drawn

    def raw_logits(self, batch: BatchArrays) -> Any:
        return self.inner.raw_logits(batch)

    def copy_blocks(self, group: int, pairs: Any) -> None:
        self.inner.copy_blocks(group, pairs)


class Rig:
    """An engine over `path`; `generate` runs requests to their end."""

    def __init__(
        self,
        path: Path,
        *,
        device: str = "cpu",
        threads: int = 2,
        activations: str = "float32",
        kv_dtype: str = "float32",
        blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 512,
        depth: int = 1,
        prefix_caching: bool = True,
        witness: bool = True,
    ):
        loaded = Loaded(
            path,
            make_device(device, threads, activations),
            max_model_len=max_model_len,
            blocks=blocks,
            block_size=block_size,
            kv_dtype=kv_dtype,
            tokens=max_num_batched_tokens,
            sequences=max_num_seqs * 2,
        )
        self.vocab = loaded.config.vocab_size
        self.witness = Witness(loaded.compiled)
        model = self.witness if witness else loaded.compiled
        runner = Runner(model, loaded.limits, len(loaded.model.groups), block_size, self.vocab)
        self.engine: Engine = build_engine(
            Local(runner),
            groups=loaded.model.groups,
            blocks=loaded.spec.blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=prefix_caching,
            depth=depth,
        )

    def close(self) -> None:
        self.engine.close()

    def generate(self, requests: Sequence[Request]) -> dict[tuple[str, int], list[Delta]]:
        """(request id, choice) -> its deltas."""
        out: dict[tuple[str, int], list[Delta]] = {}
        for request in requests:
            self.engine.add(request)
        for _ in range(100_000):
            if self.engine.idle:
                return out
            for delta in self.engine.step():
                out.setdefault((delta.request, delta.choice), []).append(delta)
        raise AssertionError("the engine does not come to an end")

    def tokens(self, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
        return {key: [t for d in deltas for t in d.tokens] for key, deltas in self.generate(requests).items()}


def request(
    id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    seed: int = 1,
    eos_ids: tuple[int, ...] = (),
    **sampling: Any,
) -> Request:
    sampling.setdefault("temperature", 0.0)
    n = sampling.get("n", 1)
    return Request(
        id=id,
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seed=seed,
        max_tokens=max_tokens,
        eos_ids=eos_ids,
        n=n,
        arrival=0,
        read_prefix_cache=sampling.get("prompt_logprobs") is None,
    )


def ids(seed: int, length: int, vocab: int = 199) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, vocab, length)]
