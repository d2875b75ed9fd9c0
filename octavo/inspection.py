"""What a model is, what it will take, and what to look out for: told from headers, no weight is read.

Sizes are those of start-up: `octavo.build` and `octavo.resolve` compute them for both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from octavo.build import Form, Text, build_text, find_model, form_of, open_model, size_here
from octavo.checkpoint import Checkpoint
from octavo.config import ConfigError, EngineConfig, environment_threads
from octavo.devices import DeviceUnavailable
from octavo.layers.linear import Embedding, Leaf, Linear, Value
from octavo.layers.moe import Experts, MoE
from octavo.layers.norm import Norm
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.weights import SHOWN, Found, fit, is_table, may_round
from octavo.ops.contract import Stored
from octavo.parallel.rank import Rank, SplitError
from octavo.quant import KINDS, multiplied_as, row_bytes
from octavo.quant.onload import FLOATS
from octavo.resolve import Resolved, resolve
from octavo.text.template import TemplateError
from octavo.text.tokenizer import Tokenizer, TokenizerError

PARTS = ("embedding", "attention", "mlp", "router", "experts", "norms", "head", "other")
"""What tensors are for, in the order of the table."""

FEW_BITS = 3.5
"""Bits per weight below which a model is worth a warning: the answers of files of 2 and 3 bits are visibly worse."""

_NOTHING = np.zeros((0, 0), np.uint8)


@dataclass(frozen=True)
class Tensors:
    """Those of one part of the model that are stored in one format."""

    part: str
    format: str
    count: int
    parameters: int
    bytes: int
    """In the files."""


@dataclass(frozen=True)
class TextFacts:
    tokenizer: str
    """Its kind, in words."""
    vocabulary: int
    chat_template: bool
    special: dict[str, int]
    """Ids of the tokens with a name ("bos_token") that the vocabulary has."""
    ends: tuple[int, ...]
    """Ids that end an answer."""
    adds_bos: bool
    """Whether plain text gets a begin-of-sequence token."""


@dataclass(frozen=True)
class Memory:
    """What runs in one place, and what it takes there; bytes."""

    place: str
    """In words: this machine, or which part of which GPUs."""
    available: int | None
    """For all of it; None where it was not asked."""
    weights: int
    """As they are multiplied with."""
    activations: int | None
    """Buffers of a step and scratch memory; None where it cannot be told."""
    max_model_len: int
    max_num_seqs: int
    kv_heads: int
    kv_per_token: int
    """In all layers together, while no window has passed it."""
    kv_per_sequence: int
    """Of max_model_len tokens."""
    kv_total: int
    kv_tokens: int
    sequences: int
    """How many of max_model_len tokens have room at once."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    model: str
    path: str
    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope: str
    """In words."""
    windows: dict[str, int]
    """What layers see -> how many see so."""
    experts: int
    experts_per_token: int
    parameters: int
    active_parameters: int
    """That a token is multiplied with: of a mixture the experts it is sent to, not the others."""
    file_bytes: int
    """Of all tensors."""
    tied: bool
    """Whether the head is the embedding table."""
    tensors: tuple[Tensors, ...]
    text: TextFacts | None
    notes: tuple[str, ...]
    """What start-up prints of the weights."""
    memory: tuple[Memory, ...]
    warnings: tuple[str, ...]


def inspect(config: EngineConfig, gpu_memory: int | None = None, ranks: int = 1) -> Inspection:
    """Look at the model that `config` names.

    `gpu_memory`: bytes of each of `ranks` GPUs among which the model is divided; None looks at this machine.
    Raises ValueError of the kind at fault, as start-up does, where not even the headers make sense; what would only
    stop a start is a warning.
    """
    path = find_model(config)
    warnings: list[str] = []
    with open_model(path) as checkpoint:
        form = form_of(config, checkpoint)
        c = form.config
        whole = form.architecture.make(c, c.max_position_embeddings)
        plan, problems = fit(whole, checkpoint, form.architecture.names(c), form.architecture.ignore(c))
        if problems:
            more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            warnings.append(
                f"The files do not fit the architecture and are refused: {'; '.join(problems[:SHOWN])}{more}."
            )
        tensors, parameters, active = _tensors(whole, plan, checkpoint)
        text = _text(config, warnings)
        if gpu_memory is None and ranks == 1:
            memory = _here(config, checkpoint, form, warnings)
        else:
            memory = _on_gpus(config, checkpoint, form, gpu_memory, ranks, warnings)
        length = max((place.max_model_len for place in memory), default=c.max_position_embeddings)
        warnings += [f"{warning}." for warning in _traps(checkpoint, form, whole, tensors, text, length)]
        mixtures = [layer for block in whole.blocks for layer in vars(block).values() if isinstance(layer, MoE)]
        return Inspection(
            model=config.model,
            path=str(path),
            architecture=form.architecture.name,
            layers=c.layers,
            hidden_size=c.hidden_size,
            heads=c.heads,
            kv_heads=whole.kv.kv_heads,
            head_dim=whole.kv.head_dim,
            vocabulary=c.vocab_size,
            context=c.max_position_embeddings,
            rope=_rope(c, whole),
            windows=_windows(whole),
            experts=c.experts,
            experts_per_token=max((layer.rule.top_k for layer in mixtures), default=0),
            parameters=parameters,
            active_parameters=active,
            file_bytes=checkpoint.total_bytes,
            tied=whole.lm_head is None,
            tensors=tensors,
            text=None if text is None else _text_facts(text),
            notes=form.notes,
            memory=memory,
            warnings=tuple(warnings),
        )


# -- tensors


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


def _tensors(
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


# -- words


def _rope(c: ModelConfig, model: Decoder) -> str:
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


def _windows(model: Decoder) -> dict[str, int]:
    def words(attention: Any) -> str:
        if attention.window:
            return f"the last {attention.window} tokens"
        return f"chunks of {attention.chunk} tokens" if attention.chunk else "everything"

    return dict(Counter(words(block.attn) for block in model.blocks))


def _text(config: EngineConfig, warnings: list[str]) -> Text | None:
    try:
        return build_text(config)
    except (TokenizerError, TemplateError) as error:
        warnings.append(f"The text side cannot be built: {error}")
        return None


def _text_facts(text: Text) -> TextFacts:
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


# -- memory


def _here(config: EngineConfig, checkpoint: Checkpoint, form: Form, warnings: list[str]) -> tuple[Memory, ...]:
    """This machine, as a start would have it now."""
    try:
        resolved = size_here(config, checkpoint, form)
    except ConfigError as error:
        warnings.append(f"It does not fit this machine now: {error}.")
        return ()
    model = form.architecture.make(form.config, resolved.max_model_len)
    measured = _measured(config, checkpoint, form, model, resolved)
    weights, step = (checkpoint.multiplied_bytes, None) if measured is None else measured
    return (_memory(config, "this machine", None, weights, step, resolved),)


def _on_gpus(
    config: EngineConfig, checkpoint: Checkpoint, form: Form, memory: int | None, ranks: int, warnings: list[str]
) -> tuple[Memory, ...]:
    """The first and the last rank of a tensor-parallel group; the others have no more than these."""
    c = form.config
    found: list[Memory] = []
    for index in dict.fromkeys((0, ranks - 1)):
        model = form.architecture.make(c, c.max_position_embeddings)
        whole_kv = model.kv
        try:
            if ranks > 1:
                model.split(Rank(index, ranks))
            weights = _stored_bytes(form, model, checkpoint)
        except (SplitError, ValueError) as error:
            warnings.append(f"It cannot be divided among {ranks} GPUs: {error}.")
            return ()
        step = _step_bytes(config, c, model)
        place = f"GPU {index} of {ranks}"
        budget = None if memory is None else int(memory * config.gpu_memory_utilization) - weights - step
        if budget is not None and budget <= 0:
            warnings.append(
                f"{place} has no memory left for keys and values: {_size(weights)} of weights and {_size(step)} of "
                f"activations in {config.gpu_memory_utilization:.0%} of {_size(memory or 0)}."
            )
            return ()
        room = budget if budget is not None else 1 << 62
        asked = replace(config, kv_cache_memory_bytes=config.kv_cache_memory_bytes or budget)
        try:
            resolved = resolve(asked, c, model.groups, model.kv, room, f"left on {place}", checkpoint.cache.wanted)
        except ConfigError as error:
            warnings.append(f"{place}: {error}.")
            return ()
        found.append(_memory(config, place, memory, weights, step, resolved))
        if index == 0 and ranks > whole_kv.kv_heads > model.kv.kv_heads:
            copies = ranks // whole_kv.kv_heads
            warnings.append(
                f"There are {whole_kv.kv_heads} KV heads for {ranks} GPUs: each is kept {copies} times, so that the "
                f"cache of all of them holds as many tokens as {whole_kv.kv_heads} GPUs would."
            )
        if index == 0 and ranks > 1 and model.kv == whole_kv and not model.kv.latent:
            warnings.append(f"Attention is not divided: each of the {ranks} GPUs keeps all keys and values.")
    return tuple(found)


def _memory(
    config: EngineConfig, place: str, available: int | None, weights: int, step: int | None, resolved: Resolved
) -> Memory:
    return Memory(
        place=place,
        available=available,
        weights=weights,
        activations=step,
        max_model_len=resolved.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_heads=resolved.kv.kv_heads,
        kv_per_token=resolved.token_bytes,
        kv_per_sequence=resolved.sequence_bytes,
        kv_total=resolved.kv_bytes,
        kv_tokens=resolved.kv.blocks[0] * resolved.kv.block_size,
        sequences=resolved.sequences,
        notes=resolved.notes,
    )


def _measured(
    config: EngineConfig, checkpoint: Checkpoint, form: Form, model: Decoder, resolved: Resolved
) -> tuple[int, int] | None:
    """(bytes of packed weights, bytes of a step's buffers) on the CPU of this machine; None without its kernels, or
    where the files do not fit."""
    threads = environment_threads() if config.threads is None else config.threads
    try:
        from octavo.devices.cpu.blank import BlankDevice

        device = BlankDevice(threads, form.activations)  # type: ignore[arg-type]
        vectors = 0
        plan, problems = fit(model, checkpoint, form.architecture.names(form.config))
        for path, leaf in model.leaves():
            values = [(found.need, _blank(found, _kind(path, leaf, found, form, checkpoint))) for found in plan[path]]
            vectors += sum(value.nbytes for _, value in values if not isinstance(value, Stored))
            leaf.fill(device, values, checkpoint.style)
        one = resolved.kv._replace(blocks=(1,) * len(resolved.kv.blocks))
        compiled = device.compile(model.body, model.head, resolved.limits, device.kv_cache(one))
    except (DeviceUnavailable, MemoryError, ValueError):
        return None
    return device.weight_bytes + vectors, compiled.bytes


def _blank(found: Found, kind: str) -> Value:
    """What fills a need when only its shape matters."""
    need = found.need
    if need.matrix:
        return Stored(kind, need.shape[0], need.shape[1], _NOTHING)
    return np.ones(math.prod(need.shape), np.float32)


def _kind(path: str, leaf: Leaf, found: Found, form: Form, checkpoint: Checkpoint) -> str:
    """The format in which a tensor stays in memory."""
    kind = checkpoint.kind(found.name)
    if form.rule is None or kind not in FLOATS or not found.need.matrix:
        return kind
    rule = form.rule if may_round(path, leaf) else form.rule.tables if is_table(path, leaf) else None
    return kind if rule is None or found.need.whole[-1] % KINDS[rule.kind][0] else rule.kind


def _stored_bytes(form: Form, model: Decoder, checkpoint: Checkpoint) -> int:
    """Bytes of what a rank keeps of all tensors, in the formats that devices multiply with; vectors in float32. Raises
    ValueError where a block would be cut."""
    plan, _ = fit(model, checkpoint, form.architecture.names(form.config))
    total = 0
    for path, leaf in model.leaves():
        for found in plan[path]:
            if found.name not in checkpoint.names():
                continue
            if found.need.matrix:
                n_out, n_in = found.need.shape
                total += n_out * row_bytes(multiplied_as(_kind(path, leaf, found, form, checkpoint)), n_in)
            else:
                total += 4 * math.prod(found.need.shape)
    return total


def _step_bytes(config: EngineConfig, c: ModelConfig, model: Decoder) -> int:
    """Estimate of the buffers of a step on a GPU, in float32: of every token of the largest step its residual, its
    normed form, and the widest product of a layer with what it gives; and of every sequence its logits."""
    widths = [leaf.n_in + sum(leaf.parts.values()) for _, leaf in model.leaves() if isinstance(leaf, Linear | Experts)]
    logits = c.vocab_size * min(config.max_num_seqs, config.max_num_batched_tokens)
    return 4 * (config.max_num_batched_tokens * (2 * c.hidden_size + max(widths, default=0)) + logits)


# -- traps


def _traps(
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


# -- output


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Plain values; sizes are bytes."""
    return asdict(inspection)


def as_text(found: Inspection) -> str:
    """For people."""
    facts: list[tuple[str, str]] = [
        ("model", found.model if found.model == found.path else f"{found.model} ({found.path})"),
        (
            "architecture",
            f"{found.architecture}, {found.layers} layers of {found.hidden_size}, vocabulary {found.vocabulary}",
        ),
        ("attention", f"{found.heads} heads, {found.kv_heads} KV heads of {found.head_dim}"),
        ("layers see", ", ".join(f"{what} ({count} layers)" for what, count in found.windows.items())),
        ("context", f"{found.context} tokens"),
        ("RoPE", found.rope),
    ]
    if found.experts:
        facts.append(("experts", f"{found.experts}, of which a token takes {found.experts_per_token}"))
    active = f", {_count(found.active_parameters)} active" if found.active_parameters != found.parameters else ""
    facts.append(("parameters", f"{_count(found.parameters)}{active}"))
    if found.text is not None:
        text = found.text
        ids = ", ".join(f"{name.removesuffix('_token')} {id}" for name, id in text.special.items())
        facts += [
            ("tokenizer", f"{text.tokenizer}, {text.vocabulary} tokens; {ids or 'no special ids'}"),
            ("answers end at", ", ".join(map(str, text.ends)) or "nothing"),
            ("plain text", "begins with bos" if text.adds_bos else "begins as it is"),
            ("chat template", "yes" if text.chat_template else "no"),
        ]
    lines = [f"{name:15} {value}" for name, value in facts]
    lines += ["", f"{'tensors':15} {'format':8} {'count':>7} {'parameters':>12} {'in the files':>13}"]
    lines += [
        f"{row.part:15} {row.format:8} {row.count:>7} {_count(row.parameters):>12} {_size(row.bytes):>13}"
        for row in found.tensors
    ]
    if found.tied:
        lines.append(f"{'head':15} the embedding table")
    lines.append(f"{'all':15} {'':8} {'':7} {_count(found.parameters):>12} {_size(found.file_bytes):>13}")
    for place in found.memory:
        lines += ["", *_place(place)]
    lines += [""] * bool(found.warnings) + [f"! {warning}" for warning in found.warnings]
    return "\n".join(lines)


def _place(place: Memory) -> list[str]:
    step = "not known" if place.activations is None else _size(place.activations)
    rows = [
        ("on", place.place + (f", {_size(place.available)}" if place.available else "")),
        ("weights", _size(place.weights)),
        ("activations", step),
        ("KV cache", f"{_size(place.kv_total)}: {place.kv_tokens} tokens of {_size(place.kv_per_token)}"),
        (
            "sequences",
            f"{place.sequences} of {place.max_model_len} tokens ({_size(place.kv_per_sequence)} each) at once, at most "
            f"{place.max_num_seqs} run",
        ),
    ]
    return [f"{name:15} {value}" for name, value in rows] + [f"{'':15} {note}" for note in place.notes]


def _count(n: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(n)


def _size(n: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
