"""The server's life: take the port, set the engine going, answer 503, load the model, answer, drain, end.

The engine runs in a process of its own; this one holds the HTTP side, the tokenizer and the chat template. What answers
over HTTP (octavo.api.server) takes half a second to import: by then the engine loads already.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from octavo.config import EngineConfig

if TYPE_CHECKING:
    from octavo.client import AsyncEngine
    from octavo.info import ModelInfo
    from octavo.text.request import RequestFactory
    from octavo.text.template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer


class Text(Protocol):
    """The text side of a model (see octavo.build)."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def template(self) -> ChatTemplate | None: ...

    def factory(self, info: ModelInfo, config: EngineConfig) -> RequestFactory: ...


class Parts(NamedTuple):
    """What a server is made of."""

    engine: Callable[[EngineConfig], AsyncEngine]
    """May set it going at once: what it is for has been checked, and the port is taken."""
    text: Callable[[EngineConfig], Text]
    """Reads files; called beside the event loop."""


class CannotServe(Exception):
    """The server cannot start, or cannot go on; the text is one line for the user."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port` (0: any free one).

    Raises:
        CannotServe: the port is taken, or there is no such address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotServe(f"cannot listen on {host}: {error.strerror or error}; choose another --host.") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise CannotServe(
            f"cannot listen on {host} port {port}: {error.strerror or error}; stop what uses it or "
            "choose another --port."
        ) from None
    return listening


@contextlib.contextmanager
def bind_path(path: str) -> Iterator[socket.socket]:
    """A Unix socket that listens at `path`; the file is gone when the block ends.

    Raises:
        CannotServe: somebody listens there, or there can be no such file.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listening.bind(path)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise CannotServe(f"cannot listen at {path}: {error.strerror or error}; choose another --uds.") from None
    try:
        with listening:
            yield listening
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _remove_stale(path: str) -> None:
    """Remove the socket that a server which has not ended in order left behind. Raises OSError for one in use."""
    if not stat.S_ISSOCK(os.stat(path).st_mode if os.path.exists(path) else 0):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def url_of(listening: socket.socket, config: EngineConfig) -> str:
    """Where a client on this machine reaches the server."""
    if listening.family == socket.AF_UNIX:
        return f"unix://{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    shown = f"[{host}]" if ":" in host else host
    return f"http{'s' if config.ssl_certfile else ''}://{shown}:{port}"


def check_tls(config: EngineConfig) -> None:
    """See that the TLS files are there, where any are named.

    Raises:
        CannotServe: one cannot be read.
    """
    for path in filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise CannotServe(f"cannot read the TLS file {path}: {error.strerror or error}.") from None


def allow_many_files() -> None:
    """Let this process have as many files and connections open as the system allows it to ask for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_standard_files() -> None:
    """Let 0, 1 and 2 be open, as a program that starts others expects: else the next sockets would be among them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def serve(config: EngineConfig, parts: Parts) -> int:
    """Run a server until SIGINT or SIGTERM; returns the exit status: 0 ended as asked, 1 an error (told on stderr)."""
    try:
        open_standard_files()
        allow_many_files()
        check_tls(config)
        with bind_path(config.uds) if config.uds else bind(config.host, config.port) as listening:
            engine = parts.engine(config)
            from octavo.api.server import until_signal

            asyncio.run(until_signal(config, listening, engine, parts.text))
    except CannotServe as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    return 0
