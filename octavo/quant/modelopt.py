"""NVIDIA's ModelOpt: MODULE.weight of 8-bit floats with weight_scale, or of two 4-bit floats per byte with weight_scale
for each 16 and weight_scale_2, by which those are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.quant import fp8, nvfp4
from octavo.quant.method import Head, Layout, QuantError

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4")


class ModelOpt:
    """quant_method "modelopt". What input_scale says of activations is of no concern: they stay floats."""

    name = "modelopt"
    endings = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")
    marks = (".weight_scale",)

    def layout(self, module: str, heads: Mapping[str, Head]) -> Layout:
        if ".weight" not in heads:
            raise QuantError("it has weight_scale, but no weight")
        if heads[".weight"].kind == "U8":
            return nvfp4.layout_of(heads, ".weight", ".weight_scale", ".weight_scale_2", divided=False)
        return fp8.layout_of(heads, ".weight", ".weight_scale", None)


def read(config: Mapping[str, Any]) -> ModelOpt:
    """Of quantization_config, or of hf_quant_config.json, which has it under "quantization". Raises QuantError."""
    said = (config.get("quantization") or config).get("quant_algo")
    if said not in ALGORITHMS:
        raise QuantError(f"quant_algo is {said!r}; {', '.join(ALGORITHMS)} can be read")
    return ModelOpt()
