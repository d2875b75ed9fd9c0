"""The front end's side of the engine: requests in, streams of deltas out, whether the engine runs here or elsewhere.

`InProcess` runs it on a thread, `Process` in a process of its own. Both are used from one asyncio event loop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NamedTuple, Protocol

import msgspec

from octavo.config import EngineConfig
from octavo.info import ModelInfo
from octavo.process import DEFAULT_BUILDER, cause
from octavo.types import Delta, EngineStats, FinishReason, Request
from octavo.wire import (
    HEADER,
    Abort,
    Add,
    AskStats,
    Close,
    Deltas,
    Failed,
    FromEngine,
    Left,
    Progress,
    Ready,
    Rejected,
    Served,
    Stats,
    ToEngine,
    frame,
    run,
)

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long a closed engine gets to end by itself."""
OBITUARY_SECONDS = 1.0
"""How long to wait for the exit status of a process that closed its socket."""
STDERR = 2
ROOT = str(Path(__file__).parents[1])
CHILD = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; "
    "import octavo.process; sys.exit(octavo.process.main())"
)
"""`python -m octavo.process`, but finding Octavo where this process has it, and no module of the current folder, where
a user's random.py would come before Python's own."""


class RequestRejected(ValueError):
    """The engine does not take the request: its id is in use, or it can never fit."""


class EngineUnavailable(RuntimeError):
    """The engine is still loading, or dead; the text says which, and why."""


class Status(NamedTuple):
    state: Literal["loading", "ready", "dead"]
    reason: str = ""
    """While loading, what is being done; when dead, why."""


class AsyncEngine(Protocol):
    """An engine as the front end sees it."""

    @property
    def status(self) -> Status: ...

    async def start(self) -> ModelInfo:
        """Load the model; returns when requests may come.

        Raises:
            EngineUnavailable: it could not be loaded; the text is the cause.
        """

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """The request's deltas as they come; ends when each of its choices has a finish reason. Closing or cancelling
        the iterator aborts the request. If the engine dies, each open choice gets finish reason "error".

        Raises:
            RequestRejected: the engine does not take it.
            EngineUnavailable: the engine is loading or dead.
        """

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """End one choice, or all (None): its stream gets finish reason "abort". Unknown and finished ones are fine."""

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Abort what runs and end the engine. May be called again."""


class _Mailbox:
    """Deltas of one request on their way to whoever iterates."""

    def __init__(self, request: Request) -> None:
        self.id = request.id
        self.open = set(range(request.n))
        self._items: list[Delta] = []
        self._error: Exception | None = None
        self._waker: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        """Deltas of a choice that has ended are dropped."""
        if delta.choice not in self.open:
            return
        if delta.finish is not None:
            self.open.discard(delta.choice)
        self._items.append(delta)
        self._wake()

    def end(self, finish: FinishReason, error: str | None = None, choice: int | None = None) -> None:
        """End one open choice, or all of them."""
        for index in sorted(self.open) if choice is None else [choice]:
            self.put(Delta(self.id, index, finish=finish, error=error))

    def fail(self, error: Exception) -> None:
        self._error = error
        self.open.clear()
        self._wake()

    async def take(self) -> list[Delta]:
        """What has come since, at least one delta; empty at the end."""
        while not self._items and self.open:
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        if self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)


class _Client(ABC):
    """Streams by request id, and what to do with each message of the engine."""

    def __init__(self) -> None:
        self._status = Status("loading")
        self._mailboxes: dict[str, _Mailbox] = {}
        self._leaving: dict[str, asyncio.Future[None]] = {}
        """Ids whose abort the engine has not confirmed yet: late deltas of theirs may still come."""
        self._asking: deque[asyncio.Future[EngineStats]] = deque()
        self._started: asyncio.Future[ModelInfo] | None = None

    @abstractmethod
    def _post(self, message: ToEngine) -> None:
        """Hand a message to the engine, in order."""

    @abstractmethod
    async def _launch(self) -> None:
        """Set the engine going; its first answers are `Progress`, then `Ready` or `Failed`."""

    @abstractmethod
    async def close(self) -> None: ...

    @property
    def status(self) -> Status:
        return self._status

    async def start(self) -> ModelInfo:
        started: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._started = started
        try:
            await self._launch()
            return await started
        except BaseException:
            started.cancel()  # nobody waits for it any longer
            await self.close()
            raise

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        while (leaving := self._leaving.get(request.id)) is not None:
            await asyncio.shield(leaving)
        self._check_ready()
        if request.id in self._mailboxes:
            raise RequestRejected(f"request id {request.id!r} is in use; give each request an id of its own")
        mailbox = _Mailbox(request)
        self._mailboxes[request.id] = mailbox
        try:
            self._post(Add(request))
            while deltas := await mailbox.take():
                for delta in deltas:
                    yield delta
        finally:
            if mailbox.open:
                self._abandon(request.id)
            self._mailboxes.pop(request.id, None)

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None or not mailbox.open or (choice is not None and choice not in mailbox.open):
            return
        if choice is None:
            self._abandon(request_id)
        elif self._status.state == "ready":
            self._post(Abort(request_id, choice))
        mailbox.end("abort", choice=choice)

    async def stats(self) -> EngineStats:
        self._check_ready()
        asking: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._asking.append(asking)
        self._post(AskStats())
        return await asking

    def _abandon(self, request_id: str) -> None:
        if self._status.state == "ready":
            self._leaving[request_id] = asyncio.get_running_loop().create_future()
            self._post(Abort(request_id))

    def _check_ready(self) -> None:
        state, reason = self._status
        if state == "loading":
            raise EngineUnavailable(f"The model is still loading{': ' + reason if reason else ''}. Try again soon.")
        if state == "dead":
            raise EngineUnavailable(f"The engine is dead: {reason}")

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                if (mailbox := self._mailboxes.get(delta.request)) is not None and delta.request not in self._leaving:
                    mailbox.put(delta)
        elif isinstance(message, Rejected):
            if (mailbox := self._mailboxes.get(message.request)) is not None:
                mailbox.fail(RequestRejected(message.reason))
        elif isinstance(message, Left):
            self._leaving.pop(message.request).set_result(None)
        elif isinstance(message, Stats):
            asking = self._asking.popleft()
            if not asking.done():
                asking.set_result(message.stats)
        elif isinstance(message, Progress):
            self._status = Status("loading", message.text)
        elif isinstance(message, Ready):
            self._status = Status("ready")
            if self._started is not None and not self._started.done():
                self._started.set_result(message.info)
        else:
            self._die(message.reason)

    def _die(self, reason: str, finish: FinishReason = "error") -> None:
        """The engine is gone: nobody waits for it any longer. The first reason is kept."""
        if self._status.state == "dead":
            return
        self._status = Status("dead", reason)
        for mailbox in self._mailboxes.values():
            mailbox.end(finish, f"The engine stopped: {reason}" if finish == "error" else None)
        for leaving in self._leaving.values():
            leaving.set_result(None)
        self._leaving.clear()
        error = EngineUnavailable(reason)
        for asking in self._asking:
            if not asking.done():
                asking.set_exception(error)
        self._asking.clear()
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)


class InProcess(_Client):
    """The engine on a thread of this process. `build` runs there too."""

    def __init__(self, build: Callable[[], Served]) -> None:
        super().__init__()
        self._build = build
        self._inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def close(self) -> None:
        self._die("it was closed", finish="abort")
        self._inbox.put(Close())
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    def _post(self, message: ToEngine) -> None:
        self._inbox.put(message)

    async def _launch(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def _run(self) -> None:
        try:
            built = self._build()
        except Exception as error:
            self._send(Failed(cause(error)))
            return
        self._send(Ready(built.info))
        if (failure := run(built.engine, self._inbox, self._send)) is not None:
            self._send(failure)

    def _send(self, message: FromEngine) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._receive, message)
        except RuntimeError:  # the event loop is closed: nobody is left to tell
            logger.debug("dropped a message of the engine: the event loop is closed")


class Process(_Client):
    """The engine in a process of its own, which ends with this one.

    `builder` ("module:function") makes the engine from the configuration over there.
    """

    def __init__(self, config: EngineConfig, builder: str = DEFAULT_BUILDER) -> None:
        super().__init__()
        self._config = config
        self._builder = builder
        self._child: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def close(self) -> None:
        self._die("it was closed", finish="abort")
        if self._writer is not None:
            self._writer.close()
        if self._child is not None and await self._exit_status(CLOSE_SECONDS) is None:
            self._child.kill()
            await self._exit_status(CLOSE_SECONDS)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def _post(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", CHILD, ROOT, "--fd", str(theirs.fileno()), "--builder", self._builder]
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=STDERR, pass_fds=[theirs.fileno()])
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(frame(self._config))
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        try:
            while True:
                (n,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                self._receive(decoder.decode(await reader.readexactly(n)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._die(await self._obituary())
        except msgspec.MsgspecError as error:
            logger.exception("the engine's process sent what cannot be read")
            self._die(f"its process sent what cannot be read: {error}")

    async def _obituary(self) -> str:
        """How the child ended, once its socket is closed."""
        status = await self._exit_status(OBITUARY_SECONDS)
        if status is None:
            return "its process closed the connection"
        if status == -signal.SIGKILL:
            return "its process was killed (SIGKILL); if nobody did, the machine may have run out of memory"
        if status < 0:
            return f"its process was killed by {signal.Signals(-status).name}"
        return f"its process ended with exit status {status}"

    async def _exit_status(self, seconds: float) -> int | None:
        """The child's exit status, waiting at most `seconds`; None while it lives."""
        assert self._child is not None
        deadline = asyncio.get_running_loop().time() + seconds
        while (status := self._child.poll()) is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        return status
