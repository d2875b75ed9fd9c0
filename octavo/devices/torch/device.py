"""The contract in eager torch: each operation is a few whole-step tensor expressions.

torch chooses the order of additions of a product by its shape, so this device does *not* give the same bits for a row
whatever its batch, which the reference and the native CPU device do.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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
)
from octavo.ops.sampling import draw
from octavo.quant import dense

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
"""Of elements of the KV cache."""


class TorchDevice:
    """Eager torch on `place` ("cpu", "cuda", …). Weights are dense float32."""

    name = "torch"
    notes: tuple[str, ...] = ("the eager torch device is for tests",)

    def __init__(self, place: str = "cpu") -> None:
        self.place = torch.device(place)

    def weight(self, parts: list[Stored]) -> TorchWeight:
        check_parts(parts)
        return TorchWeight(torch.cat([torch.from_numpy(dense(part)) for part in parts]).to(self.place))

    def vector(self, values: F32) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.place)

    def kv_cache(self, spec: KVSpec) -> TorchCache:
        return TorchCache(spec, self.place)

    def compile(self, body: Any, head: Any, limits: BatchLimits, cache: TorchCache) -> TorchModel:
        """Keep both functions: they run anew each step."""
        return TorchModel(body, head, limits, cache)


class TorchWeight:
    """`rows` is float32 [n_out, n_in]."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.n_out, self.n_in = rows.shape


class TorchPages:
    """Keys or values of a layer: elements [block, token in block, KV head, d] as bytes, and their scales [KV head, 1]
    or, of a type that has one for each head of each token, [block, token in block, KV head, 1].

    `scales`: of the heads; () are all 1.
    """

    def __init__(self, spec: KVSpec, layer: int, scales: tuple[float, ...], place: torch.device) -> None:
        shape = (spec.blocks[spec.group_of[layer]], spec.block_size, spec.kv_heads)
        self.kind, self.dtype = KV_TYPES[spec.dtype], _DTYPES[spec.dtype]
        # Not every operation on arrays knows floats of 8 bits.
        self.bytes = torch.zeros((*shape, spec.head_dim * self.kind.bytes), dtype=torch.uint8, device=place)
        self.scales = torch.tensor(scales or [1.0] * spec.kv_heads, dtype=torch.float32, device=place)[:, None]
        if self.kind.scale_bytes:
            self.scales = torch.zeros((*shape, 1), dtype=torch.float32, device=place)

    def write(self, blocks: Tensor, offsets: Tensor, x: Tensor) -> None:
        """Store `x` [T, G, d] at (block, token in block)."""
        scales = self.scales
        if self.kind.scale_bytes:
            scales = x.abs().amax(dim=-1, keepdim=True) / self.kind.largest
            scales = torch.where(scales.isfinite(), scales.clamp(min=KV_LEAST_SCALE), torch.nan)
            self.scales[blocks, offsets] = scales
        codes = x / scales
        if self.kind.largest < torch.inf:
            codes = codes.clamp(-self.kind.largest, self.kind.largest)
        if self.dtype == torch.int8:
            codes = codes.nan_to_num(0).round()
        self.bytes[blocks, offsets] = codes.to(self.dtype).contiguous().view(torch.uint8)

    def read(self, blocks: Tensor, skip: int, count: int) -> Tensor:
        """[G, count, d] in float32: `count` tokens of a sequence with these blocks, from its token `skip` on."""
        scales = self.scales[blocks] if self.kind.scale_bytes else self.scales
        tokens = (self.bytes[blocks].view(self.dtype).float() * scales).flatten(0, 1)
        return tokens[skip : skip + count].transpose(0, 1)

    def copy(self, source: int, destination: int) -> None:
        self.bytes[destination] = self.bytes[source]
        if self.kind.scale_bytes:
            self.scales[destination] = self.scales[source]


class TorchCache:
    """Keys and values of each layer."""

    def __init__(self, spec: KVSpec, place: torch.device) -> None:
        check_cache(spec)
        self.spec = spec
        self.place = place
        scales = spec.scales or (KVScales((), ()),) * spec.layers
        self.k = [TorchPages(spec, layer, own.k, place) for layer, own in enumerate(scales)]
        # Of latent attention, the values are the beginning of the keys.
        self.v = [] if spec.latent else [TorchPages(spec, layer, own.v, place) for layer, own in enumerate(scales)]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store k and v [T, G, d] at (block, token in block)."""
        self.k[layer].write(blocks, offsets, k)
        if v is not None:
            self.v[layer].write(blocks, offsets, v)

    def read(self, layer: int, table: I32, first: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V [G, end - first, d] in float32 at positions [first, end) of the sequence with block table `table`."""
        group, size = self.spec.group_of[layer], self.spec.block_size
        needed = table[first // size : -(-end // size)]
        check_ids(f"tables[{group}]", needed, self.spec.blocks[group])
        blocks = torch.from_numpy(needed.astype(np.int64)).to(self.place)
        k = self.k[layer].read(blocks, first % size, end - first)
        if self.spec.latent:
            return k, k[..., : self.spec.latent]
        return k, self.v[layer].read(blocks, first % size, end - first)

    def copy(self, layer: int, source: int, destination: int) -> None:
        for pages in (self.k[layer], *self.v[layer : layer + 1]):
            pages.copy(source, destination)


class TorchBatch(NamedTuple):
    """A step as the operations see it: the arrays on the host, and what they index with on the device."""

    arrays: BatchArrays
    cache: TorchCache
    tokens: Tensor
    positions: Tensor
    rows: Tensor
    written: tuple[tuple[Tensor, Tensor], ...]
    """Per KV group (block, token in block) that each token's K and V go to."""


class TorchModel:
    """A body and a head, run eagerly."""

    def __init__(self, body: Any, head: Any, limits: BatchLimits, cache: TorchCache) -> None:
        self.body = body
        self.head = head
        self.limits = limits
        self.cache = cache
        self.ops = TorchOps()

    def run(self, batch: BatchArrays, sampling: Sampling) -> Drawn:
        logits = self.raw_logits(batch)
        check_sampling(sampling, logits.shape[0], logits.shape[1])
        return draw(logits, sampling)

    def raw_logits(self, batch: BatchArrays) -> F32:
        # The size of the vocabulary is the embedding's; `embed` checks the ids, before anything is written.
        check_batch(batch, self.limits, self.cache.spec, vocab=np.iinfo(np.int32).max)
        with torch.inference_mode():
            logits: Tensor = self.head(self.ops, self.body(self.ops, self._batch(batch)))
            host: F32 = logits.cpu().numpy()
        return host

    def _batch(self, batch: BatchArrays) -> TorchBatch:
        def indices(values: I32) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(self.cache.place)

        size = self.cache.spec.block_size
        owner = np.repeat(batch.slots, np.diff(batch.starts))
        offsets = indices(batch.positions % size)
        written = tuple((indices(table[owner, batch.positions // size]), offsets) for table in batch.tables)
        return TorchBatch(
            batch, self.cache, indices(batch.tokens), indices(batch.positions), indices(batch.rows), written
        )

    def copy_blocks(self, group: int, pairs: I32) -> None:
        check_copies(pairs, group, self.cache.spec)
        for layer, layer_group in enumerate(self.cache.spec.group_of):
            if layer_group == group:
                for source, destination in pairs.tolist():
                    self.cache.copy(layer, source, destination)


class TorchOps:
    """The operations. Shapes and meaning of each are in `octavo.ops.contract.Ops`."""

    def embed(self, batch: Any, table: Any, scale: float) -> Tensor:
        check_ids("tokens", batch.arrays.tokens, table.n_out)
        return _tensor(table.rows[batch.tokens] * scale)

    def embed_positions(self, batch: Any, table: Any, offset: int, residual: Any) -> Tensor:
        check_ids("positions", batch.arrays.positions + np.int32(offset), table.n_out)
        return _tensor(table.rows[batch.positions + offset] + residual)

    def rotary(self, batch: Any, rope: Rope) -> Tensor:
        inverse = torch.tensor(rope.inv_freq, dtype=torch.float32, device=batch.positions.device)
        angles = (batch.positions.float()[:, None] * inverse).double()
        return torch.cat([angles.cos(), angles.sin()], dim=1).float() * rope.scale

    def norm(
        self, x: Any, weight: Any, eps: float, residual: Any = None, *, bias: Any = None, center: bool = False
    ) -> Tensor:
        out = _norm(x, weight, eps, center)
        if bias is not None:
            out = out + bias
        return out if residual is None else out + _tensor(residual)

    def activate(self, x: Any, activation: Activation, parameters: Any = None, times: Any = None) -> Tensor:
        out = _activate(x, activation, parameters)
        return out if times is None else out * _tensor(times)

    def linear(self, x: Any, weight: Any, bias: Any = None, residual: Any = None, scale: float = 1.0) -> Tensor:
        out = functional.linear(x, weight.rows, bias)
        if scale != 1:
            out = out * scale
        return out if residual is None else out + _tensor(residual)

    def gated(self, x: Any, weight: Any, activation: Activation, bias: Any = None, limit: float = 0.0) -> Tensor:
        gate, up = functional.linear(x, weight.rows, bias).chunk(2, dim=1)
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "swiglu_oai":
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return _activate(gate, activation) * up

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
    ) -> Tensor:
        check_router(router, len(gate_up))
        chosen, weights = _route(logits, router, correction)
        first, second = (None if b is None else b.view(len(down), -1) for b in (gate_up_bias, down_bias))
        results = x.new_zeros(*chosen.shape, down[0].n_out)
        for e in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == e)
            share = weights[rows, places, None]
            given = x[rows] * share if router.weigh_input else x[rows]
            hidden = self.gated(given, gate_up[e], activation, None if first is None else first[e], limit)
            y = self.linear(hidden, down[e], None if second is None else second[e])
            results[rows, places] = y if router.weigh_input else y * share
        out = results.sum(dim=1)
        return _tensor(out if residual is None else out + residual)

    def headwise(self, x: Any, weight: Any, heads: int) -> Tensor:
        blocks = weight.rows.view(heads, -1, weight.n_in)
        return torch.einsum("thk,hnk->thn", x.view(len(x), heads, -1), blocks).flatten(1)

    def add(self, x: Any, y: Any, scale: float = 1.0) -> Tensor:
        return _tensor((x + y) * scale)

    def blend(self, x: Any, gate: Any, residual: Any = None) -> Tensor:
        out = x * torch.sigmoid(gate)
        return _tensor(out if residual is None else out + residual)

    def mix(self, coefficients: Any, first: int, streams: tuple[Any, ...], residual: Any = None) -> Tensor:
        columns = coefficients[:, first : first + len(streams)]
        out = torch.einsum("tj,tjd->td", columns, torch.stack(streams, dim=1))
        return out if residual is None else out + _tensor(residual)

    def match_rms(self, x: Any, like: Any, eps: float) -> Tensor:
        wanted, own = (v.square().mean(dim=-1, keepdim=True) for v in (like, x))
        return _tensor(x * torch.sqrt(wanted / own.clamp(min=eps)))

    def keep_top(self, x: Any, deviations: float) -> Tensor:
        deviation, mean = torch.std_mean(x, dim=-1, correction=0, keepdim=True)
        return functional.relu(x - (mean + deviations * deviation))

    def reduce(self, x: Any) -> Tensor:
        return _tensor(x)

    def store_kv(
        self,
        batch: Any,
        qkv: Any,
        rotary: Any,
        shape: AttentionShape,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
        v_norm: HeadNorm | None = None,
    ) -> Tensor:
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        q, k, v = heads.tensor_split([shape.heads, shape.heads + shape.kv_heads * shape.stores], dim=1)
        norms = (q_norm, k_norm, v_norm)
        q, k, v = (_head_norm(x, norm, after=False) for x, norm in zip((q, k, v), norms, strict=True))
        if shape.clip > 0:
            q, k, v = (x.clamp(-shape.clip, shape.clip) for x in (q, k, v))
        if rotary is not None:
            q, k = _rotate(q, rotary), _rotate(k, rotary)
        q, k, v = (_head_norm(x, norm, after=True) for x, norm in zip((q, k, v), norms, strict=True))
        if shape.temperature is not None:
            scale, floor, start = shape.temperature
            steps = torch.floor((batch.positions + start).float() / floor)
            q = q * (1 + scale * torch.log1p(steps))[:, None, None]
        if shape.stores:
            batch.cache.write(shape.layer, *batch.written[shape.group], k, v)
        return _tensor(q.flatten(1))

    def store_latent(
        self, batch: Any, q_latent: Any, q_rope: Any, latent: Any, k_rope: Any, rotary: Any, shape: AttentionShape
    ) -> Tensor:
        rows = len(latent)
        turned = _rotate(q_rope.view(rows, shape.heads, -1), rotary)
        k = torch.cat([latent[:, None], _rotate(k_rope[:, None], rotary)], dim=2)
        batch.cache.write(shape.layer, *batch.written[shape.group], k, None)
        return _tensor(torch.cat([q_latent.view(rows, shape.heads, -1), turned], dim=2).flatten(1))

    def attend(self, batch: Any, q: Any, shape: AttentionShape, sinks: Any = None) -> Tensor:
        out = q.new_empty(len(q), shape.heads * (shape.latent or shape.head_dim))
        starts = batch.arrays.starts.tolist()
        for slot, start, end in zip(batch.arrays.slots.tolist(), starts[:-1], starts[1:], strict=True):
            positions = batch.positions[start:end]
            last = int(batch.arrays.positions[end - 1])
            begins = _first_seen(shape, positions)
            first = int(begins[0])
            k, v = batch.cache.read(shape.layer, batch.arrays.tables[shape.group][slot], first, last + 1)
            away = torch.arange(first, last + 1, device=q.device) - positions[:, None]
            seen = (away <= 0) & (away >= (begins - positions)[:, None])
            out[start:end] = _attend(q[start:end], k, v, away, seen, shape, sinks)
        return _tensor(out)

    def gather(self, batch: Any, x: Any) -> Tensor:
        return _tensor(x[batch.rows])

    def logits(self, x: Any, weight: Any, softcap: float = 0.0, scale: float = 1.0, bias: Any = None) -> Tensor:
        out = functional.linear(x, weight.rows, bias) * scale
        return softcap * torch.tanh(out / softcap) if softcap > 0 else out


def _tensor(x: Any) -> Tensor:
    """`x`, which is a tensor already, as the type checker should know it."""
    out: Tensor = x
    return out


def _norm(x: Tensor, weight: Tensor, eps: float, center: bool = False) -> Tensor:
    """Over the last axis."""
    if center:
        x = x - x.mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _head_norm(x: Tensor, norm: HeadNorm | None, after: bool) -> Tensor:
    """`x` [T, heads, d], normed where `norm` is the one before or after the rotation."""
    if norm is None or norm.after != after or not x.shape[1]:
        return x
    weight = norm.weight.view(-1, x.shape[2]).expand(x.shape[1:])
    if norm.over == "all":
        return _norm(x.flatten(1), weight.flatten(), norm.eps, norm.center).view(x.shape)
    return _norm(x, weight, norm.eps, norm.center)


def _activate(x: Tensor, activation: Activation, parameters: Any = None) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    if activation == "gelu":
        return functional.gelu(x)
    if activation == "relu":
        return functional.relu(x)
    if activation == "relu2":
        return functional.relu(x).square()
    if activation == "tanh":
        return torch.tanh(x)
    if activation == "identity":
        return x
    if activation == "xielu":
        p, n, beta, eps = parameters
        return _tensor(torch.where(x > 0, p * x * x, n * (torch.expm1(torch.minimum(x, eps)) - x)) + beta * x)
    raise ValueError(f"unknown activation {activation!r}; there are {', '.join(get_args(Activation))}")


def _route(logits: Tensor, router: Router, correction: Any) -> tuple[Tensor, Tensor]:
    """[rows, top_k] experts in router order, and their weights."""
    if router.scoring == "sparsemixer":
        return _sparsemixer(logits, router)
    scores = torch.softmax(logits, dim=1) if router.scoring == "softmax" else torch.sigmoid(logits)
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        grouped = choice.view(len(choice), router.groups, -1)
        ranked = grouped.sort(dim=2, descending=True).values
        best = ranked[:, :, 0] if router.group_score == "max" else ranked[:, :, 0] + ranked[:, :, 1]
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.sort(dim=1, descending=True, stable=True).indices[:, : router.top_groups], True)
        choice = grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    chosen = choice.sort(dim=1, descending=True, stable=True).indices[:, : router.top_k]
    weights = scores.gather(1, chosen)
    if router.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + router.eps).clamp(min=router.floor)
    return chosen, weights * router.scale


def _sparsemixer(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    left, chosen, weights = logits.clone(), [], []
    for _ in range(router.top_k):
        largest, expert = left.max(dim=1, keepdim=True)
        far = (largest - logits) / torch.maximum(logits.abs(), largest) > 2 * router.jitter
        chosen.append(expert)
        weights.append(torch.softmax(left.masked_fill(far, -torch.inf), dim=1).gather(1, expert))
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(chosen, dim=1), torch.cat(weights, dim=1)


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turn the pairs (i, i + n/2) of the first n values of every head of `x` [T, heads, d]; n = width of `rotary`."""
    cos, sin = rotary[:, None, :].chunk(2, dim=2)
    half = cos.shape[2]
    a, b, rest = x.tensor_split([half, 2 * half], dim=2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=2)


def _first_seen(shape: AttentionShape, positions: Tensor) -> Tensor:
    """[t]: the first position whose key a query at each of `positions` [t] sees."""
    if shape.chunk:
        return positions - positions % shape.chunk
    return (positions - shape.window + 1).clamp(min=0) if shape.window else torch.zeros_like(positions)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, away: Tensor, seen: Tensor, shape: AttentionShape, sinks: Tensor | None
) -> Tensor:
    """q [t, H d] over k and v [G, n, d]; `away` [t, n] are the positions of the keys relative to each query, `seen`
    [t, n] says which keys it sees."""
    queries = q.view(q.shape[0], shape.kv_heads, -1, shape.head_dim)  # head h reads KV head h // (H/G)
    scores = torch.einsum("tghd,gnd->ghtn", queries * shape.scale, k)
    if shape.softcap > 0:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    per_head = (shape.kv_heads, -1, 1, 1)
    if shape.alibi:
        scores = scores + torch.tensor(shape.alibi, device=q.device).view(per_head) * away
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(per_head).expand(*scores.shape[:3], 1)], dim=3)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[1]]
    return torch.einsum("ghtn,gnd->tghd", weights, v).flatten(1)
