"""`python -m tests.fuzz SECONDS [TARGET]`: see scripts/fuzz.

With atheris (coverage-guided) where it is installed, otherwise with random changes. Each target runs in a process of
its own with limited memory; an input that is a finding is left in build/fuzz.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

try:
    import atheris
except ModuleNotFoundError:
    atheris = None

if atheris is not None:
    # An editable install brings a finder of its own, which alone finds the kernels, and whose modules would not be
    # instrumented.
    importlib.import_module("octavo._native")
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    with atheris.instrument_imports(include=["octavo"]):
        from tests.fuzz.targets import CLEAR, TARGETS
else:
    from tests.fuzz.targets import CLEAR, TARGETS

FOUND = Path(__file__).parents[2] / "build" / "fuzz"
MEMORY = 2 << 30
"""Bytes that one input may make a process take beyond what it has when it begins."""
SLOW = 20
"""Seconds after which an input counts as a hang."""


def _run(name: str, data: bytes, folder: Path) -> None:
    with contextlib.suppress(*CLEAR):
        TARGETS[name].run(data, folder)


def _guided(name: str, seconds: int, folder: Path) -> None:
    """Does not return: libFuzzer ends the process."""
    corpus = FOUND / name
    corpus.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(TARGETS[name].corpus()):
        (corpus / f"made-{i}").write_bytes(data)
    flags = [
        f"-max_total_time={seconds}",
        f"-timeout={SLOW}",
        f"-rss_limit_mb={MEMORY >> 20}",
        "-max_len=262144",
        f"-artifact_prefix={FOUND}/{name}-",
        "-print_final_stats=0",
    ]

    def mutator(data: bytes, longest: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, longest))
        return TARGETS[name].mutated(data, rng)[:longest]

    atheris.Setup([sys.argv[0], *flags, str(corpus)], lambda data: _run(name, data, folder), custom_mutator=mutator)
    atheris.Fuzz()


def _random(name: str, seconds: int, folder: Path) -> None:
    rng = random.Random()
    corpus = TARGETS[name].corpus()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = TARGETS[name].mutated(rng.choice(corpus), rng)
        began = time.monotonic()
        try:
            _run(name, data, folder)
            assert time.monotonic() - began < SLOW, "this takes too long"
        except BaseException:
            FOUND.mkdir(parents=True, exist_ok=True)
            (FOUND / f"{name}-crash").write_bytes(data)
            raise


def main() -> int:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    if len(sys.argv) > 2:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            (_random if atheris is None else _guided)(sys.argv[2], seconds, Path(folder))
        return 0
    bad = []
    for name in TARGETS:
        print(f"fuzzing {name} for {seconds // len(TARGETS)} s", flush=True)
        if subprocess.run([sys.executable, "-m", "tests.fuzz", str(seconds // len(TARGETS)), name]).returncode:
            bad.append(name)
    print(f"findings in {', '.join(bad)}: the inputs are in {FOUND}" if bad else "no findings")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
