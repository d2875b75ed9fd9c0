"""Talking to a model from a terminal: a small client of the chat API, and the conversation around it."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (gives input() line editing and a history)

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer."


class TalkError(Exception):
    """The server cannot be reached or has refused; the text is one line for the user."""


@dataclass
class Endpoint:
    """A server of the OpenAI API."""

    url: str
    """With or without `/v1` at its end."""
    key: str | None = None
    model: str | None = None
    """None: the one it serves first."""

    def first_model(self) -> str:
        """The name of the model that is served first. Raises TalkError."""
        with self._answer("GET", "/models", None) as response:
            models = json.loads(response.read())["data"]
        if not models:
            raise TalkError(f"{self.url} serves no model.")
        return str(models[0]["id"])

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer; closing the iterator closes the connection, which ends the answer.

        Raises:
            TalkError: refused, broken off, or an error in the stream.
        """
        full = {"model": self.model, **body, "stream": True}
        with self._answer("POST", path, full) as response:
            for line in response:
                data = line.decode("utf-8").strip()
                if not data.startswith("data:"):
                    continue
                data = data.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise TalkError(str(chunk["error"].get("message")))
                yield chunk

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        parts = urllib.parse.urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname or "localhost", parts.port, timeout=600)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        base = parts.path.rstrip("/").removesuffix("/v1")
        try:
            connection.request(method, f"{base}/v1{path}", None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise TalkError(_message(response))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise TalkError(f"{self.url}: {error or type(error).__name__}") from None
        finally:
            connection.close()


def _message(response: http.client.HTTPResponse) -> str:
    """What an answer that is an error says."""
    raw = response.read(65536)
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status} {response.reason}"


def say(endpoint: Endpoint, messages: list[dict[str, str]], options: Mapping[str, Any], out: TextIO) -> str:
    """Print the answer to `messages` as it comes and return it; Ctrl-C stops it and what has come is kept."""
    return _print(
        endpoint.stream("/chat/completions", {"messages": messages, **options}),
        out,
        lambda choice: choice["delta"].get("content") or "",
    )


def continue_text(endpoint: Endpoint, prompt: str, options: Mapping[str, Any], out: TextIO) -> str:
    """Print what follows `prompt`, without a chat template, and return it."""
    return _print(endpoint.stream("/completions", {"prompt": prompt, **options}), out, lambda choice: choice["text"])


def _print(chunks: Iterator[dict[str, Any]], out: TextIO, text_of: Any) -> str:
    answer = ""
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(chunks):  # type: ignore[type-var]
        for chunk in chunks:
            for choice in chunk["choices"]:
                text = text_of(choice)
                out.write(text)
                out.flush()
                answer += text
    out.write("\n")
    return answer


@dataclass
class Conversation:
    """A chat in a terminal: one line in, one answer out, with everything said so far."""

    endpoint: Endpoint
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    lines: TextIO = field(default_factory=lambda: sys.stdin)
    out: TextIO = field(default_factory=lambda: sys.stdout)

    def run(self) -> None:
        """Until /exit or the end of input."""
        self.out.write(_HELP + "\n")
        messages = self._start()
        while (line := self._ask()) is not None:
            if line == "/exit":
                return
            if line == "/reset":
                messages = self._start()
            elif line in ("/help", "/?"):
                self.out.write(_HELP + "\n")
            elif line:
                self._turn(messages, line)

    def _start(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _turn(self, messages: list[dict[str, str]], line: str) -> None:
        messages.append({"role": "user", "content": line})
        try:
            answer = say(self.endpoint, messages, self.options, self.out)
        except TalkError as error:
            messages.pop()
            self.out.write(f"error: {error}\n")
            return
        messages.append({"role": "assistant", "content": answer})

    def _ask(self) -> str | None:
        """The next line; None at the end of input. Ctrl-C at the prompt starts a new line."""
        while True:
            try:
                if self.lines is sys.stdin and sys.stdin.isatty():
                    return input("> ").strip()
                line = self.lines.readline()
                return line.strip() if line else None
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.out.write("\n")
