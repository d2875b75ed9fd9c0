"""How many tokens a second a front-end process passes on: a make-believe engine makes 20,000 a second over 200 streams.

Prints the rate the clients saw, how far the last one was behind the engine, and the share of one CPU that the front end
took. `--streams`, `--rate` and `--tokens` change the load; `--profile FILE` writes where the time went (cProfile).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from octavo.api.serve import Parts, bind
from octavo.api.server import Server
from octavo.build import build_text
from octavo.client import Process
from octavo.config import EngineConfig
from octavo.info import ModelInfo
from octavo.types import Delta, EngineStats, Request

ROOT = Path(__file__).parents[1]


@dataclass
class Metronome:
    """Every choice gets a token at each step, and a step takes `pause` seconds, whatever happens."""

    pause: float
    live: dict[str, tuple[Request, int]] = field(default_factory=dict)
    announce: Callable[[list[str]], None] | None = None
    due: float = 0.0

    @property
    def idle(self) -> bool:
        return not self.live

    def add(self, request: Request) -> None:
        self.live[request.id] = (request, 0)

    def isolate(self, request_id: str, tokens: int) -> None:
        pass

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.live.pop(request_id, None)

    def step(self) -> list[Delta]:
        now = time.perf_counter()
        self.due = max(self.due + self.pause, now - 0.5)
        time.sleep(max(0.0, self.due - now))
        deltas = []
        for name, (request, done) in list(self.live.items()):
            last = done + 1 == request.max_tokens
            deltas.append(Delta(name, start=done, tokens=[300 + done % 40000], finish="length" if last else None))
            if last:
                del self.live[name]
            else:
                self.live[name] = (request, done + 1)
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.live))

    def close(self) -> None:
        pass


@dataclass
class Built:
    engine: Metronome
    info: ModelInfo


def build(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> Built:
    pause = float(os.environ["OCTAVO_BENCH_PAUSE"])
    return Built(Metronome(pause), ModelInfo(model=config.model, max_model_len=8192, vocab_size=49152))


async def serve(port: int) -> None:
    config = EngineConfig(model="smollm2", host="127.0.0.1", port=port, disable_uvicorn_access_log=True)
    parts = Parts(engine=lambda config: Process(config, "benchmarks.frontend:build"), text=build_text)
    with bind(config.host, config.port) as listening:
        server = Server(config, listening, parts.engine(config), parts.text, lambda info: print("ready", flush=True))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
        await server.run()


def load(port: int, streams: int, tokens: int) -> tuple[float, int]:
    """Read `streams` answers at once; seconds from the first event to the last, and events."""
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    watched = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + b"\r\n\r\n" + raw)
        connection.setblocking(False)
        watched.register(connection, selectors.EVENT_READ, bytearray())
    events = 0
    began = ended = 0.0
    left = streams
    while left:
        for key, _ in watched.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            ended = time.perf_counter()
            began = began or ended
            events += data.count(b"data: {")
            if b"[DONE]" in data or not data:
                watched.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                left -= 1
    return ended - began, events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=int, default=20_000, help="tokens a second, all streams together")
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--profile", help="write a profile of the front end to this file")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        with cProfile.Profile() if options.profile else open(os.devnull) as profile:
            asyncio.run(serve(options.serve))
        if options.profile:
            profile.dump_stats(options.profile)
        return
    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port)]
    if options.profile:
        command += ["--profile", options.profile]
    pause = options.streams / options.rate
    environment = {**os.environ, "OCTAVO_BENCH_PAUSE": str(pause), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        for line in itertools.takewhile(lambda line: line.strip() != "ready", server.stdout):
            print(line, end="", file=sys.stderr)
        process = psutil.Process(server.pid)
        load(port, options.streams, 20)
        used = sum(process.cpu_times()[:2])
        seconds, events = load(port, options.streams, options.tokens)
        used = sum(process.cpu_times()[:2]) - used
        server.terminate()
    ideal, tokens = options.tokens * pause, options.streams * options.tokens
    print(
        f"{options.streams} streams, {options.rate} tokens/s asked: {events / seconds:.0f} events/s seen, "
        f"{events} events of {tokens} tokens, {seconds - ideal:+.2f} s behind the engine, front end "
        f"{100 * used / seconds:.0f} % of a CPU ({1e6 * used / tokens:.1f} us a token)"
    )


if __name__ == "__main__":
    main()
