"""compressed-tensors, the format of llm-compressor: integers packed or as they are, and floats of 8 or 4 bits.

The layouts are those of https://github.com/vllm-project/compressed-tensors (0.20), read from the tensors of a module
and the config group that targets it:

- pack-quantized: weight_packed int32, of which each holds 32 / bits integers, lowest bits first, plus 2^(bits - 1);
  weight_scale [n_out, groups], weight_zero_point packed the same along n_out, weight_g_idx [n_in] the group of each
  column where they were reordered, weight_shape.
- int-quantized and naive-quantized: weight int8, weight_scale, weight_zero_point int8.
- float-quantized and naive-quantized: weight E4M3 or E5M2, weight_scale; mxfp8-quantized: weight_scale are exponents.
- nvfp4-pack-quantized: weight_packed uint8, two 4-bit floats each, the first in the low half; weight_scale E4M3 of each
  16, divided by weight_global_scale. mxfp4-pack-quantized: weight_scale are exponents of each 32.

A value is (q - zero point) times scale. With scales of 16 bits all of that is exact in float32. With scales in float32
symmetric 8-bit integers and floats are rounded once, as compressed-tensors does; for other integers the product with
the zero point is rounded on its own, which may change the last bit. Nothing is done with what activations were to be
quantized to: they are rounded as --cpu-activations says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import I32, Stored
from octavo.quant import affine, fp8, grouped, mxfp4, nvfp4
from octavo.quant.affine import Affine
from octavo.quant.method import Head, Layout, QuantError, Values, plain
from octavo.quant.scales import Grid, grid

U8 = npt.NDArray[np.uint8]

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
"""That config.json may name; what a module's tensors are says which of them it is."""


class Scheme(NamedTuple):
    """What a config group says of weights."""

    bits: int
    kind: str
    """ "int" or "float"."""
    group: int
    """Columns that share a scale; 0: not in groups."""
    cell: tuple[int, int] | None
    """Rows and columns of a block."""
    symmetric: bool
    """Without zero points."""


class CompressedTensors:
    """quant_method "compressed-tensors"."""

    name = "compressed-tensors"
    endings = (
        ".weight",
        ".weight_packed",
        ".weight_scale",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight_shape",
        ".weight_global_scale",
        ".input_scale",
        ".input_zero_point",
        ".input_global_scale",
        ".output_scale",
        ".output_zero_point",
    )
    marks = (".weight_packed", ".weight_scale")

    def __init__(self, groups: Sequence[tuple[tuple[str, ...], Scheme]]):
        """`groups`: targets and scheme of each."""
        self.groups = groups

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        scheme = self._scheme(module)
        scale = heads.get(".weight_scale")
        weight = heads.get(".weight_packed") or heads.get(".weight")
        if weight is None or scale is None:
            raise QuantError("it has no weight_scale" if scale is None else "it has neither weight nor weight_packed")
        if ".weight" in heads and ".weight_packed" in heads:
            raise QuantError("it has both weight and weight_packed")
        if len(weight.shape) != 2:
            raise QuantError(f"its weight has the shape {list(weight.shape)}; a matrix is needed")
        if not scheme.symmetric and ".weight_zero_point" not in heads:
            raise QuantError("it has no weight_zero_point, and its group is not symmetric")
        if ".weight_packed" in heads:
            return _packed(heads, scheme) if weight.kind == "I32" else _packed_floats(heads, scheme)
        if weight.kind in fp8.FORMATS:
            return _floats(heads, scheme)
        if weight.kind == "I8":
            return _integers(heads, scheme)
        raise QuantError(f"weight has the type {weight.kind}; I8 or {' or '.join(fp8.FORMATS)} is needed")

    def _scheme(self, module: str) -> Scheme:
        """Of the group whose targets name the module, or else match it as "re:" patterns, or else name its class: an
        embedding is known by its name, everything else is taken for Linear, or for any class where none says Linear."""
        found = [
            scheme
            for matches in (_names, _matches, _is_embedding, _is_linear, _is_class)
            for targets, scheme in self.groups
            if any(matches(target, module) for target in targets)
        ]
        if not found:
            raise QuantError("no group of config_groups targets it")
        return found[0]


def _names(target: str, module: str) -> bool:
    return target == module


def _matches(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


def _is_embedding(target: str, module: str) -> bool:
    return target == "Embedding" and "embed" in module.rpartition(".")[2]


def _is_linear(target: str, module: str) -> bool:
    return target == "Linear"


def _is_class(target: str, module: str) -> bool:
    return target[:1].isupper()


def read(config: Mapping[str, Any]) -> CompressedTensors:
    """Of quantization_config. Raises QuantError."""
    sparsity, transform = config.get("sparsity_config"), config.get("transform_config")
    if sparsity and sparsity.get("format") != "dense":
        raise QuantError(f"sparsity_config is {sparsity!r}; matrices that are not sparse can be read")
    if transform and transform.get("config_groups"):
        raise QuantError(f"transform_config is {transform!r}; weights that are not rotated can be read")
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        raise QuantError(f"config_groups is {groups!r}; an object of groups is needed")
    _check_format(config.get("format"), "format")
    schemes = []
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
            raise QuantError(f"config_groups.{name} is {group!r}; an object with a list of targets is needed")
        _check_format(group.get("format"), f"config_groups.{name}.format")
        for target in group["targets"]:
            try:
                re.compile(target)
            except (re.error, TypeError) as error:
                raise QuantError(f"config_groups.{name}.targets has {target!r}: {error}") from None
        if group.get("weights") is not None:
            schemes.append((tuple(group["targets"]), _scheme(group["weights"], f"config_groups.{name}.weights")))
    return CompressedTensors(schemes)


def _check_format(said: Any, key: str) -> None:
    if said is not None and said not in FORMATS:
        raise QuantError(f"{key} is {said!r}; {', '.join(FORMATS)} can be read")


def _scheme(weights: Mapping[str, Any], key: str) -> Scheme:
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    known = {"int": range(2, 9), "float": (4, 8)}
    if bits not in known.get(kind, ()):
        raise QuantError(f"{key} has {kind!r} of {bits} bits; int of 2 to 8 and float of 4 and 8 can be read")
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if strategy is None:  # what the format takes for it
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        raise QuantError(f"{key}.strategy is {strategy!r}; tensor, channel, group, tensor_group and block can be read")
    if strategy not in ("group", "tensor_group"):
        group = 0
    elif type(group) is not int or group < 1:
        raise QuantError(f"{key}.group_size is {group!r}; a number of columns is needed")
    cell = fp8.cell_of(weights.get("block_structure"), f"{key}.block_structure") if strategy == "block" else None
    return Scheme(bits, kind, group, cell, weights.get("symmetric", True) is not False)


def _cell(scheme: Scheme) -> tuple[int, int] | None:
    return (1, scheme.group) if scheme.group else scheme.cell


def _shares(heads: Mapping[str, Head], n_out: int, n_in: int, scheme: Scheme) -> Grid:
    return grid(n_out, n_in, heads[".weight_scale"].shape, _cell(scheme))


def _floats(heads: Mapping[str, Head], scheme: Scheme) -> Layout:
    scale = heads[".weight_scale"]
    if scale.kind == "U8":
        heads = {**heads, ".weight_scale": scale._replace(kind="F8_E8M0")}
    return fp8.layout_of(heads, ".weight", ".weight_scale", _cell(scheme))


def _packed_floats(heads: Mapping[str, Head], scheme: Scheme) -> Layout:
    packed, scale = heads[".weight_packed"], heads[".weight_scale"]
    if (scheme.kind, scheme.bits) != ("float", 4):
        raise QuantError(f"weight_packed is {packed.kind}, which holds floats of 4 bits; the group says {scheme}")
    if scale.kind == "F8_E4M3":
        return nvfp4.layout_of(heads, ".weight_packed", ".weight_scale", ".weight_global_scale", divided=True)
    return mxfp4.layout_of(heads, ".weight_packed", ".weight_scale")


def _check_scales(heads: Mapping[str, Head]) -> None:
    """Of integers."""
    if (kind := heads[".weight_scale"].kind) not in grouped.FLOATS:
        raise QuantError(f"weight_scale has the type {kind}; {', '.join(grouped.FLOATS)} can be read")


def _integers(heads: Mapping[str, Head], scheme: Scheme) -> Layout:
    _check_scales(heads)
    n_out, n_in = heads[".weight"].shape
    shares, zeros = _shares(heads, n_out, n_in, scheme), heads.get(".weight_zero_point")
    if zeros is not None and (zeros.kind, zeros.shape) != ("I8", heads[".weight_scale"].shape):
        raise QuantError(f"weight_zero_point is {zeros.kind} {list(zeros.shape)}; int8 as weight_scale's is needed")
    form = affine.fitting(8, n_in, min(shares.columns, n_in))
    return Layout(form.name if form else "F32", (n_out, n_in), partial(_build_integers, form, shares))


def _build_integers(form: Affine | None, shares: Grid, parts: Mapping[str, Values]) -> Stored:
    return _affine(form, shares, parts[".weight"], parts[".weight_scale"], parts.get(".weight_zero_point"))


def _columns(shape: Head, n_out: int) -> int:
    """Which the tensor weight_shape says, as rows are filled up to whole words."""
    sizes = shape.values().reshape(-1).tolist() if shape.kind in grouped.INTEGERS else []
    if len(sizes) != 2 or sizes[0] != n_out:
        raise QuantError(f"weight_shape is {shape.kind} {sizes or list(shape.shape)} for {n_out} rows; two are needed")
    return int(sizes[1])


def _packed(heads: Mapping[str, Head], scheme: Scheme) -> Layout:
    _check_scales(heads)
    bits, (n_out, words) = scheme.bits, heads[".weight_packed"].shape
    n_in = _columns(heads[".weight_shape"], n_out) if ".weight_shape" in heads else words * 32 // bits
    if scheme.kind != "int" or words != grouped.words(n_in, bits):
        raise QuantError(
            f"weight_packed is int32 {[n_out, words]} for {n_in} columns; the group says {scheme.kind} of {bits} bits, "
            f"which {grouped.words(n_in, bits)} words hold"
        )
    shares, zeros = _shares(heads, n_out, n_in, scheme), heads.get(".weight_zero_point")
    across = -(-n_out // shares.rows), -(-n_in // shares.columns)
    needed = grouped.words(across[0], bits), across[1]
    if zeros is not None and (zeros.kind, zeros.shape) != ("I32", needed):
        raise QuantError(f"weight_zero_point is {zeros.kind} {list(zeros.shape)}; int32 {list(needed)} is needed")
    order = _order(heads[".weight_g_idx"].values(), scheme.group) if ".weight_g_idx" in heads else None
    form = affine.fitting(4 if bits <= 4 else 8, n_in, min(shares.columns, n_in))
    return Layout(
        form.name if form else "F32", (n_out, n_in), partial(_build_packed, form, shares, bits, across[0], order)
    )


def _order(group_of: Values, group: int) -> I32 | None:
    """Columns group by group; None where they lie so. Raises QuantError where groups are not `group` columns each."""
    if (group_of < 0).all():  # reserved, never filled
        return None
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    if not group or not np.array_equal(group_of[order], np.arange(len(order)) // group):
        raise QuantError(f"weight_g_idx does not put {group} columns into each group")
    return None if np.array_equal(order, np.arange(len(order))) else order


def _build_packed(
    form: Affine | None, shares: Grid, bits: int, rows: int, order: I32 | None, parts: Mapping[str, Values]
) -> Stored:
    q, zeros = unpack(parts[".weight_packed"], bits, shares.n_in), parts.get(".weight_zero_point")
    if zeros is not None:
        zeros = unpack(np.ascontiguousarray(zeros.T), bits, rows).T
    if order is not None:
        q = q[:, order]
    stored = _affine(form, shares, q, parts[".weight_scale"], zeros)
    return stored._replace(columns=order)


def unpack(words: Values, bits: int, count: int) -> npt.NDArray[np.int8]:
    """int32 [n, words] -> int8 [n, count]: integers of `bits` bits, one after another from the lowest bit of the first
    word, less 2^(bits - 1)."""
    values = grouped.unpacked(words, bits)[:, :count]
    signed: npt.NDArray[np.int8] = (values - np.uint8(1 << (bits - 1))).view(np.int8)
    return signed


def _affine(form: Affine | None, shares: Grid, q: Values, scales: Values, zeros: Values | None) -> Stored:
    """(q - zeros) times scales, q int8; as plain floats where no block format fits."""
    block = form.block if form else 1
    d = shares.spread(scales, block)
    z = np.zeros((), np.float32) if zeros is None else shares.spread(zeros, block)
    if form is None:
        return plain((q - z) * d)
    offset = 8 if form.bits == 4 else 0  # those of 4 bits have no sign
    return Stored(form.name, shares.n_out, shares.n_in, form.rows(q + np.int8(offset), d, -(z + offset) * d))
