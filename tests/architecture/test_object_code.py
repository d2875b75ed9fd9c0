"""The object code of the kernels, and samples of what must not get into it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.object_code import ROOT, WIDTHS, Function, faults, functions, main, newest_objects, shared

LOOP = """
#include <immintrin.h>
void {name}(const float* x, long n, float* out) {{
    __m256 sums[{sums}];
#pragma GCC unroll 32
    for (int i = 0; i < {sums}; ++i) sums[i] = _mm256_setzero_ps();
    for (long k = 0; k < n; ++k) {{
#pragma GCC unroll 32
        for (int i = 0; i < {sums}; ++i)
            sums[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(x + i + k), _mm256_loadu_ps(x + 8 * k), sums[i]);
    }}
#pragma GCC unroll 32
    for (int i = 0; i < {sums}; ++i) _mm256_storeu_ps(out + 8 * i, sums[i]);
}}
"""
WIDE = "#include <immintrin.h>\n__m512 twice(__m512 x) { return _mm512_add_ps(x, x); }"
MASKED = "#include <immintrin.h>\n__m256 some(__m256 x, __mmask8 m) { return _mm256_maskz_add_ps(m, x, x); }"
PLAIN = "double twice(double x) { return x + x; }"


def compiled(folder: Path, code: str, *flags: str) -> list[Function]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler, "Octavo is compiled from source here, so there is a compiler"
    (folder / "sample.cpp").write_text(code)
    command = [compiler, "-O3", *flags, "-c", "sample.cpp", "-o", "sample.o"]
    subprocess.run(command, cwd=folder, check=True)
    return [*functions(folder / "sample.o")]


def test_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
    for folder, unit in (("avx2", "linear_int8"), ("avx2", "attention"), ("", "program")):
        assert unit in newest_objects(folder)
    assert {path.parent.name for path in (ROOT / "native").glob("*/*.cpp")} <= set(WIDTHS)


def test_a_loop_that_spills(tmp_path: Path) -> None:
    found = compiled(tmp_path, LOOP.format(name="many_sums", sums=24), "-mavx2", "-mfma")
    assert [len(function.hot_loops()) for function in found] == [1]
    [told] = faults("avx2", "linear_float", found)
    assert told.startswith("native/avx2/linear_float.cpp: many_sums(") and "vectors to the stack" in told
    assert faults("avx2", "linear_float", compiled(tmp_path, LOOP.format(name="few", sums=8), "-mavx2", "-mfma")) == []


def test_what_is_allowed_is_no_more_than_that(tmp_path: Path) -> None:
    found = compiled(tmp_path, LOOP.format(name="many_sums", sums=24), "-mavx2", "-mfma")
    [spilled] = found
    few = [spilled._replace(name="some_rows<4, 4>()")]
    assert spilled.spills() > 5 and faults("avx2", "linear_int8", few)
    assert (faults("avx2", "linear_int16", few) == []) == (spilled.spills() <= 16)


@pytest.mark.parametrize(
    ("folder", "code", "flag", "wrong"),
    [
        ("avx2", WIDE, "-mavx512f", True),
        ("avx2", MASKED, "-mavx512vl", True),
        ("avx2", PLAIN, "-mavx2", False),
        ("", PLAIN, "-mavx2", True),
        ("", PLAIN, "-msse2", False),
    ],
)
def test_instructions_beyond_the_folder(tmp_path: Path, folder: str, code: str, flag: str, wrong: bool) -> None:
    told = faults(folder, "rows", compiled(tmp_path, code, flag))
    assert bool(told) == wrong and all("is beyond" in one for one in told)


def test_a_product_without_fused_multiply_adds(tmp_path: Path) -> None:
    [told] = faults("avx2", "attention", compiled(tmp_path, PLAIN, "-mavx2"))
    assert told == "native/avx2/attention.cpp: no loop has a fused multiply-add"


@pytest.mark.parametrize(("linkage", "expected"), [("inline", ["half(float)"]), ("static", [])])
def test_code_that_the_linker_may_share(tmp_path: Path, linkage: str, expected: list[str]) -> None:
    half = f"{linkage} __attribute__((noinline)) float half(float x) {{ return x / 2; }}"
    compiled(tmp_path, f"{half}\nfloat use(float x) {{ return half(x); }}")
    assert shared(tmp_path / "sample.o") == expected
