"""bitsandbytes: 4-bit codes of which a block shares its largest absolute value (Dettmers et al., "QLoRA", 2023), and
integers of 8 bits with one scale per row (Dettmers et al., "LLM.int8()", 2022)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import Stored
from octavo.quant.affine import fitting
from octavo.quant.codebook import FP4_32, NF4_32, Codebook
from octavo.quant.method import Head, Layout, QuantError, Values, plain

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

_STATES = {".weight.quant_state.bitsandbytes__nf4": NF4_32, ".weight.quant_state.bitsandbytes__fp4": FP4_32}
"""Tensors of JSON that tell how a matrix of 4 bits is stored, and its values as bitsandbytes has them."""

_FLOATS = ("F32", "F16", "BF16")


class _State(NamedTuple):
    """What the JSON says: sizes in elements; `nested` is 0 where block maxima are floats."""

    n_out: int
    n_in: int
    block: int
    nested: int
    offset: np.float32


class Bitsandbytes:
    """Matrices as transformers saves them.

    Of 4 bits: codes WEIGHT, two in a byte, of the matrix as one long row that blocks divide without regard to its rows;
    WEIGHT.absmax, of which double quantization makes codes of 8 bits with tensors of their own; WEIGHT.quant_map, the
    values of the codes. A value is that of its code times the maximum of its block, in float32; bitsandbytes then
    rounds it to the type it computes in, which is not done here.

    Of 8 bits: WEIGHT int8 and the largest absolute value of each row, SCB. A value is WEIGHT times SCB / 127, both
    rounded to float32; kernels of bitsandbytes do these two in several orders, which differ in the last bit.
    """

    name = "bitsandbytes"
    endings = (
        ".weight",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *_STATES,
        ".SCB",
        ".weight_format",
    )
    marks = (*_STATES, ".SCB")

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        states = [ending for ending in _STATES if ending in heads]
        if len(states) + (".SCB" in heads) != 1:
            raise QuantError(f"it has {' and '.join(states)}" + " and SCB" * (".SCB" in heads))
        return _of_4_bits(states[0], heads) if states else _of_8_bits(heads)


def read(config: Mapping[str, Any]) -> Bitsandbytes:
    """What the configuration says, each matrix says for itself."""
    return Bitsandbytes()


def normal_floats(values: F32) -> U8:
    """Rows of NF4_32 from [n, n_in], n_in a multiple of 32, as bitsandbytes makes them without double quantization: a
    block of 64 neighbours (of 32 where rows are no multiple of 64) shares its largest magnitude, and codes are the
    nearest. Of two that are as near, the higher code. Raises QuantError for numbers that are not finite."""
    n_out, n_in = values.shape
    block = 64 if n_in % 64 == 0 else 32
    blocks = values.reshape(n_out, -1, block)
    largest = np.maximum(blocks.max(2), -blocks.min(2))
    if not np.isfinite(largest).all():
        raise QuantError("a matrix has numbers that are not finite")
    shares = np.divide(blocks, largest[:, :, None], out=np.zeros_like(blocks), where=largest[:, :, None] != 0)
    borders = (NF4_32.table[1:] + NF4_32.table[:-1]) / 2
    codes = np.searchsorted(borders, shares.reshape(n_out, n_in), side="right").astype(np.uint8)
    return NF4_32.rows(codes, largest)


def _of_4_bits(ending: str, heads: Mapping[str, Head]) -> Layout:
    state = _state(ending, heads[ending])
    count = state.n_out * state.n_in
    blocks = -(-count // state.block)
    _need(heads, ".weight.absmax", ("U8",) if state.nested else _FLOATS, blocks)
    _need(heads, ".weight.quant_map", _FLOATS, 16)
    if state.nested:
        _need(heads, ".weight.nested_absmax", _FLOATS, -(-blocks // state.nested))
        _need(heads, ".weight.nested_quant_map", _FLOATS, 256)
    have = heads[".weight"].values().nbytes if ".weight" in heads else 0  # of any type: --bnb_4bit_quant_storage
    if have != -(-count // 2):
        raise QuantError(f".weight has {have:,} bytes; {count:,} codes of 4 bits are needed")
    form = _STATES[ending]
    values = heads[".weight.quant_map"].values().astype(np.float32)
    fits = np.array_equal(values, form.table) and state.n_in % form.block == 0 and state.block % form.block == 0

    def build(parts: Mapping[str, Values]) -> Stored:
        return _blocks(form if fits else None, state, parts)

    return Layout(form.name if fits else "F32", (state.n_out, state.n_in), build)


def _state(ending: str, head: Head) -> _State:
    try:
        said = json.loads(head.values().tobytes().decode())
        n_out, n_in = (_count(n) for n in said["shape"])
        nested = "nested_blocksize" in said
        return _State(
            n_out,
            n_in,
            _count(said["blocksize"]),
            _count(said["nested_blocksize"]) if nested else 0,
            np.float32(said["nested_offset"] if nested else 0),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise QuantError(f"{ending} does not say shape and blocksize ({type(error).__name__}: {error})") from None


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no size")
    return value


def _need(heads: Mapping[str, Head], ending: str, kinds: tuple[str, ...], count: int) -> None:
    head = heads.get(ending)
    if head is None:
        raise QuantError(f"it has no {ending}")
    if head.kind not in kinds or int(np.prod(head.shape)) != count:
        raise QuantError(f"{ending} is {head.kind} {list(head.shape)}; {'/'.join(kinds)} [{count}] is needed")


def _blocks(form: Codebook | None, state: _State, parts: Mapping[str, Values]) -> Stored:
    """In `form`, whose blocks lie in one block of the file and in one row each; in float32 without it."""
    n_out, n_in, block, nested, offset = state
    packed = np.ascontiguousarray(parts[".weight"]).reshape(-1).view(np.uint8)
    codes: U8 = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[: n_out * n_in]
    maxima = parts[".weight.absmax"].reshape(-1)
    if nested:
        values = parts[".weight.nested_quant_map"].reshape(-1).astype(np.float32)[maxima]
        scales = parts[".weight.nested_absmax"].reshape(-1).astype(np.float32)
        maxima = values * np.repeat(scales, nested)[: values.size] + offset
    d: F32 = maxima.astype(np.float32)
    if form is not None:
        d = np.repeat(d, block // form.block)[: n_out * n_in // form.block]
        return Stored(form.name, n_out, n_in, form.rows(codes.reshape(n_out, n_in), d.reshape(n_out, -1)))
    table = parts[".weight.quant_map"].reshape(-1).astype(np.float32)
    return plain((table[codes] * np.repeat(d, block)[: codes.size]).reshape(n_out, n_in))


def _of_8_bits(heads: Mapping[str, Head]) -> Layout:
    weight = heads.get(".weight", Head("nothing", (), lambda: np.zeros(0)))
    if weight.kind != "I8" or len(weight.shape) != 2:
        raise QuantError(f".weight is {weight.kind} {list(weight.shape)}; I8 [n_out, n_in] is needed")
    n_out, n_in = weight.shape
    _need(heads, ".SCB", _FLOATS, n_out)
    if ".weight_format" in heads and (tiled := int(heads[".weight_format"].values().reshape(-1)[0])):
        raise QuantError(f".weight_format is {tiled}, an order for one kind of GPU; 0 is needed. Save the model again")
    form = fitting(8, n_in, n_in)

    def build(parts: Mapping[str, Values]) -> Stored:
        q = parts[".weight"]
        d = (parts[".SCB"].astype(np.float32) / np.float32(127)).reshape(n_out, 1)
        if form is None:
            return plain(q * d)
        return Stored(form.name, n_out, n_in, form.rows(q, d, np.zeros_like(d)))

    return Layout("F32" if form is None else form.name, weight.shape, build)
