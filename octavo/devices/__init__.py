"""The places where models run. A device's own modules are imported only when it is chosen: `octavo` on a CPU loads no
torch, and a machine without the native kernels can still run the reference."""

from __future__ import annotations

from typing import Any, cast

from octavo.ops.contract import Device

DEVICES = ("cpu", "reference", "torch")

MOST_THREADS_PER_CPU = 4
"""Threads that share a CPU wait for one another at every barrier of a step: a user may want some, nobody thousands."""


class DeviceUnavailable(RuntimeError):
    """The device exists, but not in this build or on this machine."""


def select_device(name: str, threads: int | None, activations: str) -> Device:
    """The device called `name`: "cpu" (native kernels; also what "auto" means), "reference" (numpy, slow) or "torch"
    (eager, for tests).

    `threads` and `activations` ("float32", "int16", "bfloat16" or "int8": what the inputs of matrix products are
    rounded to) are for "cpu" (None: as many threads as this process may use); the others compute in float32. Raises
    ValueError for an unknown name, DeviceUnavailable where the device cannot run here.
    """
    if name in ("cpu", "auto"):
        from octavo.devices.cpu.device import CpuDevice
        from octavo.devices.cpu.threads import allowed_cpus

        allowed = allowed_cpus()
        most = MOST_THREADS_PER_CPU * allowed.threads
        device = CpuDevice(None if threads is None else min(threads, most), cast(Any, activations))  # checked there
        if threads is not None and threads > most:
            device.notes = (f"{most} threads, not the {threads} asked for, because {allowed.reason}",)
        return device
    if name == "reference":
        from octavo.ops.reference import ReferenceDevice

        return ReferenceDevice()
    if name == "torch":
        try:
            from octavo.devices.torch.device import TorchDevice
        except ModuleNotFoundError as missing:
            if missing.name != "torch":
                raise
            raise DeviceUnavailable('device "torch" needs PyTorch; install it, or use device "cpu"') from missing
        return TorchDevice()
    raise ValueError(f"unknown device {name!r}; there are {', '.join(DEVICES)}")
