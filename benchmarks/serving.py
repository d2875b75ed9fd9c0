"""Figures of `octavo serve` on this machine: start-up, one stream, many streams, and a long prompt that joins.

    python benchmarks/serving.py [--model smollm2] [--streams 100] [-- flags of octavo serve]

Starts a server on a free loopback port, drives it over HTTP and prints one JSON line per workload. Latencies are
seconds; `gap` is the time between two tokens of one stream; memory is that of the server's process tree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from statistics import median
from typing import Any

import aiohttp
import psutil

WORDS = ("time", "water", "stone", "letter", "river", "garden", "market", "winter", "music", "bridge", "paper")


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


class Server:
    """`octavo serve` in a process of its own; `ready` is the time from its start to its first streamed token."""

    def __init__(self, model: str, flags: list[str]):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.model = model
        self.began = time.perf_counter()
        command = [sys.executable, "-m", "octavo", "serve", model, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--disable-uvicorn-access-log", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.peak = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/completions"

    async def first_token(self, session: aiohttp.ClientSession) -> float:
        while self.process.poll() is None:
            try:
                out = await stream(session, self, "Hello", 1)
                return float(out["stamps"][0] - self.began)
            except (aiohttp.ClientError, RuntimeError):
                await asyncio.sleep(0.01)
        raise SystemExit("the server ended before it was ready; run it by hand to see why")

    def memory(self) -> int:
        """Resident bytes of the tree now; the largest seen is kept in `peak`."""
        root = psutil.Process(self.process.pid)
        total = sum(p.memory_info().rss for p in (root, *root.children(recursive=True)))
        self.peak = max(self.peak, total)
        return total

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


async def stream(
    session: aiohttp.ClientSession, server: Server, prompt: str, max_tokens: int, **more: Any
) -> dict[str, Any]:
    """One streamed completion: when it was sent, and when each token came."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        **more,
    }
    sent, stamps = time.perf_counter(), []
    async with session.post(server.url, json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {(await answer.text())[:200]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event.get("error"):
                    raise RuntimeError(event["error"]["message"])
                if event["choices"]:
                    stamps.append(time.perf_counter())
    return {"sent": sent, "stamps": stamps}


def gaps(out: dict[str, Any]) -> list[float]:
    return [b - a for a, b in zip(out["stamps"], out["stamps"][1:], strict=False)]


def at(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4)


async def single(session: aiohttp.ClientSession, server: Server) -> dict[str, Any]:
    rng = random.Random(1)
    outs = [await stream(session, server, text(rng, 90), 128) for _ in range(4)]
    every = [g for o in outs for g in gaps(o)]
    return {
        "gap_p50": at(every, 0.5),
        "tok_s": round(1 / median(every), 1),
        "ttft_p50": at([o["stamps"][0] - o["sent"] for o in outs], 0.5),
    }


async def burst(session: aiohttp.ClientSession, server: Server, streams: int) -> dict[str, Any]:
    rng = random.Random(2)
    lengths = [(rng.randrange(12, 200), rng.randrange(16, 180)) for _ in range(streams)]
    began = time.perf_counter()
    task = asyncio.gather(*(stream(session, server, text(rng, words), tokens) for words, tokens in lengths))
    while not task.done():
        server.memory()
        await asyncio.sleep(0.1)
    outs = await task
    wall = time.perf_counter() - began
    every = [g for o in outs for g in gaps(o)]
    return {
        "streams": streams,
        "wall": round(wall, 2),
        "tok_s": round(sum(t for _, t in lengths) / wall, 1),
        "ttft_p50": at([o["stamps"][0] - o["sent"] for o in outs], 0.5),
        "gap_p50": at(every, 0.5),
        "gap_p99": at(every, 0.99),
        "peak_mib": round(server.peak / 2**20),
    }


async def join(session: aiohttp.ClientSession, server: Server, streams: int, words: int) -> dict[str, Any]:
    """A long prompt arrives while `streams` others decode: how far do their gaps stretch?"""
    rng = random.Random(3)
    running = [asyncio.create_task(stream(session, server, text(rng, 20), 400)) for _ in range(streams)]
    await asyncio.sleep(5)
    sent = time.perf_counter()
    long = await stream(session, server, text(rng, words), 1)
    first = long["stamps"][0]
    outs = await asyncio.gather(*running)
    pairs = [(a, b) for o in outs for a, b in zip(o["stamps"], o["stamps"][1:], strict=False)]
    usual = [b - a for a, b in pairs if b < sent and a > sent - 3]
    during = [b - a for a, b in pairs if b > sent and a < first]
    stretch = [g / median(usual) for g in during]
    return {
        "streams": streams,
        "prompt_words": words,
        "usual_gap": at(usual, 0.5),
        "gap_p50": at(during, 0.5),
        "gap_max": at(during, 1),
        "stretch_p50": at(stretch, 0.5),
        "stretch_p99": at(stretch, 0.99),
        "stretch_max": at(stretch, 1),
        "long_ttft": round(first - sent, 2),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("flags", nargs="*", help="flags of octavo serve, after --")
    args = parser.parse_args()
    server = Server(args.model, args.flags)
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(900)) as session:
            ready = await server.first_token(session)
            print(
                json.dumps(
                    {"workload": "start", "first_token": round(ready, 2), "rss_mib": round(server.memory() / 2**20)}
                ),
                flush=True,
            )
            print(json.dumps({"workload": "single", **await single(session, server)}), flush=True)
            print(json.dumps({"workload": "burst", **await burst(session, server, args.streams)}), flush=True)
            print(json.dumps({"workload": "join", **await join(session, server, 16, 5900)}), flush=True)
    finally:
        server.close()


if __name__ == "__main__":
    asyncio.run(main())
