"""A server without requests leaves the CPU to others."""

from __future__ import annotations

import http.client
import json
import shlex
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import psutil

from octavo.bench.client import Target
from octavo.bench.servers import find_model, is_ready, start
from tests import realmodels

SECONDS = 2.0
CPU_SECONDS = 0.3
"""What front end and engine may take in SECONDS: a thread that spins takes them all."""

WAKE_UPS = 400
"""Times that their threads may wake up in SECONDS: one that polls every millisecond does 2,000 times."""


def _used(pid: int) -> tuple[float, int]:
    """CPU seconds of a process and those below it, and how often their threads have waited for something."""
    first = psutil.Process(pid)
    family = [first, *first.children(recursive=True)]
    assert len(family) >= 2  # front end and engine
    times = [process.cpu_times() for process in family]
    tasks = [task for process in family for task in Path(f"/proc/{process.pid}/task").iterdir()]
    said = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    waits = [int(line.split()[1]) for line in said if line.startswith("voluntary_ctxt_switches")]
    return sum(t.user + t.system for t in times), sum(waits)


def test_an_idle_server_uses_no_cpu(tmp_path: Path) -> None:
    """After streams, with their connections still open."""
    command = [sys.executable, "-m", "octavo", "serve", str(realmodels.smollm2_gguf()), "--host", "127.0.0.1"]
    command += ["--threads", "2", "--max-model-len", "512", "--max-num-seqs", "8", "--port"]
    server, port = start(shlex.join(command) + " {port}", tmp_path / "log")
    with ExitStack() as end:
        end.callback(server.stop)
        target = Target(f"http://127.0.0.1:{port}")
        while not is_ready(target):
            assert server.exit_status is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        body = {"model": find_model(target), "prompt": "Once", "max_tokens": 8, "stream": True}
        for _ in range(4):
            connection = end.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)))
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
        time.sleep(1)
        before = _used(server.process.pid)
        time.sleep(SECONDS)
        after = _used(server.process.pid)
    assert after[0] - before[0] < CPU_SECONDS
    assert after[1] - before[1] < WAKE_UPS
