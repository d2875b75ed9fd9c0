"""The contract in numpy: slow, eager, and meant to be read. What the other devices are tested against.

Every row is computed by operations of its own, whose shapes depend on the model and the token's position only. A
matrix product of several rows at once would not do: BLAS chooses its order of additions by the number of rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from octavo.ops.check import check_batch, check_cache, check_copies, check_ids, check_parts, check_sampling
from octavo.ops.contract import (
    F32,
    I32,
    Activation,
    AttentionShape,
    BatchArrays,
    BatchLimits,
    Drawn,
    KVSpec,
    Rope,
    Sampling,
    Stored,
)
from octavo.ops.sampling import draw
from octavo.quant import dense


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


class ReferenceCache:
    """K and V of each layer: [block, KV head, token in block, head_dim] in the cache's type."""

    def __init__(self, spec: KVSpec) -> None:
        check_cache(spec)
        self.spec = spec
        shapes = [(spec.blocks[group], spec.kv_heads, spec.block_size, spec.head_dim) for group in spec.group_of]
        self.k = [np.zeros(shape, spec.dtype) for shape in shapes]
        self.v = [np.zeros(shape, spec.dtype) for shape in shapes]

    def write(self, layer: int, blocks: I32, positions: I32, k: F32, v: F32) -> None:
        """Store k and v [T, G, d] of tokens at `positions`, whose blocks are `blocks`."""
        offsets = positions % self.spec.block_size
        self.k[layer][blocks, :, offsets] = k
        self.v[layer][blocks, :, offsets] = v

    def read(self, layer: int, table: I32, first: int, end: int) -> tuple[F32, F32]:
        """K and V [G, end - first, d] in float32 at positions [first, end) of the sequence with block table `table`.
        Entries of the table for blocks before `first` are not looked at."""
        size = self.spec.block_size
        blocks = table[first // size : -(-end // size)]
        check_ids(f"tables[{self.spec.group_of[layer]}]", blocks, self.spec.blocks[self.spec.group_of[layer]])
        skip = first % size

        def rows(pages: np.ndarray[Any, Any]) -> F32:
            heads_first = pages[blocks].swapaxes(0, 1)
            flat = heads_first.reshape(heads_first.shape[0], -1, heads_first.shape[3])
            return _f32(flat[:, skip : skip + end - first].astype(np.float32))

        return rows(self.k[layer]), rows(self.v[layer])


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
                    self.cache.k[layer][destination] = self.cache.k[layer][source]
                    self.cache.v[layer][destination] = self.cache.v[layer][source]


class ReferenceOps:
    """The operations. Shapes and meaning of each are in `octavo.ops.contract.Ops`."""

    def embed(self, batch: Any, table: Any, scale: float) -> F32:
        check_ids("tokens", batch.arrays.tokens, table.n_out)
        return _f32(table.rows[batch.arrays.tokens] * np.float32(scale))

    def rotary(self, batch: Any, rope: Rope) -> F32:
        angles = batch.arrays.positions.astype(np.float32)[:, None] * np.array(rope.inv_freq, np.float32)
        turns = np.concatenate([np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))], axis=1)
        return _f32(turns.astype(np.float32) * np.float32(rope.scale))

    def norm(self, x: Any, weight: Any, eps: float, residual: Any = None) -> F32:
        out = _rms_norm(x, weight, eps)
        return out if residual is None else _f32(out + residual)

    def linear(self, x: Any, weight: Any, bias: Any = None, residual: Any = None) -> F32:
        out: F32 = weight.times(x)
        if bias is not None:
            out = out + bias
        return out if residual is None else _f32(out + residual)

    def gated(self, x: Any, weight: Any, activation: Activation) -> F32:
        gate, up = np.split(weight.times(x), 2, axis=1)
        return _f32(_activate(gate, activation) * up)

    def store_kv(
        self,
        batch: Any,
        qkv: Any,
        rotary: Any,
        shape: AttentionShape,
        q_norm: Any = None,
        k_norm: Any = None,
        eps: float = 0.0,
    ) -> F32:
        heads = qkv.reshape(qkv.shape[0], -1, shape.head_dim)
        q, k, v = np.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)
        if q_norm is not None:
            q = _rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = _rms_norm(k, k_norm, eps)
        if rotary is not None:
            q, k = _rotate(q, rotary), _rotate(k, rotary)
        batch.cache.write(shape.layer, batch.written_blocks(shape.group), batch.arrays.positions, k, v)
        return _f32(q.reshape(q.shape[0], -1))

    def attend(self, batch: Any, q: Any, shape: AttentionShape) -> F32:
        out = np.empty_like(q)
        window = shape.window or batch.arrays.positions.max(initial=0) + 1
        for slot, start, end in batch.spans():
            table = batch.arrays.tables[shape.group][slot]
            positions = batch.arrays.positions[start:end]
            first = max(0, int(positions[0]) - window + 1)
            k, v = batch.cache.read(shape.layer, table, first, int(positions[-1]) + 1)
            for t in range(start, end):
                last = int(batch.arrays.positions[t])
                seen = slice(max(0, last - window + 1) - first, last + 1 - first)
                out[t] = _attend_row(q[t], k[:, seen], v[:, seen], shape)
        return _f32(out)

    def gather(self, batch: Any, x: Any) -> F32:
        return _f32(x[batch.arrays.rows])

    def logits(self, x: Any, weight: Any, softcap: float = 0.0, scale: float = 1.0) -> F32:
        out = weight.times(x) * np.float32(scale)
        return _f32(np.float32(softcap) * np.tanh(out / np.float32(softcap)) if softcap > 0 else out)


def _f32(x: Any) -> F32:
    """`x`, which is float32 already, as the type checker should know it."""
    out: F32 = x
    return out


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """Over the last axis; the mean in float64."""
    mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    return _f32(x * (1.0 / np.sqrt(mean + eps)).astype(np.float32) * weight)


def _activate(x: F32, activation: Activation) -> F32:
    if activation == "silu":
        return _f32(x / (1 + np.exp(-x)))
    if activation == "gelu_tanh":
        return _f32(0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))))
    if activation == "gelu":
        normal_cdf = [0.5 * math.erfc(-value / math.sqrt(2)) for value in x.ravel().tolist()]
        return _f32(x * np.array(normal_cdf, np.float32).reshape(x.shape))
    if activation == "relu":
        return _f32(np.maximum(x, 0))
    raise ValueError(f"unknown activation {activation!r}; there are silu, gelu_tanh, gelu and relu")


def _rotate(x: F32, rotary: F32) -> F32:
    """Turn the pairs (i, i + n/2) of the first n values of every head of `x` [T, heads, d]; n = width of `rotary`."""
    cos, sin = np.split(rotary[:, None, :], 2, axis=2)
    half = cos.shape[2]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return _f32(np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=2))


def _attend_row(q: F32, k: F32, v: F32, shape: AttentionShape) -> F32:
    """One query token [H d] over the keys and values [G, n, d] it sees."""
    queries = q.reshape(shape.kv_heads, -1, shape.head_dim) * np.float32(shape.scale)  # head h reads KV head h // (H/G)
    scores = np.einsum("ghd,gnd->ghn", queries, k)
    if shape.softcap > 0:
        scores = np.float32(shape.softcap) * np.tanh(scores / np.float32(shape.softcap))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("ghn,gnd->ghd", weights, v) / weights.sum(axis=-1, keepdims=True)
    return _f32(mixed.reshape(-1))
