"""`octavo bench startup`: how long a server takes from the start of its process to its first token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from octavo.bench.client import Ask, Target, load
from octavo.bench.figures import Distribution
from octavo.bench.offline import PERCENTILES, write_json
from octavo.bench.options import BenchError, StartupOptions
from octavo.bench.servers import ServerError, find_model, is_ready, last_lines, start
from octavo.checkpoint import CheckpointError
from octavo.checkpoint.hub import locate
from octavo.config import EngineConfig, cache_dir

_POLL = 0.005
"""Seconds between two looks at a server that starts."""


def startup(options: StartupOptions, config: EngineConfig) -> dict[str, Any]:
    """Start servers of the model one after the other; print and return the figures, seconds. Raises BenchError."""
    files = model_files(config)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        command = _command(config, Path(folder))
        log = Path(folder) / "log"
        with tqdm(
            total=options.num_iters_cold + options.num_iters_warm, desc="Starts", disable=options.disable_tqdm
        ) as bar:
            for kind, count in (("cold", options.num_iters_cold), ("warm", options.num_iters_warm)):
                if kind == "warm" and count and not options.num_iters_cold:
                    _read(files)
                ready, first = [], []
                for _ in range(count):
                    if kind == "cold":
                        forget(files)
                    times = _once(command, log, options.start_timeout)
                    ready.append(times[0])
                    first.append(times[1])
                    bar.update(1)
                result |= _figures(kind, ready, first) if count else {}
    for line in _lines(result):
        print(line)
    write_json(options.output_json, result)
    return result


def model_files(config: EngineConfig) -> list[Path]:
    """The files of the model, downloaded where needed. Raises BenchError."""
    try:
        path = locate(
            config.model,
            revision=config.revision,
            hf_token=config.hf_token,
            download_dir=Path(config.download_dir) if config.download_dir else None,
            cache_dir=cache_dir(),
        )
    except CheckpointError as error:
        raise BenchError(str(error)) from None
    return [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]


def forget(files: Iterable[Path]) -> None:
    """Drop files from the memory of the system, so that they are read from the disk again. Pages that another process
    has mapped stay."""
    for file in files:
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _read(files: Iterable[Path]) -> None:
    """Bring files into the memory of the system."""
    for file in files:
        with file.open("rb") as opened:
            while opened.read(2**24):
                pass


def _command(config: EngineConfig, folder: Path) -> str:
    """The command line of a server with these options, `{port}` for its port; they go through a file, as they may hold
    tokens."""
    file = folder / "options.json"
    file.touch(0o600)
    file.write_text(json.dumps({name: value for name, value in vars(config).items() if value not in (None, ())}))
    return shlex.join(
        [sys.executable, "-m", "octavo", "serve", "--config", str(file), "--host", "127.0.0.1", "--port", "{port}"]
    )


def _once(command: str, log: Path, timeout: float) -> tuple[float, float]:
    """Seconds until the server said that it was ready, and until a request sent then had its first token."""
    try:
        started, port = start(command, log)
    except ServerError as error:
        raise BenchError(f"the server {error}") from None
    try:
        target = Target(f"http://127.0.0.1:{port}")
        while not is_ready(target):
            if started.exit_status is not None or time.perf_counter() - started.begun > timeout:
                raise BenchError(_why(log, started.exit_status, timeout))
            time.sleep(_POLL)
        ready = time.perf_counter() - started.begun
        target.model = find_model(target)
        [outcome] = asyncio.run(load(target, [Ask("Hello", 1, extra={"temperature": 0})], timeout=timeout))
        if outcome.error is not None:
            raise BenchError(f"the server that was started failed: {outcome.error}")
        return ready, (outcome.first or outcome.ended) - started.begun
    except ServerError as error:
        raise BenchError(f"the server that was started failed: {error}") from None
    finally:
        started.stop()


def _why(log: Path, status: int | None, timeout: float) -> str:
    if status is None:
        return f"the server was not ready after {timeout:g} s; --start-timeout lets it take longer."
    said = [line for line in last_lines(log) if line.strip()]
    return f"the server ended with status {status}: {said[-1] if said else 'it printed nothing'}"


def _figures(kind: str, ready: list[float], first: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, times in ((f"{kind}_startup", ready), (f"{kind}_first_token", first)):
        distribution = Distribution.of(times, PERCENTILES)
        found |= {
            f"avg_{name}_time": distribution.mean,
            f"{name}_times": times,
            f"{name}_percentiles": {f"{p:g}": value for p, value in distribution.percentiles.items()},
        }
    return found


def _lines(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for kind, what in (("cold", "files read from disk"), ("warm", "files in memory")):
        if f"avg_{kind}_startup_time" in result:
            ready, first = result[f"{kind}_startup_percentiles"]["50"], result[f"{kind}_first_token_percentiles"]["50"]
            number = len(result[f"{kind}_startup_times"])
            lines.append(f"{kind.capitalize()} start ({what}): ready in {ready:.2f} s, first token after {first:.2f} s")
            lines[-1] += f" (medians of {number})"
    return lines
