"""GGUF files: what the file says counts, and broken ones do not start."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo import LLM, SamplingParams
from tests import realmodels
from tests.cases.real import start_fails
from tests.devices import make_device
from tests.models.families.llama import LLAMA3_ROPE
from tests.models.tiny import COMMON, Loaded, make

EOS_KEY = b"tokenizer.ggml.eos_token_id\x04\x00\x00\x00"
ADD_BOS_KEY = b"tokenizer.ggml.add_bos_token\x07\x00\x00\x00"


def edited(path: Path, changes: dict[bytes, bytes]) -> Path:
    """A copy of SmolLM2's file; the bytes after each key are replaced."""
    shutil.copy(realmodels.smollm2_gguf(), path)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        for key, value in changes.items():
            at = content.find(key)
            assert at >= 0, key
            content[at + len(key) : at + len(key) + len(value)] = value
    return path


def test_gguf_02_and_08_end_and_begin_of_sequence_come_from_the_file(tmp_path: Path, smol: LLM) -> None:
    path = edited(tmp_path / "edited.gguf", {EOS_KEY: (500).to_bytes(4, "little"), ADD_BOS_KEY: b"\x01"})
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={500: 100.0})
    with LLM(str(path), max_model_len=64, kv_cache_memory_bytes="8MiB") as llm:
        [stopped] = llm.generate("Hello", params, use_tqdm=False)
    [goes_on] = smol.generate("Hello", params, use_tqdm=False)
    assert (list(stopped.outputs[0].token_ids), stopped.outputs[0].finish_reason) == ([500], "stop")
    assert (list(goes_on.outputs[0].token_ids), goes_on.outputs[0].finish_reason) == ([500] * 8, "length")
    assert list(stopped.prompt_token_ids) == [1, *goes_on.prompt_token_ids]


def test_gguf_08_begin_of_sequence_of_gemma(gemma: LLM) -> None:
    [output] = gemma.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids[0] == 2 and 2 not in output.prompt_token_ids[1:]


def test_gguf_06_frequency_factors_equal_llama_3_scaling(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder, oracle = make("llama-rope-llama3", tmp_path)
    dim = COMMON["hidden_size"] // COMMON["num_attention_heads"]
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**COMMON, rope_parameters=LLAMA3_ROPE), "cpu")
    plain = 10000.0 ** -(np.arange(0, dim, 2) / dim)
    factors = (plain / scaled.numpy().astype(np.float64)).astype(np.float32)
    assert factors.max() == pytest.approx(8) and factors.min() == pytest.approx(1)
    path = _as_gguf(folder, tmp_path / "tiny.gguf", factors)
    ids = [1, *np.random.default_rng(1).integers(3, 199, 99).tolist()]
    with torch.no_grad():
        want = oracle(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(Loaded(path, make_device("cpu")).logits(ids), want, rtol=0, atol=3e-4)
    plain_path = _as_gguf(folder, tmp_path / "plain.gguf", None)
    assert np.abs(Loaded(plain_path, make_device("cpu")).logits(ids) - want).max() > 1e-2, "the factors matter"


def _as_gguf(folder: Path, path: Path, factors: Any) -> Path:
    """A tiny llama folder as a GGUF file: rows of q and k in pairs, as such files keep them."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": COMMON["num_attention_heads"], "attn_k": COMMON["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(COMMON["num_hidden_layers"])
    writer.add_context_length(COMMON["max_position_embeddings"])
    writer.add_embedding_length(COMMON["hidden_size"])
    writer.add_feed_forward_length(COMMON["intermediate_size"])
    writer.add_head_count(COMMON["num_attention_heads"])
    writer.add_head_count_kv(COMMON["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    for name, values in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        short = names[stem]
        if short in heads:
            rows, width = values.shape
            values = values.reshape(heads[short], 2, rows // heads[short] // 2, width).swapaxes(1, 2)
            values = np.ascontiguousarray(values.reshape(rows, width))
        writer.add_tensor(f"{prefix}{short}.weight", values)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_07_a_file_that_was_cut_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copy(realmodels.smollm2_gguf(), path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 2**20)
    line = start_fails(path)
    assert str(path) in line and "shorter than its header says" in line


@pytest.mark.parametrize(("at", "value", "cause"), [(0, b"GGUX", "not a GGUF file"), (4, b"\x63\0\0\0", "version 99")])
def test_gguf_07_other_headers_do_not_load(tmp_path: Path, at: int, value: bytes, cause: str) -> None:
    path = tmp_path / "other.gguf"
    head = bytearray(realmodels.smollm2_gguf().open("rb").read(1 << 16))
    head[at : at + 4] = value
    path.write_bytes(head)
    with pytest.raises(ValueError, match=cause) as caught:
        LLM(str(path))
    assert str(path) in str(caught.value)
