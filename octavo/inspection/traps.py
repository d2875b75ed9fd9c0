"""What to look out for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from octavo.build import Form, Text
from octavo.checkpoint import Checkpoint
from octavo.inspection.facts import Tensors
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder

FEW_BITS = 3.5
"""Bits per weight below which a model is worth a warning: the answers of files of 2 and 3 bits are visibly worse."""


def traps(
    checkpoint: Checkpoint, form: Form, model: Decoder, tensors: Iterable[Tensors], text: Text | None, length: int
) -> Iterator[str]:
    yield from _traps_of_weights(checkpoint, form, model, tensors)
    yield from _traps_of_positions(form.config, model, length)
    if text is not None:
        yield from _traps_of_text(checkpoint, form.config, text)


def _traps_of_weights(checkpoint: Checkpoint, form: Form, model: Decoder, tensors: Iterable[Tensors]) -> Iterator[str]:
    names = checkpoint.names()
    if model.lm_head is None and "lm_head.weight" in names:
        yield "The config says that the head is the embedding table, yet the files have an lm_head: it is not used"
    if form.architecture.name.startswith("Gemma") and any(row.format == "F16" for row in tensors):
        yield (
            "Weights of a Gemma are float16 here, which was trained in bfloat16: a value beyond 65,504 has become "
            "infinite in the conversion; prefer a bfloat16 or quantized file"
        )
    said = checkpoint.config.get("quantization_config") or {}
    if said.get("desc_act"):
        yield (
            "GPTQ's act-order: the columns of matrices lie in an order of their own, so that inputs are reordered "
            "before each product, and matrices that ranks divide by columns may have to be expanded"
        )
    rows = [row for row in tensors if row.part in ("attention", "mlp", "experts")]
    elements = sum(row.parameters for row in rows)
    bits = 8 * sum(row.bytes for row in rows) / elements if elements else 32.0
    if bits < FEW_BITS:
        yield f"The layers' matrices have {bits:.1f} bits per weight: expect worse answers than of 4 bits and more"


def _traps_of_positions(c: ModelConfig, model: Decoder, length: int) -> Iterator[str]:
    kind = c.rope.get("rope_type")
    if kind == "longrope":
        original = int(c.rope.get("original_max_position_embeddings") or c.max_position_embeddings)
        which = "long" if length > original else "short"
        yield (
            f"RoPE of the kind longrope is fixed at start: a --max-model-len of at most {original} takes the short "
            f"factors, a larger one the long ones for every request; {length} takes the {which} ones"
        )
    if kind == "dynamic" and not c.rope.get("alpha"):
        yield f"RoPE of the kind dynamic is fixed at start for --max-model-len {length}, whatever a request's length"
    spans = sorted({block.attn.window or block.attn.chunk for block in model.blocks} - {0})
    if spans and length > spans[0]:
        what = "sliding windows" if any(block.attn.window for block in model.blocks) else "chunks"
        every = all(block.attn.window or block.attn.chunk for block in model.blocks)
        yield (
            f"Layers with {what} of {', '.join(map(str, spans))} tokens do not see further back"
            + (": no layer does, so that a longer prompt is not seen as a whole" if every else "")
        )


def _traps_of_text(checkpoint: Checkpoint, c: ModelConfig, text: Text) -> Iterator[str]:
    tokenizer = text.tokenizer
    if not text.template:
        where = "the GGUF file" if checkpoint.style == "gguf" else "the folder"
        yield f"There is no chat template in {where}: /v1/chat/completions needs --chat-template"
    if not text.eos_ids:
        yield (
            "No id ends an answer: neither config nor generation config nor tokenizer names one; requests need stop "
            "or max_tokens"
        )
    declared = checkpoint.generation_config.get("eos_token_id")
    if checkpoint.style == "hf" and checkpoint.generation_config and declared is None and text.eos_ids:
        yield "generation_config.json names no eos_token_id: the config's and the tokenizer's are taken"
    outside = [id for id in text.eos_ids if not isinstance(id, int) or not 0 <= id < c.vocab_size]
    if outside:
        ids = ", ".join(map(str, outside))
        yield f"The ids {ids} that end an answer are outside of the vocabulary of {c.vocab_size}"
    if tokenizer.vocab_size > c.vocab_size:
        yield (
            f"The tokenizer has {tokenizer.vocab_size} tokens and the embedding table {c.vocab_size} rows: tokens "
            "beyond cannot be used"
        )
