"""Templates of callers run in a process of their own, which ends with what they do.

Jinja's sandbox keeps a template away from Python's insides, but not from time and memory: a few lists that hold each
other twice make a text without end in one step. So a template that came with a request is rendered by a child with
little memory and an alarm that nothing in it can put off. Where the child dies, the request is at fault.
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from octavo.text.sandbox import MAX_SECONDS, MAX_SOURCE, ChatEnvironment, TemplateError

MEMORY = 1 << 30
"""Bytes of address space of a child."""
SECONDS = MAX_SECONDS + 2
"""Time for one rendering: more than the sandbox itself allows, so that what it can count is answered with its words."""
WORKERS = 4
"""Renderings at once."""
_TEMPLATES = 16
"""Templates that a child keeps ready."""
_HEADER = struct.Struct("<I")
_ROOT = str(Path(__file__).parents[2])
_CHILD = "import sys; sys.path.append(sys.argv[1]); from octavo.text.confined import main; main(int(sys.argv[2]))"


class Confined:
    """The sandbox, in children of this process: the same results, and never more than so much time and memory.

    Variables are what JSON can say. May be used from several threads; beyond `WORKERS` renderings they wait.
    """

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._free = threading.BoundedSemaphore(WORKERS)
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()

    def read(self, source: str) -> str:
        """The template, once it is known to be one.

        Raises:
            TemplateError: it is too long, or no template.
        """
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are read.")
        self._ask([source])
        return source

    def run(self, template: str, variables: dict[str, Any]) -> str:
        """The rendered text.

        Raises:
            TemplateError: the template exceeds a limit, fails, or refuses the variables.
        """
        return self._ask([template, variables])

    def close(self) -> None:
        """End the children; what they are rendering fails."""
        for child in list(self._busy):
            child.end()
        while self._idle:
            self._idle.pop().kill()

    def _ask(self, question: list[Any]) -> str:
        with self._free:
            child = self._take()
            self._busy.add(child)
            try:
                answer = child.ask(json.dumps(question).encode())
            except BaseException:
                child.kill()
                raise
            finally:
                self._busy.discard(child)
            self._idle.append(child)
        text, error = json.loads(answer)
        if error is not None:
            raise TemplateError(error)
        return str(text)

    def _take(self) -> _Child:
        with contextlib.suppress(IndexError):
            while True:
                child = self._idle.pop()
                if child.alive:
                    return child
                child.kill()
        return _Child(self._seconds)


class _Child:
    """A process that renders one template after the other."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, _ROOT, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        if _receive(self._out) is None:
            self.kill()
            raise RuntimeError("the process that renders templates of callers does not start")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes) -> bytes:
        with contextlib.suppress(BrokenPipeError):
            _send(self._in, question)
        answer = _receive(self._out)
        if answer is None:
            raise TemplateError(
                f"the chat template takes more than {self._seconds} seconds or {MEMORY >> 20} MiB of memory"
            )
        return answer

    def end(self) -> None:
        """Whoever waits for an answer gets none; they clean up."""
        self._process.kill()

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes and waits for it
            pass


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_HEADER.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """The next message; None when the other end is gone."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack(header)
    data = pipe.read(size)
    return data if len(data) == size else None


def main(seconds: int) -> None:
    """The child: answers until its input ends, or a rendering takes more than `seconds`."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    environment = ChatEnvironment()
    read = functools.lru_cache(_TEMPLATES)(environment.read)
    _send(sys.stdout.buffer, b"")  # ready
    while (question := _receive(sys.stdin.buffer)) is not None:
        signal.alarm(seconds)
        try:
            source, *variables = json.loads(question)
            template = read(source)
            answer = [environment.run(template, variables[0]) if variables else "", None]
        except TemplateError as error:
            answer = [None, str(error)]
        _send(sys.stdout.buffer, json.dumps(answer).encode())
        signal.alarm(0)
