"""The composition root: from an `EngineConfig` to a running engine and to the text side of a server.

The only module that imports every layer. The engine half (weights, device, scheduler) and the text half (tokenizer,
template) are built apart, because a server runs them in two processes.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import octavo
from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.checkpoint.converted import Converted, identity
from octavo.checkpoint.hub import locate
from octavo.config import ConfigError, EngineConfig, cache_dir, environment_threads
from octavo.devices import DeviceUnavailable, select_device
from octavo.devices.cpu.threads import allowed_cpus
from octavo.devices.memory import available_memory
from octavo.engine import Engine, build_engine
from octavo.info import ModelInfo
from octavo.layers.rope import RopeError
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.registry import Architecture, find
from octavo.models.weights import LoadError, load, quantizable
from octavo.ops.contract import CompiledModel, Profiled, Stored
from octavo.quant import about_rewriting, rewritten
from octavo.quant.onload import RULES, Rule, quantize, saved
from octavo.resolve import Resolved, activations, check_quantization, resolve, with_scales
from octavo.runtime.executor import Local
from octavo.runtime.runner import Runner
from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.request import RequestFactory
from octavo.text.template import PARAMETERS, ChatTemplate, TemplateError, load_template
from octavo.text.tokenizer import Tokenizer, TokenizerError

logger = logging.getLogger(__name__)

CONVERTING = ("checkpoint", "layers", "models", "quant")
"""Packages that say what becomes of a matrix before it is packed."""

Progress = Callable[[str, int, int], Any]
"""Called as (what is being done, done, total)."""


GENERATION_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json that become sampling defaults, and our names for them."""


@dataclass(frozen=True)
class Text:
    """The text side of a model: what turns messages into token ids and back."""

    tokenizer: Tokenizer
    template: ChatTemplate
    """False when the model has none."""
    eos_ids: tuple[int, ...]
    """Every id that the checkpoint's config, its generation config or its tokenizer declares as an end."""
    defaults: dict[str, Any]
    """Sampling parameters in place of Octavo's own defaults."""

    def factory(self, info: ModelInfo, config: EngineConfig) -> RequestFactory:
        """What makes `Request`s for the engine that `info` describes."""
        return RequestFactory(
            self.tokenizer,
            self.template,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_ids=self.eos_ids,
            default_sampling=self.defaults,
            max_logprobs=config.max_logprobs,
        )


@dataclass(frozen=True)
class Built:
    """A model ready to answer in this process."""

    engine: Engine
    info: ModelInfo
    profiled: Profiled | None
    """What times the model's operations; None on a device that cannot."""


def find_model(config: EngineConfig) -> Path:
    """Where the model's files are on this machine; downloads them where needed. Raises CheckpointError."""
    return _locate(config, config.model, config.revision)


@contextmanager
def model_headers(config: EngineConfig) -> Iterator[tuple[Path, bool]]:
    """The model's files as `find_model` gives them, but of weights that are on the hub the headers alone; and whether
    they are there after the block. Raises CheckpointError."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as made:
        path = _locate(config, config.model, config.revision, headers=Path(made))
        try:
            yield path, not path.is_relative_to(made)
        except ValueError as error:  # the user knows the model by its own name
            if made not in str(error):
                raise
            raise type(error)(str(error).replace(made, config.model)) from None


def _locate(
    config: EngineConfig, name: str, revision: str | None, weights: bool = True, headers: Path | None = None
) -> Path:
    return locate(
        name,
        revision=revision,
        hf_token=config.hf_token,
        download_dir=Path(config.download_dir) if config.download_dir else None,
        cache_dir=cache_dir(),
        weights=weights,
        headers=headers,
    )


@contextmanager
def open_model(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint at `path`, closed at the end of the block; errors about what it holds name the path."""
    with open_checkpoint(path) as checkpoint:
        try:
            yield checkpoint
        except (ModelConfigError, LoadError, RopeError, TokenizerError) as error:
            if str(path) in str(error):
                raise
            raise type(error)(f"{path}: {error}") from None


def build_text(config: EngineConfig) -> Text:
    """Tokenizer, chat template and generation defaults of the model; reads no weights."""
    asked = _own_tokenizer(config) if config.tokenizer else None
    with open_model(find_model(config)) as checkpoint:
        tokenizer = _tokenizer(checkpoint) if asked is None else asked
        template = chat_template(config, tokenizer)
        generation = _generation(config, checkpoint)
        declared = [checkpoint.config.get("eos_token_id"), generation.get("eos_token_id"), tokenizer.eos_id]
    eos = dict.fromkeys(i for ids in declared for i in (ids if isinstance(ids, list) else [ids]) if i is not None)
    defaults = {ours: generation[key] for key, ours in GENERATION_KEYS.items() if generation.get(key) is not None}
    return Text(tokenizer, template, tuple(eos), defaults)


def chat_template(config: EngineConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that chats are rendered with: --chat-template, or else the tokenizer's.

    Raises:
        ConfigError: an option about templates cannot be honoured.
        TemplateError: the tokenizer's own template cannot be read.
    """
    for name in sorted(PARAMETERS & config.default_chat_template_kwargs.keys()):
        raise ConfigError(f"--default-chat-template-kwargs cannot set {name}, which each request says for itself.")
    if not config.chat_template:
        return ChatTemplate.of(tokenizer, content_format=config.chat_template_content_format)
    try:
        return ChatTemplate.of(tokenizer, load_template(config.chat_template), config.chat_template_content_format)
    except TemplateError as error:
        raise ConfigError(f"--chat-template: {error}") from None


def _own_tokenizer(config: EngineConfig) -> Tokenizer:
    """The one that --tokenizer names: a repository, a folder, or a GGUF file."""
    assert config.tokenizer is not None
    path = _locate(config, config.tokenizer, config.tokenizer_revision, weights=False)
    if path.suffix == ".gguf":
        with open_model(path) as checkpoint:
            return _tokenizer(checkpoint)
    return Tokenizer.from_folder(path)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.metadata is not None:
        return from_gguf(checkpoint.metadata)
    return Tokenizer.from_folder(checkpoint.path)


def _generation(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The generation config the user chose, with overrides; an override of one key keeps the others."""
    chosen = config.generation_config
    if chosen == "auto":
        out = dict(checkpoint.generation_config)
    elif chosen == "vllm":
        out = {k: v for k, v in checkpoint.generation_config.items() if k == "eos_token_id"}
    else:
        file = Path(chosen) / "generation_config.json" if Path(chosen).is_dir() else Path(chosen)
        try:
            out = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--generation-config {chosen}: cannot read {file}: {error}") from None
    for key in config.override_generation_config:
        if key not in GENERATION_KEYS and key != "eos_token_id":
            known = ", ".join(GENERATION_KEYS)
            logger.warning("--override-generation-config: %s has no effect here; known: %s", key, known)
    return {**out, **config.override_generation_config}


@dataclass(frozen=True)
class Form:
    """What a model is, and how its weights will be kept: all that follows from the headers."""

    architecture: Architecture
    config: ModelConfig
    kinds: frozenset[str]
    """Formats of its matrices in the files."""
    method: str | None
    """How these were quantized, in config.json's word."""
    rule: Rule | None
    """How matrices are quantized while they are loaded."""
    activations: str
    why: str
    """The sentence that explains `activations`."""
    notes: tuple[str, ...]
    """What start-up says of the weights."""


def form_of(config: EngineConfig, checkpoint: Checkpoint) -> Form:
    """Raises ModelConfigError, ConfigError."""
    architecture = find(checkpoint.config)
    model = architecture.config(checkpoint.config)
    kinds = frozenset(checkpoint.kind(n) for n in checkpoint.names() if len(checkpoint.shape(n)) >= 2)
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    on_load = check_quantization(config.quantization, method, kinds, RULES)
    rule = RULES[str(config.quantization)] if on_load else None
    activation_type, why = activations(config, kinds | {rule.kind} if rule else kinds)
    notes = (
        f"{architecture.name}, {model.layers} layers, {checkpoint.total_bytes / 2**20:.0f} MiB of "
        f"{'/'.join(sorted(kinds))} weights",
        *([f"matrices quantized while loading: {rule.about}"] if rule else []),
        *filter(None, map(about_rewriting, sorted(kinds))),
    )
    return Form(architecture, model, kinds, method, rule, activation_type, why, notes)


def size_here(config: EngineConfig, checkpoint: Checkpoint, form: Form) -> Resolved:
    """Sizes for the memory of this machine that the weights will leave. Raises ConfigError."""
    free, source = available_memory()
    layout = form.architecture.make(form.config, form.config.max_position_embeddings)
    free -= checkpoint.multiplied_bytes
    if form.rule:
        rule, (products, tables) = form.rule, quantizable(layout)
        free += int(
            saved(rule, form.kinds) * products + (saved(rule.tables, form.kinds) * tables if rule.tables else 0)
        )
    sizes = resolve(config, form.config, layout.groups, layout.kv, max(free, 0), source, checkpoint.cache.wanted)
    spec, notes = with_scales(sizes.kv, layout.caches, checkpoint.cache)
    return replace(sizes, kv=spec, notes=(*sizes.notes, *notes))


def build(config: EngineConfig, on_progress: Progress | None = None) -> Built:
    """Load the model and make its engine. Raises ValueError (of the kind at fault) with one clear sentence."""
    began = time.perf_counter()
    path = find_model(config)
    with open_model(path) as checkpoint:
        form = form_of(config, checkpoint)
        architecture, model_config, rule = form.architecture, form.config, form.rule
        threads = environment_threads() if config.threads is None else config.threads
        try:
            device = select_device(config.device, threads, form.activations)
        except DeviceUnavailable as error:
            raise ConfigError(f"{error} It is correct and slow; choose it with --device reference.") from error
        resolved = size_here(config, checkpoint, form)
        workers = allowed_cpus().threads if threads is None else threads
        model = architecture.make(model_config, resolved.max_model_len)
        with _converted(config, checkpoint, form) as converted:
            load(
                model,
                checkpoint,
                architecture.names(model_config),
                device,
                architecture.ignore(model_config),
                partial(on_progress, "loading weights") if on_progress else None,
                partial(quantize, rule, threads=workers) if rule else None,
                partial(quantize, rule.tables, threads=workers) if rule and rule.tables else None,
                partial(_kept, converted, workers) if converted else None,
            )
        notes = (
            *form.notes,
            *device.notes,
            *(["OMP_NUM_THREADS sets the number of threads"] if threads is not None and config.threads is None else []),
            *([f"converted weights come from {converted.file}"] if converted and converted.found else []),
            form.why,
            *resolved.notes,
        )
        quantization = config.quantization or form.method
        info = _info(
            config, path, architecture.name, model_config, resolved, checkpoint.total_bytes, quantization, device.name
        )
    compiled = device.compile(model.body, model.head, resolved.limits, device.kv_cache(resolved.kv))
    engine = _engine(config, model, compiled, resolved)
    info.notes = [*notes, f"ready in {time.perf_counter() - began:.1f} s"]
    return Built(engine, info, compiled if isinstance(compiled, Profiled) else None)


def _converted(config: EngineConfig, checkpoint: Checkpoint, form: Form) -> AbstractContextManager[Converted | None]:
    """Where converted matrices are kept; None for checkpoints whose matrices can be packed as they are."""
    converts = form.rule is not None or form.method is not None or any(map(about_rewriting, form.kinds))
    if not converts or config.converted_cache_bytes == 0:
        return nullcontext()
    code = [file for package in CONVERTING for file in (Path(octavo.__file__).parent / package).rglob("*.py")]
    says = [octavo.__version__, checkpoint.config, config.quantization]
    key = identity(checkpoint.files, says, code)
    return Converted(cache_dir() / "converted", key, config.converted_cache_bytes)


def _kept(converted: Converted, threads: int, name: str, make: Callable[[], Stored]) -> Stored:
    return converted.matrix(name, lambda: rewritten(make(), threads))


def _engine(config: EngineConfig, model: Decoder, compiled: CompiledModel, resolved: Resolved) -> Engine:
    runner = Runner(compiled, resolved.limits, len(model.groups), config.block_size, model.config.vocab_size)
    return build_engine(
        Local(runner),
        groups=model.groups,
        blocks=resolved.kv.blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        depth=config.depth,
    )


def _info(
    config: EngineConfig,
    path: Path,
    architecture: str,
    model: ModelConfig,
    resolved: Resolved,
    weight_bytes: int,
    quantization: str | None,
    device: str,
) -> ModelInfo:
    spec = resolved.kv
    return ModelInfo(
        model=config.model,
        path=str(path),
        architecture=architecture,
        max_model_len=resolved.max_model_len,
        vocab_size=model.vocab_size,
        block_size=spec.block_size,
        kv_blocks=list(spec.blocks),
        kv_bytes=resolved.kv_bytes,
        kv_dtype=spec.dtype,
        weight_bytes=weight_bytes,
        quantization=quantization,
        device=device,
        created=int(time.time()),
    )
