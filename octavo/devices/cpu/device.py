"""The native CPU device: weights in packed panels, a step in one native call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from octavo.devices.cpu.native import load_native
from octavo.devices.cpu.nodes import share_threads
from octavo.devices.cpu.recorder import PANEL, Activations, CpuArray, CpuWeight, Recorder, row_vector
from octavo.devices.cpu.threads import AllowedCpus, allowed_cpus
from octavo.ops.check import check_batch, check_cache, check_copies, check_parts, check_sampling
from octavo.ops.contract import (
    F32,
    I32,
    BatchArrays,
    BatchLimits,
    Drawn,
    KVScales,
    KVSpec,
    OpTime,
    Roofline,
    Sampling,
    Stored,
)
from octavo.quant import in_order, multiplied_as, rewritten
from octavo.quant.slabs import each_slab, slab_rows

HEAD_ROWS = 32
"""Rows of logits in memory at a time."""


class CpuDevice:
    """`Device` of the contract on `threads` threads (worker 0 is the caller); None takes all that are allowed.

    On a machine of several NUMA nodes the threads are bound to these, and each node's threads own a share of every
    matrix, which lies in the node's memory. `nodes` states the node of each thread, from 0 on, instead: nothing is
    bound then, and the machine need not have them (tests).

    `activations` fixes how the inputs of products are rounded: "float32" not at all; "int16", where weights are
    quantized to integers, to 16 bits per row; "bfloat16" like that, and where weights are bfloat16 to bfloat16, but for
    logits; "int8" like that, and where weights have 2 to 6 bits to 8 bits in groups of 32, but for logits. Raises
    DeviceUnavailable where the native kernels cannot run.
    """

    name = "cpu"

    def __init__(
        self, threads: int | None = None, activations: Activations = "float32", nodes: Sequence[int] | None = None
    ) -> None:
        if activations not in get_args(Activations):
            raise ValueError(f"activations {activations!r} must be one of {', '.join(get_args(Activations))}")
        self.activations = activations
        self.native: Any = load_native()
        allowed = allowed_cpus() if threads is None else AllowedCpus(threads, "it was asked for")
        self.threads = allowed.threads
        used = [node for node in share_threads(self.threads) if node.threads]
        self.memory_nodes: list[int] = []
        """The system's numbers of the nodes whose memory is used; empty where it has but one."""
        if nodes is not None:
            self.pool = self.native.Pool(self.threads, list(nodes))
        elif len(used) > 1:
            self.memory_nodes = [node.number for node in used]
            of_each = [i for i, node in enumerate(used) for _ in range(node.threads)]
            self.pool = self.native.Pool(self.threads, of_each, [node.cpus for node in used])
        else:
            self.pool = self.native.Pool(self.threads)
        noun = "thread" if self.threads == 1 else "threads"
        shares = ", ".join(f"{node.threads} on node {node.number}" for node in used)
        self.notes: tuple[str, ...] = (
            f"{self.threads} {noun} because {allowed.reason}",
            *([f"threads of the NUMA nodes: {shares}"] if self.memory_nodes else []),
            f"{self.native.kernels()} kernels",
        )
        """What start-up should say about the device."""
        self.store = self.native.Store()
        self.weight_bytes = 0
        """Size of all weights packed so far."""

    def weight(self, parts: list[Stored]) -> CpuWeight:
        """Pack on all threads, straight from the checkpoint's bytes. Raises ValueError for data that does not fit."""
        check_parts(parts)
        columns = parts[0].columns
        if any(part.columns is not columns and not _same(part.columns, columns) for part in parts):
            # A product takes its input in one order. Only these parts are expanded.
            parts, columns = [in_order(part) for part in parts], None
        kinds = tuple(multiplied_as(part.kind) for part in parts)
        shapes = [(kind, part.n_out) for kind, part in zip(kinds, parts, strict=True)]
        packed = self.native.allocate(self.pool, self.store, shapes, parts[0].n_in)
        for i, part in enumerate(parts):
            if kinds[i] == part.kind:
                self.native.pack(self.pool, packed, i, 0, part)
            else:
                self._rewrite(packed, i, part)
        self.weight_bytes += packed.bytes
        return CpuWeight(packed, kinds, columns)

    def _rewrite(self, packed: Any, i: int, part: Stored) -> None:
        """Pack a part in the format it is multiplied in: slab by slab, so that the memory it takes is bounded."""
        self.native.touch_pages(self.pool, packed, i)
        step = slab_rows(part.n_in, PANEL)

        def pack(start: int) -> None:
            data = part.data[start : start + step]
            slab = rewritten(part._replace(n_out=len(data), data=data))
            # Each slab on its own thread: together they would meet at a barrier after every one.
            self.native.pack(self.native.Pool(1), packed, i, start, slab)

        each_slab(pack, part.n_out, step, self.threads)

    def vector(self, values: F32) -> F32:
        return row_vector(values)

    def dense(self, weight: CpuWeight) -> F32:
        """[n_out, n_in]: the exact values of a packed weight (tests, export)."""
        out = np.empty((weight.n_out, weight.n_in), np.float32)
        self.native.unpack(self.pool, weight.packed, out)
        if weight.columns is not None:
            out[:, weight.columns] = out.copy()
        return out

    def kv_cache(self, spec: KVSpec) -> CpuCache:
        """Zero-filled; memory is taken as blocks are first written, from all nodes in turn. Raises MemoryError."""
        check_cache(spec)
        ones = KVScales((1.0,) * spec.kv_heads, (1.0,) * spec.kv_heads)
        native = self.native.KVCache(
            spec.kv_heads,
            spec.head_dim,
            spec.latent,
            spec.dtype,
            spec.block_size,
            spec.blocks,
            spec.group_of,
            [[*own.k, *own.v] for own in spec.scales or (ones,) * spec.layers],
            self.memory_nodes,
        )
        return CpuCache(spec, native)

    def compile(self, body: Any, head: Any, limits: BatchLimits, cache: CpuCache) -> CpuModel:
        """Record both functions and allocate everything a step within `limits` needs."""
        recorder = Recorder(
            self.activations, limits.tokens, cache.spec, cache.native, limits.rows, limits.max_model_len
        )
        hidden = body(recorder, None)
        body_program, body_offset = recorder.build(self.native, self.pool, hidden)

        head_rows = min(HEAD_ROWS, max(1, limits.rows))
        head_recorder = Recorder(self.activations, head_rows, cache.spec, cache.native)
        x = head_recorder.input(hidden.width)
        logits: CpuArray = head(head_recorder, x)
        head_program, head_offset = head_recorder.build(self.native, self.pool, logits)
        model = self.native.Model(
            self.pool,
            cache.native,
            body_program,
            head_program,
            body_offset(hidden.floats),
            head_offset(x.floats),
            head_offset(logits.floats),
            hidden.width,
            logits.width,
            limits.tokens,
            head_rows,
        )
        return CpuModel(self, model, limits, cache, recorder.vocab or np.iinfo(np.int32).max, logits.width)

    def roofline(self) -> Roofline:
        """Of all threads together, measured now: a second or two, on a machine that should be quiet."""
        return Roofline(*self.native.measure_roofline(self.pool))


def _same(first: I32 | None, second: I32 | None) -> bool:
    return first is not None and second is not None and np.array_equal(first, second)


class CpuCache:
    """The paged KV cache of a model."""

    def __init__(self, spec: KVSpec, native: Any) -> None:
        self.spec = spec
        self.native = native

    @property
    def bytes(self) -> int:
        """Address space; memory is used as blocks are written."""
        return int(self.native.bytes)


class CpuModel:
    """`CompiledModel` of the contract: each method is one native call, with the GIL released."""

    def __init__(
        self, device: CpuDevice, model: Any, limits: BatchLimits, cache: CpuCache, vocab_in: int, vocab_out: int
    ) -> None:
        self.device = device
        self.model = model
        self.limits = limits
        self.cache = cache
        self.vocab_in = vocab_in
        self.vocab_out = vocab_out

    @property
    def bytes(self) -> int:
        """Memory of activations and scratch."""
        return int(self.model.bytes)

    def run(self, batch: BatchArrays, sampling: Sampling) -> Drawn:
        """Raises ValueError when an array is not what the contract says; nothing is written then."""
        batch = self._checked(batch)
        rows = batch.rows.size
        check_sampling(sampling, rows, self.vocab_out)
        width = max(0, int(sampling.logprobs.max(initial=0)))
        drawn = Drawn(
            token=np.full(rows, -1, np.int32),
            logprob=np.zeros(rows, np.float32),
            rank=np.zeros(rows, np.int32),
            top_ids=np.full((rows, width), -1, np.int32),
            top_logprobs=np.zeros((rows, width), np.float32),
            ok=np.zeros(rows, np.uint8),
            report_logprobs=np.zeros(sampling.report_ids.size, np.float32),
        )
        self.model.run(batch, sampling, drawn)
        return drawn

    def raw_logits(self, batch: BatchArrays) -> F32:
        """[R, V] float32. Raises as `run` does."""
        batch = self._checked(batch)
        out = np.empty((batch.rows.size, self.vocab_out), np.float32)
        self.model.raw_logits(batch, out)
        return out

    def copy_blocks(self, group: int, pairs: I32) -> None:
        check_copies(pairs, group, self.cache.spec)
        self.device.native.copy_blocks(self.cache.native, group, np.ascontiguousarray(pairs))

    def start_profile(self) -> None:
        self.model.start_profile()

    def stop_profile(self) -> list[OpTime]:
        return [OpTime(*entry) for entry in self.model.stop_profile()]

    def roofline(self) -> Roofline:
        return self.device.roofline()

    def _checked(self, batch: BatchArrays) -> BatchArrays:
        check_batch(batch, self.limits, self.cache.spec, self.vocab_in)
        # Native code keeps pointers for the time of the call: no conversion may happen on the way.
        return batch._replace(tables=tuple(np.ascontiguousarray(table) for table in batch.tables))
