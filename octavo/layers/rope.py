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
    `rope_freq_factors` (d/2 divisors, as GGUF files carry them). Raises RopeError naming what is missing or wrong.
    """
    parameters = checked(parameters)
    kind = str(parameters.get("rope_type") or "default")
    rotated = rotated_size(parameters, head_dim)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise RopeError(f"RoPE would turn {rotated} of the {head_dim} values of a head, an even number is needed")
    if kind not in _KINDS:
        raise RopeError(f"rope_type {kind!r} is not supported; known: {', '.join(sorted(_KINDS))}")
    try:
        base = float(parameters["rope_theta"])
        frequencies, scale = _KINDS[kind](parameters, base, rotated, max_position_embeddings, max_model_len)
    except KeyError as missing:
        raise RopeError(f"rope_type {kind!r} needs {missing.args[0]!r} in its parameters") from None
    if parameters.get("rope_freq_factors") is not None:
        frequencies = (frequencies / _divisors(parameters, "rope_freq_factors", rotated)).astype(np.float32)
    if not (np.isfinite(frequencies).all() and math.isfinite(scale)):
        raise RopeError(f"rope_type {kind!r}: its parameters give frequencies that are no numbers")
    return Rope(tuple(float(f) for f in frequencies.astype(np.float32)), scale)


def checked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those parameters that are set. Raises RopeError where one that is a number in every kind is none."""
    for key, lowest in _NUMBERS.items():
        value = parameters.get(key)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < lowest or value == lowest == 0 and key not in _MAY_BE_ZERO:
            raise RopeError(f"the RoPE parameters have {key} = {value!r}, a number above {lowest} is needed")
    return {key: value for key, value in parameters.items() if value is not None}


def _divisors(parameters: Mapping[str, Any], key: str, rotated: int) -> F32:
    """A list of rotated/2 positive numbers."""
    try:
        values = np.asarray(parameters[key], np.float32)
    except (TypeError, ValueError):
        raise RopeError(f"the RoPE parameters have {key} = {parameters[key]!r}, numbers are needed") from None
    if values.shape != (rotated // 2,):
        raise RopeError(f"the RoPE parameters have {values.size} numbers in {key}, {rotated // 2} are needed")
    if not (np.isfinite(values) & (values > 0)).all():
        raise RopeError(f"the RoPE parameters have a number in {key} that is not above 0")
    return values


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
    if low >= high:
        raise RopeError(f"rope_type 'llama3' has low_freq_factor = {low}, not below high_freq_factor = {high}")
    wavelength = 2 * np.pi / plain.astype(np.float64)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    out = np.where(wavelength > original / low, plain / factor, np.where(wavelength < original / high, plain, blended))
    return out.astype(np.float32), 1.0


def _yarn(p: Mapping[str, Any], base: float, rotated: int, native: int, length: int) -> tuple[F32, float]:
    original = float(p.get("original_max_position_embeddings") or native)
    factor = float(p["factor"])
    if base <= 1:
        raise RopeError(f"rope_type 'yarn' needs a rope_theta above 1, not {base}")

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
    if original < 2:
        raise RopeError(f"rope_type 'longrope' has original_max_position_embeddings = {original}")
    factors = _divisors(p, "long_factor" if length > original else "short_factor", rotated)
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

_NUMBERS = {
    **dict.fromkeys(("rope_theta", "factor", "partial_rotary_factor", "attention_factor", "alpha"), 0),
    **dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"), 0),
    "llama_4_scaling_beta": 0,
    "original_max_position_embeddings": 1,
}
"""Parameters that are numbers, and what they may not be below."""

_MAY_BE_ZERO = ("alpha", "mscale", "mscale_all_dim", "llama_4_scaling_beta")
"""Where 0 says what no value says."""
