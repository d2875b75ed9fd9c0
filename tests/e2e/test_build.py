"""What building an engine refuses, in one sentence each."""

from __future__ import annotations

from pathlib import Path

import pytest

import octavo.devices.cpu.native as native
from octavo.build import build
from octavo.config import ConfigError, EngineConfig
from octavo.devices import DeviceUnavailable
from tests.models.tiny import make


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("build"))[0]


def test_a_machine_without_kernels_is_told_of_the_reference_device(llama: Path, monkeypatch) -> None:
    def absent() -> None:
        raise DeviceUnavailable("This CPU lacks AVX2. Only the reference device is available on this machine.")

    monkeypatch.setattr("octavo.devices.cpu.device.load_native", absent)
    assert native.load_native is not absent
    with pytest.raises(ConfigError, match=r"lacks AVX2\..* choose it with --device reference"):
        build(EngineConfig(model=str(llama)))
    built = build(EngineConfig(model=str(llama), device="reference"))
    assert built.info.device == "reference"
    built.engine.close()


def test_quantization_that_the_checkpoint_does_not_have_names_the_ways_out(llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"plain F32 values\. Either drop --quantization .* quantized with awq"):
        build(EngineConfig(model=str(llama), quantization="awq"))


def test_start_up_says_what_was_decided(llama: Path) -> None:
    built = build(EngineConfig(model=str(llama), max_num_seqs=4))
    text = "\n".join(built.info.notes)
    for part in (
        "LlamaForCausalLM, 3 layers",
        "F32 weights",
        "activations float32 because the weights are not quantized",
        "context 512 tokens, up to 4 sequences",
        "KV cache",
        "ready in",
    ):
        assert part in text
    built.engine.close()
