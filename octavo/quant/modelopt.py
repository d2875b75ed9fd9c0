"""NVIDIA's ModelOpt, in the layouts that its export writes for Hugging Face folders (version 0.47).

MODULE.weight and MODULE.weight_scale are, by their types:

- floats of 8 bits with one scale, one per row, or one per 128 x 128 (FP8_PB_WO: [n, 1, m, 1]); with uint8 exponents of
  each 32 (MXFP8).
- uint8, two 4-bit floats each: with E4M3 scales of each 16 and weight_scale_2, by which those are multiplied (NVFP4 in
  its variants); with uint8 exponents of each 32 (MXFP4).
- uint8, two integers of 4 bits each, of rows 2i (low half) and 2i + 1, with scales in floats [n_out, groups] (AWQ).
  W4A8_AWQ's weight_scale_2 belongs to the 8-bit floats that its kernel multiplies with, and not to the values. With
  scales in float32, 8 scale and the product are rounded on their own, which may change the last bits.
- int8 with a scale per row (SmoothQuant, W8A16).

Stacks of experts for x @ W are NAME_proj and NAME_proj_weight_scale (Llama 4): floats of 8 bits [E, n_in, n_out] with
one scale, or NVFP4 with both tensors turned, [E, n_in / 2, n_out] and [E, n_in / 16, n_out]; they become
NAME_proj.weight [E, n_out, n_in].

pre_quant_scale [n_in], by which inputs are multiplied where the layer before could not take that over, becomes part of
the matrix, which then is float32. What input_scale says of activations is of no concern: they stay floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from octavo.ops.contract import Stored
from octavo.quant import affine, dense, fp8, mxfp4, nvfp4
from octavo.quant.method import Head, Layout, QuantError, Values, plain

ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MXFP8",
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
    "MIXED_PRECISION",
)
"""Each matrix says by its tensors which of them it is."""

BLOCK = (128, 128)
"""Rows and columns that share a scale in FP8_PB_WO."""

STACK = "_proj"

_FLOATS = ("F32", "F16", "BF16")


class ModelOpt:
    """quant_method "modelopt"."""

    name = "modelopt"
    endings = (
        ".weight",
        ".weight_scale",
        ".weight_scale_2",
        ".input_scale",
        ".pre_quant_scale",
        *(STACK + ending for ending in ("", "_weight_scale", "_weight_scale_2", "_input_scale")),
    )
    marks = (".weight_scale", STACK + "_weight_scale")

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        if STACK + "_weight_scale" in heads:
            return _stack({_of_matrix(ending): head for ending, head in heads.items()})
        weight, scale, smooth = (heads.get(e) for e in (".weight", ".weight_scale", ".pre_quant_scale"))
        if weight is None or scale is None:
            raise QuantError("it has weight_scale, but no weight")
        layout = _layout(weight, scale, heads)
        if smooth is None:
            return layout
        if smooth.kind not in _FLOATS or smooth.shape != layout.shape[-1:]:
            raise QuantError(
                f"pre_quant_scale is {smooth.kind} {list(smooth.shape)}; {list(layout.shape[-1:])} is needed"
            )
        return Layout("F32", layout.shape, partial(_smoothed, layout))


def _layout(weight: Head, scale: Head, heads: Mapping[str, Head]) -> Layout:
    if weight.kind == "I8":
        return _integers(weight, scale)
    if weight.kind == "U8" and scale.kind == "F8_E4M3":
        return nvfp4.layout_of(heads, ".weight", ".weight_scale", ".weight_scale_2", divided=False)
    if weight.kind == "U8" and scale.kind == "U8":
        return mxfp4.layout_of(heads, ".weight", ".weight_scale")
    if weight.kind == "U8":
        return _pairs(weight, scale)
    if scale.kind == "U8":
        exponents = {**heads, ".weight_scale": scale._replace(kind="F8_E8M0")}
        return fp8.layout_of(exponents, ".weight", ".weight_scale", (1, 32))
    if len(scale.shape) == 4 and scale.shape[1::2] == (1, 1):
        heads = {**heads, ".weight_scale": scale._replace(shape=scale.shape[::2])}
    return fp8.layout_of(heads, ".weight", ".weight_scale", BLOCK)


def _of_matrix(ending: str) -> str:
    """The ending that a tensor of a stack has as one of a single matrix."""
    return ".weight" if ending == STACK else "." + ending.removeprefix(STACK + "_")


def _stack(heads: Mapping[str, Head]) -> Layout:
    weight, scale = heads.get(".weight"), heads[".weight_scale"]
    if weight is None or len(weight.shape) != 3 or weight.kind not in ("U8", *fp8.FORMATS):
        said = "not there" if weight is None else f"{weight.kind} {list(weight.shape)}"
        raise QuantError(f"{STACK} is {said}; U8 or {' or '.join(fp8.FORMATS)} [E, n_in, n_out] are needed")
    turned = [".weight"] if scale.shape in ((), (1,)) else [".weight", ".weight_scale"]
    if any(len(heads[e].shape) != 3 for e in turned) or scale.shape not in (
        (),
        (1,),
        (weight.shape[0], *scale.shape[1:]),
    ):
        raise QuantError(f"{STACK}_weight_scale is {list(scale.shape)} beside {list(weight.shape)}")
    entry = {e: head._replace(shape=head.shape[:0:-1]) if e in turned else head for e, head in heads.items()}
    one = _layout(entry[".weight"], entry[".weight_scale"], entry)

    def build(parts: Mapping[str, Values]) -> Stored:
        named = {_of_matrix(ending): part for ending, part in parts.items()}
        return one.build({e: np.ascontiguousarray(part.T) if e in turned else part for e, part in named.items()})

    return Layout(one.kind, (weight.shape[0], *one.shape), build, STACK + ".weight")


def _smoothed(layout: Layout, parts: Mapping[str, Values]) -> Stored:
    return plain(dense(layout.build(parts)) * parts[".pre_quant_scale"].astype(np.float32))


def _integers(weight: Head, scale: Head) -> Layout:
    if (
        len(weight.shape) != 2
        or scale.kind not in _FLOATS
        or scale.shape not in (weight.shape[:1], (*weight.shape[:1], 1))
    ):
        raise QuantError(
            f"weight is {weight.kind} {list(weight.shape)} and weight_scale {scale.kind} {list(scale.shape)}; int8 "
            "[n_out, n_in] and floats [n_out] are needed"
        )
    n_out, n_in = weight.shape
    form = affine.fitting(8, n_in, n_in)

    def build(parts: Mapping[str, Values]) -> Stored:
        q, d = parts[".weight"], parts[".weight_scale"].astype(np.float32).reshape(n_out, 1)
        return plain(q * d) if form is None else Stored(form.name, n_out, n_in, form.rows(q, d, np.zeros_like(d)))

    return Layout("F32" if form is None else form.name, weight.shape, build)


def _pairs(weight: Head, scale: Head) -> Layout:
    """Integers of 4 bits, two rows in a byte."""
    fits = len(weight.shape) == 2 and len(scale.shape) == 2 and scale.kind in _FLOATS
    if not fits or scale.shape[0] != 2 * weight.shape[0] or 0 in scale.shape or weight.shape[1] % scale.shape[1]:
        raise QuantError(
            f"weight is {weight.kind} {list(weight.shape)} and weight_scale {scale.kind} {list(scale.shape)}; uint8 "
            "[n_out / 2, n_in] and floats [n_out, groups] are needed"
        )
    (n_out, groups), n_in = scale.shape, weight.shape[1]
    form = affine.fitting(4, n_in, n_in // groups)

    def build(parts: Mapping[str, Values]) -> Stored:
        packed, d = parts[".weight"], parts[".weight_scale"].astype(np.float32)
        q = np.stack([packed & 15, packed >> 4], axis=1).reshape(n_out, n_in) ^ np.uint8(8)  # from 0 to 15
        if form is None:
            return plain((q.astype(np.float32) - 8) * np.repeat(d, n_in // groups, axis=1))
        return Stored(form.name, n_out, n_in, form.rows(q, d, -8 * d))

    return Layout("F32" if form is None else form.name, (n_out, n_in), build)


def read(config: Mapping[str, Any]) -> ModelOpt:
    """Of quantization_config, or of hf_quant_config.json, which has it under "quantization". Raises QuantError."""
    holder = config.get("quantization") or config
    said = holder.get("quant_algo") if isinstance(holder, dict) else None
    if str(said).upper() not in ALGORITHMS:
        raise QuantError(f"quant_algo is {said!r}; {', '.join(ALGORITHMS)} can be read")
    return ModelOpt()
