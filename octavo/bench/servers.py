"""The servers of a comparison: found by URL or started from a command line, watched while they work, and stopped."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shlex
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from octavo.bench.client import Target
from octavo.bench.compare_options import PORT
from octavo.bench.machine import Gpus

_POLL = 0.05
"""Seconds between two looks at a server that starts."""
_SAMPLE = 0.5
"""Seconds between two looks at the memory of a server that works."""
_PATIENCE = 15.0
"""Seconds that a process has to end by itself."""
_LOG_LINES = 20
"""How much of a log a report shows."""
_LONGEST_LINE = 300
"""Characters of a line of a log."""
_SECRETS = ("--api-key", "--api_key", "--token", "--hf-token", "--password")

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxies: the client that loads the servers takes none either."""


class ServerError(Exception):
    """A server does not start, or does not answer; the text is a sentence for the report."""


@dataclass
class Server:
    """What the user says about a server."""

    name: str
    target: Target
    command: str | None = None
    """What starts it; `{port}` in it becomes a free port. None: it runs at `target.url`."""
    pid: int | None = None
    """Whose tree of processes is measured; None: the one that was started, or that listens at the URL."""


# -- asking


def get(target: Target, path: str, seconds: float = 5.0) -> tuple[int, bytes]:
    """Status and body of a route. Raises OSError when nobody answers."""
    headers = dict(target.headers)
    if target.key:
        headers.setdefault("Authorization", f"Bearer {target.key}")
    try:
        with _OPENER.open(urllib.request.Request(target.address(path), headers=headers), timeout=seconds) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, OSError) else OSError(str(error.reason)) from None
    except ValueError as error:  # no URL at all
        raise OSError(str(error)) from None
    except Exception as error:  # what answers speaks no HTTP
        if isinstance(error, OSError):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from None


def is_ready(target: Target) -> bool:
    """Whether a server answers requests: /health says so, or it has none and lists its models."""
    try:
        status, _ = get(target, "/health")
        if status == 404:
            status, _ = get(target, "/v1/models")
    except OSError:
        return False
    return status == 200


def is_there(target: Target) -> bool:
    """Whether anything answers, ready or not."""
    try:
        get(target, "/health")
    except OSError:
        return False
    return True


def find_model(target: Target) -> str | None:
    """The model that a server names first. Raises ServerError where one must be named and is not found."""
    path = "/info" if target.kind == "tgi" else "/v1/models"
    try:
        status, body = get(target, path)
        told = json.loads(body)
        found = told["model_id"] if target.kind == "tgi" else told["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        if target.kind == "tgi":
            return None
        raise ServerError(f"{target.address(path)} names no model; say which one with --model NAME=MODEL") from None
    return str(found)


def versions(target: Target) -> dict[str, str]:
    """What a server tells about its version, by the route that tells it."""
    found: dict[str, str] = {}
    for path, keys in (
        ("/version", ("version",)),
        ("/info", ("version", "sha", "docker_label", "model_dtype")),
        ("/api/version", ("version",)),
        ("/props", ("build_info",)),
    ):
        with contextlib.suppress(OSError, ValueError):
            status, body = get(target, path)
            told = json.loads(body) if status == 200 else None
            if isinstance(told, dict):
                found |= {f"{path} {key}": str(told[key])[:100] for key in keys if told.get(key)}
    return found


# -- starting and stopping


@dataclass
class Started:
    """A server that runs because we started it."""

    process: subprocess.Popen[bytes]
    log: Path
    begun: float = field(default_factory=time.perf_counter)

    @property
    def exit_status(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def stop(self) -> None:
        """End it, and then what is left of its processes; those that do not end in time are killed."""
        family = self._family()
        try:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_PATIENCE)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            psutil.wait_procs(family, _PATIENCE)
        finally:  # also when the user does not want to wait
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.process.wait()

    def _family(self) -> list[psutil.Process]:
        """The process, what it started, and what these started and left behind in their session."""
        found = {process.pid: process for process in tree(self.process.pid)}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process.pid) == self.process.pid:
                    found[process.pid] = process
        return list(found.values())


def start(command: str, log: Path) -> tuple[Started, int]:
    """Start a command line, with a free port put in; what it prints is added to `log`. Returns it and its port.

    Raises:
        ServerError: it cannot be started.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    words = [word.replace(PORT, str(port)) for word in shlex.split(command)]
    with log.open("ab") as out:
        try:
            # In a session of its own, so that Ctrl-C at the terminal reaches us alone, who then stop it.
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise ServerError(f"cannot be started: {words[0]}: {error.strerror}") from None
    return Started(process, log), port


def wait_ready(target: Target, seconds: float, started: Started | None = None) -> None:
    """Wait until a server answers. Raises ServerError when it ends, or takes more than `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_ready(target):
        if started is not None and started.exit_status is not None:
            raise ServerError(f"{ending(started.exit_status)} while it started")
        if time.monotonic() > deadline:
            raise ServerError(f"is not ready after {seconds:g} s: neither /health nor /v1/models answers 200")
        time.sleep(_POLL)


def ending(status: int) -> str:
    """How a process ended, in words."""
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def last_lines(log: Path) -> list[str]:
    """The end of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 20_000))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line[:_LONGEST_LINE] for line in text.splitlines() if line.strip()][-_LOG_LINES:]


def without_secrets(command: str) -> str:
    """A command line that may be shown to others."""
    words = []
    hidden = False
    for word in command.split(" "):
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            hidden = name in _SECRETS
            words.append(f"{name}=***" if hidden and equals else word)
        else:
            words.append("***" if hidden else word)
    return " ".join(words)


# -- watching


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; empty when it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def listener(url: str) -> int | None:
    """The process of this machine that listens at a URL; None for another machine, or where that is not told."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_here(parts.hostname or ""):
        return None
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and connection.pid
        if listens and connection.laddr and connection.laddr.port == port:
            return None if connection.pid == os.getpid() else connection.pid
    return None


def _is_here(host: str) -> bool:
    """Whether a host is this machine: a loopback address."""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)


@dataclass(frozen=True)
class Usage:
    """What a tree of processes uses; bytes."""

    resident: int
    """Pages shared by several of the processes count for each of them."""
    private: int
    """Resident without pages of files and shared memory."""
    cpu_seconds: float
    """Since they started, those included that have ended."""
    processes: int
    gpu: int | None = None
    """On all GPUs."""
    gpu_of_all: int | None = None
    """What all programs together have on all GPUs."""


def usage(pid: int | None, gpus: Gpus | None = None) -> Usage | None:
    """None where the process is not known, or has ended."""
    processes = [] if pid is None else tree(pid)
    resident = private = seen = 0
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            with process.oneshot():
                memory, cpu = process.memory_info(), process.cpu_times()
            resident += memory.rss
            private += memory.rss - getattr(memory, "shared", 0)
            seconds += cpu.user + cpu.system + cpu.children_user + cpu.children_system
            seen += 1
    if not seen:
        return None
    if gpus is None:
        return Usage(resident, private, seconds, seen)
    gpu = gpus.used_by(process.pid for process in processes)
    return Usage(resident, private, seconds, seen, gpu, gpus.used())


def proportional(pid: int | None) -> int | None:
    """Bytes of a tree of processes, each shared page divided among those who share it; None where that is not told.

    Costs the kernel a walk through all of their pages.
    """
    total = 0
    for process in [] if pid is None else tree(pid):
        try:
            total += process.memory_full_info().pss
        except (psutil.Error, AttributeError):
            return None
    return total or None


class Watch:
    """Looks at a tree of processes again and again while the block runs."""

    def __init__(self, pid: int | None, gpus: Gpus, clock: Callable[[], float] = time.perf_counter) -> None:
        self.samples: list[tuple[float, Usage]] = []
        """When, and what was used."""
        self._pid = pid
        self._gpus = gpus
        self._clock = clock
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._done.wait(_SAMPLE):
            self._look()

    def _look(self) -> None:
        if (used := usage(self._pid, self._gpus)) is not None:
            self.samples.append((self._clock(), used))

    def peak(self, what: str) -> Any:
        """The largest value of a field of `Usage`; None where it is not known."""
        values = [value for _, used in self.samples if (value := getattr(used, what)) is not None]
        return max(values, default=None)

    @property
    def cpu_seconds(self) -> float | None:
        """What the processes worked while the block ran."""
        if len(self.samples) < 2:
            return None
        return max(0.0, self.samples[-1][1].cpu_seconds - self.samples[0][1].cpu_seconds)
