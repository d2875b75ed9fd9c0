"""How fast the CPU device's attention is: GFLOP/s and GB/s of steps of prompts, of decodes and of both.

    python benchmarks/attention.py [--types float16,int8,...] [--steps decode] [threads ...]

`--types`: of the KV cache, which take turns; `--steps`: only steps whose names have this in them.

A body of one layer is run with one attention and with several; the difference, at the fastest of many runs, is that of
attention alone. GFLOP/s count two operations for each element of the keys and values that each query head sees; GB/s
count the cache of every context once, which is what a step has to read at least. "per thread" divides by the processor
time of all threads instead of the time on the clock: on a machine with other work to do, it says more. "roofline" is
the time that memory or multiply-adds need at least, as measured before, as share of the time taken; above 100 % the
cache of a case lies in the processor's caches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from octavo.devices.cpu.device import CpuCache, CpuDevice, CpuModel
from octavo.ops.contract import AttentionShape, BatchArrays, BatchLimits, KVShape, KVSpec, Roofline, Rope, Stored

BLOCK = 16
MORE = 5
"""Attentions beside the first."""


class Span(NamedTuple):
    """`tokens` of a sequence that then has `context`."""

    tokens: int
    context: int


class Case(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    spans: tuple[Span, ...]
    window: int = 0
    latent: int = 0

    def shape(self) -> AttentionShape:
        shape = AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, 0, 0, self.window)
        return shape._replace(latent=self.latent)

    def seen(self, position: int) -> int:
        return min(position + 1, self.window) if self.window else position + 1

    def flops(self) -> int:
        seen = sum(self.seen(p) for span in self.spans for p in range(span.context - span.tokens, span.context))
        return 2 * (self.head_dim + (self.latent or self.head_dim)) * self.heads * seen

    def bytes(self, dtype: str) -> int:
        tokens = sum(
            min(span.context, self.window + span.tokens) if self.window else span.context for span in self.spans
        )
        return KVShape(self.kv_heads, self.head_dim, self.latent).bytes(dtype) * tokens


def cases() -> list[Case]:
    layouts = {
        "prompt of 512": (Span(512, 512),),
        "512 at 2048": (Span(512, 2048),),
        "256 at 6000": (Span(256, 6000),),
        "decode 1 x 4000": (Span(1, 4000),),
        "decode 1 x 8000": (Span(1, 8000),),
        "decode 32 x 512": (Span(1, 512),) * 32,
        "decode 16 x 4000": (Span(1, 4000),) * 16,
        "256 at 512 + decode 16 x 2000": (Span(256, 512), *(Span(1, 2000),) * 16),
    }
    shapes = ((9, 3, 64), (4, 1, 256), (32, 8, 128))
    full = [Case(name, *shape, spans) for shape in shapes for name, spans in layouts.items()]
    latent = [
        Case(name, heads, 1, 576, layouts[name], latent=512)
        for heads in (16, 128)
        for name in ("prompt of 512", "decode 1 x 8000", "decode 32 x 512")
    ]
    return [*full, Case("256 at 6000", 4, 1, 256, (Span(256, 6000),), 512), *latent]


def step(case: Case, spans: Sequence[tuple[int, Span]], table: Any) -> BatchArrays:
    """A step over the spans (slot, span); one output row."""
    positions = [np.arange(span.context - span.tokens, span.context, dtype=np.int32) for _, span in spans]
    joined = np.concatenate(positions)
    return BatchArrays(
        tokens=joined % 512,
        positions=joined,
        starts=np.cumsum([0, *map(len, positions)], dtype=np.int32),
        slots=np.array([slot for slot, _ in spans], np.int32),
        rows=np.zeros(1, np.int32),
        tables=(table,),
    )


def compile_layer(dev: CpuDevice, case: Case, cache: CpuCache, limits: BatchLimits, attends: int) -> CpuModel:
    rng = np.random.default_rng(0)
    shape, turned = case.shape(), case.head_dim - case.latent

    def weight(rows: int, columns: int) -> Any:
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        return dev.weight([Stored("F32", rows, columns, values.view(np.uint8))])

    widths = (case.heads * case.latent, case.heads * turned, case.latent, turned)
    tables = [weight(512, n) for n in (widths if case.latent else ((case.heads + 2 * case.kv_heads) * case.head_dim,))]
    out = weight(8, case.heads * (case.latent if case.latent and attends else case.head_dim))

    def body(ops: Any, batch: Any) -> Any:
        parts = [ops.embed(batch, table, 1.0) for table in tables]
        if case.latent:
            x = q = ops.store_latent(batch, *parts, ops.rotary(batch, Rope((1.0,) * (turned // 2))), shape)
        else:
            x = q = ops.store_kv(batch, *parts, None, shape)
        for _ in range(attends):
            x = ops.attend(batch, q, shape)
        return ops.gather(batch, x)

    return dev.compile(body, lambda ops, x: ops.logits(x, out), limits, cache)


class Seconds(NamedTuple):
    """Of one attention over a case's step."""

    clock: float
    processors: float
    """Of all together."""
    least: float
    """What the machine needs at least."""


def seconds(case: Case, dev: CpuDevice, roofline: Roofline, types: Sequence[str]) -> dict[str, Seconds]:
    """By type of the KV cache."""
    blocks = -(-max(span.context for span in case.spans) // BLOCK)
    table = np.random.default_rng(1).permutation(len(case.spans) * blocks).astype(np.int32)
    table = table.reshape(len(case.spans), blocks)
    limits = BatchLimits(1024, len(case.spans), 1, blocks * BLOCK)
    models = {}
    for dtype in types:
        cache = dev.kv_cache(KVSpec(1, case.kv_heads, case.head_dim, dtype, BLOCK, (table.size,), (0,), case.latent))
        fill, *models[dtype] = (compile_layer(dev, case, cache, limits, n) for n in (0, 1, 1 + MORE))
        for slot, span in enumerate(case.spans):
            for end in range(span.context % 1024 or 1024, span.context + 1, 1024):
                fill.raw_logits(step(case, [(slot, Span(min(1024, end), end))], table))
    work = step(case, list(enumerate(case.spans)), table)
    best = {dtype: np.full((2, 2), np.inf) for dtype in types}
    until = time.monotonic() + len(types)
    while time.monotonic() < until:
        for dtype, pair in models.items():
            for i, model in enumerate(pair):
                began = time.perf_counter(), time.process_time()
                model.raw_logits(work)
                took = time.perf_counter() - began[0], time.process_time() - began[1]
                best[dtype][i] = np.minimum(best[dtype][i], took)
    found = {}
    for dtype, (_, many) in models.items():
        many.start_profile()
        many.raw_logits(work)
        least = sum(roofline.seconds(time) for time in many.stop_profile() if time.name.startswith("attend"))
        clock, processors = (best[dtype][1] - best[dtype][0]) / MORE
        found[dtype] = Seconds(float(clock), float(processors), least / (1 + MORE))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="float16")
    parser.add_argument("--steps", default="")
    parser.add_argument("threads", nargs="*", type=int)
    options = parser.parse_args()
    devices = {count: CpuDevice(count) for count in options.threads or [1, CpuDevice().threads]}
    rooflines = {count: dev.roofline() for count, dev in devices.items()}
    print(
        f"{'heads':>7}{'dim':>5}  {'step':32}{'cache':>10}{'threads':>8}{'ms':>9}{'GFLOP/s':>9}{'per thread':>12}"
        f"{'GB/s':>7}{'roofline':>10}"
    )
    for case in cases():
        if options.steps not in case.name:
            continue
        for count, dev in devices.items():
            found = seconds(case, dev, rooflines[count], options.types.split(","))
            for dtype, (took, processors, least) in found.items():
                heads = f"{case.heads}/{case.kv_heads}"
                name = case.name + (f", window {case.window}" if case.window else "")
                print(
                    f"{heads:>7}{case.head_dim:5}  {name:32}{dtype:>10}{count:8}{took * 1e3:9.3f}"
                    f"{case.flops() / took * 1e-9:9.1f}{case.flops() / processors * 1e-9:12.1f}"
                    f"{case.bytes(dtype) / took * 1e-9:7.1f}{least / took:10.0%}",
                    flush=True,
                )
    for count, most in rooflines.items():
        print(
            f"{count} threads at most: {most.bytes_per_second * 1e-9:.1f} GB/s, "
            f"{most.operations_per_second[0] * 1e-9:.0f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
