"""The server from its first answer, 503, to its last: load the model, answer, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

import octavo
from octavo.api.app import create_app
from octavo.api.connections import Connection, quiet_when_full
from octavo.api.frontend import Service, make_frontend
from octavo.api.serve import CannotServe, Text, url_of
from octavo.client import AsyncEngine, EngineUnavailable
from octavo.config import EngineConfig
from octavo.info import ModelInfo

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
"""How long answers get to reach their clients after the engine has been closed."""


async def _beside(read: Callable[[EngineConfig], Text], config: EngineConfig) -> Text:
    """`read(config)` on a thread that does not keep the program alive when it is told to end meanwhile."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Text] = loop.create_future()

    def settle(text: Text | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if text is not None:
            done.set_result(text)
        elif error is not None:
            done.set_exception(error)

    def work() -> None:
        text, problem = None, None
        try:
            text = read(config)
        except Exception as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any longer
            loop.call_soon_threadsafe(settle, text, problem)

    threading.Thread(target=work, name="text", daemon=True).start()
    return await done


async def load(service: Service, engine: AsyncEngine, read: Callable[[EngineConfig], Text]) -> ModelInfo:
    """Start `engine`, read the text side beside it, and let `service` answer.

    Raises:
        CannotServe: the model cannot be loaded.
    """
    service.watch_loading(engine)
    config = service.config
    try:
        info, text = await asyncio.gather(engine.start(), _beside(read, config))
        factory = text.factory(info, config)
    except Exception as error:
        known = isinstance(error, (EngineUnavailable, ValueError, OSError))
        logger.log(logging.DEBUG if known else logging.ERROR, "cannot load the model", exc_info=error)
        raise CannotServe(str(error) if known else f"{type(error).__name__}: {error}") from None
    service.open(make_frontend(engine, text.tokenizer, text.template, factory, info, config, service.callers))
    return info


class _Http(uvicorn.Server):
    """uvicorn, without its signal handlers: the end of the engine comes first. While nobody asks, it sleeps, where
    uvicorn looks ten times a second whether it should end and what time it is (see `Connection`)."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Take no more connections; `serve` returns when those that are open have been answered."""
        self.should_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        await self._ended.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One server from start to end.

    Args:
        config: what the user said.
        listening: where requests come in.
        engine: what answers them, not started yet.
        read: gives the text side; it reads files, and is called beside the event loop.
        on_ready: called when requests are answered.
    """

    def __init__(
        self,
        config: EngineConfig,
        listening: socket.socket,
        engine: AsyncEngine,
        read: Callable[[EngineConfig], Text],
        on_ready: Callable[[ModelInfo], None],
    ) -> None:
        self._config = config
        self._listening = listening
        self._engine = engine
        self._read = read
        self._on_ready = on_ready
        self._service = Service(config)
        self._http = _Http(
            uvicorn.Config(
                create_app(self._service),
                http=Connection,
                log_config=None,
                log_level=config.uvicorn_log_level,
                lifespan="off",
                ws="none",
                access_log=not config.disable_uvicorn_access_log,
                root_path=config.root_path or "",
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                ssl_ca_certs=config.ssl_ca_certs,
                ssl_cert_reqs=config.ssl_cert_reqs,
                ssl_ciphers=config.ssl_ciphers,
                server_header=False,
            )
        )
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    def stop(self) -> None:
        """End: the first call drains, the second ends at once. Call it from the event loop."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop` is called.

        Raises:
            CannotServe: the model cannot be loaded, or its engine has died.
        """
        asyncio.get_running_loop().set_exception_handler(quiet_when_full())
        engine = self._engine
        serving = asyncio.create_task(self._http.serve(sockets=[self._listening]))
        try:
            loading = asyncio.create_task(load(self._service, engine, self._read))
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({loading, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
                _check(serving)
                return
            self._on_ready(loading.result())
            await self._watch(engine, stopped, serving)
        finally:
            self._service.close("The server is shutting down.")
            self._http.end()
            await self._drain(engine, serving)
            self._service.callers.close()

    async def _watch(self, engine: AsyncEngine, stopped: asyncio.Task[bool], serving: asyncio.Task[None]) -> None:
        while not stopped.done():
            await asyncio.wait({stopped, serving}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            state, reason = engine.status
            if state == "dead":  # one that can be started again is not
                raise CannotServe(f"the engine has stopped: {reason}")
            _check(serving)

    async def _drain(self, engine: AsyncEngine, serving: asyncio.Task[None]) -> None:
        """Let running requests finish for `shutdown_timeout` seconds, end the rest, and the engine."""
        hurry = asyncio.create_task(self._hurry.wait())
        if self._config.shutdown_timeout > 0 and engine.status.state in ("ready", "restarting"):
            await asyncio.wait(
                {serving, hurry}, timeout=self._config.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED
            )
        await engine.close()
        if not hurry.done():
            await asyncio.wait({serving, hurry}, timeout=_CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        self._http.force_exit = True
        hurry.cancel()
        await asyncio.gather(serving, hurry, return_exceptions=True)


def _check(serving: asyncio.Task[None]) -> None:
    """Raises CannotServe if the HTTP server has ended, which it does not do by itself."""
    if serving.done():
        error = serving.exception()
        raise CannotServe(f"the HTTP server cannot go on: {error}" if error else "the HTTP server has stopped.")


async def until_signal(
    config: EngineConfig, listening: socket.socket, engine: AsyncEngine, read: Callable[[EngineConfig], Text]
) -> None:
    """Serve until SIGINT or SIGTERM; the arguments are `Server`'s. Raises CannotServe."""
    url = url_of(listening, config)
    print(f"Octavo {octavo.__version__} listens at {url} and loads {config.model}", flush=True)

    def ready(info: ModelInfo) -> None:
        print(_welcome(info, config, url), flush=True)
        # What has been imported and read stays: to look through it again for garbage would hold up all streams for tens
        # of milliseconds.
        gc.freeze()

    server = Server(config, listening, engine, read, ready)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    await server.run()


def _welcome(info: ModelInfo, config: EngineConfig, url: str) -> str:
    """What start-up has decided, and a line to try."""
    key = ' -H "Authorization: Bearer $OCTAVO_API_KEY"' if config.api_key else ""
    name = (*config.served_model_name, config.model)[0]
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    return "\n".join(
        [
            *(f"  {note}" for note in info.notes),
            f"Serving {name} at {url} - try:",
            f"  curl {_curl(url)}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        ]
    )


def _curl(url: str) -> str:
    """`url` as curl's arguments."""
    return f"--unix-socket {url.removeprefix('unix://')} http://localhost" if url.startswith("unix://") else url
