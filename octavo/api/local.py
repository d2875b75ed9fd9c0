"""A server for this program alone: on a free local port, behind a random key, on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterator

from octavo.api.serve import Parts, bind, url_of
from octavo.api.terminal import Endpoint
from octavo.config import EngineConfig


@contextlib.contextmanager
def local_server(config: EngineConfig, parts: Parts) -> Iterator[Endpoint]:
    """Load the model of `config`, and serve it to the block; the engine's process ends with it.

    Raises:
        CannotServe: the model cannot be loaded.
    """
    key = secrets.token_urlsafe(24)
    config = dataclasses.replace(config, api_key=(key,), uvicorn_log_level="critical", disable_uvicorn_access_log=True)
    thread = _Thread(config, parts)
    with thread.listening:
        thread.start()
        try:
            thread.wait_ready()
            yield Endpoint(url_of(thread.listening, config), key)
        finally:
            thread.stop()


class _Thread(threading.Thread):
    """Runs one `Server` with an event loop of its own."""

    def __init__(self, config: EngineConfig, parts: Parts) -> None:
        super().__init__(name="server", daemon=True)
        self.listening = bind("127.0.0.1", 0)
        self._config = config
        self._parts = parts
        self._settled = threading.Event()
        """Set when the server answers, or has failed."""
        self._problem: Exception | None = None
        self._stop: Callable[[], None] | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._problem = error
        self._settled.set()

    async def _serve(self) -> None:
        engine = self._parts.engine(self._config)
        from octavo.api.server import Server  # takes a while; the engine loads meanwhile

        server = Server(self._config, self.listening, engine, self._parts.text, lambda info: self._settled.set())
        loop = asyncio.get_running_loop()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(server.stop)

        self._stop = stop
        await server.run()

    def wait_ready(self) -> None:
        """Raises what the server raised while it loaded."""
        self._settled.wait()
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        """End the server and wait for it."""
        if self._stop is not None:
            self._stop()
        self.join()
