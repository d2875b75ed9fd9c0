"""More connections than the server may have open: it says so briefly, serves those it has, and recovers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

import octavo
from octavo.api.serve import bind
from tests.api.harness import MODEL, until
from tests.clients.test_soak import SERVER

BEGINNINGS = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHos",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
)


@pytest.mark.xfail(strict=True, reason="asyncio logs every accept() that fails, 16,000 times a second")
def test_more_connections_than_file_descriptors(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    paths = [str(Path(__file__).parents[2]), str(Path(octavo.__file__).parents[1])]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", 'ulimit -n 200; exec "$@"', "bash", sys.executable, "-c", SERVER, str(port)],
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    try:
        until(lambda: answers(url), 30)
        with httpx.Client(base_url=url, timeout=20) as known, contextlib.ExitStack() as stack:
            assert known.get("/health").status_code == 200
            before = psutil.Process(process.pid).num_fds()
            for i in range(300):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.sendall(BEGINNINGS[i % 3])
            time.sleep(3)
            body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "ignore_eos": True}
            answer = known.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 3, "an open connection is served"
            stack.close()
            until(lambda: answers(url), 20)
            until(lambda: psutil.Process(process.pid).num_fds() <= before, 20)
        assert log.stat().st_size < 100_000
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
