"""Batch invariance, bitwise, on raw logits: a token's bits do not depend on what else the engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.models.tiny import make, save_bfloat16
from tests.runtime.rig import Rig, ids, request

VARIANTS = ["llama", "gemma3", "mistral-window"]
EIGHT_BITS = [("llama", "int8"), ("gemma3", "int8"), ("llama", "fp8_e4m3"), ("gemma3", "fp8_e5m2")]


class Model(NamedTuple):
    """A model, and the type of the cache that its keys and values are kept in."""

    path: Path
    kv_dtype: str = "float32"

    def rig(self, **options: Any) -> Rig:
        return Rig(self.path, kv_dtype=self.kv_dtype, **options)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("invariance")
    return {name: make(name, folder)[0] for name in VARIANTS}


@pytest.fixture(scope="module", params=[*((variant, "float32") for variant in VARIANTS), *EIGHT_BITS], ids="-".join)
def model(request, paths) -> Model:
    variant, kv_dtype = request.param
    return Model(paths[variant], kv_dtype)


PROMPT = ids(7, 117)
SUBJECT = dict(max_tokens=12, seed=99, temperature=0.9)


@pytest.fixture(scope="module")
def alone(model: Model):
    """(tokens, raw logits by position) of the subject, alone in a fresh engine."""
    return run(model)


def run(model: Model, others=(), before=(), **rig):
    r = model.rig(**rig)
    if before:
        r.generate(list(before))
    subject = request("subject", PROMPT, **SUBJECT)
    half = len(others) // 2
    tokens = r.tokens([*others[:half], subject, *others[half:]])[("subject", 0)]
    logits = {key: v for key, v in r.witness.logits.items() if key[0] == SUBJECT["seed"]}
    r.close()
    return tokens, logits


def assert_same(got, want) -> None:
    assert got[0] == want[0]
    assert got[1].keys() == want[1].keys()
    for key, logits in want[1].items():
        np.testing.assert_array_equal(got[1][key], logits, err_msg=str(key))


def neighbours(count: int) -> list:
    rng = np.random.default_rng(3)
    return [
        request(
            f"n{i}",
            ids(1000 + i, int(rng.integers(1, 120))),
            max_tokens=int(rng.integers(1, 14)),
            seed=i,
            temperature=float(i % 3) / 2,
        )
        for i in range(count)
    ]


def test_among_63_others(model: Model, alone) -> None:
    assert_same(run(model, neighbours(63), blocks=700), alone)


@pytest.mark.parametrize("chunk", [7, 16, 33])
def test_chunked(model: Model, alone, chunk: int) -> None:
    assert_same(run(model, max_num_batched_tokens=chunk, max_num_seqs=4), alone)


@pytest.mark.parametrize("shared", [16, 112, 116, 117, 50, 97])
def test_prefix_hit_of_full_and_partial_blocks(model: Model, alone, shared: int) -> None:
    earlier = request("earlier", PROMPT[:shared] + ids(55, 5), max_tokens=2, seed=5)
    r = model.rig()
    r.generate([earlier])
    deltas = r.generate([request("subject", PROMPT, **SUBJECT)])[("subject", 0)]
    assert deltas[0].cached == min(shared, len(PROMPT) - 1), "the test wants a hit"
    logits = {k: v for k, v in r.witness.logits.items() if k[0] == SUBJECT["seed"]}
    got = ([t for d in deltas for t in d.tokens], logits)
    r.close()
    assert_same(got, alone)


@pytest.mark.parametrize(  # a model of windows alone never outgrows its admission
    ("variant", "kv_dtype"), [("llama", "float32"), ("gemma3", "float32"), *EIGHT_BITS]
)
def test_after_preemption(paths, variant: str, kv_dtype: str) -> None:
    model = Model(paths[variant], kv_dtype)
    alone = run(model)
    r = model.rig(blocks=26, max_num_seqs=6, prefix_caching=False)
    # Requests that end at once teach the engine to admit more than fit if all run to their limit.
    r.generate([request(f"short{i}", ids(i, 3), max_tokens=100, eos_ids=tuple(range(199))) for i in range(50)])
    others = [request(f"n{i}", ids(40 + i, 90), max_tokens=60, seed=i) for i in range(5)]
    tokens = r.tokens([*others, request("subject", PROMPT, **SUBJECT)])[("subject", 0)]
    assert r.engine.stats().preemptions > 0, "the test wants preemptions"
    got = tokens, {k: v for k, v in r.witness.logits.items() if k[0] == SUBJECT["seed"]}
    r.close()
    assert_same(got, alone)


def test_one_thread(model: Model, alone) -> None:
    assert_same(run(model, neighbours(5), threads=1), alone)


def test_two_steps_in_flight(model: Model, alone) -> None:
    assert_same(run(model, neighbours(9), depth=2), alone)


def test_block_size(model: Model, alone) -> None:
    assert_same(run(model, block_size=32), alone)


def test_forked_choice_0_equals_the_single_one(model: Model, alone) -> None:
    r = model.rig()
    tokens = r.tokens([request("subject", PROMPT, n=4, **SUBJECT)])
    got = tokens[("subject", 0)], {k: v for k, v in r.witness.logits.items() if k[1] == 0}
    assert len({tuple(t) for t in tokens.values()}) > 1, "choices draw with keys of their own"
    first = len(PROMPT)
    for choice in range(1, 4):
        np.testing.assert_array_equal(r.witness.logits[(99, choice, first)], r.witness.logits[(99, 0, first)])
    r.close()
    assert_same(got, alone)


def test_logprobs_asked_change_nothing(model: Model, alone) -> None:
    r = model.rig()
    subject = request("subject", PROMPT, logprobs=5, **SUBJECT)
    deltas = r.generate([subject])[("subject", 0)]
    got = ([t for d in deltas for t in d.tokens], {k: v for k, v in r.witness.logits.items() if k[0] == 99})
    r.close()
    assert_same(got, alone)
    for position, delta in zip(range(len(PROMPT), len(PROMPT) + 12), deltas, strict=True):
        raw = got[1][(99, 0, position)].astype(np.float64)
        want = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        entry = delta.logprobs[0]
        assert entry.token == delta.tokens[0]
        assert entry.logprob == pytest.approx(want[entry.token], abs=1e-5)
        assert entry.rank == 1 + int((raw > raw[entry.token]).sum())
        order = sorted(range(len(raw)), key=lambda i: (-raw[i], i))[:5]
        assert [t for t, _ in entry.top] == order


def test_bfloat16_activations_hold_too(paths, tmp_path: Path) -> None:
    model = Model(save_bfloat16(paths["llama"], tmp_path / "rounded"))
    assert_same(run(model, neighbours(20), activations="bfloat16"), run(model, activations="bfloat16"))


def test_int8_and_int16_activations_hold_too(paths) -> None:
    model = Model(paths["llama"])
    for mode in ("int16", "int8"):
        assert_same(run(model, neighbours(20), activations=mode), run(model, activations=mode))
