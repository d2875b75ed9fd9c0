"""GGUF files: made with the gguf package, broken byte by byte, and the two real ones."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.checkpoint.gguf import read_gguf
from octavo.checkpoint.gguf_families import FAMILIES
from octavo.quant import GGUF_QUANTIZED, dense, row_bytes
from tests.realmodels import gemma_gguf, gemma_hf, smollm2_gguf, smollm2_hf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, INNER = 64, 4, 2, 32, 48, 96
"""Sizes of the made models; heads * head_dim is not the hidden size."""


def _arrays() -> dict[str, np.ndarray]:
    """Tensors of a one-layer llama under GGUF names."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _write(
    path: Path,
    arrays: dict[str, np.ndarray],
    architecture: str = "llama",
    more: Callable[[gguf.GGUFWriter], None] | None = None,
    kinds: dict[str, str] | None = None,
) -> Path:
    """`kinds` name the block formats of tensors whose arrays are bytes already."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    if more is not None:
        more(writer)
    for name, array in arrays.items():
        kind = (kinds or {}).get(name)
        writer.add_tensor(name, array, raw_dtype=None if kind is None else gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return _write(tmp_path / "sound.gguf", _arrays())


# -- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "shift"),
    [
        (smollm2_gguf, smollm2_hf, 0.0),
        (gemma_gguf, gemma_hf, 1.0),
    ],
)
def test_real_files_equal_what_transformers_reads(
    ours: Callable[[], Path], theirs: Callable[[], Path], shift: float
) -> None:
    """All vectors, and some rows of every matrix; Gemma's GGUF norms hold 1 + w."""
    with open_checkpoint(ours()) as file, open_checkpoint(theirs()) as folder:
        assert (file.style, folder.style) == ("gguf", "hf")
        assert file.names() == folder.names()
        for name in file.names():
            assert file.shape(name) == folder.shape(name)
            if len(file.shape(name)) == 1:
                assert np.array_equal(file.vector(name), folder.vector(name) + np.float32(shift)), name
                continue
            a, b = file.stored(name), folder.stored(name)
            assert (a.n_out, a.n_in) == (b.n_out, b.n_in)
            rows = np.linspace(0, a.n_out - 1, 40).astype(int)
            some = [s._replace(n_out=len(rows), data=s.data[rows]) for s in (a, b)]
            assert np.array_equal(dense(some[0]), dense(some[1])), name


def test_real_files_are_mapped_not_copied() -> None:
    with open_checkpoint(gemma_gguf()) as checkpoint:
        assert checkpoint.total_bytes == 246_587_904
        assert not any(checkpoint.stored(f"model.layers.3.self_attn.{p}_proj.weight").data.flags.owndata for p in "qkv")
        assert not checkpoint.stored("model.embed_tokens.weight").data.flags.owndata


def test_real_metadata() -> None:
    with open_checkpoint(gemma_gguf()) as checkpoint:
        values = checkpoint.metadata
        assert values is not None
        tokens = values["tokenizer.ggml.tokens"]
        assert len(tokens) == 262_144 and tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
        assert tokens[106] == "<end_of_turn>" and all(type(token) is str for token in tokens)
        assert values["tokenizer.ggml.scores"].dtype == np.float32 and len(values["tokenizer.ggml.scores"]) == 262_144
        assert values["tokenizer.ggml.add_bos_token"] is True and values["tokenizer.ggml.add_eos_token"] is False
        assert values["gemma3.rope.freq_base"] == 1e6 and values["tokenizer.ggml.bos_token_id"] == 2


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    """One file with all formats; bytes go through unchanged."""
    rng = np.random.default_rng(1)
    arrays, kinds = _arrays(), {}
    readable = ("F32", "F16", "BF16", *sorted(GGUF_QUANTIZED))
    for kind in readable:
        name = f"extra.{kind}.weight"
        if kind in ("F32", "F16"):
            arrays[name] = rng.standard_normal((3, 512)).astype(np.float32 if kind == "F32" else np.float16)
        else:
            arrays[name] = rng.integers(0, 256, (3, row_bytes(kind, 512)), dtype=np.uint8)
            kinds[name] = kind
    with open_checkpoint(_write(tmp_path / "m.gguf", arrays, kinds=kinds)) as checkpoint:
        for kind in readable:
            stored = checkpoint.stored(f"extra.{kind}.weight")
            assert (stored.kind, stored.n_out, stored.n_in) == (kind, 3, 512)
            assert stored.data.tobytes() == arrays[f"extra.{kind}.weight"].tobytes()


def test_bytes_of_what_is_rewritten(tmp_path: Path) -> None:
    """TQ2_0 (66 bytes per 256 elements) is rewritten as INT4_128 (72 bytes per 128)."""
    plain = _write(tmp_path / "plain.gguf", _arrays())
    data = np.zeros((6, row_bytes("TQ2_0", 512)), np.uint8)
    more = _write(tmp_path / "more.gguf", {**_arrays(), "extra.weight": data}, kinds={"extra.weight": "TQ2_0"})
    with open_checkpoint(plain) as first, open_checkpoint(more) as second:
        assert first.multiplied_bytes == first.total_bytes == second.total_bytes - 6 * 2 * 66
        assert second.multiplied_bytes == first.total_bytes + 6 * 4 * 72


def _paired(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order of llama's GGUF files: row 2i of a head is its row i, row 2i + 1 its row i + d/2."""
    out, d = np.empty_like(matrix), len(matrix) // heads
    for head in range(heads):
        for i in range(d // 2):
            out[head * d + 2 * i] = matrix[head * d + i]
            out[head * d + 2 * i + 1] = matrix[head * d + i + d // 2]
    return out


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_rows_of_q_and_k(tmp_path: Path, architecture: str) -> None:
    """llama's are put back into Hugging Face order, biases too; the others' are left alone. All in Q8_0."""
    rng = np.random.default_rng(2)
    arrays, kinds, right = _arrays(), {}, {}
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        matrix = rng.integers(0, 256, (heads * HEAD_DIM, row_bytes("Q8_0", HIDDEN)), dtype=np.uint8)
        bias = rng.standard_normal(heads * HEAD_DIM).astype(np.float32)
        right[part] = matrix, bias
        paired = architecture == "llama" and part != "v"
        arrays[f"blk.0.attn_{part}.weight"] = _paired(matrix, heads) if paired else matrix
        arrays[f"blk.0.attn_{part}.bias"] = _paired(bias, heads) if paired else bias
        kinds[f"blk.0.attn_{part}.weight"] = "Q8_0"
    with open_checkpoint(_write(tmp_path / "m.gguf", arrays, architecture, kinds=kinds)) as checkpoint:
        assert checkpoint.config["attention_bias"] is (None if architecture == "llama" else True)
        for part, (matrix, bias) in right.items():
            assert np.array_equal(checkpoint.stored(f"model.layers.0.self_attn.{part}_proj.weight").data, matrix)
            assert np.array_equal(checkpoint.vector(f"model.layers.0.self_attn.{part}_proj.bias"), bias)


def test_bfloat16_and_half_vectors(tmp_path: Path) -> None:
    arrays, kinds = _arrays(), {"blk.0.attn_norm.weight": "BF16"}
    norm = arrays["blk.0.attn_norm.weight"].astype(ml_dtypes.bfloat16)
    arrays["blk.0.attn_norm.weight"] = norm.view(np.uint8)
    arrays["output_norm.weight"] = arrays["output_norm.weight"].astype(np.float16)
    with open_checkpoint(_write(tmp_path / "m.gguf", arrays, kinds=kinds)) as checkpoint:
        assert np.array_equal(checkpoint.vector("model.layers.0.input_layernorm.weight"), norm.astype(np.float32))
        assert np.array_equal(checkpoint.vector("model.norm.weight"), arrays["output_norm.weight"].astype(np.float32))


# -- names and configuration ------------------------------------------------------------------------------------


def test_names_and_unknown_tensors(tmp_path: Path) -> None:
    arrays = {**_arrays(), "blk.0.attn_sinks.weight": np.ones(4, np.float32), "odd": np.ones(4, np.float32)}
    layer = "model.layers.0."
    with open_checkpoint(_write(tmp_path / "m.gguf", arrays)) as checkpoint:
        assert checkpoint.names() == {
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
            layer + "input_layernorm.weight",
            layer + "post_attention_layernorm.weight",
            layer + "self_attn.q_proj.weight",
            layer + "self_attn.k_proj.weight",
            layer + "self_attn.v_proj.weight",
            layer + "self_attn.o_proj.weight",
            layer + "mlp.gate_proj.weight",
            layer + "mlp.up_proj.weight",
            layer + "mlp.down_proj.weight",
            "blk.0.attn_sinks.weight",
            "odd",
        }


def test_config(sound: Path) -> None:
    with open_checkpoint(sound) as checkpoint:
        assert checkpoint.generation_config == {}
        assert checkpoint.config == {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": float(np.float32(1e-5)),
            "max_position_embeddings": 256,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": 10000.0,
            "rope_scaling": None,
        }


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_config_of_other_architectures(tmp_path: Path, architecture: str) -> None:
    arrays = _arrays()
    del arrays["output.weight"]
    with open_checkpoint(_write(tmp_path / "m.gguf", arrays, architecture)) as checkpoint:
        assert checkpoint.config["architectures"] == [f"Qwen{architecture[-1]}ForCausalLM"]
        assert checkpoint.config["tie_word_embeddings"] is True


def test_real_configs_say_what_transformers_says() -> None:
    for gguf_path, folder in ((smollm2_gguf(), smollm2_hf()), (gemma_gguf(), gemma_hf())):
        with open_checkpoint(gguf_path) as ours, open_checkpoint(folder) as theirs:
            rope = theirs.config["rope_parameters"]
            local = rope.get("sliding_attention", {}).get("rope_theta")
            assert ours.config["rope_theta"] == rope.get("full_attention", rope)["rope_theta"]
            assert ours.config.get("rope_local_base_freq") == local
            shared = set(ours.config) & set(theirs.config)
            assert len(shared) >= 17
            assert {key: ours.config[key] for key in shared} == {key: theirs.config[key] for key in shared}


def test_special_ids_and_sampling(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(7)
        writer.add_eot_token_id(9)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 7)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    with open_checkpoint(_write(tmp_path / "m.gguf", _arrays(), more=more)) as checkpoint:
        assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (1, 7)
        assert checkpoint.generation_config == {
            "eos_token_id": [7, 9],
            "temperature": 0.5,
            "top_k": 20,
            "do_sample": True,
        }


def test_rope_scaling(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(500000.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    def none(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_dimension_count(HEAD_DIM // 2)

    found = [open_checkpoint(_write(tmp_path / "m.gguf", _arrays(), more=m)).config for m in (linear, yarn, none)]
    assert found[0]["rope_theta"] == 500000.0
    assert found[0]["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert found[1]["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert found[2]["rope_scaling"] is None and found[2]["partial_rotary_factor"] == 0.5


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    with open_checkpoint(_write(tmp_path / "m.gguf", {**_arrays(), "rope_freqs.weight": factors})) as checkpoint:
        assert checkpoint.config["rope_freq_factors"] == factors.tolist()
        assert "rope_freqs.weight" not in checkpoint.names()
    for wrong, message in ((factors[:-1], r"has the shape \[15\] where \[16\]"), (-factors, "positive numbers")):
        path = _write(tmp_path / "m.gguf", {**_arrays(), "rope_freqs.weight": wrong})
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)


def test_gemma_3(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(512)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    vector = np.ones(HIDDEN, np.float32)
    arrays = {
        **_arrays(),
        "blk.0.post_attention_norm.weight": vector * 2,
        "blk.0.post_ffw_norm.weight": vector * 3,
        "blk.0.attn_q_norm.weight": vector[:HEAD_DIM],
        "blk.0.attn_k_norm.weight": vector[:HEAD_DIM],
    }
    arrays["blk.0.ffn_norm.weight"] = vector * 4
    layer = "model.layers.0."
    with open_checkpoint(_write(tmp_path / "m.gguf", arrays, "gemma3", more)) as checkpoint:
        assert checkpoint.vector(layer + "post_attention_layernorm.weight")[0] == 2
        assert checkpoint.vector(layer + "post_feedforward_layernorm.weight")[0] == 3
        assert checkpoint.vector(layer + "pre_feedforward_layernorm.weight")[0] == 4
        assert {layer + "self_attn.q_norm.weight", layer + "self_attn.k_norm.weight"} < checkpoint.names()
        config = checkpoint.config
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
        assert config["sliding_window"] == 512
        assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
        assert config["query_pre_attn_scalar"] == HEAD_DIM and config["layer_types"] == ["sliding_attention"]


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.block_count"]
        writer.add_block_count(2)
        writer.add_nextn_predict_layers(1)

    further = {name.replace("blk.0.", "blk.1."): array for name, array in _arrays().items() if "blk.0." in name}
    arrays = {**_arrays(), **further, "blk.1.nextn.eh_proj.weight": np.ones((HIDDEN, 2 * HIDDEN), np.float32)}
    with open_checkpoint(_write(tmp_path / "m.gguf", arrays, more=more)) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 1
        assert not [name for name in checkpoint.names() if ".1." in name]


def test_windows_layer_by_layer(tmp_path: Path) -> None:
    """Files of late list which layers slide; the list is as long as the model."""

    def pattern(*slides: bool) -> Callable[[gguf.GGUFWriter], None]:
        def more(writer: gguf.GGUFWriter) -> None:
            writer.add_sliding_window(512)
            writer.add_sliding_window_pattern(list(slides))

        return more

    with open_checkpoint(_write(tmp_path / "m.gguf", _arrays(), "gemma3", pattern(False))) as checkpoint:
        assert checkpoint.config["layer_types"] == ["full_attention"]
    with pytest.raises(CheckpointError, match="sliding_window_pattern' is an array of 2 for 1 layers"):
        open_checkpoint(_write(tmp_path / "m.gguf", _arrays(), "gemma3", pattern(True, True)))


@pytest.mark.parametrize(("layers", "alibi"), [(32, False), (40, True)])
def test_baichuans_size_says_whether_it_has_alibi(tmp_path: Path, layers: int, alibi: bool) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["baichuan.block_count"]
        writer.add_block_count(layers)

    arrays = {**_arrays(), **{f"odd.{i}": np.ones(1, np.float32) for i in range(layers)}}
    with open_checkpoint(_write(tmp_path / "m.gguf", arrays, "baichuan", more)) as checkpoint:
        assert (checkpoint.config["max_position_embeddings"], checkpoint.config.get("model_max_length")) == (
            (None, 256) if alibi else (256, None)
        )


def test_dimensions_of_one_may_be_left_out(tmp_path: Path) -> None:
    """The gate of Qwen's shared expert is a matrix of one row, a router's correction a vector."""
    for gate, correction in (((HIDDEN,), (4,)), ((1, HIDDEN), (1, 4))):
        arrays = {
            **_arrays(),
            "blk.0.ffn_gate_inp_shexp.weight": np.ones(gate, np.float32),
            "blk.0.exp_probs_b.bias": np.ones(correction, np.float32),
        }
        with open_checkpoint(_write(tmp_path / "m.gguf", arrays, "qwen2moe")) as checkpoint:
            assert checkpoint.shape("model.layers.0.mlp.shared_expert_gate.weight") == (1, HIDDEN)
            assert checkpoint.shape("model.layers.0.mlp.gate.e_score_correction_bias") == (4,)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_a_llama_under_another_name_is_read_or_refused(tmp_path: Path, architecture: str) -> None:
    """Whatever of its metadata and tensors an architecture does not find in the file."""
    for more in (None, lambda writer: writer.add_layer_norm_eps(1e-5)):
        with contextlib.suppress(CheckpointError):
            open_checkpoint(_write(tmp_path / "m.gguf", _arrays(), architecture, more)).close()


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    path = _write(tmp_path / "m.gguf", _arrays(), "mamba")
    with pytest.raises(CheckpointError, match="architecture 'mamba'; known are apertus, .*, llama, .*, starcoder2"):
        open_checkpoint(path)


def _write_parts(folder: Path, arrays: dict[str, np.ndarray]) -> list[Path]:
    """The same model as gguf's own writer cuts it, five tensors to a file."""
    writer = gguf.GGUFWriter(folder / "parts.gguf", "llama", split_max_tensors=5)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("parts-*.gguf"))


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    first, *others = _write_parts(tmp_path, _arrays())
    assert first.name == "parts-00001-of-00003.gguf" and len(others) == 2
    (tmp_path / "whole").mkdir()
    whole = open_checkpoint(_write(tmp_path / "whole" / "whole.gguf", _arrays()))
    for path in (first, tmp_path):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.names() == whole.names()
            assert checkpoint.config == whole.config
            for name in whole.names():
                assert np.array_equal(checkpoint.vector(name), whole.vector(name)), name


def test_parts_that_are_missing_mixed_up_or_renamed_are_named(tmp_path: Path) -> None:
    first, second, third = _write_parts(tmp_path, _arrays())
    with pytest.raises(CheckpointError, match="is part 2 of 3: open the first, parts-00001-of-00003.gguf"):
        open_checkpoint(second)
    aside = third.rename(tmp_path / "aside")
    for path in (first, tmp_path, second):
        with pytest.raises(CheckpointError, match="lacks 1 of the 3 parts of the model: parts-00003-of-00003.gguf"):
            open_checkpoint(path)
    third.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match="parts-00003-of-00003.gguf is not part 3 of 3, as its name says"):
        open_checkpoint(first)
    aside.rename(third)
    other = first.rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="part 1 of 3, so it must be called NAME-00001-of-00003.gguf"):
        open_checkpoint(other)
    other.rename(first)
    data = bytearray(first.read_bytes())
    at = data.index(b"split.tensors.count") + len("split.tensors.count") + 4
    data[at] += 1
    first.write_bytes(data)
    with pytest.raises(CheckpointError, match="hold 12 tensors, but 13 are announced"):
        open_checkpoint(first)


def _many_layers(writer: gguf.GGUFWriter) -> None:
    del writer.kv_data[0]["gemma3.block_count"]
    writer.add_block_count((1 << 32) - 1)
    writer.add_sliding_window(512)


def test_impossible_configurations(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    arrays = _arrays()
    del arrays["token_embd.weight"]
    with pytest.raises(CheckpointError, match="no tensor 'token_embd.weight'"):
        open_checkpoint(_write(path, arrays))
    with pytest.raises(CheckpointError, match="4294967295 layers but only 12 tensors"):
        open_checkpoint(_write(path, _arrays(), "gemma3", more=_many_layers))
    with pytest.raises(CheckpointError, match="which 4 heads cannot share"):
        open_checkpoint(_write(path, {**_arrays(), "blk.0.attn_q.weight": np.ones((6, HIDDEN), np.float32)}))
    with pytest.raises(CheckpointError, match="two tensors for 'model.norm.weight'"):
        open_checkpoint(_write(path, {**_arrays(), "model.norm.weight": np.ones(4, np.float32)}))


# -- broken files -----------------------------------------------------------------------------------------------


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _pair(key: bytes, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _info(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def _file(
    pairs: list[bytes],
    infos: list[bytes],
    data: int,
    *,
    start: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensors, values = counts or (len(infos), len(pairs))
    head = start + struct.pack("<IQQ", version, tensors, values) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + bytes(data)


NAME = _pair(b"general.architecture", 8, _text(b"llama"))
A, B = _info(b"a", (8,), 0, 0), _info(b"b", (32, 2), 2, 32)


@pytest.mark.parametrize("version", [2, 3])
def test_the_broken_files_below_differ_from_a_sound_one(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(_file([NAME], [A, B], 68, version=version))
    metadata, tensors = read_gguf(path)
    assert metadata == {"general.architecture": "llama"}
    assert {n: (t.kind, t.shape, t.data.nbytes) for n, t in tensors.items()} == {
        "a": ("F32", (8,), 32),
        "b": ("Q4_0", (2, 32), 36),
    }


HUGE = struct.pack("<IQ", 8, 1 << 61)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "is not a GGUF file: it starts with b'GG'"),
        (_file([NAME], [A], 32, start=b"GGML"), "is not a GGUF file: it starts with b'GGML'"),
        (_file([NAME], [A], 32, version=1), "has GGUF version 1; versions 2 and 3"),
        (_file([NAME], [A], 32, version=99), "has GGUF version 99; versions 2 and 3"),
        (_file([NAME], [A], 32, version=3 << 24), "is a big-endian GGUF file"),
        (b"GGUF\x03\x00\x00\x00\x01", "ends inside its header"),
        (_file([NAME], [A, B], 67), "tensor 'b' ends at byte 68 of the data, which has 67 bytes"),
        (_file([NAME], [A], 0), "tensor 'a' ends at byte 32"),
        (_file([NAME], [], 0, counts=(1 << 60, 1)), "announces 1,152,921,504,606,846,976 tensors"),
        (_file([NAME], [], 0, counts=(0, 1 << 60)), "announces 1,152,921,504,606,846,976 metadata entries"),
        (_file([NAME], [A], 32, counts=(2, 1)), "broken|ends|shorter"),
        (_file([_pair(b"k", 9, HUGE)], [], 64), "announces 2,305,843,009,213,693,952 strings in 'k'"),
        (_file([_pair(b"k", 9, struct.pack("<IQ", 4, 1 << 61))], [], 64), "ends inside its header"),
        (_file([_pair(b"k", 9, struct.pack("<IQQ", 8, 2, 1 << 62))], [], 64), "in the strings of 'k'"),
        (_file([_pair(b"k", 9, struct.pack("<IQ", 9, 1))], [], 64), "'k' has arrays of arrays"),
        (_file([_pair(b"k", 77, b"")], [], 64), "'k' has values of type 77"),
        (_file([struct.pack("<Q", 1 << 62)], [], 64), "ends inside its header"),
        (_file([NAME, NAME], [A], 32), "metadata has 'general.architecture' twice"),
        (_file([NAME], [A, A], 32), "it has the tensor 'a' twice"),
        (_file([_pair(b"\xff", 0, b"1")], [], 0), "a metadata key is not UTF-8"),
        (_file([_pair(b"k", 8, _text(b"\xff"))], [], 0), "the value of 'k' is not UTF-8"),
        (
            _file([_pair(b"k", 9, struct.pack("<IQ", 8, 2) + _text(b"x") + _text(b"\xc3"))], [], 0),
            "entry 1 of 'k' is not",
        ),
        (_file([NAME], [_info(b"\xfe", (8,), 0, 0)], 32), "a tensor's name is not UTF-8"),
        (
            _file([NAME], [_info(b"a", (8,), 15, 0)], 32),
            "tensor 'a' has the type Q8_K, which cannot be read; readable are",
        ),
        (_file([NAME], [_info(b"a", (8,), 999, 0)], 32), "tensor 'a' has the type number 999"),
        (_file([NAME], [_info(b"a", (), 0, 0)], 32), "tensor 'a' has 0 dimensions"),
        (_file([NAME], [_info(b"a", (1,) * 5, 0, 0)], 32), "tensor 'a' has 5 dimensions"),
        (_file([NAME], [_info(b"a", (1 << 62, 1 << 62), 0, 0)], 32), "shorter than its header says: tensor 'a'"),
        (_file([NAME], [_info(b"a", (33,), 2, 0)], 32), "rows of 33 elements, not a multiple of 32"),
        (_file([NAME], [_info(b"a", (8,), 0, 8)], 64), "offset 8 of tensor 'a' is not a multiple of 32"),
        (_file([NAME], [A, _info(b"b", (8,), 0, 0)], 64), "tensors 'a' and 'b' overlap"),
        (_file([_pair(b"general.alignment", 4, struct.pack("<I", 0))], [A], 32), "general.alignment is 0"),
        (_file([_pair(b"general.alignment", 4, struct.pack("<I", 48))], [A], 32), "general.alignment is 48"),
        (_file([_pair(b"general.alignment", 8, _text(b"x"))], [A], 32), "general.alignment is 'x'"),
    ],
)
def test_broken_files_name_file_and_cause(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.block_count",
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.context_length",
    ],
)
def test_missing_and_wrong_metadata(sound: Path, key: str) -> None:
    content = sound.read_bytes()
    assert (
        content.count(key.encode() + b"\x04")
        + content.count(key.encode() + b"\x06")
        + content.count(key.encode() + b"\x08")
        == 1
    )
    sound.write_bytes(content.replace(key.encode(), key[:-1].encode() + b"?"))
    with pytest.raises(CheckpointError, match=f"{re.escape(key)}. is missing"):
        open_checkpoint(sound)


@pytest.mark.parametrize("value", [0, [1, 2], -1, "4", 4.5])
def test_wrong_metadata(tmp_path: Path, value: Any) -> None:
    """A file whose number of heads is something else."""

    def more(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["llama.attention.head_count"]
        add: Callable[[str, Any], None] = {
            int: writer.add_int32,
            list: writer.add_array,
            str: writer.add_string,
            float: writer.add_float32,
        }[type(value)]
        add("llama.attention.head_count", value)

    with pytest.raises(CheckpointError, match="head_count"):
        open_checkpoint(_write(tmp_path / "m.gguf", _arrays(), more=more))


def test_truncated_real_file(tmp_path: Path) -> None:
    """Cut inside the vocabulary, inside the tensor table, and inside the data."""
    whole = smollm2_gguf().read_bytes()
    for size in (100_000, 1_700_000, 30_000_000):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="cut.gguf (ends inside its header|is shorter than its header says)"):
            open_checkpoint(path)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_never_raise_anything_else(sound: Path, seed: int) -> None:
    """Damaged headers are read as they stand or refused."""
    rng = np.random.default_rng(seed)
    whole = sound.read_bytes()
    header = len(whole) - sum(a.nbytes for a in _arrays().values())
    refused = 0
    for _ in range(300):
        broken = bytearray(whole)
        for at in rng.integers(0, header, 2):
            broken[at] = rng.integers(0, 256)
        sound.write_bytes(broken)
        try:
            with open_checkpoint(sound) as checkpoint:
                assert checkpoint.total_bytes <= len(whole)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_folder_with_one_or_several_files(sound: Path) -> None:
    with open_checkpoint(sound.parent) as checkpoint:
        assert checkpoint.path == sound and checkpoint.style == "gguf"
    (sound.parent / "other.gguf").write_bytes(sound.read_bytes())
    with pytest.raises(CheckpointError, match="holds several models; name one: other.gguf, sound.gguf"):
        open_checkpoint(sound.parent)
