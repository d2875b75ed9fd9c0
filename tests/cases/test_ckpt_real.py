"""Checkpoint folders: what their files say counts, and broken ones do not start."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import LLM, SamplingParams
from tests import realmodels
from tests.cases.conftest import EOS, LINE_BREAK, SAID, SAID_IDS
from tests.cases.real import start_fails
from tests.cases.successor import write_successor
from tests.devices import make_device
from tests.models.tiny import VARIANTS, Loaded, make
from tests.models.variant import Variant

START = {"prompt_token_ids": [LINE_BREAK]}


def said(folder: Path) -> str:
    with LLM(str(folder), kv_cache_memory_bytes="8MiB") as llm:
        [output] = llm.generate(START, SamplingParams(temperature=0, max_tokens=50), use_tqdm=False)
    text: str = output.outputs[0].text
    return text


def test_ckpt_02_weights_that_were_cut_do_not_start(tmp_path: Path) -> None:
    model = write_successor(tmp_path, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf())
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1024)
    assert "model.safetensors" in start_fails(model)


def test_ckpt_03_only_files_of_the_index_are_read(tmp_path: Path) -> None:
    model = write_successor(tmp_path, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf())
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")})
    )
    save_file({name: np.zeros_like(values) for name, values in tensors.items()}, model / "consolidated.safetensors")
    assert said(model) == SAID


@pytest.mark.parametrize(
    ("context", "length", "more"),
    [
        (64, 30, {}),
        (64, 64, {}),
        (256, 30, {"original_max_position_embeddings": 64}),
        (256, 64, {"original_max_position_embeddings": 64}),
    ],
)
def test_ckpt_06_dynamic_scaling_within_the_original_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, length: int, more: dict[str, int]
) -> None:
    import torch

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, **more}
    changes = {"rope_parameters": rope, "max_position_embeddings": context}
    monkeypatch.setitem(VARIANTS, "dynamic", Variant("Llama", changes))
    folder, oracle = make("dynamic", tmp_path)
    ids = [1, *np.random.default_rng(1).integers(3, 199, length - 1).tolist()]
    with torch.no_grad():
        want = oracle(torch.tensor([ids])).logits[0].numpy()
    scaled = Loaded(folder, make_device("cpu"), max_model_len=context).logits(ids)
    np.testing.assert_allclose(scaled, want, rtol=0, atol=2e-4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    )
    np.testing.assert_array_equal(Loaded(folder, make_device("cpu"), max_model_len=context).logits(ids), scaled)


def test_ckpt_06_no_context_beyond_the_original_length(tmp_path: Path) -> None:
    """Scaling that depends on the running length is not taken up: the context ends where it would begin."""
    model = write_successor(tmp_path, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf())
    config = json.loads((model / "config.json").read_text())
    config |= {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="64"):
        LLM(str(model), max_model_len=65)
    with LLM(str(model), kv_cache_memory_bytes="8MiB") as llm:
        assert llm.info.max_model_len == 64


def test_ckpt_10_every_declared_end_stops(tmp_path: Path) -> None:
    ends = (17, 19)
    model = write_successor(
        tmp_path,
        (LINE_BREAK, *SAID_IDS, 40),
        realmodels.smollm2_hf(),
        eos=ends[0],
        generation={"eos_token_id": list(ends), "temperature": 0.9, "top_p": 0.8},
    )
    with LLM(str(model), kv_cache_memory_bytes="8MiB", override_generation_config={"temperature": 0.5}) as llm:
        default = llm.get_default_sampling_params()
        assert (default.temperature, default.top_p) == (0.5, 0.8)
        for end in (*ends, EOS):
            default = llm.get_default_sampling_params()
            default.max_tokens, default.logit_bias = 8, {end: 100.0}
            [output] = llm.generate(START, default, use_tqdm=False)
            assert (list(output.outputs[0].token_ids), output.outputs[0].finish_reason) == ([end], "stop")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 128}, "'gptq': bits is 5; supported are 2, 3, 4 and 8"),
        ({"quant_method": "foo"}, "quantized with 'foo', which cannot be read; known are .*gptq"),
    ],
)
def test_quant_09_unknown_quantization_does_not_start(
    tmp_path: Path, quantization: dict[str, object], words: str
) -> None:
    model = write_successor(tmp_path, (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ValueError, match=words):
        LLM(str(model))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", '{"architectures": ["MambaForCausalLM"]}', ["MambaForCausalLM"]),
        ("config.json", "{not json", ["config.json"]),
        ("tokenizer.json", None, ["tokenizer"]),
    ],
)
def test_start_04_broken_folders_end_with_one_clear_line(
    tmp_path: Path, file: str, content: str | None, words: list[str]
) -> None:
    model = write_successor(tmp_path / "model", (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf())
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_text(content)
    line = start_fails(model)
    assert line.startswith("octavo: error: ") and all(word in line for word in words), line
    assert str(model) in line
