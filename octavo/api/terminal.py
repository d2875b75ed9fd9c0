"""Talking to a model from a terminal: a small client of the OpenAI API, and the conversation around it."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (gives input() line editing and a history)

_HELP = (
    "Ctrl-C stops an answer, Ctrl-D or /exit ends, /reset forgets what was said; "
    'a message of several lines begins and ends with """.'
)
TIMEOUT = 600.0
"""Seconds without a byte after which a server is given up."""
_BLOCK = '"""'
"""Begins and ends a message of several lines."""
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
"""A model may write characters that move the cursor or change the colours of a terminal; line ends and tabs stay."""


class TalkError(Exception):
    """The server cannot be reached or has refused; the text is one line for the user."""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self._path)


@dataclass
class Endpoint:
    """A server of the OpenAI API."""

    url: str
    """With or without `/v1` at its end; `unix:///path` is a unix socket."""
    key: str | None = None
    model: str | None = None
    """None: the one it serves first."""

    def first_model(self) -> str:
        """The name of the model that is served first. Raises TalkError."""
        with self._answer("GET", "/models", None) as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except IndexError:
                raise TalkError(f"{self.url} serves no model.") from None
            except (ValueError, KeyError, TypeError):
                raise TalkError(f"{self.url} is no server of the OpenAI API: it does not list its models.") from None

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer; closing the iterator closes the connection, which ends the answer.

        Raises:
            TalkError: refused, broken off, or an error in the stream.
        """
        full = {"model": self.model, **body, "stream": True}
        with self._answer("POST", path, full) as response:
            for line in response:
                data = line.decode("utf-8", "replace").strip()
                if not data.startswith("data:"):  # a comment keeps the connection open
                    continue
                data = data.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                try:
                    chunk = json.loads(data)
                except ValueError:
                    raise TalkError(f"{self.url} sent what is not JSON: {data[:100]!r}") from None
                if "error" in chunk:
                    raise TalkError(_message(chunk) or "the server tells of an error without a message.")
                yield chunk
            raise TalkError(f"{self.url} ended the answer before it was complete.")

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection, base = self._connection()
        try:
            connection.request(method, f"{base}/v1{path}", None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise TalkError(_refusal(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise TalkError(f"cannot talk to {self.url}: {reason}") from None
        except UnicodeEncodeError:
            raise TalkError("the API key and the URL must be plain ASCII text.") from None
        finally:
            connection.close()

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        """A connection, not yet open, and the path under which the server is published."""
        try:
            parts = urllib.parse.urlsplit(self.url if "//" in self.url else f"http://{self.url}")
            port = parts.port
        except ValueError as error:
            raise TalkError(f"{self.url} is no URL: {error}.") from None
        base = parts.path.rstrip("/").removesuffix("/v1")
        if parts.scheme == "unix":
            return _UnixConnection(parts.netloc + parts.path, TIMEOUT), ""
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TalkError(f"{self.url} is no URL such as http://localhost:8000/v1 or unix:///run/octavo.sock.")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname, port, timeout=TIMEOUT), base


def _refusal(response: http.client.HTTPResponse) -> str:
    """What an answer that is an error says."""
    try:
        said = _message(json.loads(response.read(65536)))
    except ValueError:
        said = None
    return said or f"HTTP {response.status} {response.reason}"


def _message(body: Any) -> str | None:
    """The message of an error, as OpenAI and others write it; on one line."""
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(text.split()) if isinstance(text, str) and text.strip() else None


@dataclass
class Answer:
    """What came, and when."""

    text: str = ""
    stopped: bool = False
    """Whether Ctrl-C ended it."""
    tokens: int = 0
    """As the server counts them, else the pieces that came."""
    begun: float = field(default_factory=time.monotonic)
    first: float | None = None
    """When the first piece came."""
    ended: float = 0.0

    def stats(self) -> str:
        """One line: time to the first token, number of tokens, and how fast they came after the first."""
        if self.first is None:
            return "no tokens"
        seconds = self.ended - self.first
        speed = f"; {(self.tokens - 1) / seconds:.1f} tokens/s" if self.tokens > 1 and seconds > 0 else ""
        tokens = f"{self.tokens} token{'' if self.tokens == 1 else 's'}"
        return f"first token after {self.first - self.begun:.2f} s; {tokens} in {self.ended - self.begun:.2f} s{speed}"


def say(endpoint: Endpoint, messages: list[dict[str, str]], options: Mapping[str, Any], out: TextIO) -> Answer:
    """Print the answer to `messages` as it comes and return it; Ctrl-C stops it and what has come is kept."""
    return _print(
        endpoint.stream("/chat/completions", {"messages": messages, **options}),
        out,
        lambda choice: choice["delta"].get("content") or "",
    )


def continue_text(endpoint: Endpoint, prompt: str, options: Mapping[str, Any], out: TextIO) -> Answer:
    """Print what follows `prompt`, without a chat template, and return it."""
    return _print(endpoint.stream("/completions", {"prompt": prompt, **options}), out, lambda choice: choice["text"])


def _print(chunks: Iterator[dict[str, Any]], out: TextIO, text_of: Callable[[dict[str, Any]], str]) -> Answer:
    answer = Answer()
    terminal = out.isatty()
    try:
        with contextlib.closing(chunks):  # type: ignore[type-var]
            for chunk in chunks:
                for text in map(text_of, chunk.get("choices") or ()):
                    if text:
                        answer.first = answer.first or time.monotonic()
                        answer.tokens += 1
                        out.write(text.translate(_CONTROL) if terminal else text)
                        out.flush()
                        answer.text += text
                if usage := chunk.get("usage"):
                    answer.tokens = usage["completion_tokens"]
    except KeyboardInterrupt:
        answer.stopped = True
    finally:
        answer.ended = time.monotonic()
        if answer.text or not sys.exc_info()[0]:
            out.write("\n")  # an error begins a line of its own
            out.flush()
    return answer


@dataclass
class Session(ABC):
    """Messages in, answers out, until the end of input. At a terminal, errors and Ctrl-C end an answer only; where
    input comes from a pipe or file they end the session, so that a script notices."""

    endpoint: Endpoint
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    lines: TextIO = field(default_factory=lambda: sys.stdin)
    out: TextIO = field(default_factory=lambda: sys.stdout)
    notes: TextIO = field(default_factory=lambda: sys.stderr)
    """Where prompts go when `out` is no terminal, errors, and the line of `stats`."""
    stats: bool = False

    @property
    def interactive(self) -> bool:
        return self.lines.isatty()

    @abstractmethod
    def reset(self) -> None:
        """Forget what was said."""

    @abstractmethod
    def answer(self, text: str, options: Mapping[str, Any]) -> Answer:
        """Print and return the answer to `text`. Raises TalkError; then `text` is forgotten."""

    def turn(self, text: str) -> Answer:
        """One message and its answer. Raises TalkError."""
        usage = {"stream_options": {"include_usage": True}} if self.stats else {}
        answer = self.answer(text, {**self.options, **usage})
        if self.stats:
            self.notes.write(f"[{answer.stats()}]\n")
        return answer

    def run(self) -> None:
        """Until /exit or the end of input.

        Raises:
            TalkError, KeyboardInterrupt: where input is no terminal.
        """
        self.reset()
        if self.interactive:
            self.notes.write(_HELP + "\n")
        while (text := self._ask()) is not None:
            if text == "/exit":
                return
            if text == "/reset":
                self.reset()
            elif text in ("/help", "/?"):
                self.notes.write(_HELP + "\n")
            elif text:
                self._guarded(text)

    def _guarded(self, text: str) -> None:
        try:
            if self.turn(text).stopped and not self.interactive:
                raise KeyboardInterrupt
        except TalkError as error:
            if not self.interactive:
                raise
            self.notes.write(f"error: {error}\n")

    def _ask(self) -> str | None:
        """The next message; None at the end of input. Ctrl-C at the prompt starts a new one."""
        while True:
            try:
                return self._message()
            except EOFError:
                if self.interactive:
                    self.notes.write("\n")
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.notes.write("\n")

    def _message(self) -> str:
        """One line, or the lines between two `_BLOCK`s. Raises EOFError."""
        line = self._line("> ").strip()
        if not line.startswith(_BLOCK):
            return line
        line = line.removeprefix(_BLOCK)
        lines = []
        while not line.rstrip().endswith(_BLOCK):
            lines.append(line)
            line = self._line("... ")
        lines.append(line.rstrip().removesuffix(_BLOCK))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str:
        if self.interactive and self.lines is sys.stdin and self.out is sys.stdout and self.out.isatty():
            return input(prompt)
        if self.interactive:
            self.notes.write(prompt)
            self.notes.flush()
        line = self.lines.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


@dataclass
class Conversation(Session):
    """A chat with everything said so far."""

    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def answer(self, text: str, options: Mapping[str, Any]) -> Answer:
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = say(self.endpoint, asked, options, self.out)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer


@dataclass
class Continuation(Session):
    """Each message is a text that the model continues; nothing is remembered."""

    def reset(self) -> None:
        pass

    def answer(self, text: str, options: Mapping[str, Any]) -> Answer:
        return continue_text(self.endpoint, text, options, self.out)
