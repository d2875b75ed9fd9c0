"""What the compiler made of the kernels, read from a disassembly of the newest objects under build/.

    python -m tests.architecture.object_code

A loop that is there for multiply-adds must keep its vectors in registers, one that reads weights for few rows must ask
for them ahead, an object must have no instruction that the processors it is for do not know, and none may lend such
code to other objects. Tells what is wrong, and ends with status 1 then.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FUNCTION = re.compile(r"[0-9a-f]+ <(.+)>:$")
_LINE = re.compile(r" *([0-9a-f]+):\t(?:\{\w+\} )?(\S+)\s*(.*)$")
_STACK = re.compile(r",-?(?:0x[0-9a-f]+)?\(%r(sp|bp)\)$")
_SYMBOL = re.compile(r"[0-9a-f]+ (\w) (.+)$")
_VECTOR = re.compile(r"%[xyz]mm\d")
_JUMPS = ("j", "loop")
MULTIPLY_ADDS = ("vfmadd", "vfnmadd", "vpmadd", "vpdp", "vdpbf")
"""How the instructions begin that a hot loop is there for."""

ROOT = Path(__file__).parents[2]

WIDTHS = {"": 128, "avx2": 256, "avx512": 512, "avx512bf16": 512}
"""Folders under native/, and the bits of a register that instructions of their objects may use."""

PRODUCTS = ("attention", "linear_bfloat16", "linear_float", "linear_int16", "linear_int8")
"""Units that must have hot loops."""


READERS = ("linear_int16", "linear_int8")
"""Units whose loops over few rows wait for memory, unless they ask for what they will read."""


class Allowed(NamedTuple):
    """Vectors that hot loops of the functions with `functions` in their names may write to the stack."""

    folder: str
    unit: str
    functions: str
    most: int


SPILLS = (
    # A cell of less than 8 bits is unpacked to a buffer of 16 vectors; few rows of 8 bits keep up to 4 sums there.
    Allowed("avx2", "linear_int16", "_rows<", 16),
    # Sums of 3 and 4 rows, their parts, masks and the higher bits of formats with two planes: 20 values, 16 registers.
    Allowed("avx2", "linear_int8", ", 3>", 2),
    Allowed("avx2", "linear_int8", ", 4>", 5),
    # Sums of as many rows as there are registers for: what is for the next cell, masks, or a value of all columns.
    Allowed("avx512", "linear_int16", "tile<", 6),
    Allowed("avx512", "linear_int8", "tile<", 3),
    Allowed("avx512", "linear_int8", "few_rows<", 8),
    # And what pairs are made of bytes with: 5 rows at a time would be slower than 7 that have some of it on the stack.
    Allowed("avx512", "linear_int16", "few_rows<", 19),
)


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


class Function(NamedTuple):
    name: str
    instructions: tuple[Instruction, ...]

    def loops(self) -> list[tuple[Instruction, ...]]:
        """The innermost loops: what lies between a jump back and its target, and holds no other such pair."""
        begins = {i.address: index for index, i in enumerate(self.instructions)}
        spans = []
        for index, i in enumerate(self.instructions):
            target = _target(i)
            if target is not None and begins.get(target, index + 1) <= index:
                spans.append((begins[target], index))
        inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
        return [self.instructions[begin : end + 1] for begin, end in inner]

    def hot_loops(self) -> list[tuple[Instruction, ...]]:
        """The innermost loops with a multiply-add."""
        return [loop for loop in self.loops() if any(i.name.startswith(MULTIPLY_ADDS) for i in loop)]

    def fetches(self) -> bool:
        """Whether a hot loop asks for memory ahead. A compiler may drop that, as it has no effect on results."""
        return any(i.name.startswith("prefetch") for loop in self.hot_loops() for i in loop)

    def spills(self) -> int:
        """The most places on the stack that a hot loop writes vectors to."""
        framed = any(i.name == "mov" and i.operands == "%rsp,%rbp" for i in self.instructions)
        return max((len({*_written(loop, framed)}) for loop in self.hot_loops()), default=0)


def _written(loop: tuple[Instruction, ...], framed: bool) -> Iterator[str]:
    """Places on the stack that a loop writes vectors to; an address with an index is one of an array."""
    for i in loop:
        place = _STACK.search(i.operands)
        if i.name.startswith("vmov") and place and (place[1] == "sp" or framed) and _VECTOR.search(i.operands):
            yield place[0]


def _target(i: Instruction) -> int | None:
    """Where a jump goes to; None for what is no jump within the function."""
    if not i.name.startswith(_JUMPS) or not (word := i.operands.split(" ")[0]):
        return None
    try:
        return int(word, 16)
    except ValueError:
        return None


def functions(object_file: Path) -> Iterator[Function]:
    """Those of an object file, in order. Raises CalledProcessError, FileNotFoundError without binutils."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--wide", "--demangle", str(object_file)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name, found = "", []
    for line in listing.splitlines():
        if begun := _FUNCTION.match(line):
            if found:
                yield Function(name, tuple(found))
            name, found = begun[1], []
        elif instruction := _LINE.match(line):
            operands = instruction[3].partition("#")[0].strip()
            found.append(Instruction(int(instruction[1], 16), instruction[2], operands))
    if found:
        yield Function(name, tuple(found))


def width(i: Instruction) -> int:
    """0: no vectors; 128: SSE; 256: AVX; 512: AVX-512, which includes mask registers and registers beyond 15."""
    if re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]|\{1to\d+\}", i.operands):
        return 512
    if "%ymm" in i.operands or (i.name.startswith("v") and "%xmm" in i.operands):
        return 256
    return 128 if "%xmm" in i.operands else 0


def newest_objects(folder: str) -> dict[str, Path]:
    """The newest object of every unit of native/`folder` ("": native/ itself), by the unit's name.

    Raises FileNotFoundError where a unit has none, or none newer than its source.
    """
    found = {}
    for source in sorted((ROOT / "native" / folder).glob("*.cpp")):
        objects = ROOT.glob(f"build/*/CMakeFiles/*.dir/{source.relative_to(ROOT)}.o")
        newest = max(objects, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None or newest.stat().st_mtime < source.stat().st_mtime:
            raise FileNotFoundError(f"{source.relative_to(ROOT)} is not compiled: run scripts/build")
        found[source.stem] = newest
    return found


def faults(folder: str, unit: str, found: list[Function]) -> list[str]:
    """What is wrong with the functions of a unit of native/`folder`."""
    wrong = []
    most = WIDTHS[folder]
    for function in found:
        if beyond := next((i for i in function.instructions if width(i) > most), None):
            wrong.append(f"{function.name}: {beyond.name} {beyond.operands} is beyond {most} bits")
        rule = next((r for r in SPILLS if (r.folder, r.unit) == (folder, unit) and r.functions in function.name), None)
        if (spills := function.spills()) > (rule.most if rule else 0):
            wrong.append(f"{function.name}: a loop writes {spills} vectors to the stack")
        if unit in READERS and "few_rows<" in function.name and not function.fetches():
            wrong.append(f"{function.name}: the loop that reads weights does not ask for them ahead")
    fused = any(i.name.startswith(("vfmadd", "vdpbf16ps")) for f in found for loop in f.hot_loops() for i in loop)
    if folder and unit in PRODUCTS and not fused:
        wrong.append("no loop has a fused multiply-add")
    return [f"native/{folder}{'/' if folder else ''}{unit}.cpp: {one}" for one in wrong]


def shared(object_file: Path) -> list[str]:
    """Functions and data that the linker may merge with those of other objects, keeping any one of the copies."""
    listing = subprocess.run(["nm", "--demangle", str(object_file)], check=True, capture_output=True, text=True).stdout
    return [found[2] for line in listing.splitlines() if (found := _SYMBOL.match(line)) and found[1] in "WVu"]


def main() -> int:
    wrong = []
    for folder in WIDTHS:
        for unit, path in newest_objects(folder).items():
            wrong += faults(folder, unit, [*functions(path)])
            if folder:  # what other objects shared with it, an older CPU could not run
                wrong += [f"native/{folder}/{unit}.cpp: {name} may become that of all units" for name in shared(path)]
    print("\n".join(wrong) if wrong else "object code: clean")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
