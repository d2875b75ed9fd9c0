"""The same bits for a row whatever else is in the batch, however its prompt was cut, wherever its blocks lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.ops.contract import (
    F32,
    KV_TYPES,
    AttentionShape,
    BatchLimits,
    CompiledModel,
    Device,
    HeadNorm,
    Rope,
    Temperature,
)
from octavo.quant import KINDS
from tests.ops.harness import (
    INVARIANT,
    ROWS,
    Pages,
    Span,
    attention_model,
    compile_op,
    device,
    f32,
    parameters,
    random_stored,
)

pytestmark = pytest.mark.parametrize("name", INVARIANT)

THREADS = {"reference": (1,), "cpu": (1, 2)}


def _devices(name: str) -> list[Device]:
    return [device(name, threads) for threads in THREADS[name]]


def _random(rows: int, width: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def _assert_rows_stand_alone(name: str, make: Callable[[Device], Callable[..., Any]], x: F32, width: int) -> None:
    """`make(device)(ops, input)` on subsets of the rows of `x`, in another order, equals the whole, bit for bit."""
    whole = None
    for dev in _devices(name):
        op, table, pages = make(dev), dev.weight([f32(x)]), Pages(1, 128)

        def body(ops: Any, batch: Any, op: Any = op, table: Any = table) -> Any:
            return op(ops, ops.embed(batch, table, 1.0))

        model = compile_op(dev, body, width, pages)
        if whole is None:
            whole = model.raw_logits(pages.step([Span(0, 0, range(len(x)))]))
        rng = np.random.default_rng(1)
        for rows in ROWS:
            picked = rng.permutation(len(x))[:rows]
            got = model.raw_logits(pages.step([Span(0, 0, picked.tolist())]))
            assert np.array_equal(got.view(np.uint32), whole[picked].view(np.uint32)), f"{rows} rows differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_in", "n_out"), [(512, 83), (1536, 200)])
def test_linear(name: str, kind: str, n_in: int, n_out: int) -> None:
    stored, values = random_stored(kind, n_out, n_in, np.random.default_rng(2)), _random(1, n_out)[0]

    def make(dev: Device) -> Any:
        weight, bias = dev.weight([stored]), dev.vector(values)
        return lambda ops, x: ops.linear(x, weight, bias)

    _assert_rows_stand_alone(name, make, _random(100, n_in), n_out)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gated(name: str, kind: str, activation: Any) -> None:
    parts = [random_stored(kind, 96, 256, np.random.default_rng(seed)) for seed in (2, 3)]

    def make(dev: Device) -> Any:
        weight, bias = dev.weight(parts), dev.vector(_random(1, 192)[0])
        return lambda ops, x: ops.gated(x, weight, activation, bias, 0.9)

    _assert_rows_stand_alone(name, make, _random(100, 256), 96)


@pytest.mark.parametrize("center", [False, True])
def test_norm(name: str, center: bool) -> None:
    def make(dev: Device) -> Any:
        weight, bias = dev.vector(_random(1, 576)[0]), dev.vector(_random(1, 576, 1)[0])
        return lambda ops, x: ops.norm(x, weight, 1e-5, x, bias=bias, center=center)

    _assert_rows_stand_alone(name, make, _random(100, 576), 576)


@pytest.mark.parametrize("activation", ["gelu", "xielu"])
def test_plain_feed_forward(name: str, activation: Any) -> None:
    """linear, activate and linear with all their options."""
    up, down = (random_stored("Q4_K", n, 256, np.random.default_rng(n)) for n in (256, 83))

    def make(dev: Device) -> Any:
        first, second, bias = dev.weight([up]), dev.weight([down]), dev.vector(_random(1, 256)[0])
        parameters = dev.vector(np.array([0.8, 1.3, 0.5, -1e-6], np.float32)) if activation == "xielu" else None

        def op(ops: Any, x: Any) -> Any:
            hidden = ops.activate(ops.linear(x, first, bias, None, 0.3), activation, parameters, x)
            return ops.linear(hidden, second)

        return op

    _assert_rows_stand_alone(name, make, _random(100, 256), 83)


def _blended(ops: Any, x: Any, column: Any, four: Any) -> Any:
    return ops.blend(x, column(ops, x), x)


def _mixed(ops: Any, x: Any, column: Any, four: Any) -> Any:
    return ops.mix(four(ops, x), 1, (x, ops.add(x, x, 0.3), x), x)


ROW_OPS: dict[str, Callable[..., Any]] = {
    "add": lambda ops, x, column, four: ops.add(x, ops.activate(x, "tanh"), 0.7),
    "blend": _blended,
    "mix": _mixed,
    "match_rms": lambda ops, x, column, four: ops.match_rms(x, ops.activate(x, "tanh"), 1e-5),
    "keep_top": lambda ops, x, column, four: ops.keep_top(x, 0.5),
    "reduce": lambda ops, x, column, four: ops.reduce(x),
}


@pytest.mark.parametrize("op", ROW_OPS)
def test_row_operations(name: str, op: str) -> None:
    def make(dev: Device) -> Any:
        one, more = dev.weight([f32(_random(1, 83))]), dev.weight([f32(_random(4, 83, 1))])
        return lambda ops, x: ROW_OPS[op](ops, x, lambda o, v: o.linear(v, one), lambda o, v: o.linear(v, more))

    _assert_rows_stand_alone(name, make, _random(100, 83), 83)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_headwise(name: str, kind: str) -> None:
    stored = random_stored(kind, 5 * 40, 96, np.random.default_rng(2))

    def make(dev: Device) -> Any:
        weight = dev.weight([stored])
        return lambda ops, x: ops.headwise(x, weight, 5)

    _assert_rows_stand_alone(name, make, _random(100, 5 * 96), 200)


SHAPES = (
    AttentionShape(9, 3, 64, 0.125, 0, 0),
    AttentionShape(4, 1, 256, 0.0625, 0, 0, 300),
    AttentionShape(8, 8, 32, 0.2, 0, 0, 20, 30.0),
    AttentionShape(6, 2, 36, 0.2, 0, 0, chunk=300, temperature=Temperature(0.1, 64)),
    AttentionShape(9, 1, 20, 0.2, 0, 0, alibi=tuple(2.0**-h for h in range(9)), clip=1.5),
    AttentionShape(12, 1, 44, 0.2, 0, 0, latent=28),
)

ROPE = Rope(tuple((1e4 ** (-np.arange(8) / 8)).astype(np.float32).tolist()))


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(name: str, shape: AttentionShape, dtype: str) -> None:
    _assert_tokens_stand_alone(name, shape, dtype, None)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[5]], ids=str)
def test_attention_with_sinks(name: str, shape: AttentionShape) -> None:
    _assert_tokens_stand_alone(name, shape, "float16", _random(1, shape.heads, 3)[0])


def _assert_tokens_stand_alone(name: str, shape: AttentionShape, dtype: str, sinks: F32 | None) -> None:
    """A prompt of 1,100 tokens at once; in chunks; token by token near every edge; in larger blocks and shuffled ones;
    in the company of others: always the same bits."""
    length = 1100
    width = (shape.heads + (1 if shape.latent else 2) * shape.kv_heads) * shape.head_dim
    qkv = _random(length, width)
    q_norm = HeadNorm(_random(1, shape.head_dim, 1)[0], 1e-6)
    k_norm = HeadNorm(_random(1, shape.kv_heads * shape.head_dim, 2)[0], 1e-5, "all", center=True, after=True)
    edges = [0, 14, 15, 16, 31, 32, 254, 255, 256, 257, 510, 511, 512, 513, 1098, 1099]
    checked = {*edges, *range(3, length, 7)}
    whole: Any = None
    for dev in _devices(name):
        for block_size, cuts in (
            (16, [length]),
            (16, [1, 8, 41, 300, 811, length]),
            (32, [255, 513, length]),
            (128, [c for e in edges for c in (e, e + 1) if c]),
        ):
            pages = Pages(3, length, block_size, seed=len(cuts))
            model = attention_model(dev, qkv, shape, pages, dtype, sinks, rope=ROPE, q_norm=q_norm, k_norm=k_norm)
            got, start = [], 0
            for end in sorted(set(cuts)):
                before, mine, after = Span(1, 0, [5]), Span(2, start, range(start, end)), Span(0, 0, range(700, 733))
                company = len(cuts) > 1
                spans = [before, mine, after] if company else [mine]
                rows = [p - start + company for p in range(start, end) if p in checked]
                got.append(model.raw_logits(pages.step(spans, rows)))
                start = end
            answer = np.concatenate(got)
            whole = answer if whole is None else whole
            wrong = np.flatnonzero((answer.view(np.uint32) != whole.view(np.uint32)).any(axis=1))
            assert not wrong.size, f"block size {block_size}, cuts {cuts}: differs first at {sorted(checked)[wrong[0]]}"


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("latent", [0, 28])
@pytest.mark.parametrize(
    ("fields", "last"), [({"window": 24}, 33), ({"chunk": 24}, 23), ({"chunk": 300}, 299)], ids=str
)
def test_nan_reaches_only_those_who_see_it(
    name: str, fields: dict[str, int], last: int, latent: int, dtype: str
) -> None:
    """Token 10 of a prompt is NaN: what is computed beside it in the same step, and does not see it, keeps its bits."""
    shape = AttentionShape(3, 1, 36, 0.2, 0, 0, latent=latent, **fields)
    dev, pages, length = device(name), Pages(1, 400), 400
    qkv = _random(length, (shape.heads + (1 if latent else 2)) * 36)
    step = pages.step([Span(0, 0, range(length))])
    clean = attention_model(dev, qkv, shape, pages, dtype).raw_logits(step)
    qkv[10] = np.nan
    got = attention_model(dev, qkv, shape, pages, dtype).raw_logits(step)
    sees = np.arange(length)[10 : last + 1]
    assert np.isnan(got[sees]).all()
    others = np.delete(np.arange(length), sees)
    assert np.array_equal(got[others].view(np.uint32), clean[others].view(np.uint32))


class _Decoder:
    """Two layers of a small decoder with weights of several formats, a windowed layer and a full one."""

    vocab, hidden = 384, 256

    def __init__(self, dev: Device, pages: Pages, tokens: int) -> None:
        rng = np.random.default_rng(11)

        def weight(*parts: tuple[str, int, int]) -> Any:
            return dev.weight([random_stored(*part, rng) for part in parts])

        self.table = weight(("Q8_0", self.vocab, self.hidden))
        self.layers = [
            (
                AttentionShape(4, 2, 64, 0.125, layer, group, window),
                weight((kind, 256, 256), (kind, 128, 256), ("Q8_0", 128, 256)),
                weight((kind, 256, 256)),
                weight((kind, 512, 256), (kind, 512, 256)),
                weight((kind, 256, 512)),
            )
            for layer, group, window, kind in ((0, 1, 100, "Q4_K"), (1, 0, 0, "F16"))
        ]
        self.one = dev.vector(np.full(self.hidden, 0.9, np.float32))
        self.rope = Rope(tuple((1e4 ** (-np.arange(32) / 32)).astype(np.float32).tolist()))
        limits: BatchLimits = pages.limits(tokens)
        cache = dev.kv_cache(pages.spec(2, 64, "float16", (1, 0)))
        self.model: CompiledModel = dev.compile(self.body, self.head, limits, cache)

    def body(self, ops: Any, batch: Any) -> Any:
        x, rotary = ops.embed(batch, self.table, 1.0), ops.rotary(batch, self.rope)
        for shape, qkv, out, gate_up, down in self.layers:
            q = ops.store_kv(batch, ops.linear(ops.norm(x, self.one, 1e-5), qkv), rotary, shape)
            x = ops.linear(ops.attend(batch, q, shape), out, residual=x)
            x = ops.linear(ops.gated(ops.norm(x, self.one, 1e-5), gate_up, "silu"), down, residual=x)
        return ops.gather(batch, x)

    def head(self, ops: Any, x: Any) -> Any:
        return ops.logits(ops.norm(x, self.one, 1e-5), self.table)


def test_raw_logits_of_a_decoder(name: str) -> None:
    """Every context length near an edge decodes together with the others, and in subsets of every size, as it does
    alone; and the draws are the same."""
    lengths = [1, 2, 16, 17, 255, 256, 257, 511, 512, 513, 1100]
    rng = np.random.default_rng(12)
    stream = rng.integers(0, _Decoder.vocab, 1101).tolist()
    alone: Any = None
    for dev in _devices(name):
        pages = Pages(len(lengths), 1104, 16, groups=2, seed=7)
        decoder = _Decoder(dev, pages, 2048)
        if alone is None:
            # One sequence that passes every length; its logits at each are what all others must give.
            cuts = sorted({0, *(n - 1 for n in lengths), *lengths})
            alone = {}
            for start, end in zip(cuts[:-1], cuts[1:], strict=True):
                rows = decoder.model.raw_logits(pages.step([Span(0, start, stream[start:end])]))
                alone.update({start + i + 1: row for i, row in enumerate(rows)})
            assert np.isfinite(alone[1100]).all() and alone[1100].std() > 0.01
        for slot, n in enumerate(lengths):
            if n > 1:
                decoder.model.raw_logits(pages.step([Span(slot, 0, stream[: n - 1])], []))
        for size in (11, 1, 2, 3, 4, 5, 7, 8, 10):
            picked = rng.permutation(len(lengths))[:size].tolist()
            step = pages.step([Span(s, lengths[s] - 1, [stream[lengths[s] - 1]]) for s in picked])
            got = decoder.model.raw_logits(step)
            wanted = np.stack([alone[lengths[s]] for s in picked])
            assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32)), [lengths[s] for s in picked]
            p = parameters(size, temperature=1, top_p=0.9, seed=5, position=[lengths[s] for s in picked], logprobs=2)
            drawn = decoder.model.run(step, p)
            for row, s in enumerate(picked):
                single = decoder.model.run(
                    pages.step([Span(s, lengths[s] - 1, [stream[lengths[s] - 1]])]),
                    parameters(1, temperature=1, top_p=0.9, seed=5, position=[lengths[s]], logprobs=2),
                )
                assert single.token[0] == drawn.token[row] and single.logprob[0] == drawn.logprob[row]
        # Prompts of every size beside decodes.
        for size in ROWS:
            spans = [Span(10, 1099, [stream[1099]]), Span(0, 0, stream[:size]), Span(7, 510, [stream[510]])]
            got = decoder.model.raw_logits(pages.step(spans))
            wanted = np.stack([alone[1100], *(alone[i + 1] for i in range(size)), alone[511]])
            assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32)), f"prompt of {size}"
