"""Speed of the native matrix products: GOP/s and GB/s of weights, by kind, rows and threads.

    python benchmarks/linear.py [--kinds Q4_1,Q8_0] [--rows 1,8,100] [--threads 1,2] [--activations int8]

A step runs several products over one input; matrices of different weights follow one another, so with few rows they
come from memory and not from a cache. The shortest of many runs counts, as other work on the machine only ever adds
time, and the kinds take turns, as that work comes and goes. An operation is a multiplication or an addition:
rows * n_in * n_out * 2. The percentage is of the roofline: the time that memory or multiply-adds need at least, as
measured before, as share of the time taken; more than 100 % means that weights lay in the processor's caches.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from octavo.devices.cpu.device import CpuDevice, CpuModel
from octavo.devices.cpu.recorder import Activations
from octavo.ops.contract import BatchArrays, BatchLimits, KVSpec, Roofline, Sampling, Stored
from octavo.quant import row_bytes

KINDS = "Q4_0,Q4_1,INT4_32,INT4_128,Q5_0,Q5_1,Q8_0,INT8_128,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K"

TURNS = 10
"""Of each figure."""


def random_matrix(kind: str, n_out: int, n_in: int, rng: np.random.Generator) -> Stored:
    """Random bytes, none so large that it makes a scale infinite or negative zero."""
    return Stored(kind, n_out, n_in, rng.integers(0, 0x3C, (n_out, row_bytes(kind, n_in)), np.uint8))


def blocks_for(rows: int) -> int:
    """Blocks of 128 tokens."""
    return -(-rows // 128)


def step_over(rows: int) -> BatchArrays:
    """One sequence of `rows` tokens, none of which needs a next token: the head does not run."""
    return BatchArrays(
        tokens=np.arange(rows, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32),
        starts=np.array([0, rows], np.int32),
        slots=np.zeros(1, np.int32),
        rows=np.zeros(0, np.int32),
        tables=(np.arange(blocks_for(rows), dtype=np.int32)[None],),
    )


def no_draws() -> Sampling:
    none, ints, start = np.zeros(0, np.float32), np.zeros(0, np.int32), np.zeros(1, np.int32)
    return Sampling(
        temperature=none,
        top_k=ints,
        top_p=none,
        min_p=none,
        seed=np.zeros(0, np.uint64),
        choice=ints,
        position=ints,
        target=ints,
        logprobs=ints,
        repetition=none,
        presence=none,
        frequency=none,
        seen_ptr=start,
        seen_ids=ints,
        seen_counts=ints,
        bias_ptr=start,
        bias_ids=ints,
        bias_values=none,
        allow_ptr=start,
        allow_ids=ints,
    )


def products(device: CpuDevice, kind: str, n_in: int, n_out: int, count: int, most_rows: int) -> CpuModel:
    """A model whose body is `count` products, each with a matrix of its own."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((most_rows, n_in), np.float32)
    table = device.weight([Stored("F32", most_rows, n_in, inputs.view(np.uint8))])
    weights = [device.weight([random_matrix(kind, n_out, n_in, rng)]) for _ in range(count)]

    def body(ops: Any, batch: Any) -> Any:
        x = ops.embed(batch, table, 1.0)
        for weight in weights:
            out = ops.linear(x, weight)
        return ops.gather(batch, out)

    blocks = blocks_for(most_rows)
    cache = device.kv_cache(KVSpec(1, 1, 32, "float16", 128, (blocks,), (0,)))
    head = device.weight([Stored("F32", 1, n_out, np.zeros((1, 4 * n_out), np.uint8))])
    limits = BatchLimits(most_rows, 1, 1, 128 * blocks)
    return device.compile(body, lambda ops, x: ops.logits(x, head), limits, cache)


def shortest(model: CpuModel, rows: int, seconds: float) -> float:
    """The shortest of the runs that fit `seconds`, in seconds."""
    batch, sampling = step_over(rows), no_draws()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        model.run(batch, sampling)
        best = min(best, time.perf_counter() - began)
    return best


def least(model: CpuModel, rows: int, roofline: Roofline) -> float:
    """Seconds that the products of a step need at least."""
    model.start_profile()
    model.run(step_over(rows), no_draws())
    return sum(roofline.seconds(time) for time in model.stop_profile() if time.name.startswith("linear"))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 32, 100])
    parser.add_argument("--threads", type=numbers, default=[1, 2])
    parser.add_argument("--activations", default="int8", choices=("float32", "int16", "bfloat16", "int8"))
    parser.add_argument("--n-in", type=int, default=768, help="a multiple of 256 for the K formats")
    parser.add_argument("--n-out", type=int, default=1536)
    parser.add_argument("--megabytes", type=float, default=32, help="of packed weights that a run reads")
    parser.add_argument("--seconds", type=float, default=0.5, help="per figure")
    options = parser.parse_args()
    activations: Activations = options.activations
    kinds = options.kinds.split(",")
    matrix = {kind: options.n_out * row_bytes(kind, options.n_in) for kind in kinds}
    count = {kind: max(1, round(options.megabytes * 1e6 / one)) for kind, one in matrix.items()}
    columns = " ".join(f"{f'{rows} rows':>20}" for rows in options.rows)
    print(f"{'kind':10} threads {columns}  (GOP/s, GB/s, of the roofline)")
    for threads in options.threads:
        device = CpuDevice(threads, activations)
        roofline = device.roofline()
        models = {
            kind: products(device, kind, options.n_in, options.n_out, count[kind], max(options.rows)) for kind in kinds
        }
        taken = {(kind, rows): float("inf") for kind in kinds for rows in options.rows}
        for _ in range(TURNS):
            for kind, rows in taken:
                taken[kind, rows] = min(taken[kind, rows], shortest(models[kind], rows, options.seconds / TURNS))
        for kind in kinds:
            figures = []
            for rows in options.rows:
                seconds = taken[kind, rows]
                operations = 2 * rows * options.n_in * options.n_out * count[kind]
                share = least(models[kind], rows, roofline) / seconds
                rates = (operations / seconds / 1e9, matrix[kind] * count[kind] / seconds / 1e9)
                figures.append(f"{rates[0]:8.1f} {rates[1]:6.2f} {share:4.0%}")
            print(f"{kind:10} {threads:7} " + " ".join(figures), flush=True)


if __name__ == "__main__":
    main()
