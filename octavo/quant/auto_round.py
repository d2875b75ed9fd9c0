"""AutoRound (Cheng et al., "Optimize weight rounding via signed gradient descent for the quantization of LLMs", 2023).

It decides how values are rounded; packing_format says in whose layout they are then written: GPTQ's with zero points
less one (auto_round:auto_gptq) or as they are (auto_round, auto_round:gptqmodel), AWQ's (auto_round:auto_awq), that of
compressed-tensors for floats (auto_round:llm_compressor), 8-bit floats (auto_round:fp8_static). extra_config, which
gives modules bits and groups of their own, says nothing that their tensors do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.quant import awq, fp8, gptq
from octavo.quant.compressed_tensors import CompressedTensors, Scheme
from octavo.quant.method import Head, Layout, Method, QuantError

_GPTQ = {"": "gptq_v2", "gptqmodel": "gptq_v2", "auto_gptq": "gptq", "gptq": "gptq"}
"""packing_format after "auto_round" -> version of GPTQ's layout."""

_AWQ = ("auto_awq", "awq")

FORMATS = (
    "auto_round",
    "auto_round:auto_gptq",
    "auto_round:gptqmodel",
    "auto_round:auto_awq",
    "auto_round:llm_compressor",
    "auto_round:fp8_static",
)


@dataclasses.dataclass(frozen=True)
class AutoRound:
    """quant_method "auto-round": matrices in the layout of `packed`."""

    packed: Method
    name: str = "auto-round"

    @property
    def endings(self) -> tuple[str, ...]:
        return self.packed.endings

    @property
    def marks(self) -> tuple[str, ...]:
        return self.packed.marks

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        return self.packed.layout(module, heads)


class _Floats:
    """Floats of 4 or 8 bits in the layout of compressed-tensors, each matrix with the scheme that its tensors have."""

    name = "compressed-tensors"
    endings = CompressedTensors.endings
    marks = CompressedTensors.marks

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        scale, packed = heads.get(".weight_scale"), heads.get(".weight_packed")
        weight = packed or heads.get(".weight")
        if weight is None or scale is None or len(weight.shape) != 2 or len(scale.shape) != 2 or 0 in scale.shape:
            raise QuantError("a matrix weight or weight_packed and weight_scale [n_out, groups] are needed")
        n_in = weight.shape[1] * (2 if packed else 1)
        scheme = Scheme(4 if packed else 8, "float", -(-n_in // scale.shape[1]), None, symmetric=True)
        return CompressedTensors([(("Linear",), scheme)]).layout(module, heads)


def read(config: Mapping[str, Any]) -> AutoRound:
    """Of quantization_config. Raises QuantError."""
    said = config.get("packing_format", "auto_round:gptq")
    family, _, form = str(said).partition(":")
    if family != "auto_round" or form not in (*_GPTQ, *_AWQ, "llm_compressor", "fp8_static"):
        raise QuantError(f"packing_format is {said!r}; supported are {', '.join(FORMATS)}")
    if form in _GPTQ:
        return AutoRound(gptq.read({**config, "checkpoint_format": _GPTQ[form]}))
    if form in _AWQ:
        return AutoRound(awq.read({**config, "version": "gemm"}))
    if form == "fp8_static":
        return AutoRound(fp8.read(config))
    if "fp" not in str(config.get("data_type", "")):
        raise QuantError(f"data_type is {config.get('data_type')!r}; of {said} floats (mx_fp, nv_fp) can be read")
    return AutoRound(_Floats())
