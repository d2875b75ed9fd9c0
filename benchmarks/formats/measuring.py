"""What is measured of a model, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from octavo import LLM, SamplingParams
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.devices.cpu.device import CpuDevice
from octavo.quant.onload import RULES, quantize
from octavo.resolve import activations
from octavo.text.tokenizer import Tokenizer
from tests import realmodels
from tests.models.tiny import Loaded

TEXT = Path(__file__).with_name("text.txt")
STREAMS = (1, 32)
SMALL = {"kv_cache_memory_bytes": "128MiB", "max_model_len": 512, "enable_prefix_caching": False}
"""Options of the engine whose speed is measured."""

Figures = dict[str, Any]


class Model(NamedTuple):
    """A model to measure: its files, and how its matrices are quantized while it is loaded."""

    path: str
    rule: str | None = None


def apart(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work`, a function of this module, returns in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def of_kinds(model: Model) -> str:
    """The activations that Octavo takes for the weights by default."""
    with open_checkpoint(Path(model.path)) as checkpoint:
        kinds = frozenset(checkpoint.kind(n) for n in checkpoint.names() if len(checkpoint.shape(n)) >= 2)
    rule = RULES[model.rule] if model.rule else None
    return activations(EngineConfig(model=model.path), kinds | {rule.kind} if rule else kinds)[0]


def logits(model: Model, count: int, chosen: str, kv_dtype: str) -> tuple[Any, float]:
    """float32 [count, vocabulary] of the text, and the bytes of the weights in memory."""
    tokens = Tokenizer.from_folder(realmodels.smollm2_hf()).encode(TEXT.read_text())[:count]
    if len(tokens) < count:
        raise ValueError(f"the text has {len(tokens)} tokens: {count} is too many")
    device = CpuDevice(None, chosen)
    rule = RULES[model.rule] if model.rule else None
    loaded = Loaded(
        Path(model.path),
        device,
        max_model_len=count,
        blocks=-(-count // 16),
        tokens=count,
        kv_dtype=kv_dtype,
        quantize=partial(quantize, rule) if rule else None,
        quantize_tables=partial(quantize, rule.tables) if rule and rule.tables else None,
    )
    return loaded.logits(tokens), device.weight_bytes


def save_logits(model: Model, count: int, file: str) -> None:
    np.save(file, logits(model, count, "float32", "float32")[0])


def losses(model: Model, reference: str, count: int) -> Figures:
    """KL divergence and top-1 agreement with the logits in a file: with activations and KV cache in float32, and as by
    default."""
    want, chosen = np.load(reference), of_kinds(model)
    got, size = logits(model, count, "float32", "float32")
    kl, top1 = distance(got, want)
    default = distance(logits(model, count, chosen, "float16")[0], want)
    return {
        "activations": chosen,
        "memory_mib": size / 2**20,
        "kl": kl,
        "top1": top1,
        "default_kl": default[0],
        "default_top1": default[1],
    }


def distance(got: Any, want: Any) -> tuple[float, float]:
    """Mean KL divergence of `got` from `want`, logits [n, vocabulary], and the share of rows with the same greatest."""
    total = 0.0
    for pair in zip(want, got, strict=True):
        p, q = (row.astype(np.float64) - row.max() for row in pair)
        p, q = (row - np.log(np.exp(row).sum()) for row in (p, q))
        total += float(np.exp(p) @ (p - q))
    return total / len(want), float((got.argmax(1) == want.argmax(1)).mean())


def speed(model: Model, steps: int) -> Figures:
    """Of the model with default options."""
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    with LLM(model.path, quantization=model.rule, **SMALL) as llm:
        out = {"load_s": time.perf_counter() - began}
        out["rss_mib"] = (psutil.Process().memory_info().rss - before) / 2**20
        params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
        llm.generate([[1]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        for streams in STREAMS:
            prompts = [[1000 + i] for i in range(streams)]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            taken = time.perf_counter() - began
            assert all(len(output.outputs[0].token_ids) == steps for output in outputs)
            out[f"tok_s_{streams}"] = streams * steps / taken
    return out
