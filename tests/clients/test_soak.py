"""benchmarks/soak.py for a minute: the real scheduler over a make-believe model, in the processes of a real server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

import octavo
from benchmarks.soak import KINDS, allow_connections, soak, traces
from octavo.api.serve import bind
from tests.api.harness import MODEL, until

SERVER = """
import sys
from octavo.api.serve import Parts, serve
from octavo.client import Process
from octavo.config import EngineConfig
from tests.api.harness import tiny_text
config = EngineConfig(model="tiny", host="127.0.0.1", port=int(sys.argv[1]), uvicorn_log_level="error")
sys.exit(serve(config, Parts(lambda config: Process(config, "tests.api.fault_build:build_faulty"), tiny_text)))
"""


def test_soak(tmp_path: Path) -> None:
    allow_connections(250)
    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    paths = [str(Path(__file__).parents[2]), str(Path(octavo.__file__).parents[1])]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)],
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready, 30)
        report = asyncio.run(soak(url, MODEL, process.pid, connections=250, seconds=45, scale=3))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert report["wrong"] + traces(log.read_text()) == []
    assert report["ended"]["answers checked"] > 20
    assert all(report["ended"][kind.__name__] > 0 for kind in KINDS)
