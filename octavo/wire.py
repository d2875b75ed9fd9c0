"""What the front end and the engine say to each other, as messages, as frames on a socket, and the loop that answers.

A frame is a little-endian uint32 length and that many bytes of MessagePack. The first frame, from the front end, is the
`EngineConfig`; all others are the messages below. The deltas of one step travel together.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import msgspec

from octavo.info import ModelInfo
from octavo.types import Delta, EngineStats, Request

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<I")

_T = TypeVar("_T")


class Add(msgspec.Struct, tag=True, array_like=True):
    request: Request


class Replayed(msgspec.Struct, array_like=True):
    """A request that an earlier engine did not finish; what came of it stands in `request.resume`."""

    request: Request
    ended: list[int] = []
    """Choices that need no more tokens."""
    alone: int = 0
    """Tokens that each choice must make apart from all others, because the request may have ended the engine."""


class Replay(msgspec.Struct, tag=True, array_like=True):
    """Requests to go on with, all taken before the next step."""

    requests: list[Replayed]


class Abort(msgspec.Struct, tag=True, array_like=True):
    """End one choice, or all (None)."""

    request: str
    choice: int | None = None


class AskStats(msgspec.Struct, tag=True, array_like=True):
    pass


class Ping(msgspec.Struct, tag=True, array_like=True):
    """Asks for a `Pong`: is somebody there?"""


class Close(msgspec.Struct, tag=True, array_like=True):
    pass


class Progress(msgspec.Struct, tag=True, array_like=True):
    """A sentence about the loading that goes on."""

    text: str


class Ready(msgspec.Struct, tag=True, array_like=True):
    info: ModelInfo


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine could not start, or cannot go on."""

    reason: str


class Deltas(msgspec.Struct, tag=True, array_like=True):
    """All the news of a step."""

    deltas: list[Delta]


class Rejected(msgspec.Struct, tag=True, array_like=True):
    """The engine did not take the request, and why."""

    request: str
    reason: str


class Left(msgspec.Struct, tag=True, array_like=True):
    """The whole request was aborted: no delta of it will follow, its id is free."""

    request: str


class Stats(msgspec.Struct, tag=True, array_like=True):
    stats: EngineStats


class Pong(msgspec.Struct, tag=True, array_like=True):
    pass


ToEngine = Add | Replay | Abort | AskStats | Ping | Close
FromEngine = Progress | Ready | Failed | Deltas | Rejected | Left | Stats | Pong


class Engine(Protocol):
    """What the loop needs of an engine (see octavo.engine)."""

    announce: Callable[[list[str]], None] | None

    @property
    def idle(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def isolate(self, request_id: str, tokens: int) -> None: ...

    def abort(self, request_id: str, choice: int | None = None) -> object: ...

    def step(self) -> list[Delta]: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class Served(Protocol):
    """What a builder returns: an engine, and what there is to know of its model."""

    @property
    def engine(self) -> Engine: ...

    @property
    def info(self) -> ModelInfo: ...


def run(engine: Engine, inbox: SimpleQueue[ToEngine], send: Callable[[FromEngine], None]) -> Failed | None:
    """`drive` until the end, then close the engine; the message that says why, if it failed.

    Raises:
        ConnectionError: what `send` raised: nobody listens any more.
    """
    try:
        drive(engine, inbox, send)
    except ConnectionError:
        raise
    except Exception as error:
        logger.exception("the engine cannot go on")
        return Failed(f"a step failed: {type(error).__name__}: {error}")
    finally:
        engine.close()
    return None


def drive(engine: Engine, inbox: SimpleQueue[ToEngine], send: Callable[[FromEngine], None]) -> None:
    """Answer messages and run steps until `Close` comes. Waits without using the CPU while there is nothing to do.

    Raises what `engine.step` raises; the engine is then lost.
    """
    while True:
        wait = engine.idle
        left: list[str] = []
        while True:
            try:
                message = inbox.get(wait)
            except Empty:
                break
            wait = False
            if isinstance(message, Close):
                return
            if isinstance(message, Add):
                _add(engine, message.request, send)
            elif isinstance(message, AskStats):
                send(Stats(engine.stats()))
            elif isinstance(message, Ping):
                send(Pong())
            elif isinstance(message, Replay):
                for replayed in message.requests:
                    _replay(engine, replayed, send)
            else:
                engine.abort(message.request, message.choice)
                if message.choice is None:
                    left.append(message.request)
        if not engine.idle and (deltas := engine.step()):
            send(Deltas(deltas))
        for request_id in left:  # after the step, which still tells of the abort
            send(Left(request_id))


def _add(engine: Engine, request: Request, send: Callable[[FromEngine], None]) -> None:
    try:
        engine.add(request)
    except ValueError as error:
        send(Rejected(request.id, str(error)))
    except Exception as error:
        logger.exception("request %s could not be added", request.id)
        send(
            Deltas(
                [
                    Delta(request.id, choice, finish="error", error=f"internal error: {error}")
                    for choice in range(request.n)
                ]
            )
        )


def _replay(engine: Engine, replayed: Replayed, send: Callable[[FromEngine], None]) -> None:
    _add(engine, replayed.request, send)
    for choice in replayed.ended:
        engine.abort(replayed.request.id, choice)
    if replayed.alone:
        engine.isolate(replayed.request.id, replayed.alone)


def frame(message: object) -> bytes:
    """`message` as it goes over the socket."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


class Connection:
    """The engine's end of the socket: blocking; may be written to from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        data = frame(message)
        with self._lock:
            self._sock.sendall(data)

    def receive(self, decoder: msgspec.msgpack.Decoder[_T]) -> _T | None:
        """The next message; None when the other end is closed."""
        header = self._exactly(HEADER.size)
        body = self._exactly(HEADER.unpack(header)[0]) if header is not None else None
        return None if body is None else decoder.decode(body)

    def _exactly(self, n: int) -> bytes | None:
        data = bytearray()
        while len(data) < n:
            try:
                part = self._sock.recv(min(n - len(data), 1 << 20))
            except ConnectionError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)
