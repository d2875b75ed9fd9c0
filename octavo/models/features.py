"""What a model is made of, in words, read from the model itself."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.layers.attention import Attention
from octavo.layers.latent import LatentAttention
from octavo.layers.linear import GatedLinear, Layer
from octavo.layers.mlp import PlainMLP
from octavo.layers.moe import MoE
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.models.decoder import Block, Decoder


def features(model: Decoder) -> list[str]:
    """Words for what `model` has, sorted: kinds of attention, positions, norms, feed-forward layers and heads."""
    return sorted(set(_features(model)))


def _layers(layer: Layer) -> Iterator[Layer]:
    yield layer
    for value in vars(layer).values():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, Layer):
                yield from _layers(child)


def _features(model: Decoder) -> Iterator[str]:
    for layer in _layers(model):
        if isinstance(layer, Attention):
            yield from _attention(layer)
        elif isinstance(layer, LatentAttention):
            yield from ("latent attention", "RoPE")
        elif isinstance(layer, MoE):
            yield from _experts(layer)
        elif isinstance(layer, PlainMLP):
            yield "plain MLP"
        elif isinstance(layer, GatedLinear):
            yield "gated MLP"
        elif isinstance(layer, LayerNorm):
            yield "layer norm"
        elif isinstance(layer, RMSNorm):
            yield "RMS norm"
        elif isinstance(layer, Block) and layer.parallel:
            yield "parallel blocks"
    roped = [block.attn.rope is not None for block in model.blocks]
    if any(roped) and not all(roped):
        yield "layers without RoPE"
    if model.positions is not None:
        yield "learned positions"
    yield "tied head" if model.lm_head is None else "head of its own"
    if model.logit_softcap:
        yield "soft-capped logits"


def _attention(layer: Attention) -> Iterator[str]:
    shape = layer.wanted
    if shape.kv_heads == shape.heads:
        yield "multi-head attention"
    else:
        yield "multi-query attention" if shape.kv_heads == 1 else "grouped-query attention"
    for there, word in (
        (layer.rope is not None, "RoPE"),
        (bool(shape.alibi), "ALiBi"),
        (bool(shape.window), "sliding windows"),
        (bool(shape.chunk), "chunked attention"),
        (bool(shape.softcap), "soft-capped attention"),
        (bool(shape.clip), "clipped queries, keys and values"),
        (layer.sinks is not None, "attention sinks"),
        (layer.q_norm is not None, "QK norm"),
        (not shape.stores, "KV shared between layers"),
    ):
        if there:
            yield word


def _experts(layer: MoE) -> Iterator[str]:
    yield "mixture of experts"
    if layer.shared is not None:
        yield "shared experts"
    if layer.rule.groups > 1:
        yield "groups of experts"
