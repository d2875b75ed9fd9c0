"""A checkpoint that says exactly what it is told: each token of a chain is followed by the next one, whatever came
before it.

The output projections of attention and MLP are zero, so the last hidden state is the embedding of the last token; the
row of the head that belongs to a token's successor is that embedding. Embeddings are random unit vectors of 128
dimensions: the right logit is about 45, the next best below 20, so that sampling does not disturb the chain and a
logit bias of 100 does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN = 128


def write_successor(
    folder: Path,
    chain: Sequence[int],
    tokenizer: Path,
    *,
    vocab_size: int = 49152,
    eos: object = 2,
    generation: dict[str, Any] | None = None,
    size: float = 1.0,
) -> Path:
    """Write the checkpoint of `chain` (distinct token ids) with the tokenizer of the folder `tokenizer`.

    `eos`: eos_token_id of config.json; `generation`: generation_config.json; `size`: length of the
    embeddings, and so of the hidden states.
    Returns `folder`.
    """
    assert len(set(chain)) == len(chain), "a token has one successor"
    folder.mkdir(parents=True, exist_ok=True)
    embedding = np.random.default_rng(1).standard_normal((vocab_size, HIDDEN)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.zeros((vocab_size, HIDDEN), np.float32)
    for token, following in zip(chain, chain[1:], strict=False):
        head[following] = 4 * embedding[token]
    layer = "model.layers.0."
    square = np.eye(HIDDEN, dtype=np.float32)
    ones, nothing = np.ones(HIDDEN, np.float32), np.zeros((HIDDEN, HIDDEN), np.float32)
    tensors = {
        "model.embed_tokens.weight": size * embedding,
        "lm_head.weight": head,
        "model.norm.weight": ones,
        layer + "input_layernorm.weight": ones,
        layer + "post_attention_layernorm.weight": ones,
        **{f"{layer}self_attn.{name}_proj.weight": square for name in "qkv"},
        layer + "self_attn.o_proj.weight": nothing,
        layer + "mlp.gate_proj.weight": square,
        layer + "mlp.up_proj.weight": square,
        layer + "mlp.down_proj.weight": nothing,
    }
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": vocab_size,
                "hidden_size": HIDDEN,
                "intermediate_size": HIDDEN,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 1024,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False,
                "bos_token_id": 1,
                "eos_token_id": eos,
                "torch_dtype": "float32",
            }
        )
    )
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return folder
