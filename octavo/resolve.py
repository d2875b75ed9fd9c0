"""From what the user said and what the checkpoint is to what will run: pure, and every decision explained."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.config import ConfigError, EngineConfig
from octavo.models.config import ModelConfig
from octavo.ops.contract import F32, KV_LARGEST_SCALE, KV_LEAST_SCALE, BatchLimits, KVScales, KVShape, KVSpec
from octavo.quant import GGUF_QUANTIZED, LARGE_INTEGERS, QUANTIZED_FLOATS, SMALL_INTEGERS, multiplied_as
from octavo.types import KVGroup

KV_SHARE = 0.25
"""Part of the free memory that the KV cache may take when the user names no size."""

CACHE_NAMES = {"fp8": "fp8_e4m3", "int8_per_token_head": "int8"}
"""Names of --kv-cache-dtype that mean another."""

SAME_FILES = {"awq_marlin": "awq", "gptq_marlin": "gptq", "inc": "auto-round", "modelopt_fp4": "modelopt"}
"""Names that vLLM's --quantization has for a kernel or a maker, and the method whose files it reads."""


@dataclass(frozen=True)
class Resolved:
    """The frozen numbers of a running engine."""

    token_bytes: int
    """What a token takes in all layers together, while no window has passed it."""
    sequences: int
    """How many sequences of `max_model_len` tokens have room at once."""
    sequence_bytes: int
    """What one of them takes."""

    max_model_len: int
    kv: KVSpec
    limits: BatchLimits
    kv_bytes: int
    notes: tuple[str, ...]
    """One sentence per decision, for start-up to print."""


def check_quantization(
    asked: str | None, checkpoint_says: str | None, kinds: frozenset[str], on_load: Collection[str] = ()
) -> bool:
    """Whether a `--quantization` is to be done while the model is loaded; refuses one that the checkpoint is not
    stored in and that cannot be done then.

    `checkpoint_says`: the quant_method of config.json; `kinds`: storage kinds of its matrices; `on_load`: what can be
    done to plain floats. Raises ConfigError with the ways out.
    """
    found = checkpoint_says or ("gguf" if kinds & GGUF_QUANTIZED else None)
    if asked is None or found in (asked, SAME_FILES.get(asked, asked)):
        return False
    if found is None:
        if asked in on_load:
            return True
        known = f", quantize it while it is loaded with one of {', '.join(on_load)}" if on_load else ""
        raise ConfigError(
            f"--quantization {asked} was asked for, but the checkpoint holds plain {'/'.join(sorted(kinds))} values. "
            f"Either drop --quantization to serve it as it is{known}, or point --model at a checkpoint that was "
            f"quantized with {asked}"
        )
    raise ConfigError(f"--quantization {asked} was asked for, but the checkpoint is {found}: drop the flag")


def activations(config: EngineConfig, kinds: frozenset[str]) -> tuple[str, str]:
    """(activation type of matrix products, the sentence that explains it)."""
    if config.cpu_activations != "auto":
        return config.cpu_activations, f"activations {config.cpu_activations} as asked"
    if config.dtype in ("float", "float32"):
        return "float32", "activations float32 because of --dtype float32"
    multiplied = frozenset(multiplied_as(kind) for kind in kinds)
    if multiplied & SMALL_INTEGERS:
        return "int8", "activations int8 because the weights have 2 to 6 bits (--cpu-activations float32 is exact)"
    if multiplied & LARGE_INTEGERS:
        return "int16", "activations int16 because the weights have 8 bits"
    if multiplied & QUANTIZED_FLOATS:
        return "float32", "activations float32 because the weights are quantized to floats"
    if "BF16" in multiplied:
        return "bfloat16", "activations bfloat16 because the weights are (--cpu-activations float32 is exact)"
    return "float32", "activations float32 because the weights are not quantized"


def cache_dtype(config: EngineConfig, says_fp8: bool) -> tuple[str, str]:
    """(type of the KV cache, why that). `says_fp8`: the checkpoint wants it as FP8."""
    if config.kv_cache_dtype != "auto":
        return CACHE_NAMES.get(config.kv_cache_dtype, config.kv_cache_dtype), ""
    if config.dtype in ("float", "float32"):
        return "float32", " because of --dtype float32"
    return ("fp8_e4m3", " because the checkpoint says FP8") if says_fp8 else ("float16", "")


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    groups: Sequence[KVGroup],
    kv: KVShape,
    available: int,
    source: str,
    says_fp8: bool = False,
) -> Resolved:
    """Sizes of everything.

    `groups` and `kv`: the model's KV groups, and what each of its layers keeps of a token. `says_fp8`: the checkpoint
    wants its keys and values as FP8.
    `available`: bytes of memory free for the KV cache, and `source` where that number comes from. Raises ConfigError
    when what was asked cannot fit, with the numbers.
    """
    notes: list[str] = []
    native = model.max_position_embeddings
    asked = config.max_model_len
    if asked is not None and asked > native:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {native} positions the model was trained for; ask for at most "
            f"{native}"
        )
    wanted = native if asked is None or asked < 0 else asked
    dtype, because = cache_dtype(config, says_fp8)
    sizes = _Sizes(config, groups, kv.bytes(dtype))
    budget, why = _budget(config, sizes, wanted, available, source)
    length = wanted
    if sizes.sequence(wanted) > budget and config.num_gpu_blocks_override is None:
        length = sizes.longest(budget, wanted)
        if asked is not None and asked > 0:
            raise ConfigError(
                f"one sequence of --max-model-len {asked} needs {_mib(sizes.sequence(asked))} of KV cache, but only "
                f"{_mib(budget)} are there ({why}): ask for at most {length}, or raise --kv-cache-memory-bytes"
            )
        if length < 1:
            raise ConfigError(f"the KV cache has only {_mib(budget)} ({why}): not enough for one block")
        notes.append(f"max_model_len {length} instead of the model's {wanted}, to fit the KV cache")
    blocks = sizes.blocks(budget, length)
    if sizes.bytes(blocks) > available:
        raise ConfigError(
            f"{blocks[0]} KV blocks per group need {_mib(sizes.bytes(blocks))}, but only {_mib(available)} are "
            f"{source}: lower --num-gpu-blocks-override"
        )
    spec = KVSpec(
        len(sizes.group_of), kv.kv_heads, kv.head_dim, dtype, config.block_size, blocks, sizes.group_of, kv.latent
    )
    tokens = blocks[0] * config.block_size
    why = why if config.num_gpu_blocks_override is None else "as asked"
    notes.insert(0, f"KV cache {_mib(sizes.bytes(blocks))} in {dtype}{because}: {tokens} tokens ({why})")
    notes.insert(0, f"context {length} tokens, up to {config.max_num_seqs} sequences at once")
    return Resolved(
        token_bytes=sum(sizes.block_bytes) // config.block_size,
        sequences=min(have // need for have, need in zip(blocks, sizes.needs(length), strict=True)),
        sequence_bytes=sizes.sequence(length),
        max_model_len=length,
        kv=spec,
        limits=BatchLimits(
            tokens=config.max_num_batched_tokens,
            sequences=config.max_num_seqs,
            rows=config.max_num_batched_tokens,
            max_model_len=length,
        ),
        kv_bytes=sizes.bytes(blocks),
        notes=tuple(notes),
    )


class Scales(Protocol):
    """What a checkpoint has for an FP8 KV cache."""

    @property
    def other(self) -> str:
        """What it wants the cache to hold in place of FP8; empty: nothing of the kind."""

    def of(self, layer: int, whose: str) -> F32 | None:
        """Of the keys ("k") or values ("v") of a layer: one number, or one for each KV head; None: it has none."""


def with_scales(spec: KVSpec, layers: Sequence[int], scales: Scales) -> tuple[KVSpec, tuple[str, ...]]:
    """`spec` with the checkpoint's scales where it is FP8, and what start-up says of them. `layers`: of each cache the
    layer that writes it.

    Where only keys or only values have scales, these serve both, and 1 where neither has, as in vLLM. Raises
    ConfigError for scales that do not fit the cache.
    """
    if scales.other:
        unknown = (
            f"the checkpoint was made for a KV cache of {scales.other}, which Octavo has none of: it is kept in "
            f"{spec.dtype}, and the checkpoint's scales are not used"
        )
        return spec, (unknown,)
    found = [(layer, scales.of(layer, "k"), scales.of(layer, "v")) for layer in layers]
    have = sum(k is not None or v is not None for _, k, v in found)
    if not spec.dtype.startswith("fp8"):
        unused = (
            f"the checkpoint's scales of an FP8 KV cache are not used in {spec.dtype} (--kv-cache-dtype fp8 uses them)"
        )
        return spec, (unused,) if have else ()
    own = tuple(KVScales(_of_heads(spec, layer, k, v), _of_heads(spec, layer, v, k)) for layer, k, v in found)
    if spec.latent:
        own = tuple(scale._replace(v=()) for scale in own)
    missing = len(found) - have
    notes = [f"scales of the KV cache from the checkpoint for {have} of {len(found)} layers"] if have else []
    if missing:
        notes.append(
            f"{'all' if missing == len(found) else missing} layers have no scales of the KV cache in the checkpoint: "
            f"keys and values are rounded to {spec.dtype} as they are"
        )
    return spec._replace(scales=own), tuple(notes)


def _of_heads(spec: KVSpec, layer: int, scales: F32 | None, others: F32 | None) -> tuple[float, ...]:
    """A scale for each KV head."""
    given = scales if scales is not None else others
    if given is None:
        return (1.0,) * spec.kv_heads
    if given.size not in (1, spec.kv_heads):
        raise ConfigError(
            f"layer {layer} of the checkpoint has {given.size} scales of an FP8 KV cache for {spec.kv_heads} KV heads: "
            "choose --kv-cache-dtype float16"
        )
    wrong = given[~((given > KV_LEAST_SCALE) & (given < KV_LARGEST_SCALE))]
    if wrong.size:
        raise ConfigError(
            f"a scale of the FP8 KV cache of layer {layer} in the checkpoint is {wrong[0]}, which is no positive "
            f"number between {KV_LEAST_SCALE:g} and {KV_LARGEST_SCALE:g}: choose --kv-cache-dtype float16"
        )
    return tuple(np.broadcast_to(given, spec.kv_heads).tolist())


class _Sizes:
    """Block arithmetic: what sequences of a length need of each KV group."""

    def __init__(self, config: EngineConfig, groups: Sequence[KVGroup], token: int):
        """`token`: bytes that one takes in one layer."""
        self.config = config
        self.size = config.block_size
        self.groups = groups
        self.block_bytes = [len(g.layers) * token * self.size for g in groups]
        group_of = [0] * sum(len(g.layers) for g in groups)
        for index, g in enumerate(groups):
            for i in g.layers:
                group_of[i] = index
        self.group_of = tuple(group_of)

    def needs(self, length: int) -> list[int]:
        """Blocks per group of one sequence of `length` tokens: a windowed group holds the window and one step."""
        out = []
        for g in self.groups:
            held = length
            if g.window:
                held = min(length, g.window + self.config.max_num_batched_tokens + self.size)
            out.append(-(-held // self.size) + 1)  # one more: the copy of a shared tail
        return out

    def bytes(self, blocks: Sequence[int]) -> int:
        return sum(n * b for n, b in zip(blocks, self.block_bytes, strict=True))

    def sequence(self, length: int) -> int:
        return self.bytes(self.needs(length))

    def longest(self, budget: int, most: int) -> int:
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.sequence(middle) <= budget else (low, middle - 1)
        return low

    def blocks(self, budget: int, length: int) -> tuple[int, ...]:
        """Blocks per group: as many whole sequences as fit, the same share for every group."""
        one = self.needs(length)
        asked = self.config.num_gpu_blocks_override
        if asked is not None:
            return (asked,) * len(one)
        share = budget / self.bytes(one)
        return tuple(max(n, int(n * share)) for n in one)


def _budget(config: EngineConfig, sizes: _Sizes, length: int, available: int, source: str) -> tuple[int, str]:
    if config.kv_cache_memory_bytes is not None:
        if config.kv_cache_memory_bytes > available:
            raise ConfigError(
                f"--kv-cache-memory-bytes asks for {_mib(config.kv_cache_memory_bytes)}, but only {_mib(available)} "
                f"are {source}"
            )
        return config.kv_cache_memory_bytes, "as asked"
    full = config.max_num_seqs * sizes.sequence(length)
    share = int(available * KV_SHARE)
    if full <= share:
        return full, f"{config.max_num_seqs} sequences of {length} tokens"
    return share, f"{KV_SHARE:.0%} of the {_mib(available)} {source}"


def _mib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
