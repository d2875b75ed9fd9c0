"""The draw on every device: against the definition written out here, and against what users are promised."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from octavo.ops.contract import Drawn, Sampling, uniform_bits
from octavo.ops.sampling import draw
from tests.ops.harness import DEVICES, Pages, Span, device, drawing_model, f32, parameters

every_device = pytest.mark.parametrize("name", DEVICES)

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def _splitmix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _bits(seed: int, choice: int, position: int, token: int) -> int:
    key = _splitmix(_splitmix((seed + GOLDEN * (choice + 1)) & MASK) ^ position)
    return _splitmix((key + GOLDEN * (token + 1)) & MASK) >> 32


def test_random_bits() -> None:
    """The vectorised generator is the scalar one; splitmix64 itself by its published first output for state 0."""
    assert _splitmix(GOLDEN) == 0xE220A8397B1DCDAF
    ids = np.array([0, 1, 2, 50_000, 2**31 - 1], np.int64)
    for seed, choice, position in ((0, 0, 0), (MASK, 0, 1), (12345, 7, 131071), (2**63, 2**20, 2**31 - 1)):
        expected = [_bits(seed, choice, position, int(i)) for i in ids]
        assert uniform_bits(seed, choice, position, ids).tolist() == expected


def _definition(logits: Any, p: Sampling, r: int) -> tuple[int, float]:
    """The token of row r step by step in float64, and how far the nearest other outcome was away."""
    values = {i: float(v) for i, v in enumerate(logits)}
    for k in range(p.seen_ptr[r], p.seen_ptr[r + 1]):
        i, count = int(p.seen_ids[k]), int(p.seen_counts[k])
        values[i] = values[i] / p.repetition[r] if values[i] > 0 else values[i] * float(p.repetition[r])
        if count:
            values[i] -= float(p.frequency[r]) * count + float(p.presence[r])
    for k in range(p.bias_ptr[r], p.bias_ptr[r + 1]):
        values[int(p.bias_ids[k])] += float(p.bias_values[k])
    allowed = set(p.allow_ids[p.allow_ptr[r] : p.allow_ptr[r + 1]].tolist()) or set(values)
    values = {i: v for i, v in values.items() if i in allowed and v > -math.inf}
    temperature, margin = float(p.temperature[r]), math.inf
    if temperature == 0:
        ranked = sorted(values, key=lambda i: (-values[i], i))
        return ranked[0], values[ranked[0]] - values[ranked[1]] if len(ranked) > 1 else math.inf
    scores = {i: v / temperature for i, v in values.items()}
    top = max(scores.values())
    if p.min_p[r] > 0:
        line = top + math.log(float(p.min_p[r]))
        margin = min(abs(s - line) for s in scores.values())
        scores = {i: s for i, s in scores.items() if s >= line}
    ranked = sorted(scores, key=lambda i: (-scores[i], i))
    if 0 < p.top_k[r] < len(ranked):
        margin = min(margin, scores[ranked[p.top_k[r] - 1]] - scores[ranked[p.top_k[r]]])
        ranked = ranked[: p.top_k[r]]
    if p.top_p[r] < 1:
        mass = [math.exp(scores[i] - top) for i in ranked]
        reached, kept = 0.0, 0
        for m in mass:
            kept += 1
            reached += m
            margin = min(margin, abs(reached / sum(mass) - float(p.top_p[r])))
            if reached >= float(p.top_p[r]) * sum(mass):
                break
        if kept < len(ranked):
            margin = min(margin, scores[ranked[kept - 1]] - scores[ranked[kept]])
        ranked = ranked[:kept]
    key = int(p.seed[r]), int(p.choice[r]), int(p.position[r])
    noisy = {i: scores[i] - math.log(-math.log((_bits(*key, i) + 0.5) / 2**32)) for i in ranked}
    ranked = sorted(noisy, key=lambda i: (-noisy[i], i))
    gap = noisy[ranked[0]] - noisy[ranked[1]] if len(ranked) > 1 else math.inf
    return ranked[0], min(margin, gap)


def _random_parameters(rows: int, vocab: int, rng: np.random.Generator) -> Sampling:
    def some(row: Any) -> Any:
        return [row() if rng.random() < 0.4 else {} for _ in range(rows)]

    def ids(most: int) -> Any:
        return rng.choice(vocab, rng.integers(1, most), replace=False).tolist()

    return parameters(
        rows,
        temperature=rng.choice([0, 0.3, 1, 2], rows, p=[0.1, 0.3, 0.3, 0.3]),
        top_k=rng.choice([0, 1, 5, 50, 10_000], rows),
        top_p=rng.choice([1, 0.95, 0.5, 0.05], rows),
        min_p=rng.choice([0, 0.05, 0.3], rows),
        seed=rng.integers(0, 2**64, rows, np.uint64),
        choice=rng.integers(0, 4, rows),
        position=rng.integers(0, 10_000, rows),
        logprobs=rng.choice([-1, 0, 5], rows),
        repetition=rng.choice([1, 0.7, 1.3], rows),
        presence=rng.choice([0, 0.8, -0.5], rows),
        frequency=rng.choice([0, 0.4, -0.3], rows),
        seen=some(lambda: {i: int(rng.integers(0, 4)) for i in ids(40)}),
        bias=some(lambda: {i: float(rng.choice([-math.inf, -2.5, 3.0])) for i in ids(10)}),
        allow=some(lambda: ids(30)),
    )


@every_device
@pytest.mark.parametrize("vocab", [96, 1000])
def test_draws_equal_the_definition(name: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((250, vocab)) * 3).astype(np.float32)
    p = _random_parameters(250, vocab, rng)
    model, step = drawing_model(device(name), logits)
    drawn, close = model.run(step(range(250)), p), 0
    for r in range(250):
        token, margin = _definition(logits[r], p, r)
        if margin < 1e-4:
            close += 1
        else:
            assert (drawn.token[r], drawn.ok[r]) == (token, 1), r
    assert close < 25


@every_device
def test_a_draw_does_not_depend_on_its_neighbours(name: str) -> None:
    rng = np.random.default_rng(1)
    logits, p = (rng.standard_normal((64, 200)) * 3).astype(np.float32), _random_parameters(64, 200, rng)
    model, step = drawing_model(device(name), logits)
    whole = model.run(step(range(64)), p)
    for r in range(64):
        alone = model.run(step([r]), _rows(p, [r]))
        asked = max(0, int(p.logprobs[r]))
        assert alone.token[0] == whole.token[r]
        assert alone.logprob[0] == whole.logprob[r] and alone.rank[0] == whole.rank[r]
        assert np.array_equal(alone.top_ids[0], whole.top_ids[r, :asked])
        assert np.array_equal(alone.top_logprobs[0], whole.top_logprobs[r, :asked])


def _rows(p: Sampling, rows: list[int]) -> Sampling:
    """The parameters of some rows of `p`."""
    fields: dict[str, Any] = {}
    for name in ("seen", "bias", "allow", "report"):
        pointers = getattr(p, f"{name}_ptr")
        pieces = [slice(pointers[r], pointers[r + 1]) for r in rows]
        fields[f"{name}_ptr"] = np.cumsum([0, *(s.stop - s.start for s in pieces)], dtype=np.int32)
        for values in ("ids", "counts", "values"):
            if hasattr(p, f"{name}_{values}"):
                fields[f"{name}_{values}"] = np.concatenate([getattr(p, f"{name}_{values}")[s] for s in pieces])
    return p._replace(**fields, **{n: getattr(p, n)[rows] for n in p._fields if n not in fields})


@every_device
@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_draws_follow_the_softmax(name: str, varied: str) -> None:
    """Chi-square of 10,000 draws over 40 ids; the bound has probability 1e-6, and the draws are fixed."""
    rng, vocab, rounds = np.random.default_rng(2), 64, 10
    logits = np.full((1, vocab), -60, np.float32)
    logits[0, :40] = rng.standard_normal(40)
    model, step = drawing_model(device(name), logits)
    counts = np.zeros(vocab)
    for start in range(rounds):
        p = parameters(1000, temperature=0.8, **{varied: np.arange(start * 1000, start * 1000 + 1000)})
        counts += np.bincount(model.run(step([0] * 1000), p).token, minlength=vocab)
    wanted = np.exp(logits[0].astype(np.float64) / 0.8)
    wanted *= 1000 * rounds / wanted.sum()
    assert not counts[40:].any()
    assert ((counts - wanted)[:40] ** 2 / wanted[:40]).sum() < 97


# Probabilities .4 .3 .2 .1, on ids 3, 0, 2, 1.
_FOUR = {3: 0.4, 0: 0.3, 2: 0.2, 1: 0.1}


@every_device
@pytest.mark.parametrize(
    ("fields", "survivors"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {3}),
        ({"top_k": 3}, {3, 0, 2}),
        ({"top_p": 0.39}, {3}),
        ({"top_p": 0.65}, {3, 0}),
        ({"top_p": 0.75}, {3, 0, 2}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {3}),
        ({"top_p": 0.0}, {3}),
        ({"min_p": 0.4}, {3, 0, 2}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 3, "top_p": 0.75}, {3, 0}),  # .4/.9 + .3/.9 reaches it: the mass of the survivors counts
        ({"min_p": 0.4, "top_k": 3, "top_p": 0.85}, {3, 0, 2}),
        ({"min_p": 0.6, "top_k": 4, "top_p": 0.6}, {3, 0}),
        ({"allow": [1, 2]}, {1, 2}),
        ({"allow": [1, 2], "top_p": 0.6}, {2}),
        ({"bias": {3: -math.inf}}, {0, 1, 2}),
        ({"bias": {3: -math.inf, 1: 50.0}}, {1}),
    ],
    ids=str,
)
def test_survivors(name: str, fields: dict[str, Any], survivors: set[int]) -> None:
    logits = np.full((1, 64), -1000, np.float32)
    logits[0, list(_FOUR)] = np.log(list(_FOUR.values()))
    model, step = drawing_model(device(name), logits)
    fields = {n: [v] * 1000 if n in ("allow", "bias") else v for n, v in fields.items()}
    p = parameters(1000, temperature=1, seed=np.arange(1000), **fields)
    assert set(model.run(step([0] * 1000), p).token.tolist()) == survivors


@every_device
def test_ties_go_to_the_lower_id(name: str) -> None:
    logits = np.zeros((1, 64), np.float32)
    logits[0, [9, 20, 40]] = 2
    model, step = drawing_model(device(name), logits)
    drawn = model.run(step([0, 0, 0]), parameters(3, target=[-1, 20, 63], logprobs=4))
    assert drawn.token.tolist() == [9, 20, 63]
    assert drawn.rank.tolist() == [1, 2, 64]
    assert drawn.top_ids.tolist() == [[9, 20, 40, 0]] * 3
    drawn = model.run(step([0] * 1000), parameters(1000, temperature=1, top_k=2, seed=np.arange(1000)))
    assert set(drawn.token.tolist()) == {9, 20}
    drawn = model.run(step([0] * 1000), parameters(1000, temperature=1, top_k=5, seed=np.arange(1000)))
    assert set(drawn.token.tolist()) == {9, 20, 40, 0, 1}
    drawn = model.run(step([0] * 1000), parameters(1000, temperature=0.1, top_p=0.6, seed=np.arange(1000)))
    assert set(drawn.token.tolist()) == {9, 20}


@every_device
def test_penalties(name: str) -> None:
    """Presence and frequency count output tokens only; repetition takes prompt and output, and is never a reward."""
    logits = np.zeros((2, 64), np.float32)
    logits[0, [5, 6, 7]] = [3.0, 2.9, 1.0]
    logits[1] = -4
    logits[1, [5, 6]] = [-1.0, -1.5]
    model, step = drawing_model(device(name), logits)

    def first(row: int, seen: dict[int, int], **fields: float) -> int:
        return int(model.run(step([row]), parameters(1, seen=[seen], **fields)).token[0])

    assert first(0, {5: 0}, presence=2.0) == 5
    assert first(0, {5: 0}, frequency=2.0) == 5
    assert first(0, {5: 1}, presence=2.0) == 6
    assert first(0, {5: 3, 6: 1}, presence=2.0) == 5  # presence is the same however often
    assert first(0, {5: 3, 6: 1}, frequency=0.9) == 6
    assert first(0, {5: 3, 6: 3}, frequency=0.9) == 7
    assert first(0, {5: 0}, repetition=1.5) == 6
    assert first(0, {5: 0, 6: 2}, repetition=3.5) == 7
    assert first(1, {5: 0}, repetition=1.5) == 5  # -1 * 1.5 ties with -1.5, and the lower id wins
    assert first(1, {5: 0}, repetition=1.6) == 6
    assert first(1, {5: 2}, repetition=0.5, presence=0.75, frequency=0.25) == 6  # -0.5 - 0.5 - 0.75 < -1.5
    drawn = model.run(step([0]), parameters(1, seen=[{5: 1}], presence=2.0, logprobs=3))
    assert drawn.top_ids[0].tolist() == [5, 6, 7]  # reported by the raw logits
    assert drawn.rank[0] == 2


@every_device
def test_biases_and_allowed_ids(name: str) -> None:
    logits = np.random.default_rng(3).standard_normal((1, 64)).astype(np.float32)
    model, step = drawing_model(device(name), logits)
    order = np.argsort(-logits[0]).tolist()

    def first(**fields: Any) -> tuple[int, int]:
        drawn = model.run(step([0]), parameters(1, **{n: [v] for n, v in fields.items()}))
        return int(drawn.token[0]), int(drawn.ok[0])

    assert first(bias={}) == (order[0], 1)
    assert first(bias={order[30]: 100.0}) == (order[30], 1)
    assert first(bias={order[0]: -100.0}) == (order[1], 1)
    assert first(bias={order[0]: -math.inf}) == (order[1], 1)
    assert first(allow=order[5:9]) == (order[5], 1)
    assert first(allow=[order[5]]) == (order[5], 1)
    assert first(allow=[order[5], order[9]], bias={order[5]: -math.inf}) == (order[9], 1)
    assert first(allow=[order[5]], bias={order[5]: -math.inf}) == (-1, 0)
    assert first(allow=[order[5]], bias={order[5]: -math.inf}, temperature=1.0) == (-1, 0)


@every_device
def test_a_failed_row_fails_alone(name: str) -> None:
    """NaN or +inf in a row's logits; single -inf are fine, nothing but -inf is not."""
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((8, 64)).astype(np.float32)
    model, step = drawing_model(device(name), logits)
    p = parameters(8, temperature=[0, 1] * 4, seed=np.arange(8), logprobs=3)
    healthy = model.run(step(range(8)), p)
    assert healthy.ok.all()

    broken = logits.copy()
    broken[1, 17], broken[2, 63], broken[4, 0], broken[5] = np.nan, np.inf, -np.inf, -np.inf
    model, step = drawing_model(device(name), broken)
    raw = model.raw_logits(step(range(8)))
    assert np.isnan(raw[1]).any() and np.array_equal(raw[2:], broken[2:])
    drawn = model.run(step(range(8)), p)
    assert drawn.ok.tolist() == [1, 0, 0, 1, 1, 0, 1, 1]
    assert drawn.token[[1, 2, 5]].tolist() == [-1, -1, -1]
    for r in (0, 3, 6, 7):
        assert drawn.token[r] == healthy.token[r]
        assert drawn.logprob[r] == healthy.logprob[r] and np.array_equal(drawn.top_ids[r], healthy.top_ids[r])
    rest = np.exp(logits[4, 1:].astype(np.float64))
    assert math.isclose(drawn.top_logprobs[4, 0], math.log(rest.max() / rest.sum()), abs_tol=1e-5)


def _assert_reports(drawn: Drawn, logits: Any, p: Sampling) -> None:
    """Logprobs and ranks are those of the raw logits, whatever was drawn and how."""
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    for r, token in enumerate(drawn.token.tolist()):
        asked = int(p.logprobs[r])
        if asked < 0:
            continue
        order = sorted(range(logits.shape[1]), key=lambda i: (-logits[r, i], i))
        assert abs(drawn.logprob[r] - logprobs[r, token]) < 1e-5
        assert drawn.rank[r] == order.index(token) + 1
        assert drawn.top_ids[r, :asked].tolist() == order[:asked]
        assert np.abs(drawn.top_logprobs[r, :asked] - logprobs[r, order[:asked]]).max(initial=0) < 1e-5
        assert (drawn.top_ids[r, asked:] == -1).all()


@every_device
@pytest.mark.parametrize("vocab", [64, 1000])
def test_logprobs(name: str, vocab: int) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((60, vocab)) * 4).astype(np.float32)
    logits[7, 3:20] = logits[7, 2]  # ties
    model, step = drawing_model(device(name), logits)
    p = _random_parameters(60, vocab, rng)._replace(
        logprobs=rng.choice([-1, 0, 1, 5, 20, vocab], 60).astype(np.int32),
        target=np.where(rng.random(60) < 0.3, rng.integers(0, vocab, 60), -1).astype(np.int32),
    )
    drawn = model.run(step(range(60)), p)
    assert drawn.ok.all() and drawn.top_ids.shape == (60, vocab)
    scored = p.target >= 0
    assert np.array_equal(drawn.token[scored], p.target[scored])
    _assert_reports(drawn, logits, p)
    silent = model.run(step(range(60)), p._replace(logprobs=np.full(60, -1, np.int32)))
    assert np.array_equal(silent.token, drawn.token)
    assert silent.top_ids.shape == (60, 0)


@every_device
def test_logprobs_of_asked_ids(name: str) -> None:
    logits = np.random.default_rng(6).standard_normal((3, 64)).astype(np.float32)
    model, step = drawing_model(device(name), logits)
    asked: list[list[int]] = [[63, 0], [], [5, 5, 17]]
    drawn = model.run(step(range(3)), parameters(3, temperature=1, report=asked))
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    expected = [logprobs[r, i] for r, ids in enumerate(asked) for i in ids]
    assert np.abs(drawn.report_logprobs - expected).max() < 1e-5
    plain = model.run(step(range(3)), parameters(3, temperature=1))
    assert np.array_equal(plain.token, drawn.token)


@every_device
@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-9, 1e-30, 1.2e-38])
def test_tiny_temperatures_are_greedy(name: str, temperature: float) -> None:
    logits = np.round(np.random.default_rng(7).standard_normal((50, 64)) * 30).astype(np.float32)
    logits[:, 11] = 121
    logits[1::2, 11] = -500
    logits[1::2, 12] = 120  # best by at least 1
    model, step = drawing_model(device(name), logits)
    p = parameters(50, temperature=temperature, seed=np.arange(50), top_p=[0.9, 1] * 25, min_p=[0, 0, 0.1, 0.1, 0] * 10)
    drawn = model.run(step(range(50)), p)
    assert drawn.ok.all()
    assert drawn.token.tolist() == logits.argmax(axis=1).tolist()


@every_device
def test_a_step_without_output_rows(name: str) -> None:
    model, step = drawing_model(device(name), np.zeros((4, 64), np.float32))
    batch = step(range(4))._replace(rows=np.zeros(0, np.int32))
    drawn = model.run(batch, parameters(0))
    assert drawn.token.shape == (0,) and drawn.top_ids.shape == (0, 0)


@every_device
def test_a_large_vocabulary(name: str) -> None:
    """Over 32,000 ids, as the plain numpy draw has it from the same logits."""
    rng, dev, pages, vocab = np.random.default_rng(8), device(name), Pages(1, 64), 32_000
    table = dev.weight([f32(rng.standard_normal((60, 64)))])
    weight = dev.weight([f32(rng.standard_normal((vocab, 64)) / 4)])
    model = dev.compile(
        lambda ops, batch: ops.gather(batch, ops.embed(batch, table, 1.0)),
        lambda ops, x: ops.logits(x, weight),
        pages.limits(64),
        dev.kv_cache(pages.spec(1, 32)),
    )
    step, p = pages.step([Span(0, 0, range(60))]), _random_parameters(60, vocab, rng)
    drawn, plain = model.run(step, p), draw(model.raw_logits(step), p)
    assert drawn.ok.all()
    assert np.array_equal(drawn.token, plain.token)
    assert np.array_equal(drawn.rank, plain.rank) and np.array_equal(drawn.top_ids, plain.top_ids)
    assert np.abs(drawn.logprob - plain.logprob).max() < 1e-5
