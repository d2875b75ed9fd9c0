"""A batch from start to end: the lines of the input go to the same application as a server's requests, without a
socket, and as many at a time as keep the engine busy. Neither the input nor the output is ever in memory as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
from starlette.types import ASGIApp, Message
from tqdm import tqdm

from octavo.api.app import ROUTES, create_app
from octavo.api.batch.answers import Answers, BatchError, Failure, Response, answers_at, batch_name
from octavo.api.batch.lines import Ask, Refused, Survey, requests, survey, whole
from octavo.api.batch.transfer import fetch, is_url, send, shown
from octavo.api.frontend import Service
from octavo.api.serve import CannotServe, Parts
from octavo.api.server import load
from octavo.client import AsyncEngine
from octavo.config import EngineConfig, cache_dir

logger = logging.getLogger(__name__)

STREAMED = {
    operation.path: operation.event is not None
    for operation in ROUTES
    if operation.method == "POST" and operation.body is not None
}
"""The paths that lines may ask, and whether their answers can be streamed."""
IN_FLIGHT = 2
"""Lines that are being answered, for each sequence that runs at once: one runs, one waits and is tokenized already."""
LINE_BYTES = 64 * 1024
"""How much longer than the largest body a line may be."""


class Batch(NamedTuple):
    """What the user named."""

    source: str
    """Path or URL of the input."""
    target: str
    """Path or URL of the output."""
    folder: Path | None = None
    """Where answers are kept that go to a URL later."""

    @property
    def partial(self) -> Path:
        """Where the answers are until all are there."""
        if not is_url(self.target):
            return Path(f"{self.target}.partial")
        name = hashlib.sha256(self.target.partition("?")[0].encode()).hexdigest()[:16]
        return (self.folder or cache_dir() / "batches") / f"{name}.jsonl.partial"


def run_batch(config: EngineConfig, parts: Parts, batch: Batch) -> int:
    """Answer every line of the input. Returns the exit status: 0 when all have their answer, be it an error; or 128 and
    the number of the signal that ended it.

    Raises:
        BatchError: it cannot begin or go on; what has been answered is kept.
    """
    _check_target(batch)
    limit = config.max_request_bytes + LINE_BYTES
    with _opened(batch) as file:
        about = survey(file, limit)
        file.seek(0)
        name = batch_name(about.digest, config.model, config.revision)
        with answers_at(batch.partial, name) as answers:
            ended = 0
            numbers = Numbers()
            if answers.done.count < about.lines:
                asked = requests(file, limit, about.repeated, STREAMED)
                with _going_on(batch, answers, about):
                    ended = asyncio.run(_answered(config, parts, asked, answers, about, numbers))
            if ended:
                _tell(f"stopped: {_kept(batch, answers, about)}")
                return 128 + ended
            _deliver(batch, answers)
            _tell(numbers.summary(answers, about, shown(batch.target)))
    return 0


def _tell(sentence: str) -> None:
    print(f"octavo run-batch: {sentence}", file=sys.stderr, flush=True)


def _kept(batch: Batch, answers: Answers, about: Survey) -> str:
    return (
        f"{answers.done.count} of {about.lines} lines are answered in {batch.partial}; run the same command again to "
        "go on."
    )


@contextlib.contextmanager
def _going_on(batch: Batch, answers: Answers, about: Survey) -> Iterator[None]:
    """Errors in the block say how to go on."""
    try:
        yield
    except (BatchError, CannotServe, OSError) as error:
        text = f"{str(error).rstrip('.')}."
        raise BatchError(f"{text} {_kept(batch, answers, about)}" if answers.done.count else text) from None


# -- files


def _check_target(batch: Batch) -> None:
    """Raises BatchError for an output that could not be put in its place at the end."""
    target = Path(batch.target)
    if is_url(batch.target):
        return
    if target.exists() and not target.is_file():
        raise BatchError(f"the output {target} is not a file; name one, which will be written or replaced.")
    if not target.parent.is_dir():
        raise BatchError(f"the folder of the output, {target.parent}, does not exist.")
    with contextlib.suppress(OSError):
        if target.samefile(batch.source):
            raise BatchError(f"input and output are both {target}; the output needs a name of its own.")


@contextlib.contextmanager
def _opened(batch: Batch) -> Iterator[BinaryIO]:
    """The input as a file that can be read twice; one that is no such file is copied to where nobody else sees it.

    Raises:
        BatchError: it cannot be read.
    """
    try:
        file = _unnamed(batch.folder) if is_url(batch.source) else open(batch.source, "rb")  # noqa: SIM115
    except OSError as error:
        raise BatchError(f"cannot read the input {shown(batch.source)}: {error.strerror or error}.") from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(file)
        if is_url(batch.source):
            fetch(batch.source, file)
        elif not file.seekable():
            copy = stack.enter_context(_unnamed(batch.folder))
            shutil.copyfileobj(file, copy)
            file = copy
        file.seek(0)
        yield file


def _unnamed(folder: Path | None) -> BinaryIO:
    """A file without a name, which is gone when it is closed."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    file: Any = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    return cast(BinaryIO, file)


def _deliver(batch: Batch, answers: Answers) -> None:
    """Put the whole output where it belongs."""
    file = answers.settle()
    if is_url(batch.target):
        try:
            send(file, os.fstat(file.fileno()).st_size, batch.target)
        except BatchError as error:
            raise BatchError(
                f"{error} They are kept in {answers.path}; run the same command again to send them."
            ) from None
        answers.path.unlink()
        return
    try:
        answers.path.replace(batch.target)
    except OSError as error:
        raise BatchError(f"cannot write {batch.target}: {error.strerror}. The answers are in {answers.path}.") from None


# -- answering


class Numbers:
    """What one run has done, for the summary."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        """When the model was ready."""
        self.before = 0
        """Lines that an earlier run had answered."""
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def start(self) -> None:
        """The model is ready."""
        self._began = time.monotonic()

    def speed(self, tokens: int) -> float:
        """`tokens` per second of this run."""
        return tokens / max(time.monotonic() - self._began, 1e-9)

    def summary(self, answers: Answers, about: Survey, target: str) -> str:
        done = answers.done
        before = f", {self.before} of them before" if self.before else ""
        seconds = time.monotonic() - self._began
        return (
            f"{about.lines} lines: {done.count - done.failed} answered, {done.failed} failed{before}; "
            f"{self.prompt_tokens} prompt tokens, {self.generated_tokens} generated in {seconds:.1f} s "
            f"({self.speed(self.generated_tokens):.0f} tokens/s); the answers are in {target}"
        )


async def _answered(
    config: EngineConfig,
    parts: Parts,
    asked: Iterator[Ask | Refused],
    answers: Answers,
    about: Survey,
    numbers: Numbers,
) -> int:
    """Answer what is left of `asked`; returns the number of the signal that ended it, or 0.

    Raises:
        CannotServe: the model cannot be loaded.
        BatchError: the engine cannot go on, or the answers cannot be written.
    """
    numbers.before = answers.done.count
    service = Service(config)
    engine = parts.engine(config)
    with _signals() as signalled:
        work = asyncio.ensure_future(_work(parts, service, engine, asked, answers, about, numbers))
        either: list[asyncio.Future[Any]] = [work, signalled]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return 0
            return signalled.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await engine.close()
            service.callers.close()
            numbers.prompt_tokens = service.metrics.requests.prompt_tokens
            numbers.generated_tokens = service.metrics.requests.generated_tokens


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Future[int]]:
    """The number of the first SIGINT or SIGTERM that comes. A second one ends the program at once."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def take(number: int) -> None:
        signalled.set_result(number)
        for each in numbers:
            loop.remove_signal_handler(each)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for each in numbers:
        loop.add_signal_handler(each, take, int(each))
    try:
        yield signalled
    finally:
        for each in numbers:
            loop.remove_signal_handler(each)


async def _work(
    parts: Parts,
    service: Service,
    engine: AsyncEngine,
    asked: Iterator[Ask | Refused],
    answers: Answers,
    about: Survey,
    numbers: Numbers,
) -> None:
    await load(service, engine, parts.text)
    numbers.start()
    app = create_app(service)
    bar = tqdm(total=about.lines, initial=answers.done.count, unit=" lines", disable=None, dynamic_ncols=True)

    async def worker() -> None:
        for ask in asked:  # one iterator for all workers: each takes the next line
            if ask.number in answers.done:
                continue
            result = Failure(ask.code, ask.message) if isinstance(ask, Refused) else await _ask(app, ask)
            if isinstance(result, Response) and result.status_code >= 500:
                _check(engine)
            answers.add(ask.number, ask.custom_id, result)
            speed = numbers.speed(service.metrics.requests.generated_tokens)
            bar.set_postfix_str(f"{answers.done.failed} failed, {speed:.0f} tokens/s", refresh=False)
            bar.update()
            await asyncio.sleep(0)

    with bar:
        await _all([asyncio.ensure_future(worker()) for _ in range(IN_FLIGHT * service.config.max_num_seqs)])


async def _all(workers: Iterable[asyncio.Future[None]]) -> None:
    """Wait for all of them, or for the first that fails; none is left running."""
    workers = list(workers)
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for worker in workers:
            worker.cancel()
        results = await asyncio.gather(*workers, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


def _check(engine: AsyncEngine) -> None:
    """Raises BatchError where every line from now on would fail for the engine's sake."""
    state, reason = engine.status
    if state in ("failing", "dead"):
        raise BatchError(f"the engine {'keeps stopping' if state == 'failing' else 'has stopped'}: {reason}")


async def _ask(app: ASGIApp, ask: Ask) -> Response | Failure:
    """What the application answers."""
    exchange = Exchange(whole(ask.body) if STREAMED[ask.path] else ask.body)
    try:
        await app(_scope(ask.path, len(exchange.body)), exchange.receive, exchange.send)
    except Exception as error:
        logger.error("line %d failed", ask.number, exc_info=error)
        return Failure("internal_error", "Internal error; the log has the details.")
    if not exchange.is_json:
        return Failure("stream_not_supported", f"{ask.path} answers with a stream; a line needs one JSON object.")
    return Response(exchange.status, exchange.request_id, msgspec.Raw(_on_one_line(bytes(exchange.answer))))


def _on_one_line(body: bytes) -> bytes:
    return msgspec.json.format(body, indent=-1) if b"\n" in body else body


def _scope(path: str, size: int) -> dict[str, Any]:
    """A request as a server hands it to an ASGI application."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(size).encode())],
        "client": None,
        "server": None,
    }


class Exchange:
    """One request to an ASGI application and its answer, without a connection."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.status = 0
        self.request_id = ""
        self.is_json = False
        self.answer = bytearray()
        self._sent = False
        self._gone: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def receive(self) -> Message:
        """The body, once; then nothing more, unless the answer is not wanted."""
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        return await asyncio.shield(self._gone)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value.decode("latin-1") for name, value in message["headers"]}
            self.status = message["status"]
            self.request_id = headers.get(b"x-request-id", "")
            self.is_json = headers.get(b"content-type", "").partition(";")[0].strip() == "application/json"
            if not self.is_json:  # a stream: let the application stop it
                self._gone.set_result({"type": "http.disconnect"})
        elif self.is_json:
            self.answer += message.get("body", b"")
