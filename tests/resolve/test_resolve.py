"""Sizes and refusals: from options, model and memory to what runs, with exact numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import ConfigError, EngineConfig
from octavo.devices import select_device
from octavo.devices.cpu.threads import allowed_cpus
from octavo.devices.memory import available_memory
from octavo.models.config import ModelConfig
from octavo.ops.contract import KVShape
from octavo.resolve import activations, check_quantization, resolve
from octavo.types import KVGroup

MODEL = ModelConfig.read(
    {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
    "LlamaForCausalLM",
)
FULL = (KVGroup((0, 1, 2, 3)),)
TOKEN = 2 * 4 * 2 * 16 * 2
"""Bytes of one token's keys and values in float16: K and V, 4 layers, 2 heads of 16."""


def run(available: int, groups: Any = FULL, **options: Any):
    return resolve(EngineConfig(**options), MODEL, groups, KVShape(2, 16), available, "free on this machine")


def test_the_cache_holds_every_sequence_when_memory_allows() -> None:
    r = run(1 << 40, max_num_seqs=8)
    assert r.max_model_len == 1024
    assert r.kv.dtype == "float16" and r.kv.block_size == 16
    assert r.kv.blocks == (8 * (1024 // 16 + 1),)
    assert r.kv_bytes == r.kv.blocks[0] * 16 * TOKEN
    assert r.notes[1].startswith("KV cache 4.1 MiB in float16: 8320 tokens (8 sequences of 1024 tokens)")


def test_a_quarter_of_free_memory_is_the_most_by_default() -> None:
    r = run(8 << 20, max_num_seqs=64)
    assert r.kv_bytes <= 2 << 20
    assert r.kv_bytes > (2 << 20) - 16 * TOKEN
    assert "25% of the 8.0 MiB free on this machine" in r.notes[1]


def test_memory_that_the_user_names_is_taken_or_refused() -> None:
    assert run(1 << 30, kv_cache_memory_bytes="1MiB").kv_bytes == 1 << 20
    with pytest.raises(ConfigError, match=r"asks for 2.0 GiB, but only 1.0 GiB are free on this machine"):
        run(1 << 30, kv_cache_memory_bytes="2GiB")


def test_length_shrinks_to_the_memory_and_says_so() -> None:
    one_block = 16 * TOKEN
    r = run(1 << 30, kv_cache_memory_bytes=9 * one_block)
    assert r.max_model_len == 8 * 16
    assert any("max_model_len 128 instead of the model's 1024" in note for note in r.notes)


def test_length_that_was_asked_for_is_refused_with_the_numbers_when_it_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 512 needs .* ask for at most 128"):
        run(1 << 30, kv_cache_memory_bytes=9 * 16 * TOKEN, max_model_len=512)


def test_start_03_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 2000 is more than the 1024 positions"):
        run(1 << 30, max_model_len=2000)


def test_number_of_blocks_that_no_memory_holds_is_refused() -> None:
    asked = run(1 << 30, num_gpu_blocks_override=70)
    assert asked.kv.blocks == (70,) and any(note.endswith(": 1120 tokens (as asked)") for note in asked.notes)
    with pytest.raises(ConfigError, match=r"100000000000 KV blocks per group need .* only 1.0 GiB are free"):
        run(1 << 30, num_gpu_blocks_override=100_000_000_000)


def test_far_more_threads_than_cpus_are_cut_and_it_is_said() -> None:
    most = 4 * allowed_cpus().threads
    device = select_device("cpu", 1000, "float32")
    assert device.threads == most
    assert device.notes == (f"{most} threads, not the 1000 asked for, because {allowed_cpus().reason}",)


def test_auto_length_fits_the_memory() -> None:
    assert run(1 << 30, max_model_len="auto").max_model_len == 1024
    assert run(1 << 30, max_model_len="auto", kv_cache_memory_bytes=5 * 16 * TOKEN).max_model_len == 64


def test_windowed_groups_need_their_window_and_one_step() -> None:
    groups = (KVGroup((0,)), KVGroup((1, 2, 3), window=64))
    r = run(1 << 40, groups, max_num_seqs=4, max_num_batched_tokens=128)
    assert r.kv.blocks == (4 * (1024 // 16 + 1), 4 * ((64 + 128 + 16) // 16 + 1))
    assert r.kv.group_of == (0, 1, 1, 1)


def test_float32_means_float32_everywhere() -> None:
    assert run(1 << 30, dtype="float32").kv.dtype == "float32"
    assert run(1 << 30, dtype="float32", kv_cache_dtype="float16").kv.dtype == "float16"


@pytest.mark.parametrize(
    ("asked", "dtype", "token"),
    [
        ("float32", "float32", 2 * TOKEN),
        ("fp8", "fp8_e4m3", TOKEN // 2),
        ("fp8_e4m3", "fp8_e4m3", TOKEN // 2),
        ("fp8_e5m2", "fp8_e5m2", TOKEN // 2),
        ("int8", "int8", TOKEN // 2 + 4 * 2 * 2 * 4),  # and a float for each layer, head, key and value
        ("int8_per_token_head", "int8", TOKEN // 2 + 4 * 2 * 2 * 4),
    ],
)
def test_types_of_the_cache(asked: str, dtype: str, token: int) -> None:
    resolved = run(1 << 30, kv_cache_dtype=asked, max_num_seqs=8)
    assert (resolved.kv.dtype, resolved.token_bytes) == (dtype, token)
    assert resolved.kv_bytes == resolved.kv.blocks[0] * 16 * token
    assert f" in {dtype}: " in resolved.notes[1]
    assert activations(EngineConfig(dtype="float32"), frozenset({"Q4_1"}))[0] == "float32"


@pytest.mark.parametrize(
    ("kinds", "want"),
    [
        ({"Q4_1", "Q8_0"}, "int8"),
        ({"Q6_K"}, "int8"),
        ({"Q8_0"}, "int16"),
        ({"BF16"}, "bfloat16"),
        ({"BF16", "F32"}, "bfloat16"),
        ({"F16"}, "float32"),
        ({"BF16", "Q8_0"}, "int16"),
        ({"F32"}, "float32"),
        ({"INT4_128", "F16"}, "int8"),
        ({"TQ1_0", "F16"}, "int8"),  # is rewritten in integers of 4 bits
        ({"IQ2_XS"}, "int16"),
        ({"INT8_32"}, "int16"),
        ({"NF4_32", "BF16"}, "float32"),
    ],
)
def test_activations_follow_the_weights(kinds: set[str], want: str) -> None:
    assert activations(EngineConfig(), frozenset(kinds))[0] == want
    assert activations(EngineConfig(cpu_activations="int16"), frozenset(kinds))[0] == "int16"


def test_quantization_flag_on_plain_floats_names_both_ways_out() -> None:
    with pytest.raises(ConfigError) as error:
        check_quantization("awq", None, frozenset({"BF16"}))
    assert "drop --quantization" in str(error.value) and "quantized with awq" in str(error.value)
    check_quantization(None, None, frozenset({"BF16"}))
    check_quantization("gguf", None, frozenset({"Q4_1"}))
    check_quantization("gguf", None, frozenset({"MXFP4", "F16"}))
    check_quantization("gguf", None, frozenset({"IQ2_XS", "F16"}))
    for asked in (None, "mxfp4"):
        check_quantization(asked, "mxfp4", frozenset({"MXFP4", "BF16"}))
    for method in ("awq", "gptq"):
        for asked in (None, method, f"{method}_marlin"):
            check_quantization(asked, method, frozenset({"INT4_32", "F16"}))
    with pytest.raises(ConfigError, match="awq_marlin was asked for, but the checkpoint is gptq: drop the flag"):
        check_quantization("awq_marlin", "gptq", frozenset({"INT4_32", "F16"}))
    with pytest.raises(ConfigError, match="the checkpoint is mxfp4: drop the flag"):
        check_quantization("awq", "mxfp4", frozenset({"MXFP4", "BF16"}))
    with pytest.raises(ConfigError, match="the checkpoint is gguf: drop the flag"):
        check_quantization("awq", None, frozenset({"Q4_1"}))


def test_available_memory_is_the_lesser_of_machine_and_control_group(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    group.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:     2048 kB\n")
    assert available_memory(proc, group) == (2048 * 1024, "free on this machine")
    (group / "memory.max").write_text("max\n")
    assert available_memory(proc, group)[0] == 2048 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("600000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert available_memory(proc, group) == (500000, "the control group's limit")
