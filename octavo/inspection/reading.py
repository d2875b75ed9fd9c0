"""What is read: tensors from headers, the model made of the configuration, the tokenizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from octavo.build import Text, build_text
from octavo.checkpoint import Checkpoint
from octavo.config import EngineConfig
from octavo.inspection.facts import Tensors, TextFacts
from octavo.layers.linear import Embedding, Leaf
from octavo.layers.moe import Experts, MoE
from octavo.layers.norm import Norm
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.weights import Found
from octavo.text.template import TemplateError
from octavo.text.tokenizer import Tokenizer, TokenizerError

PARTS = ("embedding", "attention", "mlp", "router", "experts", "norms", "head", "other")
"""What tensors are for, in the order of the table."""


def _part(path: str, leaf: Leaf) -> str:
    if isinstance(leaf, Norm):
        return "norms"
    if isinstance(leaf, Experts):
        return "experts"
    if path == "lm_head":
        return "head"
    if isinstance(leaf, Embedding):
        return "embedding"
    if ".attn." in path:
        return "attention"
    if path.rpartition(".")[2] in ("router", "correction"):
        return "router"
    return "mlp" if ".mlp" in path else "other"


def tensors_of(
    model: Decoder, plan: Mapping[str, list[Found]], checkpoint: Checkpoint
) -> tuple[tuple[Tensors, ...], int, int]:
    """The table, all parameters, and those that a token is multiplied with. A tensor counts once."""
    have = checkpoint.names()
    shares = _shares(model)
    count: Counter[tuple[str, str]] = Counter()
    elements: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    total, active = 0, 0.0
    seen: set[str] = set()
    for path, leaf in model.leaves():
        share = shares.get(path.rpartition(".")[0], 1.0) if isinstance(leaf, Experts) else 1.0
        for found in plan[path]:
            if found.name in have and found.name not in seen:
                seen.add(found.name)
                row = (_part(path, leaf), checkpoint.kind(found.name))
                n = math.prod(checkpoint.shape(found.name))
                count[row] += 1
                elements[row] += n
                size[row] += checkpoint.bytes_of(found.name)
                total += n
                active += n * share
    rows = sorted(count, key=lambda row: (PARTS.index(row[0]), -size[row]))
    return tuple(Tensors(*row, count[row], elements[row], size[row]) for row in rows), total, round(active)


def _shares(model: Decoder) -> dict[str, float]:
    """Path of each mixture of experts -> which share of its experts a token is sent to."""
    return {
        f"blocks.{i}.{name}": layer.rule.top_k / layer.down.count
        for i, block in enumerate(model.blocks)
        for name, layer in vars(block).items()
        if isinstance(layer, MoE)
    }


def rope(c: ModelConfig, model: Decoder) -> str:
    attentions = [block.attn for block in model.blocks]
    ropes = dict.fromkeys(attention.rope for attention in attentions if attention.rope is not None)
    if not ropes:
        slopes = any(getattr(getattr(attention, "wanted", None), "alibi", ()) for attention in attentions)
        return "none: ALiBi" if slopes else "none: learned positions" if model.positions is not None else "none"
    kinds = dict.fromkeys(c.layer_types) if isinstance(c.raw.get("rope_parameters"), Mapping) else ["full_attention"]
    said = dict.fromkeys(_rope_in_words(c.rope_of(kind)) for kind in kinds)
    words = [*said, *([f"{len(ropes)} kinds of layers"] if len(ropes) > max(len(said), 1) else [])]
    without = sum(attention.rope is None for attention in attentions)
    return "; ".join([*words, *([f"{without} layers without"] if without else [])])


def _rope_in_words(rope: Mapping[str, Any]) -> str:
    more = {
        "factor": rope.get("factor"),
        "from": rope.get("original_max_position_embeddings"),
        "rotating": rope.get("partial_rotary_factor"),
    }
    said = "".join(f", {word} {value}" for word, value in more.items() if value not in (None, 1.0))
    return f"{rope.get('rope_type', 'default')}, base {float(rope['rope_theta']):g}{said}"


def windows(model: Decoder) -> dict[str, int]:
    def words(attention: Any) -> str:
        if attention.window:
            return f"the last {attention.window} tokens"
        return f"chunks of {attention.chunk} tokens" if attention.chunk else "everything"

    return dict(Counter(words(block.attn) for block in model.blocks))


def text_of(config: EngineConfig, warnings: list[str]) -> Text | None:
    try:
        return build_text(config)
    except (TokenizerError, TemplateError) as error:
        warnings.append(f"The text side cannot be built: {error}")
        return None


def text_facts(text: Text) -> TextFacts:
    tokenizer = text.tokenizer
    ids = {name: tokenizer.backend.token_to_id(token) for name, token in tokenizer.special_tokens.items()}
    return TextFacts(
        tokenizer=_kind_of(tokenizer),
        vocabulary=tokenizer.vocab_size,
        chat_template=bool(text.template),
        special={name: id for name, id in sorted(ids.items()) if id is not None},
        ends=text.eos_ids,
        adds_bos=tokenizer.encode("a")[:1] == [tokenizer.bos_id],
    )


def _kind_of(tokenizer: Tokenizer) -> str:
    model = type(tokenizer.backend.model).__name__
    if model == "BPE":
        return "byte-level BPE" if tokenizer.decoding.kind == "bytes" else "SentencePiece BPE"
    return {"Unigram": "SentencePiece Unigram"}.get(model, model)
