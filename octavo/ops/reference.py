"""The contract in numpy: slow, eager, and meant to be read. What the other devices are tested against.

Every row is computed by operations of its own, whose shapes depend on the model and the token's position only. A
matrix product of several rows at once would not do: BLAS chooses its order of additions by the number of rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, get_args

import ml_dtypes
import numpy as np

from octavo.ops.check import (
    check_batch,
    check_cache,
    check_copies,
    check_ids,
    check_parts,
    check_router,
    check_sampling,
)
from octavo.ops.contract import (
    F32,
    I32,
    KV_LEAST_SCALE,
    KV_TYPES,
    Activation,
    AttentionShape,
    BatchArrays,
    BatchLimits,
    Drawn,
    HeadNorm,
    KVScales,
    KVSpec,
    Rope,
    Router,
    Sampling,
    Stored,
    Temperature,
)
from octavo.ops.sampling import draw
from octavo.quant import dense

_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}
"""Of elements of the KV cache."""


class ReferenceDevice:
    """The executable specification. Activations are float32 arrays [rows, width]; weights are dense float32."""

    name = "reference"
    notes: tuple[str, ...] = (
        "the reference device is the specification, not a fast engine: expect a few tokens per second",
    )

    def weight(self, parts: list[Stored]) -> ReferenceWeight:
        check_parts(parts)
        return ReferenceWeight(np.concatenate([dense(part) for part in parts]))

    def vector(self, values: F32) -> F32:
        return np.array(values, np.float32)

    def kv_cache(self, spec: KVSpec) -> ReferenceCache:
        return ReferenceCache(spec)

    def compile(self, body: Any, head: Any, limits: BatchLimits, cache: ReferenceCache) -> ReferenceModel:
        """Keep both functions: they run anew each step."""
        return ReferenceModel(body, head, limits, cache)


class ReferenceWeight:
    """`rows` is float32 [n_out, n_in]."""

    def __init__(self, rows: F32) -> None:
        self.rows = rows
        self.n_out, self.n_in = rows.shape

    def times(self, x: F32) -> F32:
        """[rows, n_out] = x @ weight^T, one row of x at a time."""
        if x.shape[1] != self.n_in:
            raise ValueError(f"linear: input is {x.shape[1]} wide, the weight takes {self.n_in}")
        out = np.empty((x.shape[0], self.n_out), np.float32)
        for r, row in enumerate(x):
            out[r] = self.rows @ row
        return out


class ReferencePages:
    """Keys or values of a layer: elements [block, KV head, token in block, d] of the cache's type, and their scales
    [KV head, 1] or, of a type that has one for each head of each token, [block, KV head, token in block, 1].

    `scales`: of the heads; () are all 1.
    """

    def __init__(self, spec: KVSpec, layer: int, scales: tuple[float, ...]) -> None:
        shape = (spec.blocks[spec.group_of[layer]], spec.kv_heads, spec.block_size)
        self.kind = KV_TYPES[spec.dtype]
        self.elements = np.zeros((*shape, spec.head_dim), _DTYPES[spec.dtype])
        self.scales = np.array(scales or [1] * spec.kv_heads, np.float32)[:, None]
        if self.kind.scale_bytes:
            self.scales = np.zeros((*shape, 1), np.float32)

    def write(self, blocks: I32, offsets: I32, x: F32) -> None:
        """Store `x` [T, G, d] at (block, token in block)."""
        scales = self.scales
        if self.kind.scale_bytes:
            scales = np.abs(x).max(axis=-1, keepdims=True) / np.float32(self.kind.largest)
            scales = np.where(np.isfinite(scales), np.maximum(scales, np.float32(KV_LEAST_SCALE)), np.float32(np.nan))
            self.scales[blocks, :, offsets] = scales
        codes = x / scales
        if np.isfinite(self.kind.largest):
            codes = np.clip(codes, -np.float32(self.kind.largest), np.float32(self.kind.largest))
        if self.elements.dtype == np.int8:
            codes = np.rint(np.where(np.isnan(codes), 0, codes))
        self.elements[blocks, :, offsets] = codes.astype(self.elements.dtype)

    def read(self, blocks: I32, skip: int, count: int) -> F32:
        """[G, count, d] in float32: `count` tokens of a sequence with these blocks, from its token `skip` on."""
        scales = self.scales[blocks] if self.kind.scale_bytes else self.scales[:, None]
        heads_first = (self.elements[blocks].astype(np.float32) * scales).swapaxes(0, 1)
        return _f32(heads_first.reshape(len(heads_first), -1, heads_first.shape[3])[:, skip : skip + count])

    def copy(self, source: int, destination: int) -> None:
        self.elements[destination] = self.elements[source]
        if self.kind.scale_bytes:
            self.scales[destination] = self.scales[source]


class ReferenceCache:
    """Keys and values of each layer."""

    def __init__(self, spec: KVSpec) -> None:
        check_cache(spec)
        self.spec = spec
        scales = spec.scales or (KVScales((), ()),) * spec.layers
        self.k = [ReferencePages(spec, layer, scales[layer].k) for layer in range(spec.layers)]
        # Of latent attention, the values are the beginning of the keys.
        self.v = [] if spec.latent else [ReferencePages(spec, layer, scales[layer].v) for layer in range(spec.layers)]

    def write(self, layer: int, blocks: I32, positions: I32, k: F32, v: F32 | None) -> None:
        """Store k and v [T, G, d] of tokens at `positions`, whose blocks are `blocks`."""
        offsets = positions % self.spec.block_size
        self.k[layer].write(blocks, offsets, k)
        if v is not None:
            self.v[layer].write(blocks, offsets, v)

    def read(self, layer: int, table: I32, first: int, end: int) -> tuple[F32, F32]:
        """K and V [G, end - first, d] in float32 at positions [first, end) of the sequence with block table `table`.
        Entries of the table for blocks before `first` are not looked at."""
        size = self.spec.block_size
        blocks = table[first // size : -(-end // size)]
        check_ids(f"tables[{self.spec.group_of[layer]}]", blocks, self.spec.blocks[self.spec.group_of[layer]])
        k = self.k[layer].read(blocks, first % size, end - first)
        if self.spec.latent:
            return k, _f32(k[..., : self.spec.latent])
        return k, self.v[layer].read(blocks, first % size, end - first)

    def copy(self, layer: int, source: int, destination: int) -> None:
        for pages in (self.k[layer], *self.v[layer : layer + 1]):
            pages.copy(source, destination)


class ReferenceBatch(NamedTuple):
    """A step as the operations see it."""

    arrays: BatchArrays
    cache: ReferenceCache

    def spans(self) -> list[tuple[int, int, int]]:
        """(slot, first token, end) of each sequence."""
        starts = self.arrays.starts.tolist()
        return list(zip(self.arrays.slots.tolist(), starts[:-1], starts[1:], strict=True))

    def written_blocks(self, group: int) -> I32:
        """[T]: the block that each token's K and V go to."""
        owner = np.repeat(self.arrays.slots, np.diff(self.arrays.starts))
        blocks: I32 = self.arrays.tables[group][owner, self.arrays.positions // self.cache.spec.block_size]
        return blocks


class ReferenceModel:
    """A body and a head, run eagerly."""

    def __init__(self, body: Any, head: Any, limits: BatchLimits, cache: ReferenceCache) -> None:
        self.body = body
        self.head = head
        self.limits = limits
        self.cache = cache
        self.ops = ReferenceOps()

    def run(self, batch: BatchArrays, sampling: Sampling) -> Drawn:
        logits = self.raw_logits(batch)
        check_sampling(sampling, logits.shape[0], logits.shape[1])
        return draw(logits, sampling)

    def raw_logits(self, batch: BatchArrays) -> F32:
        # The size of the vocabulary is the embedding's; `embed` checks the ids, before anything is written.
        check_batch(batch, self.limits, self.cache.spec, vocab=np.iinfo(np.int32).max)
        # Infinities and NaN are no errors here: they stay in their row, and fail it when it is drawn.
        with np.errstate(all="ignore"):
            hidden = self.body(self.ops, ReferenceBatch(batch, self.cache))
            return _f32(self.head(self.ops, hidden))

    def copy_blocks(self, group: int, pairs: I32) -> None:
        check_copies(pairs, group, self.cache.spec)
        for layer, layer_group in enumerate(self.cache.spec.group_of):
            if layer_group == group:
                for source, destination in pairs.tolist():
                    self.cache.copy(layer, source, destination)


class ReferenceOps:
    """The operations. Shapes and meaning of each are in `octavo.ops.contract.Ops`."""

    def embed(self, batch: Any, table: Any, scale: float) -> F32:
        check_ids("tokens", batch.arrays.tokens, table.n_out)
        return _f32(table.rows[batch.arrays.tokens] * np.float32(scale))

    def embed_positions(self, batch: Any, table: Any, offset: int, residual: Any) -> F32:
        rows = batch.arrays.positions + np.int32(offset)
        check_ids("positions", rows, table.n_out)
        return _f32(table.rows[rows] + residual)

    def rotary(self, batch: Any, rope: Rope) -> F32:
        angles = batch.arrays.positions.astype(np.float32)[:, None] * np.array(rope.inv_freq, np.float32)
        turns = np.concatenate([np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))], axis=1)
        return _f32(turns.astype(np.float32) * np.float32(rope.scale))

    def norm(
        self, x: Any, weight: Any, eps: float, residual: Any = None, *, bias: Any = None, center: bool = False
    ) -> F32:
        out = _norm(x, weight, eps, center)
        if bias is not None:
            out = out + bias
        return out if residual is None else _f32(out + residual)

    def activate(self, x: Any, activation: Activation, parameters: Any = None, times: Any = None) -> F32:
        out = _activate(x, activation, parameters)
        return out if times is None else _f32(out * times)

    def linear(self, x: Any, weight: Any, bias: Any = None, residual: Any = None, scale: float = 1.0) -> F32:
        out: F32 = weight.times(x)
        if bias is not None:
            out = out + bias
        out = out * np.float32(scale)
        return out if residual is None else _f32(out + residual)

    def headwise(self, x: Any, weight: Any, heads: int) -> F32:
        blocks = weight.rows.reshape(heads, -1, weight.n_in)
        out = np.empty((len(x), weight.n_out), np.float32)
        for r, row in enumerate(x.reshape(len(x), heads, -1)):
            out[r] = np.concatenate([block @ part for block, part in zip(blocks, row, strict=True)])
        return out

    def gated(self, x: Any, weight: Any, activation: Activation, bias: Any = None, limit: float = 0.0) -> F32:
        return _gated(self.linear(x, weight, bias), activation, limit)

    def moe(
        self,
        x: Any,
        logits: Any,
        gate_up: tuple[Any, ...],
        down: tuple[Any, ...],
        router: Router,
        activation: Activation,
        *,
        correction: Any = None,
        gate_up_bias: Any = None,
        down_bias: Any = None,
        limit: float = 0.0,
        residual: Any = None,
    ) -> F32:
        check_router(router, len(gate_up))
        out = np.zeros((len(x), down[0].n_out), np.float32)
        for row, (experts, weights) in enumerate(_route(line, router, correction) for line in logits):
            for expert, weight in zip(experts, weights, strict=True):
                given = x[row : row + 1] * weight if router.weigh_input else x[row : row + 1]
                hidden = self.gated(
                    given, gate_up[expert], activation, _part(gate_up_bias, expert, len(gate_up)), limit
                )
                y = self.linear(hidden, down[expert], _part(down_bias, expert, len(down)))[0]
                out[row] += y if router.weigh_input else y * weight
        return out if residual is None else _f32(out + residual)

    def blend(self, x: Any, gate: Any, residual: Any = None) -> F32:
        out = x / (1 + np.exp(-gate))
        return _f32(out if residual is None else out + residual)

    def add(self, x: Any, y: Any, scale: float = 1.0) -> F32:
        return _f32((x + y) * np.float32(scale))

    def mix(self, coefficients: Any, first: int, streams: tuple[Any, ...], residual: Any = None) -> F32:
        out = np.zeros_like(streams[0])
        for j, stream in enumerate(streams):
            out += coefficients[:, first + j : first + j + 1] * stream
        return out if residual is None else _f32(out + residual)

    def match_rms(self, x: Any, like: Any, eps: float) -> F32:
        wanted, own = (np.mean(np.square(v, dtype=np.float64), axis=-1, keepdims=True) for v in (like, x))
        return _f32(x * np.sqrt(wanted / np.maximum(own, eps)).astype(np.float32))

    def keep_top(self, x: Any, deviations: float) -> F32:
        wide = x.astype(np.float64)
        cut = wide.mean(axis=-1, keepdims=True) + deviations * wide.std(axis=-1, keepdims=True)
        return _f32(np.maximum(x - cut.astype(np.float32), 0))

    def store_kv(
        self,
        batch: Any,
        qkv: Any,
        rotary: Any,
        shape: AttentionShape,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        v_norm: HeadNorm | None = None,
    ) -> F32:
        heads = qkv.reshape(qkv.shape[0], -1, shape.head_dim)
        q, k, v = np.split(heads, [shape.heads, shape.heads + shape.kv_heads * shape.stores], axis=1)
        norms = (q_norm, k_norm, v_norm)
        q, k, v = (_head_norm(x, n, after=False) for x, n in zip((q, k, v), norms, strict=True))
        if shape.clip > 0:
            q, k, v = (np.clip(x, -np.float32(shape.clip), np.float32(shape.clip)) for x in (q, k, v))
        if rotary is not None:
            q, k = _rotate(q, rotary), _rotate(k, rotary)
        q, k, v = (_head_norm(x, n, after=True) for x, n in zip((q, k, v), norms, strict=True))
        if shape.temperature is not None:
            q = q * _temperature(batch.arrays.positions, shape.temperature)[:, None, None]
        if shape.stores:
            batch.cache.write(shape.layer, batch.written_blocks(shape.group), batch.arrays.positions, k, v)
        return _f32(q.reshape(q.shape[0], -1))

    def store_latent(
        self, batch: Any, q_latent: Any, q_rope: Any, latent: Any, k_rope: Any, rotary: Any, shape: AttentionShape
    ) -> F32:
        rows = len(latent)
        turned = _rotate(q_rope.reshape(rows, shape.heads, -1), rotary)
        k = np.concatenate([latent[:, None], _rotate(k_rope[:, None], rotary)], axis=2)
        batch.cache.write(shape.layer, batch.written_blocks(shape.group), batch.arrays.positions, k, None)
        q = np.concatenate([q_latent.reshape(rows, shape.heads, -1), turned], axis=2)
        return _f32(q.reshape(rows, -1))

    def attend(self, batch: Any, q: Any, shape: AttentionShape, sinks: Any = None) -> F32:
        out = np.empty((len(q), shape.heads * (shape.latent or shape.head_dim)), np.float32)
        for slot, start, end in batch.spans():
            table = batch.arrays.tables[shape.group][slot]
            positions = batch.arrays.positions[start:end].tolist()
            first = first_seen(shape, positions[0])
            k, v = batch.cache.read(shape.layer, table, first, positions[-1] + 1)
            for t, position in zip(range(start, end), positions, strict=True):
                seen = slice(first_seen(shape, position) - first, position + 1 - first)
                out[t] = _attend_row(q[t], k[:, seen], v[:, seen], shape, sinks)
        return _f32(out)

    def reduce(self, x: Any) -> F32:
        return _f32(x)

    def gather(self, batch: Any, x: Any) -> F32:
        return _f32(x[batch.arrays.rows])

    def logits(self, x: Any, weight: Any, softcap: float = 0.0, scale: float = 1.0, bias: Any = None) -> F32:
        out = self.linear(x, weight, bias, None, scale)
        return _f32(np.float32(softcap) * np.tanh(out / np.float32(softcap)) if softcap > 0 else out)


def _f32(x: Any) -> F32:
    """`x`, which is float32 already, as the type checker should know it."""
    out: F32 = x
    return out


def _part(vector: Any, index: int, parts: int) -> Any:
    """Part `index` of a vector of `parts` equal parts; None of None."""
    return None if vector is None else vector.reshape(parts, -1)[index]


def _norm(x: F32, weight: F32, eps: float, center: bool = False) -> F32:
    """Over the last axis; the means in float64."""
    if center:
        x = _f32(x - np.mean(x, axis=-1, keepdims=True, dtype=np.float64).astype(np.float32))
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return _f32(x * (1.0 / np.sqrt(mean + eps)).astype(np.float32) * weight)


def _head_norm(x: F32, norm: HeadNorm | None, after: bool) -> F32:
    """`x` [T, heads, d], normed where `norm` is the one before or after the rotation."""
    if norm is None or norm.after != after or not x.shape[1]:
        return x
    weight = np.broadcast_to(norm.weight.reshape(-1, x.shape[2]), x.shape[1:])
    if norm.over == "head":
        return _norm(x, weight, norm.eps, norm.center)
    return _f32(_norm(x.reshape(len(x), -1), weight.reshape(-1), norm.eps, norm.center).reshape(x.shape))


def _temperature(positions: I32, temperature: Temperature) -> F32:
    steps = np.floor((positions + temperature.start).astype(np.float32) / np.float32(temperature.floor))
    return _f32(1 + np.float32(temperature.scale) * np.log1p(steps))


def _activate(x: F32, activation: Activation, parameters: Any = None) -> F32:
    if activation == "silu":
        return _f32(x / (1 + np.exp(-x)))
    if activation == "gelu_tanh":
        return _f32(0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))))
    if activation == "gelu":
        normal_cdf = [0.5 * math.erfc(-value / math.sqrt(2)) for value in x.ravel().tolist()]
        return _f32(x * np.array(normal_cdf, np.float32).reshape(x.shape))
    if activation == "relu":
        return _f32(np.maximum(x, 0))
    if activation == "relu2":
        return _f32(np.square(np.maximum(x, 0)))
    if activation == "tanh":
        return _f32(np.tanh(x))
    if activation == "identity":
        return x
    if activation == "xielu":
        p, n, beta, eps = parameters
        return _f32(np.where(x > 0, p * x * x, n * (np.expm1(np.minimum(x, eps)) - x)) + beta * x)
    raise ValueError(f"unknown activation {activation!r}; there are {', '.join(get_args(Activation))}")


def _gated(gate_up: F32, activation: Activation, limit: float) -> F32:
    gate, up = np.split(gate_up, 2, axis=1)
    if limit > 0:
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, -np.float32(limit), np.float32(limit))
    if activation == "swiglu_oai":
        return _f32(gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1))
    return _f32(_activate(gate, activation) * up)


def _route(logits: F32, router: Router, correction: Any) -> tuple[list[int], list[np.float32]]:
    """Experts of one row in router order, and their weights."""
    if router.scoring == "sparsemixer":
        return _sparsemixer(logits, router)
    scores = _softmax(logits) if router.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        grouped = choice.reshape(router.groups, -1)
        ranked = -np.sort(-grouped, axis=1)
        best = ranked[:, 0] if router.group_score == "max" else ranked[:, 0] + ranked[:, 1]
        kept = np.isin(np.arange(router.groups), np.argsort(-best, kind="stable")[: router.top_groups])
        choice = np.where(kept[:, None], grouped, -np.inf).reshape(-1)
    experts = np.argsort(-choice, kind="stable")[: router.top_k].tolist()
    weights = [scores[e] for e in experts]
    if router.renormalize:
        total = np.float32(0)
        for weight in weights:
            total = total + weight
        total = max(total + np.float32(router.eps), np.float32(router.floor))
        weights = [weight / total for weight in weights]
    return experts, [weight * np.float32(router.scale) for weight in weights]


def _softmax(x: F32) -> F32:
    e = np.exp(x - x.max())
    return _f32(e / e.sum())


def _sparsemixer(logits: F32, router: Router) -> tuple[list[int], list[np.float32]]:
    left, experts, weights = logits.copy(), [], []
    for _ in range(router.top_k):
        expert = int(np.argmax(left))
        largest = left[expert]
        # Written so that the largest is near itself when it is 0.
        near = ~((largest - logits) / np.maximum(np.abs(logits), largest) > np.float32(2 * router.jitter))
        experts.append(expert)
        weights.append(_softmax(np.where(near, left, -np.inf).astype(np.float32))[expert])
        left[expert] = -np.inf
    return experts, weights


def _rotate(x: F32, rotary: F32) -> F32:
    """Turn the pairs (i, i + n/2) of the first n values of every head of `x` [T, heads, d]; n = width of `rotary`."""
    cos, sin = np.split(rotary[:, None, :], 2, axis=2)
    half = cos.shape[2]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return _f32(np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=2))


def first_seen(shape: AttentionShape, position: int) -> int:
    """The first position whose key a query at `position` sees."""
    if shape.chunk:
        return position - position % shape.chunk
    return max(0, position - shape.window + 1) if shape.window else 0


def _attend_row(q: F32, k: F32, v: F32, shape: AttentionShape, sinks: Any) -> F32:
    """One query token [H d] over the keys and values [G, n, d] it sees."""
    queries = q.reshape(shape.kv_heads, -1, shape.head_dim) * np.float32(shape.scale)  # head h reads KV head h // (H/G)
    scores = np.einsum("ghd,gnd->ghn", queries, k)
    if shape.softcap > 0:
        scores = np.float32(shape.softcap) * np.tanh(scores / np.float32(shape.softcap))
    if shape.alibi:
        slopes = np.array(shape.alibi, np.float32).reshape(shape.kv_heads, -1, 1)
        scores = scores + slopes * np.arange(1 - k.shape[1], 1, dtype=np.float32)
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sunk = sinks.reshape(shape.kv_heads, -1, 1)
        largest = np.maximum(largest, sunk)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sunk - largest)
    mixed = np.einsum("ghn,gnd->ghd", weights, v) / total
    return _f32(mixed.reshape(-1))
