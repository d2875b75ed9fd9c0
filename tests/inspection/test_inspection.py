"""`octavo inspect`: its figures are those of start-up and of transformers, and no weight is read for them."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.api.cli import main
from octavo.build import build
from octavo.config import EngineConfig
from octavo.devices.cpu.device import CpuDevice
from octavo.inspection import Inspection, as_json, as_text, inspect
from octavo.ops.contract import F32, Stored
from octavo.ops.reference import ReferenceDevice
from octavo.parallel.rank import Rank
from tests import realmodels
from tests.models.tiny import VARIANTS, Loaded, make

ROOT = Path(__file__).parents[2]
MEMORY = "16MiB"


def named(beginning: str) -> str:
    """A variant whose name begins so."""
    return next(name for name in VARIANTS if name.startswith(beginning))


FAMILIES = [named(word) for word in ("llama", "gemma3", "mixtral", "deepseek", "gpt2", "qwen2")]


def look(path: Path, *, gpu_memory: int | None = None, ranks: int = 1, **options: Any) -> Inspection:
    options.setdefault("kv_cache_memory_bytes", MEMORY)
    return inspect(EngineConfig(model=str(path), threads=1, **options), gpu_memory, ranks)


# -- the same figures as start-up


@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("length", [64, None])
def test_sizes_are_those_that_start_up_prints(variant: str, length: int | None, tmp_path: Path) -> None:
    path, _ = make(variant, tmp_path)
    options: dict[str, Any] = {"max_model_len": length, "max_num_seqs": 4, "kv_cache_memory_bytes": MEMORY}
    info = build(EngineConfig(model=str(path), device="reference", **options)).info
    found = look(path, **options)
    (place,) = found.memory
    assert (place.kv_total, place.max_model_len) == (info.kv_bytes, info.max_model_len)
    assert set(found.notes) | set(place.notes) <= set(info.notes)
    assert found.file_bytes == info.weight_bytes
    assert place.kv_tokens == info.kv_blocks[0] * info.block_size
    assert place.sequences >= 1 and place.kv_per_sequence * place.sequences <= place.kv_total


@pytest.mark.parametrize("variant", FAMILIES)
def test_memory_of_weights_and_of_a_step_is_what_the_device_takes(variant: str, tmp_path: Path) -> None:
    path, _ = make(variant, tmp_path)
    found = look(path, max_model_len=512, max_num_batched_tokens=256, max_num_seqs=8)
    device = _Weighing()
    loaded = Loaded(path, device, tokens=256, sequences=8, max_model_len=512, kv_dtype="float16")
    (place,) = found.memory
    assert place.weights == device.weight_bytes + device.vector_bytes
    assert place.activations is not None
    # Output rows of a step are as many as its tokens in the one, and as its sequences in the other.
    rows = 256 * loaded.config.hidden_size * 4
    assert abs(place.activations - loaded.compiled.bytes) <= rows  # type: ignore[attr-defined]


class _Weighing(CpuDevice):
    def __init__(self) -> None:
        super().__init__(1)
        self.vector_bytes = 0

    def vector(self, values: F32) -> F32:
        self.vector_bytes += values.nbytes
        return super().vector(values)


def test_a_real_gguf_file() -> None:
    path = realmodels.smollm2_gguf()
    found = look(path, max_num_seqs=2, kv_cache_memory_bytes="512MiB")
    info = build(EngineConfig(model=str(path), max_num_seqs=2, kv_cache_memory_bytes="512MiB", threads=1)).info
    assert set(found.notes) | set(found.memory[0].notes) <= set(info.notes)
    assert (found.parameters, found.active_parameters) == (134_515_008, 134_515_008)
    assert {(row.part, row.format, row.count) for row in found.tensors} == {
        ("embedding", "Q8_0", 1),
        ("attention", "Q4_1", 120),
        ("mlp", "Q4_1", 90),
        ("norms", "F32", 61),
    }
    assert found.tied and found.text is not None
    assert found.text.special == {"bos_token": 1, "eos_token": 2, "pad_token": 2, "unk_token": 0}
    assert (found.text.tokenizer, found.text.chat_template, found.text.ends) == ("byte-level BPE", True, (2,))
    assert found.memory[0].kv_per_token == 2 * 30 * 3 * 64 * 2
    assert found.warnings == ()


# -- what the model is


@pytest.mark.parametrize("variant", FAMILIES)
def test_parameters_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    path, model = make(variant, tmp_path)
    found = look(path)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.parameters == sum(row.parameters for row in found.tensors)
    assert found.file_bytes == sum(row.bytes for row in found.tensors) == 4 * found.parameters


def test_active_parameters_leave_out_the_experts_that_a_token_is_not_sent_to(tmp_path: Path) -> None:
    path, model = make(named("mixtral"), tmp_path)
    found, c = look(path), model.config
    expert = 3 * c.hidden_size * c.intermediate_size
    idle = c.num_hidden_layers * (c.num_local_experts - c.num_experts_per_tok) * expert
    assert found.active_parameters == found.parameters - idle
    assert (found.experts, found.experts_per_token) == (c.num_local_experts, c.num_experts_per_tok)


def test_windows_and_rope(tmp_path: Path) -> None:
    path, model = make(named("gemma3"), tmp_path)
    found = look(path)
    types = model.config.layer_types
    assert found.windows == {
        f"the last {model.config.sliding_window} tokens": types.count("sliding_attention"),
        "everything": types.count("full_attention"),
    }
    assert look(make(named("gpt2"), tmp_path)[0]).rope == "none: learned positions"
    bloom = next(name for name in VARIANTS if name.startswith("bloom"))
    assert look(make(bloom, tmp_path)[0]).rope == "none: ALiBi"


# -- several GPUs


class _Counting(ReferenceDevice):
    """Adds up what it is given."""

    def __init__(self) -> None:
        self.bytes = 0

    def weight(self, parts: list[Stored]) -> Any:
        self.bytes += sum(part.data.nbytes for part in parts)
        return super().weight(parts)

    def vector(self, values: F32) -> Any:
        self.bytes += values.nbytes
        return super().vector(values)


@pytest.mark.parametrize("variant", [named("llama"), named("mixtral")])
def test_ranks_take_what_a_split_load_gives_them(variant: str, tmp_path: Path) -> None:
    path, _ = make(variant, tmp_path)
    found = look(path, gpu_memory=64 << 20, ranks=2, max_model_len=256)
    assert [place.place for place in found.memory] == ["GPU 0 of 2", "GPU 1 of 2"]
    for index, place in enumerate(found.memory):
        device = _Counting()
        loaded = Loaded(path, device, rank=Rank(index, 2))
        assert place.weights == device.bytes
        assert place.kv_heads == loaded.model.kv.kv_heads == found.kv_heads // 2
        assert place.kv_per_token == 2 * loaded.config.layers * place.kv_heads * found.head_dim * 2


def test_kv_heads_that_are_kept_several_times_are_told(tmp_path: Path) -> None:
    path, _ = make(named("llama"), tmp_path)
    found = look(path, gpu_memory=64 << 20, ranks=4)
    assert found.memory[0].kv_heads == 1
    assert any("2 KV heads for 4 GPUs: each is kept 2 times" in warning for warning in found.warnings)


def test_what_cannot_be_divided_or_does_not_fit_is_told(tmp_path: Path) -> None:
    path, _ = make(named("llama"), tmp_path)
    found = look(path, gpu_memory=64 << 20, ranks=3)
    assert found.memory == () and any("divided among 3 ranks" in warning for warning in found.warnings)
    found = look(path, gpu_memory=1 << 20)
    assert found.memory == () and any("no memory left for keys and values" in warning for warning in found.warnings)


def test_the_cache_of_a_gpu_is_what_weights_and_activations_leave(tmp_path: Path) -> None:
    path, _ = make(named("llama"), tmp_path)
    (place,) = look(path, gpu_memory=64 << 20, kv_cache_memory_bytes=None, gpu_memory_utilization=0.5).memory
    assert place.activations is not None
    left = (64 << 20) // 2 - place.weights - place.activations
    block = place.kv_per_token * 16
    assert left - 2 * block < place.kv_total <= left


# -- no weights


def test_a_model_of_70_billion_parameters_is_told_from_its_header(tmp_path: Path) -> None:
    """Of a file of 141 GB that takes no room on the disk."""
    h, inner, layers, vocabulary, kv = 8192, 28672, 80, 128256, 1024
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": h,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "eos_token_id": 7,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocabulary, h), "lm_head": (vocabulary, h), "model.norm": (h,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}input_layernorm": (h,), f"{at}post_attention_layernorm": (h,)}
        shapes |= {f"{at}self_attn.q_proj": (h, h), f"{at}self_attn.o_proj": (h, h)}
        shapes |= {f"{at}self_attn.k_proj": (kv, h), f"{at}self_attn.v_proj": (kv, h)}
        shapes |= {f"{at}mlp.gate_proj": (inner, h), f"{at}mlp.up_proj": (inner, h), f"{at}mlp.down_proj": (h, inner)}
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = look(tmp_path, gpu_memory=80 << 30, ranks=4, max_model_len=32768, kv_cache_memory_bytes=None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10, "weights were read"
    assert found.parameters == 70_553_706_496
    place = found.memory[0]
    embedding = vocabulary * h * 2 * 2  # every rank has both tables whole
    assert place.weights == (at - embedding - 2 * h * (2 * layers + 1)) // 4 + embedding + 4 * h * (2 * layers + 1)
    assert (place.kv_heads, place.kv_per_token) == (2, 2 * 80 * 2 * 128 * 2)
    assert place.sequences == place.kv_total // place.kv_per_sequence > 0


# -- traps


def with_config(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def with_tokenizer(path: Path) -> Path:
    """That of SmolLM2, in a folder's layout; its ids are beyond a tiny table."""
    for file in realmodels.smollm2_hf().glob("tokenizer*"):
        (path / file.name).write_bytes(file.read_bytes())
    return path


def warned(found: Inspection, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in found.warnings)


def test_a_head_that_is_missing_and_one_that_is_not_used(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path, _ = make(named("llama"), tmp_path)
    assert not warned(look(path), "lm_head")
    with_config(path, tie_word_embeddings=True)
    assert warned(look(path), "have an lm_head: it is not used")
    with_config(path, tie_word_embeddings=False)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({**tensors, "extra.weight": np.zeros(3, np.float32)}, path / "model.safetensors")
    found = look(path)
    assert warned(found, "are refused", "lm_head.weight is missing", "extra.weight is in the checkpoint")
    assert found.memory[0].activations is None


def test_ends_and_templates(tmp_path: Path) -> None:
    path = with_tokenizer(make(named("llama"), tmp_path)[0])
    (path / "generation_config.json").write_text('{"top_p": 0.9}')
    found = look(path)
    assert warned(found, "names no eos_token_id")
    assert warned(found, "49152 tokens and the embedding table 199 rows")
    assert found.text is not None and warned(found, "no chat template in the folder")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    assert not warned(look(path), "chat template")


def test_positions_that_are_fixed_at_start(tmp_path: Path) -> None:
    path, _ = make(named("llama"), tmp_path)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert warned(look(with_config(path, rope_parameters=rope), max_model_len=100), "dynamic", "--max-model-len 100")
    factors = [1.0] * 8
    rope = {**rope, "rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    rope["original_max_position_embeddings"] = 128
    with_config(path, rope_parameters=rope)
    assert warned(look(path, max_model_len=128), "longrope", "128 takes the short ones")
    assert warned(look(path, max_model_len=129), "longrope", "129 takes the long ones")


def test_windows_and_a_gemma_in_float16(tmp_path: Path) -> None:
    path, model = make(named("gemma3"), tmp_path)
    window = model.config.sliding_window
    assert warned(look(path, max_model_len=window + 1), f"sliding windows of {window} tokens")
    assert not warned(look(path, max_model_len=window), "sliding windows")
    assert not warned(look(path), "float16")
    model.half().save_pretrained(path)
    assert warned(look(path), "trained in bfloat16")


def test_few_bits(tmp_path: Path) -> None:
    """Of a Llama whose matrices are Q2_K: 84 bytes for 256 weights."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        rows = np.zeros((256, 84), np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    for name, shape in (("token_embd", (64, 256)), ("output_norm", (256,))):
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert warned(look(path), "2.6 bits per weight")


def test_a_model_that_does_not_fit_is_told_and_not_refused(tmp_path: Path) -> None:
    path, _ = make(named("llama"), tmp_path)
    found = look(path, kv_cache_memory_bytes=1024)
    assert found.memory == () and warned(found, "does not fit this machine now")
    assert found.parameters > 0


# -- the command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", "inspect", *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = make(named("llama"), tmp_path)
    options = ["--kv-cache-memory-bytes", MEMORY, "--max-model-len", "64", "--threads", "1"]
    assert main(["inspect", str(path), *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = look(path, max_model_len=64)
    assert printed == json.loads(json.dumps(as_json(found)))
    assert main(["inspect", str(path), *options]) == 0
    text = capsys.readouterr().out
    assert text == as_text(found) + "\n"
    assert f"{'architecture':15} LlamaForCausalLM, 3 layers of 64" in text
    assert main(["inspect", str(path), *options, "--gpu-memory", "1GiB", "-tp", "2"]) == 0
    assert "GPU 1 of 2, 1.0 GiB" in capsys.readouterr().out


def test_what_is_no_model_is_said_in_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "nothing"))
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "octavo: error:" in done.stderr and "nothing" in done.stderr
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    done = run(str(tmp_path / "broken.gguf"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "broken.gguf" in done.stderr
    assert run(str(tmp_path), "--tensor-parallel-size", "0").returncode == 2
