"""Work in a process of its own, which neither heaps up memory here nor takes other rows with it when it dies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONGEST = 900
"""Seconds that one measurement may take."""

Figures = dict[str, Any]


class Failed(RuntimeError):
    """The other process gave no figures; the message is the last that it said."""


def apart(module: str, **arguments: Any) -> Figures:
    """What `python -m MODULE`, which calls `answer`, makes of the arguments. Raises Failed."""
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=LONGEST)
    except subprocess.TimeoutExpired:
        raise Failed(f"no figures after {LONGEST} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise Failed(said[-1] if said else f"exit status {done.returncode}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def answer(work: Callable[..., Figures]) -> None:
    """In the other process: call `work` with the arguments and hand its figures back."""
    print(json.dumps(work(**json.loads(sys.argv[1]))))
