"""Speed of mixtures of experts beside the dense layer of the same active size, by rows.

    python benchmarks/experts.py [--experts 8] [--top-k 2] [--kind Q4_0] [--rows 1,8,32,128] [--activations int8]

A step runs several layers, each with weights of its own, so with few rows they come from memory and not from a cache.
The dense layer is a gated product and a product of inner width top_k * inner: a row has as many multiplications.
Its weights are read once, though, and those of a mixture as far as rows chose them: `spread` is how many experts of a
layer a step chose, and `read` how much more of the weights it had to read for that. Rows choose at random. The shortest
of many runs of either, in turn, counts, as other work on the machine only ever adds time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from linear import blocks_for, no_draws, numbers, random_matrix, step_over

from octavo.devices.cpu.device import CpuDevice, CpuModel
from octavo.devices.cpu.recorder import Activations
from octavo.ops.contract import BatchLimits, KVSpec, Router, Stored

Layer = Callable[[Any, Any, Any], Any]


def model_of(device: CpuDevice, layers: list[Layer], width: int, experts: int, most_rows: int) -> CpuModel:
    """A model whose body is `layers`, functions of (ops, x, logits), each given the same input."""
    rng = np.random.default_rng(0)

    def table(columns: int) -> Any:
        values = rng.standard_normal((most_rows, columns), np.float32)
        return device.weight([Stored("F32", most_rows, columns, values.view(np.uint8))])

    inputs, scores = table(width), table(experts)

    def body(ops: Any, batch: Any) -> Any:
        x, logits = ops.embed(batch, inputs, 1.0), ops.embed(batch, scores, 1.0)
        for layer in layers:
            out = layer(ops, x, logits)
        return ops.gather(batch, out)

    blocks = blocks_for(most_rows)
    cache = device.kv_cache(KVSpec(1, 1, 32, "float16", 128, (blocks,), (0,)))
    head = device.weight([Stored("F32", 1, width, np.zeros((1, 4 * width), np.uint8))])
    limits = BatchLimits(most_rows, 1, 1, 128 * blocks)
    return device.compile(body, lambda ops, x: ops.logits(x, head), limits, cache)


def gated_layer(device: CpuDevice, kind: str, width: int, inner: int, rng: np.random.Generator) -> tuple[Any, Any]:
    gate_up = [random_matrix(kind, inner, width, rng) for _ in range(2)]
    return device.weight(gate_up), device.weight([random_matrix(kind, width, inner, rng)])


def spread_of(rows: int, experts: int, top_k: int) -> float:
    """Expected number of experts that `rows` rows choose."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def shortest(models: list[CpuModel], rows: int, seconds: float) -> list[float]:
    """The shortest run of each model, in seconds; they take turns."""
    batch, sampling = step_over(rows), no_draws()
    best = [float("inf")] * len(models)
    end = time.perf_counter() + seconds * len(models)
    while time.perf_counter() < end:
        for i, model in enumerate(models):
            began = time.perf_counter()
            model.run(batch, sampling)
            best[i] = min(best[i], time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=1024, help="of one expert")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kind", default="Q4_0")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32, 128])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--activations", default="int8", choices=("float32", "int16", "bfloat16", "int8"))
    parser.add_argument("--seconds", type=float, default=1.0, help="per figure")
    options = parser.parse_args()
    activations: Activations = options.activations
    width, inner, experts, router = options.width, options.inner, options.experts, Router(options.top_k)

    for threads in options.threads:
        device, rng = CpuDevice(threads, activations), np.random.default_rng(0)
        mixtures: list[Layer] = []
        plain: list[Layer] = []
        for _ in range(options.layers):
            pairs = [gated_layer(device, options.kind, width, inner, rng) for _ in range(experts)]
            gate_up, down = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
            mixtures.append(lambda ops, x, logits, g=gate_up, d=down: ops.moe(x, logits, g, d, router, "silu"))
            first, second = gated_layer(device, options.kind, width, inner * options.top_k, rng)
            plain.append(lambda ops, x, logits, a=first, b=second: ops.linear(ops.gated(x, a, "silu"), b))
        most = max(options.rows)
        models = [model_of(device, layers, width, experts, most) for layers in (plain, mixtures)]
        for rows in options.rows:
            dense, mixed = (1e3 * taken / options.layers for taken in shortest(models, rows, options.seconds))
            spread = spread_of(rows, experts, options.top_k)
            print(
                f"{options.kind} {activations}, {threads} threads, {rows:4} rows: dense {dense:7.3f} ms a layer, "
                f"mixture {mixed:7.3f} ms = {mixed / dense:4.2f} x; spread {spread:5.1f}, "
                f"read {spread / options.top_k:4.1f} x",
                flush=True,
            )


if __name__ == "__main__":
    main()
