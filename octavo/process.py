"""The engine's own process: `python -m octavo.process --fd N --recorder M`, as `octavo.client.Process` starts it.

It reads its configuration from the inherited socket, builds the engine, answers until the socket closes, and ends with
its parent whatever it is doing then. Logs go to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from octavo import logs
from octavo.config import EngineConfig
from octavo.flight_recorder import FlightRecorder
from octavo.wire import Connection, Failed, Progress, Ready, Served, ToEngine, run

logger = logging.getLogger("octavo.process")

Builder = Callable[[EngineConfig, Callable[[str, int, int], None]], Served]
"""Called with the configuration and a function to call as (what is being done, done, total)."""

DEFAULT_BUILDER = "octavo.build:build"


def main() -> int:
    parser = argparse.ArgumentParser(prog="octavo.process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket")
    parser.add_argument("--recorder", type=int, required=True, help="inherited file of the flight recorder")
    parser.add_argument("--builder", default=DEFAULT_BUILDER, help="module:function that builds the engine")
    arguments = parser.parse_args()
    faulthandler.enable()  # where a fault in native code happened, or where a hung engine was ended with SIGABRT
    # Ctrl-C and a service manager's SIGTERM reach the whole group: the front end decides when to end, and says so by
    # closing the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(socket.socket(fileno=arguments.fd))
    config = connection.receive(msgspec.msgpack.Decoder(EngineConfig))
    if config is None:
        return 0
    logs.configure(config, "engine")
    try:
        return serve(connection, config, find_builder(arguments.builder), FlightRecorder(arguments.recorder))
    except ConnectionError:
        return 0


def serve(connection: Connection, config: EngineConfig, build: Builder, recorder: FlightRecorder) -> int:
    """Build and run; returns the exit status: 0 when asked to close, 1 when building or a step failed.

    Raises:
        ConnectionError: the front end is gone.
    """
    inbox: SimpleQueue[ToEngine] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox), name="listen", daemon=True).start()
    try:
        built = build(config, _Reporter(connection))
    except ConnectionError:
        raise
    except Exception as error:
        connection.send(Failed(cause(error)))
        return 1
    built.engine.announce = recorder.note
    connection.send(Ready(built.info))
    # What has been loaded stays: to look through it again for garbage would hold up a step for tens of milliseconds.
    gc.collect()
    gc.freeze()
    if (failure := run(built.engine, inbox, connection.send)) is not None:
        connection.send(failure)
        return 1
    return 0


class _Reporter:
    """Sends progress on, each whole percent once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        text = f"{what}: {done * 100 // total} %" if total else what
        if text != self._last:
            self._last = text
            self._connection.send(Progress(text))


def find_builder(path: str) -> Builder:
    """The function at "module:function"."""
    module, _, name = path.partition(":")
    found: Builder = getattr(importlib.import_module(module), name)
    return found


def cause(error: Exception) -> str:
    """One line that names the cause. Errors made for the user's eyes are shown as they are; others get a traceback in
    the log and their type in the line."""
    if isinstance(error, (ValueError, OSError)):
        return str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        return (
            "there is not enough memory: lower --max-num-batched-tokens, --max-num-seqs, --max-model-len or "
            "--kv-cache-memory-bytes"
        )
    logger.error("unexpected error", exc_info=error)
    return f"{type(error).__name__}: {error}"


def _listen(connection: Connection, inbox: SimpleQueue[ToEngine]) -> None:
    """Hand on what the front end says. When it is gone, end at once, even in the middle of a step."""
    decoder = msgspec.msgpack.Decoder(ToEngine)
    try:
        while (message := connection.receive(decoder)) is not None:
            inbox.put(message)
    except Exception:
        logger.exception("what the front end says cannot be read")
        os._exit(1)  # deaf, it would be of no use
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
