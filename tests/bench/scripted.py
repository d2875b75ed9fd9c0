"""`python -m tests.bench.scripted --port N`: a server with an engine that says a script, as a process of its own."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

from octavo.api.serve import bind
from octavo.types import Delta, Request
from tests.api.harness import ScriptEngine, parts_of, running


@dataclass
class Mortal(ScriptEngine):
    """Kills its process when it gets a certain request."""

    die_at: int = 0
    """Which one; 0: never."""
    came: int = field(default=0, init=False)

    def add(self, request: Request) -> None:
        self.came += 1
        super().add(request)

    def step(self) -> list[Delta]:
        if self.die_at and self.came >= self.die_at:
            print(f"out of luck after {self.came} requests", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--stubborn", action="store_true", help="do not end on SIGTERM, and neither does its child")
    parser.add_argument("--api-key", default=None)
    arguments = parser.parse_args()
    if arguments.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; x = b'1' * 50_000_000; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    keys = {"api_key": (arguments.api_key,)} if arguments.api_key else {}
    engine = Mortal(pause=arguments.pause, die_at=arguments.die_at)
    with running(parts_of(engine), listening=bind("127.0.0.1", arguments.port), **keys):
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
