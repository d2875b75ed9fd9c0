"""How much memory a model takes: on this machine, by the code of start-up, and on GPUs."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from octavo.build import Form, size_here
from octavo.checkpoint import Checkpoint
from octavo.config import ConfigError, EngineConfig, environment_threads
from octavo.devices import DeviceUnavailable
from octavo.inspection.facts import Memory
from octavo.inspection.telling import in_bytes
from octavo.layers.linear import Leaf, Linear, Value
from octavo.layers.moe import Experts
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.weights import Found, fit, is_table, may_round
from octavo.ops.contract import Stored
from octavo.parallel.rank import Rank, SplitError
from octavo.quant import KINDS, multiplied_as, row_bytes
from octavo.quant.onload import FLOATS
from octavo.resolve import Resolved, resolve

_NOTHING = np.zeros((0, 0), np.uint8)


def here(config: EngineConfig, checkpoint: Checkpoint, form: Form, warnings: list[str]) -> tuple[Memory, ...]:
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


def on_gpus(
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
                f"{place} has no memory left for keys and values: {in_bytes(weights)} of weights and "
                f"{in_bytes(step)} of activations in {config.gpu_memory_utilization:.0%} of {in_bytes(memory or 0)}."
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
