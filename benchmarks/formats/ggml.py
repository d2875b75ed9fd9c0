"""ggml's own quantizer, compiled from the sources in llama.cpp's package.

The functions of the `gguf` package quantize some types only, and slowly.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models.converter import SOURCES, wheel

FILES = ("ggml.c", "ggml-quants.c", "ggml-threading.cpp")
FALLBACKS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""What a matrix becomes whose rows are no whole number of blocks: as llama.cpp's llama-quant.cpp says."""

NEED_IMPORTANCE = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
"""Types that llama.cpp makes with an importance matrix only (tensor_requires_imatrix). Of some of them ggml has a way
without one, in which an error counts as much as the value's square: what is small is lost."""


class Quantizer:
    """`ggml_quantize_chunk`, without an importance matrix; where a type needs one, every input counts alike."""

    def __init__(self, folder: Path) -> None:
        """`folder` keeps the compiled library."""
        library = folder / "ggml-quantizer.so"
        if not library.exists():
            _compile(library)
        self._library = ctypes.CDLL(str(library))
        quantize = self._library.ggml_quantize_chunk
        quantize.restype = ctypes.c_size_t
        quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    def __call__(self, values: Any, kind: str) -> Any:
        """uint8 [n_out, bytes of a row] of float32 [n_out, n_in]. Raises ValueError where blocks do not fit."""
        values = np.ascontiguousarray(values, np.float32)
        said = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[said]
        n_out, n_in = values.shape
        if n_in % block:
            raise ValueError(f"a row of {n_in} elements is not a whole number of {kind} blocks ({block} elements each)")
        out = np.zeros((n_out, n_in // block * size), np.uint8)
        alike = np.ones(n_in, np.float32)
        importance = alike.ctypes.data if kind in NEED_IMPORTANCE else None

        def part(first: int) -> None:
            rows = min(64, n_out - first)
            at = out[first:].ctypes.data
            done = self._library.ggml_quantize_chunk(
                said.value, values[first:].ctypes.data, at, 0, rows, n_in, importance
            )
            assert done == rows * out.shape[1], f"ggml wrote {done} bytes of {kind}"

        part(0)  # some types make tables first
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(part, range(64, n_out, 64)))
        return out


def fitting(kind: str, n_in: int) -> str:
    """`kind`, or what llama.cpp takes in its place for rows of `n_in`."""
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return FALLBACKS[kind] if n_in % block else kind


def _compile(library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as made, zipfile.ZipFile(wheel()) as package:
        prefix = f"{SOURCES}/ggml/"
        for name in package.namelist():
            if name.startswith((f"{prefix}src/ggml", f"{prefix}include/")) and name.endswith((".h", ".c", ".cpp")):
                package.extract(name, made)
        root = Path(made) / prefix
        exported = Path(made) / "exported"
        exported.write_text("{ global: ggml_quantize_chunk; local: *; };")
        # What quantizing does not reach, backends above all, is dropped, and need not be there.
        sizes = ["-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections"]
        said = [
            "-D_GNU_SOURCE",
            '-DGGML_VERSION="0"',
            '-DGGML_COMMIT="0"',
            f"-I{root / 'include'}",
            f"-I{root / 'src'}",
        ]
        sources = [str(root / "src" / name) for name in FILES]
        script = f"-Wl,--version-script={exported}"
        target = Path(made) / library.name
        command = ["gcc", "-O3", "-w", "-shared", "-fPIC", *sizes, script, *said, *sources, "-o", str(target)]
        subprocess.run([*command, "-lm", "-lstdc++"], check=True)
        target.rename(library)
