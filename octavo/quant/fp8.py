"""FP8 as Hugging Face, DeepSeek, Qwen and vLLM publish it: a matrix of 8-bit floats beside its scales.

MODULE.weight holds E4M3 or E5M2 [n_out, n_in]; MODULE.weight_scale, or MODULE.weight_scale_inv, which means the same
despite its name, is one number, one per row, or one per block of weight_block_size, where those at the end may be cut.
A value is code times scale, rounded once to float32 as transformers does. How activations were to be quantized
(input_scale, activation_scale, activation_scheme) is of no concern: they stay floats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import F32, Stored
from octavo.quant.float8 import F8_E4M3_32, F8_E5M2_32, Float8
from octavo.quant.method import Head, Layout, QuantError, Values, plain
from octavo.quant.scales import Grid, grid, power

U8 = npt.NDArray[np.uint8]

FORMATS = {"F8_E4M3": F8_E4M3_32, "F8_E5M2": F8_E5M2_32}
"""The file's word for 8-bit floats -> our format."""

SCALES = ("F32", "F16", "BF16", "F8_E8M0")


def layout_of(heads: Mapping[str, Head], weight: str, scale: str, cell: tuple[int, int] | None) -> Layout:
    """The matrix of 8-bit floats in `heads[weight]` whose scales are `heads[scale]`, in blocks of `cell`
    where they are in blocks. Raises QuantError."""
    codes, scales = heads[weight], heads[scale]
    if codes.kind not in FORMATS or len(codes.shape) != 2:
        raise QuantError(f"{weight} is {codes.kind} {list(codes.shape)}; a matrix of {' or '.join(FORMATS)} is needed")
    if scales.kind not in SCALES:
        raise QuantError(f"{scale} has the type {scales.kind}; {', '.join(SCALES)} can be read")
    form, shares = FORMATS[codes.kind], grid(*codes.shape, scales.shape, cell)
    kind = form.name if shares.fits(form.block) else "F32"
    return Layout(kind, codes.shape, partial(_build, form, shares, scales.kind, weight, scale))


def _build(form: Float8, shares: Grid, power_of: str, weight: str, scale: str, parts: Mapping[str, Values]) -> Stored:
    codes, scales = parts[weight], parts[scale]
    if power_of == "F8_E8M0":
        scales = power(scales)
    if shares.fits(form.block):
        rows = form.rows(codes, shares.spread(scales, form.block))
        return Stored(form.name, shares.n_out, shares.n_in, rows)
    with np.errstate(invalid="ignore", over="ignore"):
        return plain(codes.view(form.dtype).astype(np.float32) * shares.spread(scales, 1))


@dataclasses.dataclass(frozen=True)
class Fp8:
    """quant_method "fp8" and "fbgemm_fp8"."""

    name: str
    cell: tuple[int, int] | None
    """weight_block_size."""
    endings: tuple[str, ...] = (
        ".weight",
        ".weight_scale_inv",
        ".weight_scale",
        ".input_scale",
        ".output_scale",
        ".activation_scale",
    )
    marks: tuple[str, ...] = (".weight_scale_inv", ".weight_scale")

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        scale = next(mark for mark in self.marks if mark in heads)
        if ".weight" not in heads:
            raise QuantError(f"it has {scale}, but no .weight")
        return layout_of(heads, ".weight", scale, self.cell)


def read(config: Mapping[str, Any]) -> Fp8:
    """Of quantization_config. Raises QuantError."""
    return Fp8(str(config["quant_method"]), cell_of(config.get("weight_block_size"), "weight_block_size"))


def cell_of(said: Any, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block, as `key` of a configuration says them; None where it says nothing. Raises
    QuantError."""
    if said is None:
        return None
    if isinstance(said, list) and len(said) == 2 and all(type(n) is int and n > 0 for n in said):
        return said[0], said[1]
    raise QuantError(f"{key} is {said!r}; rows and columns are needed, as [128, 128]")


def per_channel(values: F32) -> U8:
    """Rows of E4M3 with one scale each: their largest magnitude / 448, the largest E4M3; 1 for a row of zeros. Codes
    are values / scale in float32, rounded to nearest, ties to even."""
    return _rounded(values, np.abs(values).max(axis=1, keepdims=True))


def per_block(values: F32) -> U8:
    """The same with one scale for each 128 x 128, or what is left of them at the ends."""
    n_out, n_in = values.shape
    starts = [np.arange(0, n, 128) for n in (n_out, n_in)]
    largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(values), starts[0]), starts[1], axis=1)
    return _rounded(values, Grid(n_out, n_in, 128, 128).spread(largest, 32))


def _rounded(values: F32, largest: F32) -> U8:
    """`largest` [n_out, n] for n even parts of a row."""
    form, (n_out, n_in) = F8_E4M3_32, values.shape
    scales = largest / np.float32(448)
    scales[scales == 0] = 1
    shares = values.reshape(n_out, scales.shape[1], -1) / scales[:, :, None]
    codes = np.clip(shares, -448, 448).astype(form.dtype)  # where scales are subnormal they are not exact
    return form.rows(codes.view(np.uint8).reshape(n_out, n_in), scales)
