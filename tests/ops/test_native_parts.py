"""Pieces of the native module: its exponential, its random bits, its threads, and how activations are placed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice
from octavo.devices.cpu.native import load_native
from octavo.devices.cpu.recorder import Buffer, _plan
from octavo.devices.cpu.threads import allowed_cpus, cgroup_cpus
from octavo.ops.contract import uniform_bits
from tests.ops.harness import Pages, Span, compile_op, f32, random_stored


def test_exp_is_close_everywhere_and_exact_where_it_must_be() -> None:
    x = np.concatenate([np.linspace(-87.3, 88.3, 200_001), np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    out = np.empty_like(x)
    load_native().exp(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2e-7 * exact).all()
    edges = np.array([0, -0.0, -np.inf, -200, np.inf, 100, np.nan], np.float32)
    out = np.empty_like(edges)
    load_native().exp(edges, out)
    assert out[:6].tolist() == [1, 1, 0, 0, np.inf, np.inf]
    assert np.isnan(out[6])


@pytest.mark.parametrize(("seed", "choice", "position"), [(0, 0, 0), (2**64 - 1, 7, 4095), (12345, 1, 2**31 - 1)])
def test_random_bits_are_those_of_the_contract(seed: int, choice: int, position: int) -> None:
    ids = np.concatenate([np.arange(1000), [49_151, 262_143, 2**31 - 1]])
    out = np.empty(ids.size, np.uint32)
    load_native().noise_bits(seed, choice, position, ids, out)
    assert np.array_equal(out, uniform_bits(seed, choice, position, ids))


def _fake_root(tmp_path: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        ("0::/host/path\n", {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3.0),
        (
            "5:cpu,cpuacct:/x\n4:memory:/x\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "200000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2.0,
        ),
        (
            "5:cpu,cpuacct:/x\n",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_cgroup_quotas(tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None) -> None:
    assert cgroup_cpus(_fake_root(tmp_path, cgroup, files)) == expected


def test_the_thread_count_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    quota = _fake_root(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "250000 100000"})
    assert allowed_cpus(quota) == (2, "the cgroup quota is 2.5 CPUs, and the process may run on 4 CPUs")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("20000 100000")
    assert allowed_cpus(quota).threads == 1
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000")
    assert allowed_cpus(quota) == (4, "the process may run on 4 CPUs")


@pytest.mark.parametrize(
    ("allowed", "siblings", "expected"),
    [
        ({0, 1, 2, 3}, ["0,2", "1,3", "0,2", "1,3"], (2, "the process may run on 2 cores with 4 CPUs")),
        ({0, 1, 2, 3}, ["0-1", "0-1", "2-3", "2-3"], (2, "the process may run on 2 cores with 4 CPUs")),
        ({0, 1}, ["0,2", "1,3", "0,2", "1,3"], (2, "the process may run on 2 CPUs")),  # of each core one
        ({1, 3}, ["0,2", "1,3", "0,2", "1,3"], (1, "the process may run on 1 core with 2 CPUs")),
        ({3}, ["0,2", "1,3", "0,2", "1,3"], (1, "the process may run on 1 CPU")),
        ({0, 1, 2}, ["0,2", "1", "0,2"], (2, "the process may run on 2 cores with 3 CPUs")),
        ({0, 1}, ["nonsense", ""], (2, "the process may run on 2 CPUs")),
        ({0, 1}, [], (2, "the process may run on 2 CPUs")),
    ],
)
def test_hyper_threads_of_a_core_count_once(
    allowed: set[int], siblings: list[str], expected: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: allowed)
    files = {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": s + "\n" for i, s in enumerate(siblings)}
    assert allowed_cpus(_fake_root(tmp_path, "", files)) == expected


def test_a_quota_above_the_cores_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    files = {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 2},{i % 2 + 2}" for i in range(4)}
    files["sys/fs/cgroup/a/cpu.max"] = "300000 100000"
    root = _fake_root(tmp_path, "0::/a\n", files)
    assert allowed_cpus(root).threads == 2
    (root / "sys/fs/cgroup/cpu.max").write_text("150000 100000")  # of the group above
    assert allowed_cpus(root) == (
        1,
        "the cgroup quota is 1.5 CPUs, and the process may run on 2 cores with 4 CPUs",
    )


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks are Linux's")
def test_an_affinity_mask_is_respected() -> None:
    """As `taskset` sets it: the threads of the pool inherit it."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from octavo.devices.cpu.device import CpuDevice; device = CpuDevice();"
        "more = CpuDevice(3); masks = {frozenset(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')};"
        "print(device.threads, len(masks), len(next(iter(masks))))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["1", "1", "1"]


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_thread_counts_out_of_range(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        CpuDevice(threads)


def test_buffers_that_live_together_do_not_overlap() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        buffers = []
        for first in range(40):
            buffer = Buffer(int(rng.integers(0, 3)), int(rng.integers(1, 9)), 32 * int(rng.integers(1, 9)), first)
            buffer.last = first + int(rng.integers(0, 6))
            buffers.append(buffer)
        offsets, size = _plan(buffers)
        for i, a in enumerate(buffers):
            assert 0 <= offsets[id(a)] <= size - a.bytes
            assert offsets[id(a)] % 64 == 0
            for b in buffers[:i]:
                apart = a.first > b.last or b.first > a.last
                start = max(offsets[id(a)], offsets[id(b)])
                end = min(offsets[id(a)] + a.bytes, offsets[id(b)] + b.bytes)
                assert apart or start >= end
        assert size < sum(b.bytes for b in buffers)


def _two_layers(dev: CpuDevice) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    table = dev.weight([random_stored("Q8_0", 50, 64, rng)])
    weight = dev.weight([random_stored("Q4_0", 64, 64, rng)])
    pages = Pages(1, 64)

    def op(ops: Any, batch: Any) -> Any:
        x = ops.embed(batch, table, 1.0)
        return ops.linear(x, weight, None, ops.linear(x, weight, None, x))

    return compile_op(dev, op, 64, pages), pages


def test_many_python_threads_may_run_one_model() -> None:
    """Steps of several callers follow one another; each gets its own rows."""
    model, pages = _two_layers(CpuDevice(2, "int8"))
    steps = [pages.step([Span(0, 0, [i, i + 1])]) for i in range(8)]
    alone = [model.raw_logits(step) for step in steps]
    wrong: list[int] = []

    def run(i: int) -> None:
        for _ in range(50):
            if not np.array_equal(model.raw_logits(steps[i]), alone[i]):
                wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_idle_pool_sleeps() -> None:
    model, pages = _two_layers(CpuDevice(2))
    model.raw_logits(pages.step([Span(0, 0, [1])]))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.2  # a spinning worker would have used 0.4 s


def test_the_caller_keeps_its_denormals() -> None:
    model, pages = _two_layers(CpuDevice(2))
    model.raw_logits(pages.step([Span(0, 0, [1])]))
    tiny = np.full(64, 1e-40, np.float32)
    assert (tiny + tiny > 0).all()


def test_devices_come_and_go() -> None:
    """Pools end with their devices; a model keeps alive what it needs."""
    before = threading.active_count()
    for _ in range(20):
        model, pages = _two_layers(CpuDevice(3))
        assert model.raw_logits(pages.step([Span(0, 0, [1, 2])])).shape == (2, 64)
        del model
    assert threading.active_count() == before
    assert len(list(Path("/proc/self/task").iterdir())) < 40


def test_identity_is_exact_in_float32() -> None:
    dev = CpuDevice(1)
    x = np.random.default_rng(2).standard_normal((9, 40)).astype(np.float32)
    table, identity, pages = dev.weight([f32(x)]), dev.weight([f32(np.eye(40))]), Pages(1, 16)
    model = compile_op(dev, lambda ops, batch: ops.linear(ops.embed(batch, table, 1.0), identity), 40, pages)
    assert np.array_equal(model.raw_logits(pages.step([Span(0, 0, range(9))])), x)
