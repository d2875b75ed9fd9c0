"""Rotary position embedding: inverse frequencies of every kind, fixed at load.

Su et al., "RoFormer" (2021). Kinds and their parameter names are those of transformers' `rope_parameters`:
default, linear (Chen et al. 2023), dynamic (NTK-aware, /u/emozilla 2023), yarn (Peng et al. 2023), longrope
(Ding et al. 2024), llama3 (Llama 3.1 release). A kind whose factors depend on the running length (dynamic, longrope)
takes `max_model_len` for it, once: a token's rotation must not depend on what was served before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.ops.contract import F32, Rope


class RopeError(ValueError):
    """The RoPE parameters are incomplete or of an unknown kind."""


def make_rope(parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int, max_model_len: int) -> Rope:
    """The `Rope` of one kind of layer.

    `parameters`: rope_type, rope_theta and the kind's own keys, optionally `partial_rotary_factor` and
    `rope_freq_factors` (d/2 divisors, as GGUF files carry them). Raises RopeError naming what is missing.
    """
    kind = str(parameters.get("rope_type") or "default")
    rotated = rotated_size(parameters, head_dim)
    base = float(parameters["rope_theta"])
    if kind not in _KINDS:
        raise RopeError(f"rope_type {kind!r} is not supported; known: {', '.join(sorted(_KINDS))}")
    try:
        frequencies, scale = _KINDS[kind](parameters, base, rotated, max_position_embeddings, max_model_len)
    except KeyError as missing:
        raise RopeError(f"rope_type {kind!r} needs {missing.args[0]!r} in its parameters") from None
    factors = parameters.get("rope_freq_factors")
    if factors is not None:
        if len(factors) != rotated // 2:
            raise RopeError(f"the file holds {len(factors)} RoPE frequency factors, {rotated // 2} are needed")
        frequencies = (frequencies / np.asarray(factors, np.float32)).astype(np.float32)
    if not (np.isfinite(frequencies).all() and math.isfinite(scale)):
        raise RopeError(f"rope_type {kind!r}: its parameters give frequencies that are no numbers")
    return Rope(tuple(float(f) for f in frequencies.astype(np.float32)), scale)


def rotated_size(parameters: Mapping[str, Any], head_dim: int) -> int:
    """How many values of a head are rotated: the first ones, all of them without `partial_rotary_factor`."""
    return int(head_dim * float(parameters.get("partial_rotary_factor") or 1.0))


def _plain(base: float, rotated: int) -> F32:
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    powers: F32 = np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)
    inverse: F32 = np.reciprocal(powers)
    return inverse


def _default(p: Mapping[str, Any], base: float, rotated: int, native: int, length: int) -> tuple[F32, float]:
    return _plain(base, rotated), 1.0


def _linear(p: Mapping[str, Any], base: float, rotated: int, native: int, length: int) -> tuple[F32, float]:
    return (_plain(base, rotated) / np.float32(p["factor"])).astype(np.float32), 1.0


def _dynamic(p: Mapping[str, Any], base: float, rotated: int, native: int, length: int) -> tuple[F32, float]:
    if p.get("alpha"):  # Hunyuan calls a base stretched once and for all dynamic too
        base = base * float(p["alpha"]) ** (rotated / (rotated - 2))
    elif length > native:
        factor = float(p["factor"])
        base = base * (factor * length / native - (factor - 1)) ** (rotated / (rotated - 2))
    return _plain(base, rotated), 1.0


def _llama3(p: Mapping[str, Any], base: float, rotated: int, native: int, length: int) -> tuple[F32, float]:
    plain = _plain(base, rotated)
    factor, low, high = float(p["factor"]), float(p["low_freq_factor"]), float(p["high_freq_factor"])
    original = float(p["original_max_position_embeddings"])
    wavelength = 2 * np.pi / plain.astype(np.float64)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    out = np.where(wavelength > original / low, plain / factor, np.where(wavelength < original / high, plain, blended))
    return out.astype(np.float32), 1.0


def _yarn(p: Mapping[str, Any], base: float, rotated: int, native: int, length: int) -> tuple[F32, float]:
    original = float(p.get("original_max_position_embeddings") or native)
    factor = float(p["factor"])

    def dimension(rotations: float) -> float:
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = dimension(float(p.get("beta_fast") or 32))
    last = dimension(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    ramp = np.clip((np.arange(rotated // 2) - first) / max(last - first, 0.001), 0, 1)
    plain = _plain(base, rotated).astype(np.float64)
    out = plain / factor * ramp + plain * (1 - ramp)
    scale = p.get("attention_factor")
    if scale is None:
        m, all_dim = p.get("mscale"), p.get("mscale_all_dim")
        scale = yarn_magnitude(factor, m) / yarn_magnitude(factor, all_dim) if m and all_dim else yarn_magnitude(factor)
    return out.astype(np.float32), float(scale)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by when positions are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(p: Mapping[str, Any], base: float, rotated: int, native: int, length: int) -> tuple[F32, float]:
    original = int(p.get("original_max_position_embeddings") or native)
    factors = np.asarray(p["long_factor"] if length > original else p["short_factor"], np.float32)
    if len(factors) != rotated // 2:
        raise RopeError(f"longrope lists {len(factors)} factors, {rotated // 2} are needed")
    stretch = float(p.get("factor") or native / original)
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return (_plain(base, rotated) / factors).astype(np.float32), float(scale)


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
