"""From a workload to its figures."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.formats.apart import LONGEST, apart
from benchmarks.peers import workloads
from benchmarks.peers.engines import LlamaCpp, Next, OpenVino, PeerError, Piped, Running, threads
from benchmarks.peers.models import Model
from benchmarks.peers.reference import places, reference
from benchmarks.peers.results import Figures
from octavo.bench.client import Ask, Outcome
from octavo.bench.figures import Figures as Of
from octavo.bench.figures import itls
from octavo.bench.machine import Gpus
from octavo.bench.profile import FORMS
from octavo.bench.servers import Watch
from octavo.devices.cpu.device import CpuDevice

PERCENTILES = (95,)


# -- an engine that is up ----------------------------------------------------------------------------------------------


def served(running: Running, workload: str, number: int, short: bool) -> Figures:
    """Of a load. Raises PeerError when no request was answered, Over when it takes too long."""
    with busy_core() if workload.endswith("-noisy") else quiet_cores():
        load = workloads.load_of(workload, number, short)
        warm = [Ask("Warm up the server, please. " * 4, 8, extra=workloads.GREEDY)] * 2
        running.load(warm, 1)
        with Watch(running.pid, Gpus()) as watch:
            outcomes = running.load(load.asks, load.concurrency)
    found = figures_of(outcomes)
    peak = watch.peak("resident")
    return found | {"ready_s": running.ready_s} | ({"peak_mib": peak / 2**20} if peak else {})


def figures_of(outcomes: Sequence[Outcome]) -> Figures:
    """Latencies in milliseconds. `decode_tok_s` is one over the usual gap between two tokens, `prefill_tok_s` the
    prompt's tokens over the time to the first one: both mean something where one request runs at a time."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    if not done:
        raise PeerError(f"no request was answered: {outcomes[0].error}")
    of = Of.of(outcomes, percentiles=PERCENTILES)
    found = {
        "out_tok_s": of.output_throughput,
        "total_tok_s": of.total_token_throughput,
        "failed": of.failed,
        "wall_s": of.duration,
        "output_tokens": of.total_output_tokens,
        "prompt_tokens": of.total_input_tokens,
    }
    for name, spread in of.latencies.items():
        found |= {f"{name}_p50": spread.median, f"{name}_p95": spread.percentiles[95]}
    gaps = [gap for outcome in done for gap in itls(outcome)]
    if gaps:
        found["decode_tok_s"] = 1000 / median(gaps) if median(gaps) else 0.0
    waits = [o.prompt_tokens / (o.first - o.asked) for o in done if o.first is not None and o.prompt_tokens]
    if waits:
        found["prefill_tok_s"] = median(waits)
    return found


@contextmanager
def busy_core() -> Iterator[None]:
    """Another program works on one core all the time."""
    core = max(os.sched_getaffinity(0))
    script = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    neighbour = subprocess.Popen([sys.executable, "-c", script])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


@contextmanager
def quiet_cores() -> Iterator[None]:
    yield


# -- parity ------------------------------------------------------------------------------------------------------------


def parity(running: Running, model: Model) -> Figures:
    """How often the likeliest token is that of the float32 model, and how far probabilities are from its.

    The divergence is that of the distribution over the tokens that the engine tells and one bin of all others, which is
    a lower bound of the whole one.
    """
    assert model.floats is not None
    ids, want = reference(model.floats())
    found = [running.next_token(ids[:place]) for place in places(len(ids))]
    same = [one.token == int(row.argmax()) for one, row in zip(found, want, strict=True)]
    figures = {"top1": sum(same) / len(same)}
    if all(one.logprobs is not None for one in found):
        figures["kl"] = sum(divergence(one, row) for one, row in zip(found, want, strict=True)) / len(found)
    return figures


def divergence(said: Next, logits: Any) -> float:
    """KL divergence of what an engine says from the softmax of `logits` [vocabulary]."""
    assert said.logprobs is not None
    row = logits.astype(np.float64) - logits.max()
    tokens = list(said.logprobs)
    p = (np.exp(row) / np.exp(row).sum())[tokens]
    q = np.exp(np.array([said.logprobs[token] for token in tokens]))
    least = 1e-12  # what is left to the others is a difference, and may come out as nothing
    p, q = (np.append(part, max(1 - part.sum(), least)) for part in (p, q))
    return float((p * np.log(np.maximum(p, least) / q)).sum())


# -- an engine without a server ----------------------------------------------------------------------------------------


def batch(peer: str, model: Model, workload: str, short: bool, log: Path) -> Figures:
    """Tokens per second of decoding a batch, or of computing one prompt. Raises PeerError."""
    rows = int(workload.removeprefix("decode")) if workload.startswith("decode") else 0
    steps = 24 if short else workloads.STEPS
    path = str(model.path())
    if peer == "octavo":
        return apart("benchmarks.peers.batches", path=path, rows=rows, steps=steps)
    if peer == "llama.cpp":
        return {"tok_s": llama_batch(LlamaCpp().program("llama-batched-bench"), path, rows, steps, log)}
    if peer == "openvino":
        return {"tok_s": openvino_batch(OpenVino().python(), model.path(), rows, steps, log)}
    raise PeerError(f"{peer} is not measured without its server")


def llama_batch(program: str, path: str, rows: int, steps: int, log: Path) -> float:
    """By llama.cpp's own program."""
    prompt, tokens, many = (workloads.CONTEXT, steps, rows) if rows else (512, 1, 1)
    sizes = ["-npp", str(prompt), "-ntg", str(tokens), "-npl", str(many), "-c", str(max(many * 256, 1024))]
    said = ["-m", path, "-t", str(threads()), "-b", "2048", "-ub", "512", "--output-format", "jsonl", *sizes]
    try:
        with log.open("ab") as out:
            done = subprocess.run([program, *said], stdout=subprocess.PIPE, stderr=out, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise PeerError(f"llama-batched-bench had no figures after {LONGEST} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise PeerError(f"llama-batched-bench ended with status {done.returncode}: see {log}")
    return speed_said(json.loads(lines[-1]), bool(rows))


def speed_said(line: Mapping[str, float], decode: bool) -> float:
    return float(line["speed_tg" if decode else "speed_pp"])


def openvino_batch(python: Path, path: Path, rows: int, steps: int, log: Path) -> float:
    engine = Piped(python, path, log)
    try:
        engine.load([Ask("Warm up, please. " * 4, 4)], 1)
        rng = random.Random(rows)
        length = workloads.CONTEXT if rows else 512
        asks = [Ask(workloads.text(rng, length), steps if rows else 1) for _ in range(rows or 3)]
        outcomes = engine.load(asks, rows or 1)
    finally:
        engine.stop()
    if not rows:
        return figures_of(outcomes)["prefill_tok_s"]
    # From the step at which all have begun to that at which the first one ends.
    begun, ended = max(outcome.times[0] for outcome in outcomes), min(outcome.times[-1] for outcome in outcomes)
    if begun >= ended:
        raise PeerError("the first sequence of the batch ended before the last one had begun")
    tokens = sum(begun < moment <= ended for outcome in outcomes for moment in outcome.times)
    return tokens / (ended - begun)


# -- the machine -------------------------------------------------------------------------------------------------------


def roofs() -> Figures:
    """What this machine can do at most on all threads: GB/s read from memory, and GOP/s (a multiplication or an
    addition each) of float32 and of 8-bit integers."""
    found = CpuDevice(threads()).roofline()
    operations = dict(zip(FORMS, found.operations_per_second, strict=True))
    return {
        "read_gb_s": 1e-9 * found.bytes_per_second,
        "float32_gop_s": 1e-9 * operations["float32"],
        "int8_gop_s": 1e-9 * operations["int8"],
    }
