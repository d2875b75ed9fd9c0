"""Comparisons of small servers for the tests."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import compare as module
from octavo.bench.compare_options import CompareOptions

ROOT = Path(__file__).parents[2]


def scripted(*flags: str) -> str:
    """A command line that starts `tests.bench.scripted`."""
    words = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.bench.scripted", *flags]
    return f"{shlex.join(words)} --port {{port}}"


def compared(folder: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    """Exit status and results of a small comparison; a busy machine is not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SETTLE", 0.0)
        small = {"num_prompts": 4, "random_input_len": 30, "max_tokens": 12, "concurrency": "2", "rounds": 2}
        status = module.compare(CompareOptions(**{**small, "output_dir": str(folder), **options}))
    return status, json.loads((folder / "results.json").read_text())


def row(results: dict[str, Any], server: str, concurrency: int = 2) -> dict[str, Any]:
    """A row of the summary."""
    (found,) = (r for r in results["summary"] if (r["server"], r["concurrency"]) == (server, concurrency))
    return dict(found)


def server(results: dict[str, Any], name: str) -> dict[str, Any]:
    """What the results say of a server."""
    (found,) = (s for s in results["servers"] if s["name"] == name)
    return dict(found)
