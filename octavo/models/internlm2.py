"""InternLM 2: Llama under other names, q, k and v in one matrix whose rows lie by KV head."""

from __future__ import annotations

from octavo.layers.views import grouped
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import Names


def names(c: ModelConfig) -> Names:
    return (
        ("model.tok_embeddings", "embed"),
        ("model.layers.{i}.attention_norm", "blocks.{i}.norm1"),
        ("model.layers.{i}.attention.wqkv", "blocks.{i}.attn.qkv", grouped(c.heads, c.kv_heads, c.head_dim)),
        ("model.layers.{i}.attention.wo", "blocks.{i}.attn.out"),
        ("model.layers.{i}.ffn_norm", "blocks.{i}.norm2"),
        ("model.layers.{i}.feed_forward.w1", "blocks.{i}.mlp.gate_up.gate"),
        ("model.layers.{i}.feed_forward.w3", "blocks.{i}.mlp.gate_up.up"),
        ("model.layers.{i}.feed_forward.w2", "blocks.{i}.mlp.down"),
        ("model.norm", "norm"),
        ("output", "lm_head"),
    )


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    bias = bool(c.raw.get("bias"))
    return dense(c, max_model_len, bias=bias, out_bias=bias)
