"""More connections than the server may have open: it says so briefly, serves those it has, and recovers."""

from __future__ import annotations

import contextlib
import json
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
from octavo.api import body as body_module
from octavo.api import connections
from octavo.api.serve import bind
from tests.api.harness import MODEL, ScriptEngine, parts_of, running, until
from tests.clients.test_soak import SERVER

BEGINNINGS = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHos",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
)


def test_more_connections_than_file_descriptors(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    paths = [str(Path(__file__).parents[2]), str(Path(octavo.__file__).parents[1])]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", 'ulimit -Hn 200; exec "$@"', "bash", sys.executable, "-c", SERVER, str(port)],
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


def test_a_connection_on_which_nothing_comes_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_SECONDS", 0.2)
    with running(parts_of(ScriptEngine(pause=0.01))) as url:
        port = int(url.rsplit(":", 1)[1])
        for beginning in BEGINNINGS[:2]:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(beginning)
                assert connection.recv(100) == b""
        body = {"model": MODEL, "prompt": "a", "max_tokens": 50, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200, "one that works is left alone"


def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "PATIENCE", 0.2)
    with running(parts_of(ScriptEngine())) as url:
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(BEGINNINGS[2])
            answer = b""
            while part := connection.recv(1000):
                answer += part
    assert answer.startswith(b"HTTP/1.1 408") and b"stopped coming" in answer


def test_a_client_that_reads_nothing_gives_its_place_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 1.0)
    engine = ScriptEngine(script=lambda request, choice: [97] * 600)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 500, "ignore_eos": True}
    large = json.dumps({**body, "temperature": 1, "n": 60, "logprobs": 20, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with running(parts_of(engine), max_num_queued_reqs=1) as url, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        connection.sendall((head % len(large)).encode() + large)
        until(lambda: httpx.get(f"{url}/load").json()["server_load"] == 1)
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 503
        until(lambda: httpx.get(f"{url}/load").json()["server_load"] == 0, 30)
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
