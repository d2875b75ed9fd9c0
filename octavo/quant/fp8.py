"""FP8 as Hugging Face, DeepSeek, Qwen and vLLM publish it: a matrix of 8-bit floats beside its scales.

MODULE.weight holds E4M3 or E5M2 [n_out, n_in]; MODULE.weight_scale, or MODULE.weight_scale_inv, which means the same
despite its name, is one number, one per row, or one per block of weight_block_size, where those at the end may be cut.
A value is code times scale, rounded once to float32 as transformers does.

Stacks of experts are NAME_proj [E, n, m]. With NAME_proj_scale_inv they are matrices [n_out, n_in] with scales per
block, as transformers keeps them in memory. With NAME_proj_scale they are stored for x @ W, [n_in, n_out], with a scale
per output channel, [E, 1, n_out] or [E, n_out, 1] (Llama 4 by fbgemm); they become NAME_proj.weight [E, n_out, n_in].

How activations were to be quantized
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

STACK, STACK_SCALE, STACK_SCALE_INV = "_proj", "_proj_scale", "_proj_scale_inv"

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


def _stack(heads: Mapping[str, Head], cell: tuple[int, int] | None) -> Layout:
    codes, turned = heads.get(STACK), STACK_SCALE in heads
    scales = heads[STACK_SCALE if turned else STACK_SCALE_INV]
    if codes is None or len(codes.shape) != 3 or scales.shape[:1] != codes.shape[:1]:
        said = "not there" if codes is None else str(list(codes.shape))
        raise QuantError(f"{STACK} is {said} and its scales {list(scales.shape)}; [E, n, m] and [E, ...] are needed")
    count, *shape = codes.shape
    entry, by = codes._replace(shape=tuple(shape)), scales._replace(shape=scales.shape[1:])
    if not turned:
        one = layout_of({STACK: entry, STACK_SCALE_INV: by}, STACK, STACK_SCALE_INV, cell)
        return one._replace(shape=(count, *one.shape), ending=STACK)
    n_in, n_out = shape
    if sorted(by.shape) != sorted((1, n_out)):
        raise QuantError(
            f"{STACK_SCALE} is {list(scales.shape)}; {[count, 1, n_out]} is needed beside {[count, *shape]}"
        )
    entry, by = entry._replace(shape=(n_out, n_in)), by._replace(shape=(n_out, 1))
    one = layout_of({STACK: entry, STACK_SCALE: by}, STACK, STACK_SCALE, None)

    def build(parts: Mapping[str, Values]) -> Stored:
        return one.build({**parts, STACK: np.ascontiguousarray(parts[STACK].T)})

    return Layout(one.kind, (count, *one.shape), build, STACK + ".weight")


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
        STACK,
        STACK_SCALE,
        STACK_SCALE_INV,
    )
    marks: tuple[str, ...] = (".weight_scale_inv", ".weight_scale", STACK_SCALE, STACK_SCALE_INV)

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        if STACK_SCALE in heads or STACK_SCALE_INV in heads:
            return _stack(heads, self.cell)
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
    """`largest` [n_out, n] for n even parts of a row. Raises QuantError where one is not finite."""
    if not np.isfinite(largest).all():
        raise QuantError("a matrix has numbers that are not finite")
    form, (n_out, n_in) = F8_E4M3_32, values.shape
    scales = largest / np.float32(448)
    scales[scales == 0] = 1
    shares = values.reshape(n_out, scales.shape[1], -1) / scales[:, :, None]
    codes = np.clip(shares, -448, 448).astype(form.dtype)  # where scales are subnormal they are not exact
    return form.rows(codes.view(np.uint8).reshape(n_out, n_in), scales)
