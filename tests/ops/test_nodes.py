"""NUMA nodes: which there are, how threads are shared among them, who owns which panels, and that it changes no bit.
The machine need not have them: a pool takes the node of each worker as it is told."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice
from octavo.devices.cpu.native import load_native
from octavo.devices.cpu.nodes import Node, share_threads
from octavo.ops.contract import I32, KVSpec, Router
from octavo.quant import multiplied_as
from tests.ops.harness import Pages, Span, compile_op, f32, random_stored, rowwise

PLACEMENTS = [(0, 1), (0, 0, 0, 1), (1, 1), (0, 1, 2, 1, 0), (1, 0, 1)]
"""The node of each worker; node 0 of the third has none."""


def _machine(tmp_path: Path, nodes: dict[int, str], siblings: dict[int, str] | None = None) -> Path:
    files = {f"sys/devices/system/node/node{number}/cpulist": cpus + "\n" for number, cpus in nodes.items()}
    for cpu, text in (siblings or {}).items():
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = text
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("nodes", "allowed", "threads", "expected"),
    [
        ({0: "0-3", 1: "4-7"}, range(8), 8, [4, 4]),
        ({0: "0-3", 1: "4-7"}, range(8), 4, [2, 2]),
        ({0: "0-3", 1: "4-7"}, range(8), 3, [2, 1]),
        ({0: "0-3", 1: "4-7"}, range(8), 1, [1, 0]),
        ({0: "0,2,4", 1: "1"}, (0, 1, 2, 4), 4, [3, 1]),
        ({0: "0-3", 1: "4-7"}, (1, 2, 5), 3, [2, 1]),
        ({0: "0-3", 1: "4-7"}, (4, 5), 2, [0, 2]),  # the mask excludes node 0
        ({0: "0-3", 1: ""}, range(4), 4, [4, 0]),  # memory without CPUs
        ({2: "0-1", 10: "2-3"}, range(4), 16, [8, 8]),
        ({0: "0-1"}, range(2), 2, [2]),
        ({0: "0-1", 1: "2-3"}, range(5), 4, None),  # CPU 4 is on no node
        ({0: "nonsense"}, range(2), 2, None),
        ({}, range(2), 2, None),
    ],
)
def test_threads_are_shared_by_the_cores_of_each_node(
    nodes: dict[int, str],
    allowed: Sequence[int],
    threads: int,
    expected: list[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(allowed))
    found = share_threads(threads, _machine(tmp_path, nodes))
    assert [node.threads for node in found] == (expected or [])
    if expected is not None:
        assert [node.number for node in found] == sorted(nodes)
        assert sorted(cpu for node in found for cpu in node.cpus) == sorted(allowed)


def test_hyper_threads_of_a_node_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 has two cores with two hyper-threads each, node 1 two cores with one."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    root = _machine(tmp_path, {0: "0-3", 1: "4-5"}, {0: "0,1", 1: "0,1", 2: "2,3", 3: "2,3", 4: "4", 5: "5"})
    assert share_threads(4, root) == [Node(0, (0, 1, 2, 3), 2), Node(1, (4, 5), 2)]


def _trace(
    nodes: Sequence[int], starts: Sequence[int], times: int = 1, local: bool = False, absent: Sequence[int] = ()
) -> I32:
    """[times, items, 3]: who did each item, after how many others, how often it was done."""
    native = load_native()
    out = np.zeros((times * starts[-1], 3), np.int32)
    native.trace_phase(native.Pool(len(nodes), list(nodes)), list(starts), times, local, list(absent), out)
    return out.reshape(times, starts[-1], 3)


def _owner(starts: Sequence[int]) -> I32:
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))


STARTS = [(0, 40, 64), (0, 0, 9), (0, 9, 9), (0, 0, 0), (0, 1, 2)]


@pytest.mark.parametrize("absent", [(), (1,), (0, 2)])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("times", [1, 3])
def test_workers_take_what_their_node_owns_before_they_help(
    starts: Sequence[int], times: int, absent: Sequence[int]
) -> None:
    nodes = (0, 1, 0)
    for _ in range(20):
        out = _trace(nodes, starts, times, absent=absent)
        assert (out[..., 2] == 1).all()
        assert not np.isin(out[..., 0], absent).any()
        assert sorted(out[..., 1].ravel().tolist()) == list(range(times * starts[-1]))
        owner = np.broadcast_to(_owner(starts), out.shape[:2])
        for worker, node in enumerate(nodes):
            mine = out[..., 0] == worker
            own, others = out[mine & (owner == node), 1], out[mine & (owner != node), 1]
            assert not own.size or not others.size or own.max() < others.min()


def test_an_idle_node_s_items_are_done_by_others_last() -> None:
    """Worker 0, alone, does those of its node, then those of nodes 2 and 0, each in order."""
    starts = (0, 3, 5, 9)
    out = _trace((1, 0, 2), starts, 2, absent=(1, 2))
    assert (out[..., 0] == 0).all() and (out[..., 2] == 1).all()
    items = np.argsort(out[..., 1], axis=None) % starts[-1]
    assert items.tolist() == [3, 4, 3, 4, 5, 6, 7, 8, 5, 6, 7, 8, 0, 1, 2, 0, 1, 2]


def test_nobody_helps_with_what_is_local() -> None:
    for _ in range(20):
        out = _trace((0, 1, 0), (0, 40, 64), local=True)
        assert (out[..., 2] == 1).all()
        assert np.isin(out[0, :40, 0], (0, 2)).all() and (out[0, 40:, 0] == 1).all()
    out = _trace((0, 1, 0), (0, 40, 64), local=True, absent=(1,))
    assert (out[0, :40, 2] == 1).all() and (out[0, 40:, 2] == 0).all()


@pytest.mark.parametrize(
    ("nodes", "n_outs", "expected"),
    [
        ((0, 1), (256, 128), [(0, 0), (128, 1), (256, 0), (320, 1)]),
        ((0, 0, 0, 1), (256, 100), [(0, 0), (192, 1), (256, 0), (352, 1)]),
        ((0, 1), (83,), [(0, 0), (32, 1)]),
        ((0, 1), (20,), [(0, 1)]),  # fewer panels than nodes
        ((0, 1, 2), (64,), [(0, 1), (32, 2)]),
        ((1, 1), (256,), [(0, 1)]),
        ((0, 0), (256, 128), [(0, 0), (256, 0)]),
    ],
)
def test_nodes_own_ranges_of_panels_in_proportion_to_their_workers(
    nodes: Sequence[int], n_outs: Sequence[int], expected: list[tuple[int, int]]
) -> None:
    native = load_native()
    pool, store = native.Pool(len(nodes), list(nodes)), native.Store()
    weight = native.allocate(pool, store, [("Q4_0", n_out) for n_out in n_outs], 64)
    assert weight.owners == expected
    assert weight.n_out == sum(n_outs)


@pytest.mark.parametrize("nodes", PLACEMENTS)
def test_panels_are_packed_on_the_node_that_owns_them(nodes: Sequence[int]) -> None:
    """All at once, and in slabs that begin and end anywhere."""
    native, rng = load_native(), np.random.default_rng(0)
    pool = native.Pool(len(nodes), list(nodes))
    parts = [random_stored("Q8_0", 300, 64, rng), random_stored("Q4_0", 77, 64, rng)]
    weight = native.allocate(pool, native.Store(), [(part.kind, part.n_out) for part in parts], 64)
    firsts, owners = (np.array(column) for column in zip(*weight.owners, strict=True))
    for i, (part, before) in enumerate(zip(parts, (0, 300), strict=True)):
        for start, end in ((0, 40), (40, 240), (240, 248), (248, 300)) if i == 0 else ((0, 77),):
            packers = np.full(-(-(end - start) // 8), -1, np.int32)
            slab = part._replace(n_out=end - start, data=part.data[start:end])
            native.pack(pool, weight, i, start, slab, packers)
            rows = before + start + 8 * np.arange(packers.size)
            wanted = owners[np.searchsorted(firsts, rows, side="right") - 1]
            assert (np.array(nodes)[packers] == wanted).all()
    out, one = np.empty((377, 64), np.float32), CpuDevice(1)
    native.unpack(pool, weight, out)
    assert np.array_equal(out, one.dense(one.weight(parts)))


def test_a_part_beyond_the_weight_is_refused() -> None:
    native = load_native()
    pool, stored = native.Pool(2, [0, 1]), random_stored("Q8_0", 64, 64, np.random.default_rng(0))
    weight = native.allocate(pool, native.Store(), [("Q8_0", 64)], 64)
    for part, first_row in ((1, 0), (-1, 0), (0, 8), (0, 64)):
        with pytest.raises(ValueError, match="not in the weight"):
            native.pack(pool, weight, part, first_row, stored)
    with pytest.raises(ValueError, match="packers"):
        native.pack(pool, weight, 0, 0, stored, np.zeros(9, np.int32))


@pytest.mark.parametrize("nodes", [(0,), (0, -1), (0, 2), (0, 0, 1)])
def test_nodes_that_are_not_one_for_each_thread(nodes: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="nodes"):
        CpuDevice(2, nodes=nodes)


@pytest.mark.parametrize("kind", ["Q4_0", "IQ2_S", "TQ2_0", "F16"])
def test_rewritten_and_plain_weights_hold_the_same_values(kind: str) -> None:
    """Some formats are packed slab by slab by threads of no node, into pages that their nodes have touched."""
    stored = [random_stored(kind, 1100 if kind != multiplied_as(kind) else 200, 512, np.random.default_rng(1))]
    one, two = CpuDevice(1), CpuDevice(3, nodes=(0, 1, 1))
    assert np.array_equal(two.dense(two.weight(stored)), one.dense(one.weight(stored)))


def _bits(values: Any) -> Any:
    return values.view(np.uint32)


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("op", ["linear", "gated", "headwise", "moe", "embed"])
def test_bits_do_not_depend_on_nodes(op: str, activations: Any) -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((150, 256)).astype(np.float32)  # more rows than a work item has
    several = [random_stored(kind, n, 256, rng) for kind, n in (("Q4_0", 200), ("Q8_0", 24), ("F16", 83))]
    gate_up = [random_stored("Q4_K", 96, 256, rng) for _ in range(2)]
    uneven = [random_stored("Q4_0", 100, 256, rng) for _ in range(2)]  # the second half begins within a panel
    heads = random_stored("F32", 4 * 72, 64, rng)
    logits = rng.standard_normal((150, 6)).astype(np.float32)
    experts = [
        # One half, as two parts, is cut elsewhere than as one.
        ([random_stored("Q4_0", n, 256, rng) for n in ((64, 32, 96) if e % 2 else (96, 96))], ("Q4_0", "Q8_0")[e % 2])
        for e in range(6)
    ]
    downs = [[random_stored(kind, n, 96, rng) for n in ((40, 60) if kind == "Q8_0" else (100,))] for _, kind in experts]

    def computed(dev: CpuDevice) -> Any:
        if op == "linear":
            weight = dev.weight(several)
            return rowwise(dev, lambda ops, batch, x: ops.linear(x, weight), 307, x)
        if op == "gated":
            one, two = dev.weight(gate_up), dev.weight(uneven)
            first = rowwise(dev, lambda ops, batch, x: ops.gated(x, one, "silu"), 96, x)
            return np.hstack([first, rowwise(dev, lambda ops, batch, x: ops.gated(x, two, "silu"), 100, x)])
        if op == "headwise":
            weight = dev.weight([heads])
            return rowwise(dev, lambda ops, batch, x: ops.headwise(x, weight, 4), 288, x)
        if op == "embed":
            table, pages = dev.weight([several[0]]), Pages(1, 208)
            model = compile_op(dev, lambda ops, batch: ops.embed(batch, table, 1.0), 256, pages)
            return model.raw_logits(pages.step([Span(0, 0, range(200))]))
        first = tuple(dev.weight(parts) for parts, _ in experts)
        second, scores = tuple(dev.weight(parts) for parts in downs), dev.weight([f32(logits)])

        def mixture(ops: Any, batch: Any, x: Any) -> Any:
            return ops.moe(x, ops.embed(batch, scores, 1.0), first, second, Router(2), "silu")

        return rowwise(dev, mixture, 100, x)

    wanted = _bits(computed(CpuDevice(1, activations)))
    for nodes in PLACEMENTS:
        assert np.array_equal(_bits(computed(CpuDevice(len(nodes), activations, nodes))), wanted), nodes


def _may_place_memory() -> bool:
    """Whether mbind(2) works: some containers forbid it."""
    libc, page, mask = ctypes.CDLL(None), mmap.mmap(-1, mmap.PAGESIZE), ctypes.c_ulong(1)
    at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    mbind, interleave, size = 237, 3, ctypes.c_ulong(mmap.PAGESIZE)
    asked = libc.syscall(mbind, at, size, interleave, ctypes.byref(mask), ctypes.c_ulong(65), 0)
    return bool(asked == 0) and Path("/proc/self/numa_maps").exists()


def test_memory_that_all_read_is_spread_over_the_nodes() -> None:
    """The kernel's own word for the pages of a KV cache."""

    def spread() -> int:
        return len(re.findall(r" interleave:0\b", Path("/proc/self/numa_maps").read_text()))

    if not _may_place_memory():
        pytest.skip("the system does not let a process say where its memory is")
    dev, spec, before = CpuDevice(1), KVSpec(1, 1, 32, "float32", 16, (4096,), (0,)), spread()
    first_touched = dev.kv_cache(spec)
    assert spread() == before
    dev.memory_nodes = [0]
    spread_out = dev.kv_cache(spec)
    assert spread() == before + 1
    del first_touched, spread_out


def test_workers_and_callers_are_bound_while_they_compute() -> None:
    """To the CPUs of their node; the caller is let go afterwards."""
    mask = os.sched_getaffinity(0)
    known = {int(task) for task in os.listdir("/proc/self/task")}
    native = load_native()
    pool = native.Pool(3, [0, 1, 1], [[min(mask)], [max(mask)]])
    native.trace_phase(pool, [0, 1, 2], 1, False, [], np.zeros((2, 3), np.int32))
    workers = {int(task) for task in os.listdir("/proc/self/task")} - known
    assert [os.sched_getaffinity(worker) for worker in workers] == [{max(mask)}] * 2
    assert os.sched_getaffinity(0) == mask


def test_a_machine_of_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, matrices and the KV cache of a device follow the nodes that the system tells of."""
    cpus = tuple(os.sched_getaffinity(0))
    monkeypatch.setattr(
        "octavo.devices.cpu.device.share_threads",
        lambda threads: [Node(0, cpus, 3), Node(4, (), 0), Node(7, cpus, 1)],
    )
    dev = CpuDevice(4)
    assert dev.notes[1] == "threads of the NUMA nodes: 3 on node 0, 1 on node 7"
    assert dev.memory_nodes == [0, 7] and dev.pool.nodes == 2
    weight = dev.weight([random_stored("Q4_0", 256, 64, np.random.default_rng(0))])
    assert weight.packed.owners == [(0, 0), (192, 1)]
    monkeypatch.setattr("octavo.devices.cpu.device.share_threads", lambda threads: [Node(0, cpus, 4), Node(1, (), 0)])
    alone = CpuDevice(4)
    assert (alone.pool.nodes, alone.memory_nodes, len(alone.notes)) == (1, [], 2)
