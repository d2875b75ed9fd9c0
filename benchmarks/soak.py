"""Many connections of every kind at once, for minutes: aborts, readers that are slow or never read, malformed bodies,
bytes that are no HTTP, connections left half open, and between them requests whose answers are known.

    python benchmarks/soak.py [--model smollm2] [--connections 1000] [--seconds 180] [-- flags of octavo serve]

Starts a server on a free loopback port with a KV cache of fixed size and prints one JSON object. The exit status is 1
when an answer was wrong, something was not given back (KV blocks, requests, file descriptors), the memory of the
server's process tree grew, or the server's log has a stack trace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MIB = 2**20
GROWTH = 0.05
"""Share by which memory may grow from the end of the warm-up to the end, beside `SLACK`."""
SLACK = 24 * MIB
PATIENCE = 300.0
"""Seconds that a request which is checked may take."""

Json = dict[str, Any]


@dataclass
class Case:
    """A request whose answer is known."""

    path: str
    body: Json
    answer: Any = None


def cases(model: str) -> list[Case]:
    """Greedy and seeded, one choice and two, with logprobs and stop strings, streamed and not, both endpoints."""
    found = []
    for i in range(16):
        body: Json = {
            "model": model,
            "max_tokens": 4 + 2 * (i % 8),
            "temperature": 0 if i % 3 == 0 else 1,
            "seed": i,
            "n": 2 if i % 3 == 2 else 1,
            "stop": [".", "e "] if i % 4 == 3 else None,
            "return_token_ids": True,
            "stream": i % 2 == 0,
        }
        text = f"{i} birds sat on a wire." * (1 + i % 5)
        if i % 4 < 2:
            found.append(Case(TEXT, {**body, "prompt": text, "logprobs": i % 3, "echo": i % 8 == 0}))
        else:
            found.append(Case(CHAT, {**body, "messages": [{"role": "user", "content": text}], "logprobs": True}))
    return found


async def answer_of(session: aiohttp.ClientSession, url: str, case: Case) -> Any:
    """What is compared of an answer: by choice the text, ids, logprobs and end. Raises ValueError for an error."""
    async with session.post(url + case.path, json=case.body) as response:
        raw = await response.read()
    if response.status != 200:
        raise ValueError(f"{response.status} {raw[:300]!r}")
    if not case.body["stream"]:
        return {choice["index"]: _part(choice) for choice in json.loads(raw)["choices"]}
    events = [event for event in raw.decode().split("\n\n") if event.startswith("data: ")]
    if events[-1] != "data: [DONE]":
        raise ValueError(f"a stream ended with {events[-1][:300]!r}")
    whole: dict[int, list[Any]] = {}
    for event in events[:-1]:
        for choice in json.loads(event[6:])["choices"]:
            text, ids, scores, end = _part(choice)
            known = whole.setdefault(choice["index"], ["", [], [], None])
            known[0] += text
            known[1] += ids
            known[2] += scores
            known[3] = end
    return whole


def _part(choice: Json) -> list[Any]:
    said = choice.get("message") or choice.get("delta")
    text = choice["text"] if said is None else said.get("content") or ""
    scores = choice["logprobs"] or {}
    entries = scores.get("token_logprobs") or [entry["logprob"] for entry in scores.get("content") or ()]
    return [text, choice.get("token_ids") or [], entries, choice["finish_reason"]]


@dataclass
class Target:
    """The server, and what the connections tell of it."""

    url: str
    model: str
    pid: int
    cases: list[Case]
    seconds: float
    scale: float = 1.0
    """Times by which the stretches are shortened that a connection lasts."""
    done: Counter[str] = field(default_factory=Counter)
    """Connections ended, by kind."""
    wrong: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds of the requests whose answers were checked."""
    health: list[float] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def blame(self, text: str) -> None:
        if len(self.wrong) < 50:
            self.wrong.append(text[:500])


@contextlib.asynccontextmanager
async def connection(
    target: Target, dice: random.Random, buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """An open connection, in the end closed or reset. `buffer`: bytes that may lie unread on this side."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    raw.setblocking(False)
    if buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    if dice.random() < 0.5:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
    try:
        await asyncio.get_running_loop().sock_connect(raw, target.address)
        reader, writer = await asyncio.open_connection(sock=raw, limit=buffer or 2**16)
    except BaseException:
        raw.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.transport.abort() if dice.random() < 0.5 else writer.close()


def request(path: str, body: bytes, *headers: str) -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", "Host: soak", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def long_request(target: Target, dice: random.Random, stream: bool) -> bytes:
    """A request that runs for long: up to 200 tokens, with much to tell of each."""
    body: Json = {
        "model": target.model,
        "max_tokens": dice.randint(50, 200),
        "temperature": 1,
        "n": dice.choice([1, 1, 2]),
        "ignore_eos": True,
        "stream": stream,
    }
    words = " ".join(str(dice.randrange(100)) for _ in range(dice.randint(1, 40)))
    if dice.random() < 0.5:
        return request(TEXT, json.dumps({**body, "prompt": words, "logprobs": 5}).encode())
    messages = [{"role": "user", "content": words}]
    return request(CHAT, json.dumps({**body, "messages": messages, "logprobs": True, "top_logprobs": 5}).encode())


async def valid(target: Target, dice: random.Random) -> None:
    """A few requests on one connection, each with the known answer."""
    timeout = aiohttp.ClientTimeout(PATIENCE)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), timeout=timeout) as session:
        for _ in range(dice.randint(1, 3)):
            case = dice.choice(target.cases)
            began = time.monotonic()
            try:
                found = await answer_of(session, target.url, case)
            except (ValueError, aiohttp.ClientError, asyncio.TimeoutError) as error:  # noqa: UP041
                target.blame(f"no answer to {case.body}: {error!r}")
                continue
            target.latencies.append(time.monotonic() - began)
            target.done["answers checked"] += 1
            if found != case.answer:
                target.blame(f"wrong answer to {case.body}: {found} instead of {case.answer}")


async def abort(target: Target, dice: random.Random) -> None:
    """Goes away while its request waits, runs or is answered."""
    async with connection(target, dice) as (reader, writer):
        writer.write(long_request(target, dice, stream=dice.random() < 0.7))
        with contextlib.suppress(asyncio.TimeoutError):  # noqa: UP041
            await asyncio.wait_for(reader.readexactly(dice.randint(1, 20_000)), dice.uniform(0, 5) / target.scale)


async def slow(target: Target, dice: random.Random) -> None:
    """Reads a byte every tenth of a second."""
    async with connection(target, dice, buffer=2048) as (reader, writer):
        writer.write(long_request(target, dice, stream=True))
        for _ in range(int(dice.randint(20, 200) / target.scale)):
            if not await asyncio.wait_for(reader.read(1), PATIENCE):
                return
            await asyncio.sleep(0.1)


async def never(target: Target, dice: random.Random) -> None:
    """Does not read at all."""
    async with connection(target, dice, buffer=2048) as (_, writer):
        writer.write(long_request(target, dice, stream=dice.random() < 0.8))
        await asyncio.sleep(dice.uniform(2, 20) / target.scale)


def _bad_bodies(model: str) -> list[tuple[int, str, bytes]]:
    """(status, path, body) of requests that must be refused."""
    ok: Json = {"model": model, "prompt": "a", "max_tokens": 2}
    say = [{"role": "user", "content": "a"}]
    wrong: list[tuple[int, str, Json]] = [
        (404, TEXT, {**ok, "model": "no-such"}),
        (400, TEXT, {**ok, "n": -1}),
        (400, TEXT, {**ok, "n": 10**9}),
        (400, TEXT, {**ok, "temperature": -1, "stream": True}),
        (400, TEXT, {**ok, "logit_bias": {"-1": 5}}),
        (400, TEXT, {**ok, "stop": ""}),
        (400, TEXT, {**ok, "prompt": [10**7]}),
        (400, TEXT, {**ok, "prompt": []}),
        (400, TEXT, {**ok, "prompt": ["a", [1]]}),
        (400, TEXT, {**ok, "max_tokens": 10**6}),
        (400, TEXT, {**ok, "logprobs": 10**6}),
        (400, TEXT, {**ok, "prompt": "long " * 20_000}),
        (400, TEXT, {**ok, "allowed_token_ids": []}),
        (400, CHAT, {"model": model, "messages": []}),
        (400, CHAT, {"model": model, "messages": [{"content": "a"}]}),
        (400, CHAT, {"model": model, "messages": say, "top_p": 7}),
        (400, CHAT, {"model": model, "messages": say, "max_tokens": -5, "stream": True}),
        (400, CHAT, {"model": model}),
        (404, "/v1/no-such", ok),
    ]
    raw = [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"prompt": "\\ud800"}', b"[" * 5000, b'{"n": NaN}', b"{}x"]
    return [(status, path, json.dumps(body).encode()) for status, path, body in wrong] + [
        (400, path, body) for path in (TEXT, CHAT) for body in raw
    ]


async def malformed(target: Target, dice: random.Random) -> None:
    """Well-formed HTTP with bodies that must be refused, each with an error that names a reason."""
    async with connection(target, dice) as (reader, writer):
        for _ in range(dice.randint(1, 4)):
            wanted, path, body = dice.choice(_bad_bodies(target.model))
            writer.write(request(path, body))
            status, answer = await asyncio.wait_for(_response(reader), PATIENCE)
            message = json.loads(answer).get("error", {}).get("message") if answer[:1] == b"{" else None
            if status != wanted or not message:
                target.blame(f"{path} {body[:200]!r} was answered {status} {answer[:300]!r}, not {wanted}")
            await asyncio.sleep(dice.uniform(0, 2) / target.scale)


async def _response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of an answer with a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    [length] = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
    return int(head[0].split()[1]), await reader.readexactly(int(length))


_GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n{}",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\n",
    b"GET /v1/models/%00%ff%2e%2e HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"\r\n\r\n\r\n\x00\x00",
)


async def garbage(target: Target, dice: random.Random) -> None:
    """Bytes that are no HTTP, or nearly; whatever comes back, it is no fault of the server."""
    data = dice.choice(_GARBAGE) if dice.random() < 0.7 else dice.randbytes(dice.randint(1, 4000))
    async with connection(target, dice) as (reader, writer):
        writer.write(data)
        try:
            answer = await asyncio.wait_for(reader.read(4096), dice.uniform(0.5, 5) / target.scale)
        except asyncio.TimeoutError:  # noqa: UP041
            return
        if answer.startswith(b"HTTP/1.1 5"):
            target.blame(f"{data[:200]!r} was answered {answer[:300]!r}")


async def half_open(target: Target, dice: random.Random) -> None:
    """Sends a part of a request, or nothing, and waits; or says that it has sent all and goes on reading."""
    whole = long_request(target, dice, stream=True)
    async with connection(target, dice) as (reader, writer):
        writer.write(whole[: dice.choice([0, 5, 60, len(whole) - 3, len(whole)])])
        if dice.random() < 0.3:
            writer.write_eof()
        with contextlib.suppress(asyncio.TimeoutError):  # noqa: UP041
            await asyncio.wait_for(reader.read(100), dice.uniform(1, 10) / target.scale)


Kind = Callable[[Target, random.Random], Awaitable[None]]
KINDS: dict[Kind, int] = {valid: 8, abort: 26, slow: 16, never: 10, malformed: 16, garbage: 12, half_open: 12}
"""Kinds of connections and how many of a hundred are of each."""


async def _keep(target: Target, kind: Kind, dice: random.Random, end: float) -> None:
    """One connection of a kind after another, until `end`."""
    await asyncio.sleep(dice.uniform(0, min(5, target.seconds / 10)))
    while time.monotonic() < end:
        try:
            await kind(target, dice)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:  # noqa: UP041
            if kind is malformed:
                target.blame(f"{kind.__name__}: {error!r}")
        except OSError as error:
            target.blame(f"{kind.__name__} cannot connect: {error!r}")
            await asyncio.sleep(0.5)
        target.done[kind.__name__] += 1


async def _watch_health(target: Target, end: float) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        while time.monotonic() < end:
            began = time.monotonic()
            async with session.get(f"{target.url}/health", headers={"Connection": "close"}) as response:
                if response.status != 200:
                    target.blame(f"/health was answered {response.status}")
            target.health.append(time.monotonic() - began)
            await asyncio.sleep(0.5)


@dataclass
class Tree:
    """The processes of the server, and what they hold."""

    pid: int
    samples: list[tuple[float, int]] = field(default_factory=list)
    """(time, resident bytes)."""

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.pid)
        return [root, *root.children(recursive=True)]

    def descriptors(self) -> int:
        return sum(process.num_fds() for process in self.processes())

    async def watch(self, end: float) -> None:
        while time.monotonic() < end:
            self.samples.append((time.monotonic(), sum(each.memory_info().rss for each in self.processes())))
            await asyncio.sleep(0.5)

    def most(self, start: float, end: float) -> int:
        """The largest size in a part of the time, which is 0 at the first sample and 1 at the last."""
        first, last = self.samples[0][0], self.samples[-1][0]
        return max(size for at, size in self.samples if start <= (at - first) / (last - first) <= end)


async def number(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).split("\n")
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    if not found:
        raise KeyError(name)
    return sum(found)


GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


async def _held(url: str) -> Json:
    """What the server holds: requests and blocks."""
    async with aiohttp.ClientSession() as session:
        found: Json = {name: await number(session, url, name) for name in GAUGES}
        async with session.get(f"{url}/load") as response:
            found["server_load"] = (await response.json())["server_load"]
    return found


async def _known(target: Target, what: str) -> None:
    """Ask every case alone: the first time to know the answers, later to compare."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        for case in target.cases:
            found = await answer_of(session, target.url, case)
            if case.answer is not None and found != case.answer:
                target.blame(f"{what}: wrong answer to {case.body}: {found} instead of {case.answer}")
            case.answer = found


async def soak(url: str, model: str, pid: int, connections: int, seconds: float, scale: float = 1.0) -> Json:
    """Load the server at `url`, the process `pid`, and tell what came of it; `wrong` lists what must not be.

    Args:
        scale: times by which the stretches are shortened that a connection lasts, for a short run.
    """
    target = Target(url, model, pid, cases(model), seconds, scale)
    tree = Tree(pid)
    await _known(target, "before")
    await asyncio.sleep(1)  # for the server to see that the connections are closed
    before, children = tree.descriptors(), {process.pid for process in tree.processes()}
    began = time.monotonic()
    end = began + seconds
    kinds = [kind for kind, share in KINDS.items() for _ in range(share)]
    chosen = [kinds[(i * 37) % len(kinds)] for i in range(connections)]
    watchers = [asyncio.create_task(tree.watch(end)), asyncio.create_task(_watch_health(target, end))]
    await asyncio.gather(*(_keep(target, kind, random.Random(i), end) for i, kind in enumerate(chosen)))
    await asyncio.gather(*watchers)
    lasted = time.monotonic() - began
    left = await _until_idle(target, tree, before)
    await _known(target, "after")
    warm, last = tree.most(0.25, 0.5), tree.most(0.8, 1)
    if last > warm * (1 + GROWTH) + SLACK:
        target.blame(f"memory grew from {warm // MIB} to {last // MIB} MiB")
    if {process.pid for process in tree.processes()} != children:
        target.blame("a process of the server has ended or was started anew")
    target.latencies.sort()
    return {
        "connections": connections,
        "seconds": round(lasted),
        "ended": dict(target.done),
        "answer_p50": round(target.latencies[len(target.latencies) // 2], 2),
        "answer_max": round(target.latencies[-1], 2),
        "health_max": round(max(target.health), 3),
        "warm_mib": warm // MIB,
        "last_mib": last // MIB,
        "peak_mib": tree.most(0, 1) // MIB,
        "descriptors_before": before,
        **left,
        "wrong": target.wrong,
    }


async def _until_idle(target: Target, tree: Tree, descriptors: int) -> Json:
    """Wait until nothing is held any longer, for a minute at most, and say what is."""
    deadline = time.monotonic() + 60
    while True:
        held = {**await _held(target.url), "descriptors": tree.descriptors()}
        idle = not any(value for name, value in held.items() if name != "descriptors")
        if idle and held["descriptors"] <= descriptors:
            return held
        if time.monotonic() > deadline:
            target.blame(f"not given back after a minute: {held}, descriptors before: {descriptors}")
            return held
        await asyncio.sleep(1)


def allow_connections(count: int) -> None:
    """Raise the limit of open files to what `count` connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count * 2 + 500
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard > 0 else wanted, hard))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--kv-cache-memory-bytes", default="256MiB")
    parser.add_argument("flags", nargs="*", help="flags of octavo serve, after --")
    args = parser.parse_args()
    allow_connections(args.connections)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", args.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-cache-memory-bytes", args.kv_cache_memory_bytes, "--disable-uvicorn-access-log", *args.flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_ready(url, process))
            report = asyncio.run(soak(url, args.model, process.pid, args.connections, args.seconds))
        finally:
            process.terminate()
            status = process.wait(30)
        report["exit_status"] = status
        if status:
            report["wrong"].append(f"the server ended with status {status}")
        report["wrong"] += traces(log.read_text())
    print(json.dumps(report, indent=1))
    return 1 if report["wrong"] else 0


def traces(log: str) -> list[str]:
    """The first stack trace of a log, if there is one."""
    at = log.find("Traceback")
    return [] if at < 0 else [f"the log has a stack trace: {log[max(at - 300, 0) : at + 3000]}"]


async def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise SystemExit("the server ended before it was ready; run it by hand to see why")


if __name__ == "__main__":
    raise SystemExit(main())
