"""Tiers of native kernels: which one a CPU gets, and that all that is computed has the same bits in all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from octavo.devices import DeviceUnavailable
from octavo.devices.cpu.device import CpuDevice
from octavo.devices.cpu.native import load_native
from octavo.devices.cpu.recorder import Activations
from octavo.ops.contract import F32, KV_TYPES, Activation
from octavo.quant import KINDS
from tests.ops.harness import Pages, Span, attention_model, compile_op, f32, random_stored, rowwise
from tests.ops.test_attention_ops import Case

ROOT = Path(__file__).parents[2]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 25, 130)
"""Every number of rows that has code of its own, and some that are cut into several of these."""

LEAF0_EBX = {"AMD": 0x68747541}
LEAF1_ECX = {"FMA": 1 << 12, "XSAVE": 1 << 27, "F16C": 1 << 29}
LEAF7_EBX = {
    **{"AVX2": 1 << 5, "BMI2": 1 << 8, "AVX-512 F": 1 << 16, "AVX-512 DQ": 1 << 17},
    **{"AVX-512 BW": 1 << 30, "AVX-512 VL": 1 << 31},
}
LEAF7_ECX = {"AVX-512 VNNI": 1 << 11}
LEAF7_1_EAX = {"AVX-512 BF16": 1 << 5}
XCR0 = {"SSE state": 1 << 1, "AVX state": 1 << 2, "masks": 1 << 5, "upper halves": 1 << 6, "upper registers": 1 << 7}
WORDS = (LEAF0_EBX, LEAF1_ECX, LEAF7_EBX, LEAF7_ECX, LEAF7_1_EAX, XCR0)
EVERYTHING = {name for words in WORDS for name in words}
FOR_AVX2 = {"FMA", "F16C", "AVX2", "BMI2", "SSE state", "AVX state"}
FOR_AVX512 = EVERYTHING - {"AMD", "AVX-512 BF16"}


def chosen(features: set[str], wanted: str = "") -> str:
    """The tier that a CPU with these features gets."""
    words = [sum(words[name] for name in features & words.keys()) for words in WORDS]
    return str(load_native().choose_kernels(*words, wanted))


def test_the_fastest_tier_that_the_cpu_has() -> None:
    assert chosen(EVERYTHING) == "avx512bf16"
    assert chosen(FOR_AVX512) == "avx512"
    assert chosen(FOR_AVX2) == "avx2"
    for missing in EVERYTHING - FOR_AVX512:  # multiply-adds of bfloat16 are slow on the processors of others than AMD
        assert chosen(EVERYTHING - {missing}) == "avx512", missing
    for missing in FOR_AVX512 - FOR_AVX2 - {"XSAVE"}:
        assert chosen(EVERYTHING - {missing}) == "avx2", missing
    for missing in FOR_AVX2:
        with pytest.raises(RuntimeError, match="this CPU lacks .*, which the kernels called avx2 need"):
            chosen(EVERYTHING - {missing})


def test_a_tier_that_was_asked_for() -> None:
    assert chosen(EVERYTHING, "avx2") == "avx2"
    assert chosen(EVERYTHING, "avx512") == "avx512"
    assert chosen(EVERYTHING - {"AMD"}, "avx512bf16") == "avx512bf16"
    with pytest.raises(RuntimeError, match="this CPU lacks AVX-512 BF16, which the kernels called avx512bf16 need"):
        chosen(FOR_AVX512, "avx512bf16")
    with pytest.raises(RuntimeError, match="this CPU lacks AVX-512 VNNI, which the kernels called avx512 need"):
        chosen(EVERYTHING - {"AVX-512 VNNI"}, "avx512")
    with pytest.raises(RuntimeError, match="lacks operating-system support for AVX-512, which"):
        chosen(EVERYTHING - {"masks"}, "avx512")
    with pytest.raises(RuntimeError, match="there are no kernels called 'sse'; there are avx2, avx512, avx512bf16"):
        chosen(EVERYTHING, "sse")


def in_tier(tier: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, and the kernels of `tier`."""
    environment = {**os.environ, "OCTAVO_CPU_KERNELS": tier}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


LOAD = "from octavo.devices.cpu.native import load_native; print(load_native().kernels())"


def test_the_environment_chooses() -> None:
    assert in_tier("avx2", "-c", LOAD).stdout == "avx2\n"
    assert in_tier("", "-c", LOAD).stdout == f"{load_native().kernels()}\n"
    failed = in_tier("avx3", "-c", LOAD)
    assert f"{DeviceUnavailable.__name__}: OCTAVO_CPU_KERNELS=avx3 cannot be used: there are no" in failed.stderr


def products() -> dict[str, F32]:
    """Of every kind of weights and of activations: random rows, each number of them on its own, times a matrix whose
    last panel has no neighbour; and with more columns than a pass over them takes, the last of which is shorter and, of
    floats, ends within a cell, or does not."""
    rng = np.random.default_rng(0)
    found: dict[str, F32] = {}
    for kind, n_in in (*((kind, 1792) for kind in KINDS), *((kind, 1797) for kind in KINDS if KINDS[kind][0] == 1)):
        n_out = 83
        stored, x = random_stored(kind, n_out, n_in, rng), rng.standard_normal((max(ROWS), n_in), np.float32)
        for activations in get_args(Activations):
            dev, pages = CpuDevice(1, activations), Pages(1, 144)
            weight, table = dev.weight([stored]), dev.weight([f32(x)])
            model = compile_op(
                dev,
                lambda ops, batch, w=weight, t=table: ops.linear(ops.embed(batch, t, 1.0), w),
                n_out,
                pages,
            )
            for rows in ROWS:
                found[f"{kind} {n_in} {activations} {rows}"] = model.raw_logits(pages.step([Span(0, 0, range(rows))]))
    return found


def attention() -> dict[str, F32]:
    """Of every type of the cache, scaled, windowed, latent or not: 600 tokens at once, whose keys and values are
    copied, then 1, 2, 3 and 13, which read them in place; heads that fill no whole vector among them."""
    found: dict[str, F32] = {}
    cuts = (0, 600, 601, 603, 606, 619)
    for dtype in KV_TYPES:
        plain = Case(9, 3, 64, 0, 0.0, 16, dtype)
        for case in (
            plain._replace(scaled=dtype.startswith("fp8")),
            plain._replace(head_dim=104),  # of few rows, four vectors, then two, then the half of one
            plain._replace(heads=8, kv_heads=1, head_dim=120, window=300, softcap=20.0, block_size=32, sunk=True),
            plain._replace(heads=5, kv_heads=1, head_dim=44, latent=38, alibi=0.1),
        ):
            qkv, pages = case.qkv(cuts[-1]), Pages(1, cuts[-1], case.block_size)
            model = attention_model(CpuDevice(1), qkv, case.shape(), pages, dtype, case.sinks(), case.scales())
            for start, end in zip(cuts[:-1], cuts[1:], strict=True):
                found[f"{case} {start}"] = model.raw_logits(pages.step([Span(0, start, range(start, end))]))
    return found


def single_rows() -> dict[str, F32]:
    """Norms, activations and what compares rows, of widths that fill no whole vector among them, and gated products
    whose results are packed to each kind of activations; values from tiny to large."""
    rng = np.random.default_rng(1)
    found: dict[str, F32] = {}
    for width in (5, 40, 64, 577):
        dev = CpuDevice(1)
        x = (rng.standard_normal((4, width)) * [[1e-30], [0.1], [4.0], [1e4]]).astype(np.float32)
        like = dev.weight([f32(rng.standard_normal((4, width)))])
        weight, bias = (dev.vector(rng.standard_normal(width).astype(np.float32)) for _ in range(2))
        xielu = dev.vector(np.array([0.8, 0.6, 0.5, -1e-6], np.float32))
        ops: dict[str, Callable[[Any, Any, Any], Any]] = {
            "norm": lambda ops, batch, x, w=weight: ops.norm(x, w, 1e-5),
            "layer norm": lambda ops, batch, x, w=weight, b=bias: ops.norm(x, w, 1e-5, x, bias=b, center=True),
            "match_rms": lambda ops, batch, x, t=like: ops.match_rms(x, ops.embed(batch, t, 1.0), 1e-5),
            "keep_top": lambda ops, batch, x: ops.keep_top(x, 0.5),
            "add": lambda ops, batch, x, t=like: ops.add(x, ops.embed(batch, t, 1.0), 0.7),
        }
        for kind in set(get_args(Activation)) - {"swiglu_oai"}:
            parameters = xielu if kind == "xielu" else None
            ops[kind] = lambda ops, batch, x, k=kind, p=parameters: ops.activate(x, k, p)
        for name, op in ops.items():
            found[f"{name} {width}"] = rowwise(dev, op, width, x)
    x = (rng.standard_normal((5, 64)) * [[1e-30], [0.1], [1.0], [4.0], [30.0]]).astype(np.float32)
    for activations in get_args(Activations):
        dev = CpuDevice(1, activations)
        up, down = dev.weight([random_stored("Q4_0", 192, 64, rng)]), dev.weight([random_stored("Q4_0", 40, 96, rng)])
        for kind in ("silu", "gelu_tanh", "swiglu_oai"):
            found[f"gated {kind} {activations}"] = rowwise(
                dev, lambda ops, batch, x, k=kind, u=up, d=down: ops.linear(ops.gated(x, u, k), d), 40, x
            )
    return found


TIERS = ("avx2", "avx512", "avx512bf16")
BELOW = TIERS[: TIERS.index(load_native().kernels())]
needs_two = pytest.mark.skipif(not BELOW, reason="this CPU, or the environment, has one tier")


@needs_two
@pytest.mark.parametrize("results", [products, attention, single_rows])
def test_the_bits_are_the_same_in_all_tiers(tmp_path: Path, results: Callable[[], dict[str, F32]]) -> None:
    name, fast = results.__name__, results()
    assert fast and all(np.isfinite(values).all() for values in fast.values())
    for tier in BELOW:
        path = str(tmp_path / f"{tier}.npz")
        code = f"import numpy; from tests.ops.test_native_tiers import {name}; numpy.savez({path!r}, **{name}())"
        done = in_tier(tier, "-c", code)
        assert done.returncode == 0, done.stderr
        slow = np.load(path)
        for case, values in fast.items():
            assert np.array_equal(values.view(np.uint32), slow[case].view(np.uint32)), (tier, case)


@needs_two
@pytest.mark.parametrize("tier", BELOW)
def test_the_tiers_below_pass_their_tests_on_this_cpu(tier: str) -> None:
    names = ("integers", "bfloat16", "attention", "parts", "sampling")
    done = in_tier(tier, "-m", "pytest", "-q", *(f"tests/ops/test_native_{name}.py" for name in names))
    assert done.returncode == 0, done.stdout[-4000:]
