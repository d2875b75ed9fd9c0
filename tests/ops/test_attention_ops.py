"""rotary, store_kv, attend and copy_blocks on every device, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn, float8_e5m2

from octavo.ops.contract import KV_TYPES, AttentionShape, HeadNorm, KVScales, Rope, Temperature
from tests.ops import truth
from tests.ops.harness import (
    CONTEXTS,
    DEVICES,
    UNIT,
    Pages,
    Span,
    attention_model,
    compile_op,
    device,
    f32,
    storing,
)

pytestmark = pytest.mark.parametrize("name", DEVICES)


class Case(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    softcap: float
    block_size: int
    dtype: str
    chunk: int = 0
    alibi: float = 0.0
    """The largest slope; they halve every eight heads."""
    sunk: bool = False
    latent: int = 0
    scaled: bool = False
    """Elements of the cache are quotients by scales of the layer."""

    def shape(self, layer: int = 0, group: int = 0) -> AttentionShape:
        scale = 1.5 * self.head_dim**-0.5
        shape = AttentionShape(self.heads, self.kv_heads, self.head_dim, scale, layer, group, self.window, self.softcap)
        slopes = tuple(self.alibi * 2 ** (-head / 8) for head in range(self.heads)) if self.alibi else ()
        return shape._replace(chunk=self.chunk, alibi=slopes, latent=self.latent)

    def sinks(self) -> Any:
        """From one that takes no part to one that takes nearly all, in turns; None without."""
        choices = np.array([0.0, 3.5, -np.inf, -2.0, 12.0], np.float32)
        return np.resize(choices, self.heads) if self.sunk else None

    def scales(self) -> KVScales | None:
        """Another one for each head."""
        if not self.scaled:
            return None
        k = tuple(0.013 * 1.7**head for head in range(self.kv_heads))
        return KVScales(k, () if self.latent else tuple(1 / scale for scale in k))

    def qkv(self, tokens: int, seed: int = 0) -> Any:
        width = (self.heads + (1 if self.latent else 2) * self.kv_heads) * self.head_dim
        return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)

    def split(self, qkv: Any) -> tuple[Any, Any, Any]:
        if self.latent:
            cuts = np.cumsum([self.heads * self.latent, self.heads * (self.head_dim - self.latent)])
            q_latent, q_rope, k = np.split(qkv, cuts, axis=1)
            parts = [part.reshape(len(qkv), self.heads, -1) for part in (q_latent, q_rope)]
            return np.concatenate(parts, axis=2), k[:, None], k[:, None, : self.latent]
        heads = qkv.reshape(len(qkv), -1, self.head_dim)
        return tuple(np.split(heads, [self.heads, self.heads + self.kv_heads], axis=1))  # type: ignore[return-value]

    def truth(self, qkv: Any, positions: Any) -> truth.Pair:
        """Of tokens 0..n-1 of one sequence, the answers at `positions`, [t, H d]."""
        q, k, v = self.split(qkv)
        scales = self.scales() or KVScales((), ())
        k, k_off = truth.cached(k, self.dtype, scales.k)
        if self.latent:
            v, v_off = k[..., : self.latent], k_off[..., : self.latent]
        else:
            v, v_off = truth.cached(v, self.dtype, scales.v)
        off = 0, k_off, v_off
        value, bound = truth.attend(q[positions], k, v, positions, self.shape(), off, self.sinks())
        return value.reshape(len(positions), -1), bound.reshape(len(positions), -1)


CASES = (
    Case(9, 3, 64, 0, 0.0, 16, "float16"),
    Case(9, 3, 64, 0, 0.0, 32, "float32"),
    Case(4, 1, 256, 512, 0.0, 16, "float16"),
    Case(4, 1, 256, 0, 50.0, 32, "float32"),
    Case(8, 8, 32, 20, 0.0, 16, "float32"),
    Case(8, 8, 128, 300, 20.0, 32, "float16"),
    Case(14, 2, 64, 0, 5.0, 64, "float16"),
    Case(14, 2, 64, 256, 0.0, 128, "float32"),
    Case(2, 1, 32, 1, 0.0, 16, "float16"),
    Case(6, 2, 64, 0, 0.0, 16, "float16", chunk=24),
    Case(6, 2, 64, 0, 0.0, 32, "float32", chunk=48),
    Case(5, 1, 80, 0, 0.0, 64, "float16", chunk=300),
    Case(8, 4, 64, 0, 9.0, 16, "float32", chunk=256),
    Case(71, 1, 36, 0, 0.0, 16, "float16", alibi=0.5),
    Case(16, 16, 32, 100, 0.0, 32, "float32", alibi=0.02),
    Case(112, 112, 20, 0, 0.0, 16, "float32", alibi=2.0),
    Case(8, 2, 64, 0, 0.0, 16, "float16", sunk=True),
    Case(10, 2, 96, 128, 0.0, 32, "float32", sunk=True),
    Case(5, 5, 100, 0, 20.0, 128, "float16", sunk=True),
    Case(6, 2, 20, 0, 0.0, 16, "float32", chunk=200, alibi=0.1, sunk=True),
    Case(2, 1, 1024, 0, 0.0, 16, "float16", sunk=True),
    Case(3, 1, 514, 0, 0.0, 32, "float16"),
    Case(2, 1, 576, 0, 0.0, 16, "float16", latent=512),
    Case(128, 1, 20, 0, 0.0, 16, "float16", sunk=True, latent=12),
    Case(5, 1, 44, 70, 9.0, 128, "float32", latent=38),
    Case(24, 1, 40, 0, 0.0, 64, "float32", chunk=48, alibi=0.1, latent=32),
    Case(9, 3, 64, 0, 0.0, 16, "fp8_e4m3", scaled=True),
    Case(4, 1, 256, 512, 0.0, 32, "fp8_e5m2", scaled=True),
    Case(14, 2, 64, 0, 5.0, 64, "int8"),
    Case(71, 1, 36, 0, 0.0, 16, "int8", alibi=0.5),
    Case(5, 5, 100, 0, 20.0, 128, "fp8_e4m3", sunk=True),
    Case(3, 1, 514, 0, 0.0, 32, "fp8_e5m2"),
    Case(8, 4, 64, 0, 9.0, 16, "int8", chunk=256, sunk=True),
    Case(5, 1, 44, 70, 9.0, 128, "int8", latent=38),
    Case(128, 1, 20, 0, 0.0, 16, "fp8_e4m3", sunk=True, latent=12, scaled=True),
    Case(2, 1, 576, 0, 0.0, 16, "fp8_e5m2", latent=512),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend(name: str, case: Case) -> None:
    """A prompt in uneven chunks, answers checked at every context length that is near an edge."""
    dev, length = device(name), CONTEXTS[-1]
    qkv, pages = case.qkv(length), Pages(2, length, case.block_size)
    model = attention_model(dev, qkv, case.shape(), pages, case.dtype, case.sinks(), case.scales())
    for start, end in ((0, 1), (1, 8), (8, 15), (15, 250), (250, 514), (514, 1099), (1099, 1100)):
        wanted = [n - 1 for n in CONTEXTS if start < n <= end] or [start]
        got = model.raw_logits(pages.step([Span(1, start, range(start, end))], [p - start for p in wanted]))
        truth.assert_within(got, case.truth(qkv, wanted))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend_of_many_sequences(name: str, case: Case) -> None:
    """Prompts, continued prompts and decodes in one step: nobody reads a neighbour's cache."""
    dev, lengths = device(name), (1, 17, 33, 70, 5, 130)
    pages = Pages(len(lengths), 160, case.block_size, seed=1)
    streams = [case.qkv(n, seed) for seed, n in enumerate(lengths)]
    first = np.cumsum([0, *lengths])
    model = attention_model(dev, np.concatenate(streams), case.shape(), pages, case.dtype, case.sinks(), case.scales())
    done = (0, 16, 20, 69, 0, 129)
    for slot, n in enumerate(done):
        if n:
            model.raw_logits(pages.step([Span(slot, 0, range(first[slot], first[slot] + n))]))
    order = (3, 0, 5, 1, 4, 2)
    step = pages.step([Span(s, done[s], range(first[s] + done[s], first[s] + lengths[s])) for s in order])
    values, bounds = zip(*(case.truth(streams[s], list(range(done[s], lengths[s]))) for s in order), strict=True)
    truth.assert_within(model.raw_logits(step), (np.concatenate(values), np.concatenate(bounds)))


@pytest.mark.parametrize("dtype", ["float16", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_what_the_cache_keeps(name: str, dtype: str) -> None:
    """Of one key the value comes back as it was kept: every float of 8 bits, what lies half-way between two, a little
    beside that, denormals, zeros of either sign, what is too large; and NaN."""
    codes = np.arange(256, dtype=np.uint8)
    floats = np.concatenate([codes.view(t).astype(np.float32) for t in (float8_e4m3fn, float8_e5m2)])
    floats = np.unique(floats[np.isfinite(floats)])
    between = (floats[:-1] + floats[1:]) / 2
    steps = [np.nextafter(between, np.float32(side)) for side in (-np.inf, np.inf)]
    large = np.array([460, 464, 480, 1e4, 6e4, 65504], np.float32)
    values = np.concatenate([floats, between, *steps, large, -large])
    if dtype.startswith("fp8"):
        values = np.concatenate([values, np.array([1e30, -np.inf, np.inf], np.float32)])
    values = np.resize(values, (-(-len(values) // 64), 64))
    qkv = np.zeros((len(values), 3 * 64), np.float32)
    qkv[:, 128:] = values
    case, pages = Case(1, 1, 64, 0, 0.0, 16, dtype), Pages(len(qkv), 16)
    model = attention_model(device(name), qkv, case.shape(), pages, dtype)
    step = pages.step([Span(slot, 0, [slot]) for slot in range(len(qkv))])
    want, off = truth.cached(values[:, None], dtype)
    assert np.all(np.abs(model.raw_logits(step) - want[:, 0]) <= off[:, 0])
    qkv[1, 130], qkv[2, 66] = np.nan, np.nan
    got = attention_model(device(name), qkv, case.shape(), pages, dtype).raw_logits(step)
    assert [row.item() for row in np.isnan(got).any(axis=1)[:4]] == [False, True, True, False]
    assert not np.isnan(got[3:]).any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e-38, 0.0])
def test_integers_of_what_is_not_finite_or_hardly_there(name: str, value: float) -> None:
    """An infinity has no scale, so the token is NaN; what is too small for one is zero."""
    qkv = np.zeros((1, 96), np.float32)
    qkv[0, 64:] = value
    case, pages = Case(1, 1, 32, 0, 0.0, 16, "int8"), Pages(1, 16)
    got = attention_model(device(name), qkv, case.shape(), pages, "int8").raw_logits(pages.step([Span(0, 0, [0])]))
    assert np.isnan(got).all() if np.isinf(value) else (got == 0).all()


def test_large_scores(name: str) -> None:
    """Scores of +-1000: the softmax is one key, not a quotient of infinities."""
    case = Case(2, 1, 32, 0, 0.0, 16, "float32")
    qkv = case.qkv(40) * np.float32(30)
    pages = Pages(1, 64)
    got = attention_model(device(name), qkv, case.shape(), pages, case.dtype).raw_logits(
        pages.step([Span(0, 0, range(40))])
    )
    value, bound = case.truth(qkv, list(range(40)))
    assert np.isfinite(got).all()
    truth.assert_within(got, (value, bound))


@pytest.mark.parametrize("sink", [80.0, 1000.0, -1000.0, -np.inf, np.nan])
def test_extreme_sinks(name: str, sink: float) -> None:
    """Scores far below a sink leave nothing, a sink far below them takes nothing, and NaN is kept."""
    case = Case(2, 1, 32, 0, 0.0, 16, "float32")
    qkv, pages = case.qkv(300), Pages(1, 304)
    sinks = np.array([sink, 0.0], np.float32)
    model = attention_model(device(name), qkv, case.shape(), pages, case.dtype, sinks)
    got = model.raw_logits(pages.step([Span(0, 0, range(300))], [0, 31, 299]))
    if sink != sink:
        assert np.isnan(got).all()  # in both heads: the head of the model multiplies by the identity
        return
    q, k, v = case.split(qkv)
    value, bound = truth.attend(q[[0, 31, 299]], k, v, [0, 31, 299], case.shape(), sinks=sinks)
    truth.assert_within(got, (value.reshape(3, -1), bound.reshape(3, -1)))


@pytest.mark.parametrize("fields", [{"window": 40}, {"chunk": 76}], ids=str)
def test_table_entries_behind_the_window_are_not_read(name: str, fields: dict[str, int]) -> None:
    """Position 190 sees the last 40 tokens, or those from 152 on."""
    case = Case(4, 2, 32, 0, 0.0, 16, "float16")._replace(**fields)
    qkv, pages = case.qkv(200), Pages(1, 208)
    model = attention_model(device(name), qkv, case.shape(), pages, case.dtype)
    model.raw_logits(pages.step([Span(0, 0, range(190))]))
    pages.tables[0][0, : 150 // 16] = 2_000_000_000
    got = model.raw_logits(pages.step([Span(0, 190, range(190, 200))]))
    truth.assert_within(got, case.truth(qkv, list(range(190, 200))))


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize(
    "fields", [{}, {"window": 24}, {"chunk": 40}, {"chunk": 7, "sunk": True, "alibi": 1.0}], ids=str
)
def test_masked_positions_are_not_read(name: str, fields: dict[str, Any], dtype: str) -> None:
    """Infinity and NaN left in the cache by an earlier owner of a block, ahead of a sequence or behind what it sees."""
    case = Case(4, 2, 32, 0, 0.0, 32, dtype)._replace(**fields)
    qkv, pages = case.qkv(128), Pages(1, 128, 32)
    qkv[64:96] = np.nan
    qkv[96:] = np.inf
    model = attention_model(device(name), qkv, case.shape(), pages, case.dtype, case.sinks(), case.scales())
    model.raw_logits(pages.step([Span(0, 32, range(64, 128))]))  # positions 32..95 hold NaN, then infinity
    for start, end in ((0, 33), (33, 40), (40, 41)):
        got = model.raw_logits(pages.step([Span(0, start, range(start, end))]))
        truth.assert_within(got, case.truth(qkv[:64], list(range(start, end))))
    if fields:
        model.raw_logits(pages.step([Span(0, 0, range(64, 70))]))
        got = model.raw_logits(pages.step([Span(0, 41, [41])]))
        truth.assert_within(got, case.truth(qkv[:64], [41]))


@pytest.mark.parametrize("scale", [1.0, 1.1902380714238083])
def test_rotary(name: str, scale: float) -> None:
    """Cosine and sine as rotations of unit vectors, up to a position where a float32 angle is coarse."""
    half = 16
    rope = Rope(tuple((1e4 ** (-np.arange(half) / half)).astype(np.float32).tolist()), scale)
    dev, pages = device(name), Pages(1, 131072, 128)
    shape = AttentionShape(1, 1, 2 * half, 1.0, 0, 0)
    qkv = np.zeros((1, 6 * half), np.float32)
    qkv[0, :half] = 1  # a q whose every pair is (1, 0) turns into (cos, sin)
    table = dev.weight([f32(qkv)])

    def op(ops: Any, batch: Any) -> Any:
        return ops.store_kv(batch, ops.embed(batch, table, 1.0), ops.rotary(batch, rope), shape)

    model = compile_op(dev, op, 2 * half, pages, pages.spec(1, 2 * half))
    for start in (0, 1000, 65531, 131000):
        got = model.raw_logits(pages.step([Span(0, start, [0] * 33)]))
        angle = np.arange(start, start + 33, dtype=np.float32)[:, None] * np.array(rope.inv_freq, np.float32)
        wide = angle.astype(np.float64)
        turned = np.concatenate([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32)
        assert np.all(np.abs(got - turned * np.float32(scale)) <= 2 * np.spacing(np.abs(turned * scale)))


def _vector(size: int, seed: int) -> Any:
    return np.random.default_rng([5, seed]).standard_normal(size).astype(np.float32)


def _norms(after: Sequence[bool] = (False, False, False), full: bool = False, **fields: Any) -> dict[str, HeadNorm]:
    """Norms of q, k and v of 6 and 2 heads of 36, each with a weight and an eps of its own."""
    return {
        f"{name}_norm": HeadNorm(_vector((heads if full else 1) * 36, heads), eps, after=late, **fields)
        for name, heads, eps, late in zip("qkv", (6, 2, 2), (1e-6, 0.3, 0.05), after, strict=True)
    }


STORES: dict[str, tuple[dict[str, HeadNorm], dict[str, Any]]] = {
    "plain": ({}, {}),
    "norms": (_norms(), {}),
    "norm of keys alone": ({"k_norm": _norms()["k_norm"]}, {}),
    "layer norms": (_norms(center=True), {}),
    "a weight per head": (_norms(full=True), {}),
    "over all heads": (_norms(full=True, over="all"), {}),
    "layer norms over all heads with one weight": (_norms(over="all", center=True), {}),
    "after the rotation": (_norms((True, True, True)), {}),
    "keys after the rotation": (_norms((False, True, False), full=True, over="all"), {"clip": 0.8}),
    "clipped": ({}, {"clip": 0.5}),
    "clipped before late norms": (_norms((True, True, True), center=True), {"clip": 0.5}),
    "temperature": (_norms((True, True, False)), {"temperature": Temperature(0.1, 8)}),
    "temperature from 0": ({}, {"temperature": Temperature(0.3, 8, start=0)}),
}


@pytest.mark.parametrize("rotated", [0, 20, 36])
@pytest.mark.parametrize("store", STORES)
def test_store_kv(name: str, store: str, rotated: int) -> None:
    """q comes back as it is used; k and v are seen through attention. `rotated` 20 of 36 leaves the rest alone."""
    (norms, fields), case, length = STORES[store], Case(6, 2, 36, 0, 0.0, 16, "float32"), 50
    shape = case.shape()._replace(**fields)
    qkv, pages, dev = case.qkv(length), Pages(1, length), device(name)
    frequencies = 1e4 ** (-np.arange(0, rotated, 2) / max(1, rotated))
    rope = Rope(tuple(frequencies.astype(np.float32).tolist()), 1.25) if rotated else None
    q, k, v = (
        truth.prepare(x, range(length), shape, norms.get(f"{letter}_norm"), None if letter == "v" else rope)
        for letter, x in zip("qkv", case.split(qkv), strict=True)
    )
    if shape.temperature is not None:
        q = truth.warm(q, range(length), *shape.temperature)
    step = pages.step([Span(0, 0, range(length))])
    stored = storing(dev, qkv, shape, rope, **norms)
    got = compile_op(dev, stored, 6 * 36, pages, pages.spec(2, 36)).raw_logits(step)
    truth.assert_within(got, (q[0].reshape(length, -1), q[1].reshape(length, -1)))
    got = attention_model(dev, qkv, shape, pages, "float32", rope=rope, **norms).raw_logits(step)
    value, bound = truth.attend(q[0], k[0], v[0], range(length), shape, (q[1], k[1], v[1]))
    truth.assert_within(got, (value.reshape(length, -1), bound.reshape(length, -1)))


def test_clip_keeps_nan(name: str) -> None:
    """A value that is no number fails its row: it does not become a bound."""
    shape, pages, dev = Case(2, 1, 32, 0, 0.0, 16, "float32").shape()._replace(clip=1.0), Pages(1, 16), device(name)
    qkv = np.full((2, 4 * 32), 3, np.float32)
    qkv[1, 5] = np.nan
    model = compile_op(dev, storing(dev, qkv, shape), 64, pages, pages.spec(1, 32))
    first = model.raw_logits(pages.step([Span(0, 0, [0])]))
    assert (first == 1).all()
    assert np.isnan(model.raw_logits(pages.step([Span(0, 0, [1])]))).all()  # the head multiplies by the identity


def test_a_layer_reads_the_keys_of_another(name: str) -> None:
    """Without `stores`, qkv is q alone; the layer that has the keys may have another number of query heads."""
    own, other = Case(4, 2, 32, 0, 0.0, 16, "float16"), Case(6, 2, 32, 24, 0.0, 16, "float16")
    qkv, pages, dev = own.qkv(60), Pages(1, 64, groups=2), device(name)
    q = other.split(other.qkv(60, seed=3))[0]
    norm = HeadNorm(_vector(32, 0), 1e-5)
    keyed = storing(dev, qkv, own.shape(1, 0))
    shape = other.shape(1, 0)._replace(stores=False)
    queried = storing(dev, q.reshape(60, -1), shape, q_norm=norm, k_norm=norm)

    def op(ops: Any, batch: Any) -> Any:
        keyed(ops, batch)
        return ops.attend(batch, queried(ops, batch), shape)

    model = compile_op(dev, op, 6 * 32, pages, pages.spec(2, 32, "float16", (1, 0)))
    model.raw_logits(pages.step([Span(0, 0, range(50))]))
    got = model.raw_logits(pages.step([Span(0, 50, range(50, 60))]))
    _, k, v = (x.astype(np.float16) for x in own.split(qkv))
    value, off = truth.prepare(q[50:], range(50, 60), shape, norm, None)
    value, bound = truth.attend(value, k, v, range(50, 60), shape, (off, 0, 0))
    truth.assert_within(got, (value.reshape(10, -1), bound.reshape(10, -1)))


@pytest.mark.parametrize("rotated", [6, 10])
def test_store_latent(name: str, rotated: int) -> None:
    """q comes back as it is used; the keys are seen through attention. `rotated` 6 of 10 leaves the rest alone."""
    case, length = Case(3, 1, 30, 0, 0.0, 16, "float32", latent=20), 50
    qkv, pages, dev, shape = case.qkv(length), Pages(1, length), device(name), case.shape()
    rope = Rope(tuple((1e4 ** (-np.arange(0, rotated, 2) / rotated)).astype(np.float32).tolist()), 1.25)
    q, k, v = case.split(qkv)

    def turned(x: Any) -> truth.Pair:
        value, off = truth.turn((x[..., 20:], np.zeros(x[..., 20:].shape)), range(length), rope)
        return tuple(np.concatenate([a, b], axis=2) for a, b in ((x[..., :20], value), (0 * x[..., :20], off)))

    (q, q_off), (k, k_off) = turned(q), turned(k)
    step = pages.step([Span(0, 0, range(length))])
    spec = pages.spec(1, 30)._replace(latent=20)
    got = compile_op(dev, storing(dev, qkv, shape, rope), 90, pages, spec).raw_logits(step)
    truth.assert_within(got, (q.reshape(length, -1), q_off.reshape(length, -1)))
    got = attention_model(dev, qkv, shape, pages, "float32", rope=rope).raw_logits(step)
    value, bound = truth.attend(q, k, v, range(length), shape, (q_off, k_off, 0))
    truth.assert_within(got, (value.reshape(length, -1), bound.reshape(length, -1)))


def test_layers_use_the_table_of_their_group(name: str) -> None:
    """Two layers, each with a group and a window of its own, in one body."""
    near, far = Case(2, 1, 32, 7, 0.0, 16, "float32"), Case(2, 1, 32, 0, 0.0, 16, "float32")
    qkv, pages, dev = near.qkv(60), Pages(2, 64, groups=2, seed=3), device(name)
    other = near.qkv(60, seed=9)
    first, second = dev.weight([f32(qkv)]), dev.weight([f32(other)])
    half = dev.weight([f32(np.eye(64))])

    def op(ops: Any, batch: Any) -> Any:
        q = ops.store_kv(batch, ops.embed(batch, first, 1.0), None, near.shape(0, 1))
        a = ops.attend(batch, q, near.shape(0, 1))
        q = ops.store_kv(batch, ops.embed(batch, second, 1.0), None, far.shape(1, 0))
        return ops.linear(ops.attend(batch, q, far.shape(1, 0)), half, residual=a)

    model = compile_op(dev, op, 64, pages, pages.spec(1, 32, group_of=(1, 0)))
    model.raw_logits(pages.step([Span(1, 0, range(40))]))
    got = model.raw_logits(pages.step([Span(1, 40, range(40, 60))]))
    pairs = near.truth(qkv, list(range(40, 60))), far.truth(other, list(range(40, 60)))
    value = pairs[0][0] + pairs[1][0]
    truth.assert_within(got, (value, pairs[0][1] + pairs[1][1] + 4 * UNIT * np.abs(value)))


@pytest.mark.parametrize("dtype", ["float16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("latent", [0, 20])
def test_copied_blocks_serve_another_sequence(name: str, latent: int, dtype: str) -> None:
    """Slot 1 gets the blocks of slot 0 in group 0 by copies, and goes on as slot 0 would; group 1 is untouched."""
    case, dev = Case(4, 1 if latent else 2, 32, 0, 0.0, 16, dtype, latent=latent), device(name)
    qkv, pages = case.qkv(41), Pages(3, 48, groups=2)

    def op(ops: Any, batch: Any) -> Any:
        outs = []
        for layer, group in ((0, 0), (1, 1), (2, 0)):
            shape = case.shape(layer, group)
            outs.append(ops.attend(batch, storing(dev, qkv, shape)(ops, batch), shape))
        return ops.linear(ops.linear(outs[0], identity, residual=outs[2]), identity, residual=outs[1])

    width = 4 * (latent or 32)
    identity = dev.weight([f32(np.eye(width))])
    spec = pages.spec(case.kv_heads, 32, dtype, (0, 1, 0))._replace(latent=latent)
    model = compile_op(dev, op, width, pages, spec)
    model.raw_logits(pages.step([Span(0, 0, range(40))]))
    wanted = model.raw_logits(pages.step([Span(0, 40, [40])]))
    copies = {g: np.stack([pages.tables[g][0], pages.tables[g][1]], axis=1) for g in (0, 1)}
    model.copy_blocks(0, np.ascontiguousarray(copies[0]))
    half_way = model.raw_logits(pages.step([Span(1, 40, [40])]))
    assert not np.array_equal(half_way, wanted)
    model.copy_blocks(1, np.ascontiguousarray(copies[1]))
    assert np.array_equal(model.raw_logits(pages.step([Span(1, 40, [40])])), wanted)
    # In order: through slot 1's blocks, which are overwritten first, slot 2 gets what slot 0 had.
    chain = np.concatenate([copies[0], np.stack([pages.tables[0][1], pages.tables[0][2]], axis=1)])
    model.copy_blocks(0, chain)
    model.copy_blocks(1, np.stack([pages.tables[1][0], pages.tables[1][2]], axis=1))
    assert np.array_equal(model.raw_logits(pages.step([Span(2, 40, [40])])), wanted)
    model.copy_blocks(0, np.zeros((0, 2), np.int32))
