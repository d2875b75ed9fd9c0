"""The operations once more, from their definitions and in float64: what the devices' answers are held against.

Each function returns (value, bound): how far a float32 computation may be from the value, by standard rounding error
analysis (Higham, Accuracy and Stability of Numerical Algorithms, 2002, ch. 3): a sum of n products, in any order, is
within n * unit of the exact one, relative to the sum of the products' magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from octavo.ops.contract import AttentionShape, HeadNorm, Rope, Router
from tests.ops.harness import UNIT

Pair = tuple[Any, Any]


def linear(x: Any, w: Any) -> Pair:
    x, w = x.astype(np.float64), w.astype(np.float64)
    return x @ w.T, (w.shape[1] + 4) * UNIT * (np.abs(x) @ np.abs(w).T)


def norm(x: Any, weight: Any, eps: float, center: bool = False) -> Pair:
    x = x.astype(np.float64)
    moved = np.zeros((*x.shape[:-1], 1))
    if center:
        # The mean is a sum of n terms, whose error moves every element, and the sum of squares with them.
        moved = (x.shape[-1] + 2) * UNIT * np.abs(x).mean(axis=-1, keepdims=True) + UNIT * np.abs(x)
        x = x - x.mean(axis=-1, keepdims=True)
    size = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    value = x / size * weight
    steps = (x.shape[-1] / 2 + 8) * UNIT * np.abs(value)
    return value, steps + moved / size * np.abs(weight) + np.abs(value) * moved.max(axis=-1, keepdims=True) / size


XIELU = np.array([0.8, 1.3, 0.5, -1e-6], np.float32)
"""Parameters (p, n, beta, eps)."""


def activate(x: Any, name: str) -> Pair:
    """Value, and the largest derivative times a few ulp of the argument plus of the value."""
    size = np.abs(x)
    if name == "silu":
        value = x / (1 + np.exp(-x))
    elif name == "swiglu_oai":
        value = x / (1 + np.exp(-1.702 * x))
    elif name == "gelu_tanh":
        value = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    elif name == "gelu":
        value = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    elif name == "relu":
        value = np.maximum(x, 0.0)
    elif name == "relu2":
        value = np.maximum(x, 0.0) ** 2
        size = size + value
    elif name == "tanh":
        value = np.tanh(x)
    elif name == "identity":
        value = x
    else:
        p, n, beta, eps = XIELU.astype(np.float64)
        value = np.where(x > 0, p * x * x, n * (np.expm1(np.minimum(x, eps)) - x)) + beta * x
        size = (n + beta) * size + p * x * x + n * abs(eps)
    return value, 16 * UNIT * size


STEEPEST = {"silu": 1.1, "gelu_tanh": 1.13, "gelu": 1.13, "swiglu_oai": 1.1}
"""Largest derivative; 1 of the others, but for relu2."""


def gate(gate: Pair, up: Pair, name: str, limit: float = 0.0) -> Pair:
    """activation(gate) * up of two products."""
    (g, g_bound), (u, u_bound) = gate, up
    if limit > 0:
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
    if name == "swiglu_oai":
        u, u_bound = u + 1, u_bound + UNIT * (np.abs(u) + 1)
    value, bound = activate(g, name)
    steepest = 2 * np.abs(g) + g_bound if name == "relu2" else STEEPEST.get(name, 1.0)
    value_bound = bound + steepest * g_bound
    bound = value_bound * (np.abs(u) + u_bound) + np.abs(value) * (u_bound + 2 * UNIT * np.abs(u))
    return value * u, bound


def route(logits: Any, router: Router, correction: Any = None) -> tuple[list[int], Any]:
    """Experts of one row in router order, and their weights."""
    logits = logits.astype(np.float64)
    if router.scoring == "sparsemixer":
        left, experts, weights = dict(enumerate(logits)), [], []
        for _ in range(router.top_k):
            m = max(left.values())
            expert = min(e for e, value in left.items() if value == m)
            near = [v for v in left.values() if v == m or (m - v) / max(abs(v), m) <= 2 * router.jitter]
            experts.append(expert)
            weights.append(1 / sum(math.exp(v - m) for v in near))
            del left[expert]
        return experts, np.array(weights)
    scores = 1 / (1 + np.exp(-logits)) if router.scoring == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    choice = scores if correction is None else scores + correction
    size = len(logits) // router.groups
    groups = [sorted(choice[g * size : (g + 1) * size])[::-1] for g in range(router.groups)]
    best = [group[0] if router.group_score == "max" or size == 1 else group[0] + group[1] for group in groups]
    kept = sorted(range(router.groups), key=lambda g: (-best[g], g))[: router.top_groups]
    left_over = [e for e in range(len(logits)) if router.groups == 1 or e // size in kept]
    experts = sorted(left_over, key=lambda e: (-choice[e], e))[: router.top_k]
    weights = scores[experts]
    if router.renormalize:
        weights = weights / max(weights.sum() + router.eps, router.floor)
    return experts, weights * router.scale


def moe(
    x: Any,
    logits: Any,
    gate_up: Any,
    down: Any,
    router: Router,
    name: str,
    correction: Any = None,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    limit: float = 0.0,
) -> Pair:
    """`gate_up` [E, 2I, D] and `down` [E, D, I] as matrices, biases [E, ...] or None."""
    value, bound = (np.zeros((len(x), down.shape[1])) for _ in range(2))
    for r, row in enumerate(x.astype(np.float64)[:, None]):
        experts, weights = route(logits[r], router, correction)
        # A score is an exponential of a rounded difference over a sum of E terms; a share of one, over one sum more.
        off = (len(down) + router.top_k + 2 * np.abs(logits[r]).max() + 24) * UNIT
        for e, weight in zip(experts, weights, strict=True):
            given = (row * weight, np.abs(row * weight) * (off + UNIT)) if router.weigh_input else (row, 0 * row)
            both = add(product(given, gate_up[e]), None if gate_up_bias is None else gate_up_bias[e])
            half = both[0].shape[1] // 2
            hidden = gate((both[0][:, :half], both[1][:, :half]), (both[0][:, half:], both[1][:, half:]), name, limit)
            y, y_bound = add(product(hidden, down[e]), None if down_bias is None else down_bias[e])
            share = 1.0 if router.weigh_input else weight
            value[r] += share * y[0]
            bound[r] += abs(share) * (y_bound[0] + (off + (router.top_k + 1) * UNIT) * np.abs(y[0]))
    return value, bound


def product(x: Pair, w: Any) -> Pair:
    """`linear` of what is itself not exact."""
    value, bound = linear(x[0], w)
    return value, bound * (1 + UNIT) + x[1] @ np.abs(w.astype(np.float64)).T * (1 + (w.shape[1] + 4) * UNIT)


def add(x: Pair, y: Any) -> Pair:
    """`x` plus an exact vector, where there is one."""
    if y is None:
        return x
    value = x[0] + y.astype(np.float64)
    return value, x[1] + UNIT * (np.abs(value) + x[1])


def turn(pair: Pair, positions: Any, rope: Rope) -> Pair:
    """`pair` [T, heads, d] rotated, pair by pair."""
    value, bound = (x.astype(np.float64).copy() for x in pair)
    half = len(rope.inv_freq)
    for t, position in enumerate(positions):
        for i, frequency in enumerate(rope.inv_freq):
            angle = float(np.float32(position) * np.float32(frequency))
            a, b = value[t, :, i].copy(), value[t, :, i + half].copy()
            value[t, :, i] = rope.scale * (a * math.cos(angle) - b * math.sin(angle))
            value[t, :, i + half] = rope.scale * (b * math.cos(angle) + a * math.sin(angle))
            # Cosine and sine are within an ulp each, the products and the sum within half of one.
            wrong = bound[t, :, i] + bound[t, :, i + half] + 8 * UNIT * (np.abs(a) + np.abs(b))
            bound[t, :, i] = bound[t, :, i + half] = rope.scale * wrong
    return value, bound


def norm_heads(pair: Pair, own: HeadNorm) -> Pair:
    """`pair` [T, heads, d] after a norm."""
    tokens, heads, d = pair[0].shape
    weight = np.broadcast_to(own.weight.astype(np.float64).reshape(-1, d), (heads, d))
    width = (heads * d,) if own.over == "all" else (heads, d)
    (x, bound), weight = (a.reshape(tokens, *width) for a in pair), weight.reshape(width)
    if own.center:
        bound = bound + (x.shape[-1] + 2) * UNIT * (np.abs(x).mean(axis=-1, keepdims=True) + np.abs(x))
        x = x - x.mean(axis=-1, keepdims=True)
    root = np.sqrt((x * x).mean(axis=-1, keepdims=True) + own.eps)
    value = x / root * weight
    # What x is off by counts once by itself, and once in the mean of all.
    moved = np.abs(weight) / root * bound + np.abs(value) * bound.max(axis=-1, keepdims=True) / root
    bound = moved + (x.shape[-1] / 2 + 8) * UNIT * np.abs(value)
    return value.reshape(pair[0].shape), bound.reshape(pair[0].shape)


def prepare(x: Any, positions: Any, shape: AttentionShape, own: HeadNorm | None, rope: Rope | None) -> Pair:
    """What store_kv makes of queries, keys or values (without `rope`) `x` [T, heads, d] before the temperature."""
    pair = x.astype(np.float64), np.zeros(x.shape)
    if own is not None and not own.after:
        pair = norm_heads(pair, own)
    if shape.clip:
        pair = np.clip(pair[0], -shape.clip, shape.clip), pair[1] + UNIT * shape.clip
    if rope is not None:
        pair = turn(pair, positions, rope)
    if own is not None and own.after:
        pair = norm_heads(pair, own)
    return pair


def warm(pair: Pair, positions: Any, scale: float, floor: int, start: int) -> Pair:
    """`pair` [T, heads, d] times the temperature of its positions."""
    factor = np.array([1 + scale * math.log1p((p + start) // floor) for p in positions])[:, None, None]
    return pair[0] * factor, pair[1] * factor + 8 * UNIT * np.abs(pair[0]) * factor


def nearest(x: Any, dtype: str) -> Any:
    """`x`, as floats of 8 bits: of the finite ones the nearest, of two the one with the even code; NaN stays NaN."""
    codes = np.arange(128, dtype=np.uint8)
    values = codes.view({"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}[dtype])
    finite = values.astype(np.float64)
    finite = finite[np.isfinite(finite)]
    wide = np.minimum(np.abs(np.asarray(x, np.float64)), finite[-1])
    above = np.minimum(np.searchsorted(finite, wide), len(finite) - 1)
    below = np.maximum(above - 1, 0)
    up, down = finite[above] - wide, wide - finite[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(wide), np.nan, np.copysign(finite[code], x))


def cached(x: Any, dtype: str, scales: Sequence[float] = ()) -> Pair:
    """What a KV cache gives back of keys or values `x` [n, G, d]; `scales`: of the heads, where the type has them."""
    if dtype in ("float16", "float32"):
        return x.astype(dtype), np.zeros(x.shape)
    if dtype == "int8":
        divisor = np.abs(x).max(axis=2, keepdims=True) / np.float32(127)
        elements = np.rint(x / divisor)
    else:
        divisor = np.array(scales or [1] * x.shape[1], np.float32)[:, None]
        elements = nearest(x / divisor, dtype)
    value = elements * divisor.astype(np.float64)
    return value, 4 * UNIT * np.abs(value)


def attend(
    q: Any, k: Any, v: Any, positions: Any, shape: AttentionShape, off: Any = (0, 0, 0), sinks: Any = None
) -> Pair:
    """q [t, H, d] at `positions` over k and v [n, G, d], as the cache holds them, at positions 0..n-1; each of them may
    be off by as much as `off` says."""
    q, k, v, q_off, k_off, v_off = (np.asarray(a, np.float64) for a in (q, k, v, *off))
    q_off, k_off, v_off = (np.broadcast_to(b, a.shape) for a, b in ((q, q_off), (k, k_off), (v, v_off)))
    value = np.empty((*q.shape[:2], v.shape[2]))
    bound = np.empty(value.shape)
    d = shape.head_dim
    for t, p in enumerate(positions):
        first = max(0, p - shape.window + 1) if shape.window else 0
        if shape.chunk:
            first = p // shape.chunk * shape.chunk
        for h in range(shape.heads):
            g = h * shape.kv_heads // shape.heads
            keys, values = k[first : p + 1, g], v[first : p + 1, g]
            scores = keys @ q[t, h] * shape.scale
            wrong = (d + 8) * UNIT * (np.abs(keys) @ np.abs(q[t, h])).max() * abs(shape.scale)
            wrong += (np.abs(keys) @ q_off[t, h] + k_off[first : p + 1, g] @ np.abs(q[t, h])).max() * abs(shape.scale)
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
                wrong += 8 * UNIT * shape.softcap
            if shape.alibi:
                lost = np.float64(np.float32(shape.alibi[h])) * np.arange(first - p, 1)
                scores, wrong = scores + lost, wrong + 2 * UNIT * (np.abs(scores) + 2 * np.abs(lost))
            largest = scores.max()
            if sinks is not None:
                # Scores lie below the sink by a difference that is rounded, however small their weights are.
                largest = max(largest, np.float64(sinks[h]))
                wrong = wrong + 2 * UNIT * (largest - scores)
            weights = np.exp(scores - largest)
            total = weights.sum() + (0 if sinks is None else np.exp(np.float64(sinks[h]) - largest))
            weights /= total
            value[t, h] = weights @ values
            # A score that is off by e changes its weight by a factor exp(e): once above and once below the line.
            above, below = weights * wrong @ np.abs(values), (weights * wrong).sum() * (weights @ np.abs(values))
            bound[t, h] = above + below + (len(keys) + 32) * UNIT * (weights @ np.abs(values))
            bound[t, h] += weights @ v_off[first : p + 1, g]
    return value, bound


def assert_within(got: Any, pair: Pair) -> None:
    value, bound = pair
    assert got.shape == value.shape, (got.shape, value.shape)
    worst = np.max(np.abs(got - value) / (bound + 1e-30), initial=0)
    assert worst <= 1, f"error is {worst:.3g} times the bound of float32 arithmetic"
