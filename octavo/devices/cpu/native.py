"""The native module: there on x86-64 Linux, absent elsewhere."""

from __future__ import annotations

import importlib
import platform
from types import ModuleType

from octavo.devices import DeviceUnavailable


def load_native() -> ModuleType:
    """`octavo._native` (see its stub). Raises DeviceUnavailable that says why where it cannot be used."""
    try:
        native = importlib.import_module("octavo._native")
    except ImportError as error:
        raise DeviceUnavailable(f"{_why_absent()} Only the reference device is available on this machine.") from error
    missing = native.missing_features()
    if missing:
        raise DeviceUnavailable(
            f"This CPU lacks {missing}, which the native kernels need. Only the reference device is available on "
            "this machine."
        )
    try:
        native.kernels()
    except RuntimeError as error:
        raise DeviceUnavailable(f"{error}.") from error
    return native


def _why_absent() -> str:
    system, machine = platform.system(), platform.machine()
    if system == "Linux" and machine in ("x86_64", "AMD64"):
        return "The native kernels are not built: reinstall octavo, or run scripts/build in a source checkout."
    return f"There are no native kernels for {system} on {machine}."
