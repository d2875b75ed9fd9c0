"""Choosing a device by name."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from octavo.devices import DEVICES, DeviceUnavailable, select_device


@pytest.mark.parametrize("name", DEVICES)
def test_every_name_gives_its_device(name: str) -> None:
    assert select_device(name, 1, "float32").name == name


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown device 'gpu'; there are cpu, reference, torch"):
        select_device("gpu", 1, "float32")


def test_a_build_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "octavo._native", None)
    with pytest.raises(DeviceUnavailable, match="native kernels .* reference device"):
        select_device("cpu", 1, "float32")


def test_an_old_cpu_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "octavo._native", SimpleNamespace(missing_features=lambda: "AVX2, FMA"))
    with pytest.raises(DeviceUnavailable, match="CPU lacks AVX2, FMA"):
        select_device("cpu", 1, "float32")


def test_a_machine_without_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "octavo.devices.torch.device", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceUnavailable, match="needs PyTorch"):
        select_device("torch", 1, "float32")


def test_the_cpu_needs_no_torch() -> None:
    code = (
        "import sys; from octavo.devices import select_device\n"
        "select_device('reference', 1, 'float32'); select_device('cpu', 1, 'float32')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
