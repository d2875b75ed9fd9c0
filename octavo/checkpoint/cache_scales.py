"""What a quantized checkpoint says of an FP8 KV cache: whether it wants one, and what its elements are divided by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.multimodal import text_model
from octavo.checkpoint.tensor import Tensor
from octavo.ops.contract import F32, Stored
from octavo.quant import dense, row_bytes

ENDINGS = (
    (".k_scale", "k"),
    (".v_scale", "v"),
    (".k_proj.output_scale", "k"),
    (".v_proj.output_scale", "v"),
    (".kv_scale", "kv"),
)
"""What the names of scales end in, and whose they are. Of a module's several, the first count, and those of attention
itself before those of its projections (which ModelOpt writes)."""

UNUSED = (".q_scale", ".q_proj.output_scale", ".prob_scale", ".k_zero_point", ".v_zero_point")
"""Queries and probabilities stay floats here; the zero points of FP8 are zero."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class CacheScales(NamedTuple):
    """Of the text model."""

    wanted: bool = False
    """The config says that keys and values are to be kept as FP8."""
    other: str = ""
    """What the config wants them to be kept as if not as FP8: for a sentence. Its scales are left out."""
    tensors: Mapping[tuple[int, str], Tensor] = {}
    """(layer, "k" or "v") -> one scale, or one for each KV head."""

    def of(self, layer: int, whose: str) -> F32 | None:
        """The scales as a flat array; None where there are none. Raises CheckpointError for a type that is no float."""
        tensor = self.tensors.get((layer, whose))
        if tensor is None:
            return None
        if tensor.kind not in ("F32", "F16", "BF16"):
            raise CheckpointError(f"{tensor.file}: the scales of an FP8 KV cache are {tensor.kind}, which is no float")
        count = tensor.data.size // row_bytes(tensor.kind, 1)
        values: F32 = dense(Stored(tensor.kind, 1, count, np.ascontiguousarray(tensor.data).reshape(1, -1)))[0]
        return values


NO_SCALES = CacheScales()


def split(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], CacheScales]:
    """`tensors` of a quantized checkpoint without those for a KV cache, and what these are."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping) or not said:
        return tensors, NO_SCALES
    if said.get("quant_method") == "quanto":  # whose output_scale is that of the activations of any module
        return tensors, NO_SCALES
    endings = (*(ending for ending, _ in ENDINGS), *UNUSED)
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(endings)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in scales}
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        symmetric = scheme.get("symmetric") is not False
        wanted = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) and symmetric
        other = f"{'' if symmetric else 'asymmetric '}{scheme.get('type')} of {scheme.get('num_bits')} bits"
    else:
        algorithms = said.get("quantization")
        algorithm = (algorithms if isinstance(algorithms, Mapping) else said).get("kv_cache_quant_algo")
        wanted = str(algorithm).upper() == "FP8"
        other = str(algorithm) if algorithm else ""
    if other and not wanted:
        return rest, CacheScales(other=other)
    found: dict[tuple[int, str], Tensor] = {}
    named = text_model(config, scales)[1]
    for ending, whose in ENDINGS:
        for name in sorted((name for name in named if name.endswith(ending)), key=lambda name: "proj." in name):
            if layer := _LAYER.search(name):
                for one in whose:
                    found.setdefault((int(layer[1]), one), named[name])
    return rest, CacheScales(wanted, tensors=found)
