"""The devices every test of models and ops runs on. A device that cannot be made is a failure, not a skip."""

from __future__ import annotations

from octavo.ops.contract import Device

NAMES = ("reference", "cpu", "torch")


def make_device(name: str, threads: int = 2, activations: str = "float32") -> Device:
    if name == "torch":
        from octavo.devices.torch.device import TorchDevice

        return TorchDevice()
    if name == "cpu":
        from octavo.devices.cpu.device import CpuDevice

        return CpuDevice(threads, activations)
    from octavo.ops.reference import ReferenceDevice

    return ReferenceDevice()
