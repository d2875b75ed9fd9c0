"""What a model takes on the CPU, told from the shapes of its tensors."""

from __future__ import annotations

from octavo.devices.cpu.device import CpuDevice
from octavo.devices.cpu.recorder import CpuWeight
from octavo.ops.contract import Stored
from octavo.quant import multiplied_as


class BlankDevice(CpuDevice):
    """Takes matrices of which only kind and shape are known. All is allocated as for a real model, in address space of
    which nothing is written, so that nothing but sizes comes of it: `weight_bytes`, and `bytes` of a compiled model."""

    def weight(self, parts: list[Stored]) -> CpuWeight:
        """Raises ValueError for shapes that a format does not have, MemoryError."""
        kinds = tuple(multiplied_as(part.kind) for part in parts)
        shapes = [(kind, part.n_out) for kind, part in zip(kinds, parts, strict=True)]
        allocated = self.native.allocate(self.pool, self.store, shapes, parts[0].n_in)
        self.weight_bytes += allocated.bytes
        return CpuWeight(allocated, kinds)
