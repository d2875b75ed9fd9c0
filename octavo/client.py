"""The front end's side of the engine: requests in, streams of deltas out, whether the engine runs here or elsewhere.

`InProcess` runs it on a thread, `Process` in a process of its own. Both are used from one asyncio event loop.

The record of every request is kept here: what was asked, and each token that has come. When the engine's process dies,
`Process` starts another one and replays what is open, from the tokens that have come on; what decides about suspects
and delays is in `octavo.recovery`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NamedTuple, Protocol

import msgspec

from octavo.config import EngineConfig
from octavo.flight_recorder import FlightRecorder
from octavo.info import ModelInfo
from octavo.process import DEFAULT_BUILDER, cause
from octavo.recovery import Death, History
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
    Ping,
    Pong,
    Progress,
    Ready,
    Rejected,
    Replay,
    Replayed,
    Served,
    Stats,
    ToEngine,
    frame,
    run,
)

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long a closed engine gets to end by itself."""
OBITUARY_SECONDS = 5.0
"""How long a process that has closed its socket gets to end; then it is killed."""
HUNG_SECONDS = 2.0
"""How long a hung process gets to write down where it hangs; then it is killed."""
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
    """The engine is still loading, keeps dying, or is dead; the text says which, and why."""


class Status(NamedTuple):
    """loading: not ready for the first time; ready; restarting: it has died, what is open waits for the next one and
    new requests may join; failing: it dies again and again, new requests are refused; dead: for good."""

    state: Literal["loading", "ready", "restarting", "failing", "dead"]
    reason: str = ""
    """While loading, what is being done; else why it has died."""


class AsyncEngine(Protocol):
    """An engine as the front end sees it."""

    @property
    def status(self) -> Status: ...

    async def start(self) -> ModelInfo:
        """Load the model; returns when requests may come.

        Raises:
            EngineUnavailable: it could not be loaded; the text is the cause.
        """

    @property
    def restarts(self) -> int:
        """How often the engine has been started again."""

    @property
    def replayed(self) -> int:
        """Requests that have gone on after that."""

    def generate(self, *requests: Request) -> AsyncGenerator[list[Delta], None]:
        """The requests' deltas as they come, those that came together in one list; ends when each choice of each
        request has a finish reason. Closing or cancelling the iterator aborts the requests. If the engine dies for
        good, each open choice gets finish reason "error".

        Raises:
            RequestRejected: the engine does not take one of them; the others are aborted.
            EngineUnavailable: the engine is loading, keeps dying, or is dead.
        """

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        """End one choice, or all (None): its stream gets finish reason "abort". Unknown and finished ones are fine."""

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Abort what runs and end the engine. May be called again."""


class _Mailbox:
    """Deltas on their way to whoever iterates: those of all requests of one call."""

    def __init__(self) -> None:
        self.open = 0
        """Choices without a finish reason."""
        self._items: list[Delta] = []
        self._error: Exception | None = None
        self._waker: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        self._items.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    async def take(self) -> list[Delta]:
        """What has come since, at least one delta; empty at the end."""
        while not self._items and self.open and self._error is None:
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        if self._error is not None:
            raise self._error
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)


class _Record:
    """A request and all that has come of it."""

    def __init__(self, request: Request, mailbox: _Mailbox) -> None:
        self.request = request
        self.open = set(range(request.n))
        self._tokens: list[list[int]] = [[] for _ in range(request.n)]
        self._mailbox = mailbox
        mailbox.open += request.n

    def put(self, delta: Delta) -> None:
        """Hand on what is new. Deltas of a choice that has ended are dropped, and tokens that came before."""
        if delta.choice not in self.open:
            return
        if delta.tokens:
            known = self._tokens[delta.choice]
            if delta.start != len(known):
                delta = _fresh(delta, len(known))
            known += delta.tokens
        if delta.finish is not None:
            self.open.discard(delta.choice)
            self._mailbox.open -= 1
        self._mailbox.put(delta)

    def end(self, finish: FinishReason, error: str | None = None, choice: int | None = None) -> None:
        """End one open choice, or all of them."""
        for index in sorted(self.open) if choice is None else [choice]:
            self.put(Delta(self.request.id, index, finish=finish, error=error))

    def fail(self, error: Exception) -> None:
        self._mailbox.open -= len(self.open)
        self.open.clear()
        self._mailbox.fail(error)

    def replayed(self, alone: int) -> Replayed:
        """The request, for another engine to go on with."""
        resume = tuple(map(tuple, self._tokens))
        ended = [choice for choice in range(self.request.n) if choice not in self.open]
        return Replayed(msgspec.structs.replace(self.request, resume=resume), ended, alone)


def _fresh(delta: Delta, known: int) -> Delta:
    """`delta` without the tokens before the `known`th; an error if there are some between."""
    skip = known - delta.start
    if skip < 0:
        lost = f"internal error: output tokens {known} to {delta.start} were lost"
        return Delta(delta.request, delta.choice, start=known, finish="error", error=lost)
    scores = None if delta.logprobs is None else delta.logprobs[skip:]
    return msgspec.structs.replace(delta, start=known, tokens=delta.tokens[skip:], logprobs=scores)


class _Client(ABC):
    """Streams by request id, and what to do with each message of the engine."""

    def __init__(self) -> None:
        self.restarts = 0
        self.replayed = 0
        self._status = Status("loading")
        self._records: dict[str, _Record] = {}
        """In the order of arrival."""
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

    async def generate(self, *requests: Request) -> AsyncGenerator[list[Delta], None]:
        for request in requests:
            while (leaving := self._leaving.get(request.id)) is not None:
                await asyncio.shield(leaving)
        self._check_open()
        mailbox = _Mailbox()
        records: dict[str, _Record] = {}
        try:
            for request in requests:
                if request.id in self._records:
                    raise RequestRejected(f"request id {request.id!r} is in use; give each request an id of its own")
                self._records[request.id] = records[request.id] = _Record(request, mailbox)
                if self._status.state == "ready":  # else the next engine gets it with all that is open
                    self._post(Add(request))
            while deltas := await mailbox.take():
                yield deltas
        finally:
            for name, record in records.items():
                del self._records[name]
                if record.open:
                    self._abandon(name)

    async def abort(self, request_id: str, choice: int | None = None) -> None:
        record = self._records.get(request_id)
        if record is None or not record.open or (choice is not None and choice not in record.open):
            return
        if choice is None or record.open == {choice}:  # the id is free again when the engine says so
            self._abandon(request_id)
        elif self._status.state == "ready":
            self._post(Abort(request_id, choice))
        record.end("abort", choice=choice)

    async def stats(self) -> EngineStats:
        if self._status.state == "restarting":
            raise EngineUnavailable(_restarting(self._status.reason))
        self._check_open()
        asking: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._asking.append(asking)
        self._post(AskStats())
        return await asking

    def _abandon(self, request_id: str) -> None:
        if self._status.state == "ready":
            self._leaving[request_id] = asyncio.get_running_loop().create_future()
            self._post(Abort(request_id))

    def _check_open(self) -> None:
        """Raises EngineUnavailable where new requests cannot even wait."""
        state, reason = self._status
        if state == "loading":
            raise EngineUnavailable(f"The model is still loading{': ' + reason if reason else ''}. Try again soon.")
        if state == "failing":
            raise EngineUnavailable(f"The engine keeps stopping and is started again: {reason}. Try again later.")
        if state == "dead":
            raise EngineUnavailable(f"The engine is dead: {reason}")

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Deltas):
            records, leaving = self._records, self._leaving
            for delta in message.deltas:
                if (record := records.get(delta.request)) is not None and delta.request not in leaving:
                    record.put(delta)
        elif isinstance(message, Rejected):
            if (record := self._records.get(message.request)) is not None:
                record.fail(RequestRejected(message.reason))
        elif isinstance(message, Left):
            self._leaving.pop(message.request).set_result(None)
        elif isinstance(message, Stats):
            asking = self._asking.popleft()
            if not asking.done():
                asking.set_result(message.stats)
        elif isinstance(message, Progress):
            if self._status.state == "loading":
                self._status = Status("loading", message.text)
        elif isinstance(message, Ready):
            self._ready(message.info)
        elif isinstance(message, Failed):
            self._failed(message.reason)

    def _ready(self, info: ModelInfo) -> None:
        self._status = Status("ready")
        if self._started is not None and not self._started.done():
            self._started.set_result(info)

    def _failed(self, reason: str) -> None:
        """The engine says that it cannot start, or cannot go on."""
        self._die(reason)

    def _die(self, reason: str, finish: FinishReason = "error") -> None:
        """The engine is gone for good: nobody waits for it any longer. The first reason is kept."""
        if self._status.state == "dead":
            return
        self._status = Status("dead", reason)
        for record in self._records.values():
            record.end(finish, f"The engine stopped: {reason}" if finish == "error" else None)
        self._forget_questions(reason)
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineUnavailable(reason))

    def _forget_questions(self, reason: str) -> None:
        """Nobody is left to confirm an abort, or to tell its stats."""
        for leaving in self._leaving.values():
            leaving.set_result(None)
        self._leaving.clear()
        for asking in self._asking:
            if not asking.done():
                asking.set_exception(EngineUnavailable(reason))
        self._asking.clear()


def _restarting(reason: str) -> str:
    return f"The engine is being started again: {reason}"


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
    """The engine in a process of its own, which ends with this one. One that dies is replaced, and what was open goes
    on as if nothing had happened.

    Args:
        config: what to build.
        builder: "module:function" that makes the engine from the configuration over there.
    """

    def __init__(self, config: EngineConfig, builder: str = DEFAULT_BUILDER) -> None:
        super().__init__()
        self._config = config
        self._builder = builder
        self._history = History()
        self._begun: _Child | None = None
        self._life: _Life | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._info: ModelInfo | None = None
        """Of the first engine; none before it was ready."""

    def begin(self) -> Process:
        """Start its process already, before there is an event loop: it imports and loads while this one gets ready. If
        the system cannot, `start` tries again."""
        with contextlib.suppress(OSError):
            self._begun = _spawn(self._config, self._builder)
        return self

    @property
    def pid(self) -> int | None:
        return None if self._life is None else self._life.child.pid

    async def close(self) -> None:
        self._die("it was closed", finish="abort")
        if self._begun is not None:
            await self._launch()
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if self._life is not None:
            await self._life.close()

    def _post(self, message: ToEngine) -> None:
        if self._life is not None:
            self._life.post(message)

    async def _launch(self) -> None:
        child, self._begun = self._begun or _spawn(self._config, self._builder), None
        self._life = await _Life.start(child, self._receive)
        self._supervising = asyncio.create_task(self._supervise(self._life))
        self._supervising.add_done_callback(self._unsupervised)

    def _unsupervised(self, task: asyncio.Task[None]) -> None:
        """Nobody looks after the engine any more. If that is a fault, whoever waits for the next one must not."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the engine cannot be looked after", exc_info=error)
            self._die(f"it cannot be started again: {type(error).__name__}: {error}")

    async def _supervise(self, life: _Life) -> None:
        """Look after one process after the other, until one ends before any was ready."""
        while True:
            death = await life.end(self._config.watchdog_timeout)
            if self._info is None:
                self._die(death.reason)
                return
            self._bury(death)
            await asyncio.sleep(self._history.delay)
            life = self._life = await self._next(self._info)
            self.restarts += 1

    async def _next(self, info: ModelInfo) -> _Life:
        """Another process, with a KV cache and a context as large as the first one's."""
        sizes: dict[str, int] = {"max_model_len": info.max_model_len}
        if info.kv_bytes and self._config.num_gpu_blocks_override is None:
            sizes["kv_cache_memory_bytes"] = info.kv_bytes
        config = replace(self._config, **sizes)  # type: ignore[arg-type]
        while True:
            try:
                return await _Life.start(_spawn(config, self._builder), self._receive)
            except OSError as error:
                self._bury(Death(f"its process cannot be started: {error}", killed=True))
                await asyncio.sleep(self._history.delay)

    def _bury(self, death: Death) -> None:
        """A process has ended: those to blame for it end too, all others wait for the next one."""
        history = self._history
        waiting = [name for name, record in self._records.items() if record.open]
        guilty = history.died(death, waiting)
        times = f" ({history.in_a_row} times in a row)" if history.in_a_row > 1 else ""
        reason = f"{death.reason}{times}"
        logger.error("the engine has stopped: %s; starting it again, %d requests wait", reason, len(waiting))
        for name in guilty:
            logger.error("request %s ends: the engine stopped twice while it was computed", name)
            self._records[name].end("error", f"The engine stopped twice while it computed this request: {death.reason}")
        if history.hopeless:
            for record in self._records.values():
                record.end("error", f"The engine keeps stopping: {reason}")
        self._status = Status("failing" if history.failing else "restarting", reason)
        self._forget_questions(reason)

    def _ready(self, info: ModelInfo) -> None:
        self._history.ready()
        if self._info is None:
            self._info = info
        else:
            records = [record for record in self._records.values() if record.open]
            logger.warning("the engine runs again; %d requests go on", len(records))
            self.replayed += len(records)
            self._post(Replay([record.replayed(self._history.alone(record.request.id)) for record in records]))
        super()._ready(info)

    def _failed(self, reason: str) -> None:
        if self._info is None:
            self._die(reason)
        elif self._life is not None:
            self._life.last_words = reason


class _Child(NamedTuple):
    """A process of the engine that nobody listens to yet."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    record: int
    """File of its flight recorder."""


def _spawn(config: EngineConfig, builder: str) -> _Child:
    """Start a process of the engine and tell it its configuration.

    Raises:
        OSError: the system cannot.
    """
    ours, theirs = socket.socketpair()
    record = FlightRecorder.file(config.max_num_seqs)
    with theirs:
        fds = [theirs.fileno(), record]
        command = [sys.executable, "-c", CHILD, ROOT, "--fd", str(fds[0]), "--recorder", str(fds[1])]
        try:
            child = subprocess.Popen(
                [*command, "--builder", builder], stdin=subprocess.DEVNULL, stdout=STDERR, pass_fds=fds
            )
        except BaseException:
            ours.close()
            os.close(record)
            raise
    with contextlib.suppress(BrokenPipeError):  # it has ended already: its life will tell how
        ours.sendall(frame(config))
    return _Child(child, ours, record)


class _Life(asyncio.Protocol):
    """One process of the engine, from its start to its end, and the socket to it."""

    def __init__(self, child: subprocess.Popen[bytes], recorder: FlightRecorder, receive: Callable[..., None]) -> None:
        self.child = child
        self.last_words: str | None = None
        """What it said of its end."""
        self._recorder = recorder
        self._receive = receive
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._buffer = bytearray()
        self._loaded = False
        self._asked = 0.0
        """When it was asked for the `Pong` that has not come yet; 0.0 if there is none."""
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        """Set when the socket is closed: all it said has been received."""

    @classmethod
    async def start(cls, child: _Child, receive: Callable[[FromEngine], None]) -> _Life:
        """The life of `child`; `receive` is called with each of its messages."""
        life = cls(child.process, FlightRecorder(child.record), receive)
        await asyncio.get_running_loop().create_connection(lambda: life, sock=child.socket)
        return life

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) >= at + HEADER.size:
            end = at + HEADER.size + HEADER.unpack_from(buffer, at)[0]
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                body = bytes(view[at + HEADER.size : end])
            at = end
            try:
                message = self._decode(body)
            except msgspec.MsgspecError as error:
                logger.exception("the engine's process sent what cannot be read")
                self.last_words = f"its process sent what cannot be read: {error}"
                self.child.kill()
                break
            if isinstance(message, Pong):
                self._asked = 0.0
                continue
            self._loaded = self._loaded or isinstance(message, Ready)
            self._receive(message)
        del buffer[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set()

    def post(self, message: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    async def end(self, patience: float) -> Death:
        """Wait for the end of the process; one whose step takes more than `patience` seconds (0: any time), or that
        does not answer for so long, is ended."""
        while not self._lost.is_set():
            try:
                await asyncio.wait_for(self._lost.wait(), min(1.0, patience / 4) if patience else None)
            except asyncio.TimeoutError:  # noqa: UP041  (another class before Python 3.11)
                silence = self._silence()
                if (seconds := self._recorder.seconds()) > patience:
                    await self._end_hung(f"a step took more than {seconds:.0f} s")
                elif not seconds and silence > patience:
                    await self._end_hung(f"its process did not answer for {silence:.0f} s")
        status = await self._exit_status(OBITUARY_SECONDS)
        if status is None:
            self.child.kill()
            status = await self._exit_status(OBITUARY_SECONDS)
        killed = status == -signal.SIGKILL and self.last_words is None
        death = Death(self.last_words or _obituary(status), self._recorder.ids(), killed)
        self._recorder.close()
        return death

    async def close(self) -> None:
        """End the process: it may finish its step, for a while."""
        if self._transport is not None:
            self._transport.close()
        if await self._exit_status(CLOSE_SECONDS) is None:
            self.child.kill()
            await self._exit_status(CLOSE_SECONDS)

    def _silence(self) -> float:
        """How long it has owed an answer, as an engine between two steps never does; while it owes none it is asked for
        one. 0.0 while it loads."""
        if self._asked:
            return time.monotonic() - self._asked
        if self._loaded:
            self._asked = time.monotonic()
            self.post(Ping())
        return 0.0

    async def _end_hung(self, how: str) -> None:
        """SIGABRT makes it write down where it hangs."""
        self.last_words = f"{how} and was ended (--watchdog-timeout)"
        self.child.send_signal(signal.SIGABRT)
        if await self._exit_status(HUNG_SECONDS) is None:
            self.child.kill()

    async def _exit_status(self, seconds: float) -> int | None:
        """The child's exit status, waiting at most `seconds`; None while it lives."""
        deadline = time.monotonic() + seconds
        while (status := self.child.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return status


def _obituary(status: int | None) -> str:
    """How a child with this exit status ended."""
    if status is None:
        return "its process closed the connection"
    if status == -signal.SIGKILL:
        return "its process was killed (SIGKILL); if nobody did, the machine may have run out of memory"
    if status < 0:
        return f"its process was killed by {signal.Signals(-status).name}"
    return f"its process ended with exit status {status}"
