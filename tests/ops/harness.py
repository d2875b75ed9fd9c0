"""Run one operation on any device: a body of one op between an embedding that feeds it and a head that hands it out.

What an op gets is a row of an F32 table, picked by token id, and the head multiplies by the identity: both are exact,
so what comes back is what the op computed, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo.devices import DeviceUnavailable, select_device
from octavo.ops.contract import (
    F32,
    AttentionShape,
    BatchArrays,
    BatchLimits,
    CompiledModel,
    Device,
    HeadNorm,
    KVScales,
    KVSpec,
    Rope,
    Router,
    Sampling,
    Stored,
)
from octavo.quant import KINDS, dense, row_bytes

DEVICES = ("reference", "torch", "cpu")
"""All of them must be there: a test of a device that cannot run fails."""

INVARIANT = ("reference", "cpu")
"""Devices that promise the same bits for a row whatever else is in the batch."""

UNIT = 2.0**-24
"""Unit roundoff of float32."""

ROWS = (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 100)
CONTEXTS = (1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1100)


def device(name: str, threads: int = 1) -> Device:
    try:
        return select_device(name, threads, "float32")
    except DeviceUnavailable as missing:
        pytest.fail(f"device {name!r} is part of the tests and cannot run here: {missing}")


def f32(values: Any) -> Stored:
    """A matrix as an F32 checkpoint stores it."""
    matrix = np.ascontiguousarray(values, np.float32)
    n_out, n_in = matrix.shape
    return Stored("F32", n_out, n_in, matrix.view(np.uint8))


FLOAT_SCALES = {
    **dict.fromkeys(("INT4_32", "INT4_128", "INT8_32", "INT8_128"), 2),
    **dict.fromkeys(("F8_E4M3_32", "F8_E5M2_32", "NF4_32", "FP4_32", "E2M1_16"), 1),
    **dict.fromkeys(("IQ1_CODES", "IQ2_CODES", "IQ3_CODES"), 1),
}
"""Formats whose blocks begin with float32 scales, and how many of these there are."""


def random_stored(kind: str, n_out: int, n_in: int, rng: np.random.Generator) -> Stored:
    """Random bytes, block by block those whose values have a sane size: [1e-3, 4] is the largest of a block. Scales of
    float32, of which hardly any would be sane, are drawn from [1e-4, 1] and have either sign."""
    size = row_bytes(kind, n_in)
    block = KINDS[kind][0]
    blocks = n_in // block
    out = np.empty((n_out * blocks, size // blocks), np.uint8)
    missing = np.arange(len(out))
    while missing.size:
        out[missing] = rng.integers(0, 256, (missing.size, out.shape[1]), np.uint8)
        if kind in FLOAT_SCALES:
            drawn = (missing.size, FLOAT_SCALES[kind])
            scales = 10 ** rng.uniform(-4, 0, drawn) * rng.choice([-1, 1], drawn)
            out[missing, : 4 * drawn[1]] = scales.astype("<f4").view(np.uint8)
        with np.errstate(all="ignore"):
            peak = np.abs(dense(Stored(kind, missing.size, block, out[missing]))).max(axis=1)
        missing = missing[~((peak >= 1e-3) & (peak <= 4))]
    return Stored(kind, n_out, n_in, out.reshape(n_out, size))


HALF_SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)},
    **dict.fromkeys(("F32", "F16", "BF16", "MXFP4", "NVFP4", "IQ1_M"), ()),
}
"""Where the float16 scales of a block are, if not at 0 alone."""


def with_scale(stored: Stored, scale: float) -> Stored:
    """`stored` with `scale` as every float16 or float32 scale (and minimum) of a block."""
    blocks = stored.data.reshape(-1, KINDS[stored.kind][1]).copy()
    with np.errstate(over="ignore"):
        single, half = np.float32(scale).tobytes(), np.float16(scale).tobytes()
    floats = FLOAT_SCALES.get(stored.kind, 0)
    blocks[:, : 4 * floats] = list(single * floats)
    for at in () if floats else HALF_SCALES.get(stored.kind, (0,)):
        blocks[:, at : at + 2] = list(half)
    return stored._replace(data=blocks.reshape(stored.data.shape))


class Span(NamedTuple):
    """Tokens [start, start + len(tokens)) of the sequence in `slot`."""

    slot: int
    start: int
    tokens: Sequence[int]


class Pages:
    """Block tables of `slots` sequences of up to `length` tokens, one per KV group, with block ids in random order."""

    def __init__(self, slots: int, length: int, block_size: int = 16, groups: int = 1, seed: int = 0) -> None:
        self.block_size = block_size
        self.width = -(-length // block_size)
        self.length = length
        rng = np.random.default_rng(seed)
        self.tables = tuple(
            rng.permutation(slots * self.width).astype(np.int32).reshape(slots, self.width) for _ in range(groups)
        )

    def spec(self, kv_heads: int, head_dim: int, dtype: str = "float32", group_of: Sequence[int] = (0,)) -> KVSpec:
        blocks = tuple(table.size for table in self.tables)
        return KVSpec(len(group_of), kv_heads, head_dim, dtype, self.block_size, blocks, tuple(group_of))

    def limits(self, tokens: int) -> BatchLimits:
        slots = self.tables[0].shape[0]
        return BatchLimits(tokens, slots, tokens, self.width * self.block_size)

    def step(self, spans: Sequence[Span], rows: Sequence[int] | None = None) -> BatchArrays:
        """A step over `spans`; output rows are all tokens unless given."""
        lengths = [len(span.tokens) for span in spans]
        tokens = np.array([t for span in spans for t in span.tokens], np.int32)
        return BatchArrays(
            tokens=tokens,
            positions=np.array([span.start + i for span in spans for i in range(len(span.tokens))], np.int32),
            starts=np.cumsum([0, *lengths], dtype=np.int32),
            slots=np.array([span.slot for span in spans], np.int32),
            rows=np.arange(tokens.size, dtype=np.int32) if rows is None else np.array(rows, np.int32),
            tables=self.tables,
        )


def compile_op(
    dev: Device, op: Callable[[Any, Any], Any], width: int, pages: Pages, spec: KVSpec | None = None, tokens: int = 2048
) -> CompiledModel:
    """The model whose logits are `op(ops, batch)` [T, width] at the batch's rows."""
    identity = dev.weight([f32(np.eye(width))])

    def body(ops: Any, batch: Any) -> Any:
        return ops.gather(batch, op(ops, batch))

    def head(ops: Any, x: Any) -> Any:
        return ops.logits(x, identity)

    cache = dev.kv_cache(spec or pages.spec(1, 32))
    return dev.compile(body, head, pages.limits(tokens), cache)


def rowwise(dev: Device, op: Callable[[Any, Any, Any], Any], width: int, x: F32) -> F32:
    """`op(ops, batch, input)` for the rows of `x` [n, D] as the tokens of one sequence."""
    table = dev.weight([f32(x)])
    pages = Pages(1, max(16, len(x)))
    model = compile_op(dev, lambda ops, batch: op(ops, batch, ops.embed(batch, table, 1.0)), width, pages)
    return model.raw_logits(pages.step([Span(0, 0, range(len(x)))]))


def routes(dev: Device, logits: Any, router: Router, correction: Any = None) -> F32:
    """[rows, E]: the weight of each expert in each row, 0 where it was not chosen. Expert e of this mixture gives the
    unit vector e whatever it gets: its matrices are zero, its biases one."""
    logits = np.asarray(logits, np.float32)
    experts = logits.shape[1]
    zero = dev.weight([f32(np.zeros((64, 32)))])
    down = dev.weight([f32(np.zeros((experts, 32)))])
    ones, units = dev.vector(np.ones(experts * 64, np.float32)), dev.vector(np.eye(experts, dtype=np.float32).ravel())
    vector = None if correction is None else dev.vector(np.asarray(correction, np.float32))
    table = dev.weight([f32(logits)])

    def op(ops: Any, batch: Any, x: Any) -> Any:
        return ops.moe(
            x,
            ops.embed(batch, table, 1.0),
            (zero,) * experts,
            (down,) * experts,
            router,
            "identity",
            correction=vector,
            gate_up_bias=ones,
            down_bias=units,
        )

    return rowwise(dev, op, experts, np.ones((len(logits), 32), np.float32))


def storing(
    dev: Device, qkv: F32, shape: AttentionShape, rope: Rope | None = None, **norms: HeadNorm
) -> Callable[[Any, Any], Any]:
    """store_kv, as `op(ops, batch)`, of rows of `qkv`; weights of `norms` (q_norm, k_norm, v_norm) are arrays.

    Of latent attention store_latent: `qkv` then holds q_latent, q_rope, latent and k_rope, and without `rope` nothing
    turns."""
    if shape.latent:
        turned = shape.head_dim - shape.latent
        cuts = np.cumsum([shape.heads * shape.latent, shape.heads * turned, shape.latent])
        tables = [dev.weight([f32(part)]) for part in np.split(qkv, cuts, axis=1)]
        still = Rope((0.0,) * (turned // 2))

        def store_latent(ops: Any, batch: Any) -> Any:
            parts = (ops.embed(batch, table, 1.0) for table in tables)
            return ops.store_latent(batch, *parts, ops.rotary(batch, rope or still), shape)

        return store_latent

    table = dev.weight([f32(qkv)])
    own = {name: norm._replace(weight=dev.vector(norm.weight)) for name, norm in norms.items()}

    def store_kv(ops: Any, batch: Any) -> Any:
        rotary = None if rope is None else ops.rotary(batch, rope)
        return ops.store_kv(batch, ops.embed(batch, table, 1.0), rotary, shape, **own)

    return store_kv


def attention_model(
    dev: Device,
    qkv: F32,
    shape: AttentionShape,
    pages: Pages,
    dtype: str,
    sinks: F32 | None = None,
    scales: KVScales | None = None,
    **store: Any,
) -> CompiledModel:
    """store_kv and attend over rows of `qkv` [n, (H + 2G) d]; `store`, and `qkv` of latent attention: see `storing`.
    `scales`: of the cache."""
    stored = storing(dev, qkv, shape, **store)
    sunk = None if sinks is None else dev.vector(sinks)

    def op(ops: Any, batch: Any) -> Any:
        return ops.attend(batch, stored(ops, batch), shape, sunk)

    spec = pages.spec(shape.kv_heads, shape.head_dim, dtype, (shape.group,))._replace(latent=shape.latent)
    if scales is not None:
        spec = spec._replace(scales=(scales,))
    return compile_op(dev, op, shape.heads * (shape.latent or shape.head_dim), pages, spec)


def drawing_model(dev: Device, logits: F32) -> tuple[CompiledModel, Callable[[Sequence[int]], BatchArrays]]:
    """A model over V ids whose raw logits for token i are row i of `logits` [n, V], exactly; and what makes its steps.

    The head multiplies by 128, so a single infinity (0 times infinity is NaN, in all of the row) is written 2^127 / 64.
    """
    infinite = np.float32(2.0**121)
    table = dev.weight([f32(np.clip(logits / np.float32(128), -infinite, infinite))])
    identity, pages = dev.weight([f32(np.eye(logits.shape[1]))]), Pages(1, 1024)
    model = dev.compile(
        lambda ops, batch: ops.gather(batch, ops.embed(batch, table, 1.0)),
        lambda ops, x: ops.logits(x, identity, 0.0, 128.0),
        pages.limits(1024),
        dev.kv_cache(pages.spec(1, 32)),
    )
    return model, lambda tokens: pages.step([Span(0, 0, tokens)])


def parameters(rows: int, **fields: Any) -> Sampling:
    """Parameters of `rows` draws, greedy unless `fields` says otherwise: an array, or one value for all rows; for
    `seen` and `bias` a dict per row, for `allow` and `report` a list per row."""
    defaults: dict[str, tuple[Any, Any]] = {
        **dict.fromkeys(("top_k", "choice", "position"), (0, np.int32)),
        **dict.fromkeys(("target", "logprobs"), (-1, np.int32)),
        **dict.fromkeys(("temperature", "min_p", "presence", "frequency"), (0, np.float32)),
        **dict.fromkeys(("top_p", "repetition"), (1, np.float32)),
        "seed": (0, np.uint64),
    }
    arrays: dict[str, Any] = {}
    for name, (default, dtype) in defaults.items():
        given = np.asarray(fields.pop(name, default)).astype(dtype)
        arrays[name] = np.ascontiguousarray(np.broadcast_to(given, (rows,)))
    for name in ("seen", "bias", "allow", "report"):
        lists = fields.pop(name, [()] * rows)
        arrays[f"{name}_ptr"] = np.cumsum([0, *map(len, lists)], dtype=np.int32)
        arrays[f"{name}_ids"] = np.array([i for row in lists for i in row], np.int32)
        values = [v for row in lists if isinstance(row, dict) for v in row.values()]
        if name == "seen":
            arrays["seen_counts"] = np.array(values, np.int32)
        elif name == "bias":
            arrays["bias_values"] = np.array(values, np.float32)
    assert not fields, f"no such parameter: {fields}"
    return Sampling(**arrays)
