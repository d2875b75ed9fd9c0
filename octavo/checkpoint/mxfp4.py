"""Experts of gpt-oss as they are published: of each stack one tensor of 4-bit codes and one of scales."""

from __future__ import annotations

from typing import Any

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.tensor import AGAIN, Tensor


def joined(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with every pair NAME_blocks [..., n / 32, 16] and NAME_scales [..., n / 32] as one tensor NAME_blocks
    [..., n] of the format MXFP4; the same where config.json does not say that the method is "mxfp4".

    Raises CheckpointError for codes without scales, or with scales that do not fit.
    """
    if (config.get("quantization_config") or {}).get("quant_method") != "mxfp4":
        return tensors
    out = dict(tensors)
    for name, codes in tensors.items():
        if not name.endswith("_blocks"):
            continue
        scales = out.pop(name.removesuffix("blocks") + "scales", None)
        if scales is None:
            raise CheckpointError(f"{codes.file}: tensor {name!r} has no scales beside it. {AGAIN}")
        blocks = codes.shape[:-1]
        if (codes.kind, scales.kind, codes.shape) != ("U8", "U8", (*scales.shape, 16)) or len(blocks) < 2:
            raise CheckpointError(
                f"{codes.file} is broken: {name!r} is {codes.kind} {list(codes.shape)} and its scales are "
                f"{scales.kind} {list(scales.shape)}; uint8 [..., n, 16] and [..., n] are needed. {AGAIN}"
            )
        out[name] = Tensor("MXFP4", (*blocks[:-1], blocks[-1] * 32), codes.data, codes.file, scales=scales.data)
    return out
