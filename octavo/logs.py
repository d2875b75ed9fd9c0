"""How log lines look, in the server and in the engine's process: text for people, or one JSON object a line.

A line about a request carries its id: the one that `REQUEST_ID` holds in the context of the code that logs, or the
`request_id` that it gives along in `extra`. `extra={"fields": {...}}` adds facts to a line: as key=value behind the
text, as members in JSON. A line stays one line, whatever users write: control characters are shown escaped. Only the
traceback of an error has lines of its own, all indented. API keys never appear.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any

from octavo.config import EngineConfig

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that the running code works for."""

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_HIDDEN = "***"
_SHORTEST_SECRET = 6
"""Shorter keys are too likely to be a part of some word."""


def configure(config: EngineConfig, process: str = "") -> None:
    """Send the log of this process to stderr, as `config` says, unless logging has been set up already. `process` names
    the process in each line; the front end has no name."""
    handler = logging.StreamHandler(sys.stderr)
    secrets = (*config.api_key, config.hf_token or "")
    handler.setFormatter(JsonLines(process, secrets) if config.log_format == "json" else TextLines(process, secrets))
    logging.basicConfig(handlers=[handler], level=config.log_level.upper())


def one_line(text: str) -> str:
    """`text` with its control characters, line ends and halves of surrogate pairs escaped."""
    return text if text.isprintable() else _UNPRINTABLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class _Lines(logging.Formatter):
    """What both forms share."""

    def __init__(self, process: str, secrets: Iterable[str]) -> None:
        super().__init__()
        self._process = process
        long = [secret for secret in secrets if len(secret) >= _SHORTEST_SECRET]
        self._secrets = dict.fromkeys([*long, *(json.dumps(secret)[1:-1] for secret in long)])

    def _request(self, record: logging.LogRecord) -> str | None:
        found: str | None = getattr(record, "request_id", None) or REQUEST_ID.get()
        return found

    def _fields(self, record: logging.LogRecord) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(record, "fields", None) or {}
        return found

    def _trace(self, record: logging.LogRecord) -> str:
        text = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n".join(filter(None, (text, record.stack_info)))

    def _redacted(self, line: str) -> str:
        for secret in self._secrets:
            line = line.replace(secret, _HIDDEN)
        return line


class TextLines(_Lines):
    """`INFO 12:34:56 [engine] [request id] text key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        request = self._request(record)
        parts = [
            record.levelname,
            time.strftime("%H:%M:%S", time.localtime(record.created)),
            f"[{self._process}]" if self._process else "",
            f"[{one_line(request)}]" if request else "",
            one_line(record.getMessage()),
            *(f"{name}={_shown(value)}" for name, value in self._fields(record).items()),
        ]
        lines = [" ".join(filter(None, parts))]
        lines += [f"    {one_line(line)}" for line in self._trace(record).splitlines()]
        return self._redacted("\n".join(lines))


def _shown(value: Any) -> str:
    """A number or word as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    plain = not isinstance(value, str) or (text.isprintable() and text and not set(' "=') & set(text))
    return one_line(text if plain else json.dumps(text, ensure_ascii=False))


class JsonLines(_Lines):
    """One object a line; ASCII only, so that no reader takes a character of a user for the end of the line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if self._process:
            entry["process"] = self._process
        if request := self._request(record):
            entry["request_id"] = request
        if trace := self._trace(record):
            entry["exception"] = trace
        for name, value in self._fields(record).items():
            entry.setdefault(name, value)
        return self._redacted(json.dumps(entry, default=str))
