"""A client that loads a server with streaming requests and notes when each piece of each answer came.

Times are seconds of `time.perf_counter`. A request that fails becomes an `Outcome` with an error and harms no other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp
import msgspec

Kind = Literal["openai", "openai-chat", "tgi"]
Prompt = str | list[int] | list[dict[str, Any]]
"""A text, token ids, or messages."""

PATHS: Mapping[Kind, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "tgi": "/generate_stream",
}
_KEEP_ALIVE = 2.0
"""Seconds for which an unused connection is taken again; servers close theirs after 5 or more, and a request that meets
the end of its connection would count as failed."""
_LONGEST_LINE = 2**20
"""Bytes; an event with logprobs is long."""
_LONGEST_ERROR = 300
"""Characters of a server's refusal that are kept."""


@dataclass
class Ask:
    """One request."""

    prompt: Prompt
    max_tokens: int
    prompt_tokens: int = 0
    """How long the prompt is, where that is known; what the server counts wins."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the body in OpenAI's names, such as temperature; one that is None is left out of the body."""
    after: int | None = None
    """Index of the ask whose prompt and answer come before `prompt`; this one is sent when that answer is complete."""


@dataclass
class Target:
    """A server and how to speak to it."""

    url: str
    """Where it is, with or without /v1 at its end."""
    kind: Kind = "openai"
    model: str | None = None
    """None: no model is named in the requests."""
    key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    endpoint: str | None = None
    """Path of the requests where it is not the one of `kind`."""

    def address(self, path: str) -> str:
        """URL of a route, such as /v1/models."""
        url = self.url if "://" in self.url else f"http://{self.url}"
        return url.rstrip("/").removesuffix("/v1") + path


@dataclass
class Outcome:
    """What came of an `Ask`."""

    asked: float
    first: float | None = None
    """When the first event with text came."""
    times: list[float] = field(default_factory=list)
    """When each event with text came."""
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them, else the events with text."""
    error: str | None = None
    """In one line; None when the answer is complete."""


class _Incomplete(Exception):
    """An answer that is none; its text becomes `Outcome.error`."""


def open_session(target: Target, timeout: float | None = None) -> aiohttp.ClientSession:
    """A pool of connections to `target`, for any number of requests at a time; to be used as a context.

    Args:
        timeout: seconds that one request may take; None for no limit.
    """
    headers = dict(target.headers)
    if target.key:
        headers.setdefault("Authorization", f"Bearer {target.key}")
    return aiohttp.ClientSession(
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=timeout),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
        read_bufsize=_LONGEST_LINE,
    )


async def ask(session: aiohttp.ClientSession, target: Target, ask: Ask) -> Outcome:
    """Send one request and read its answer to the end."""
    url = target.address(target.endpoint or PATHS[target.kind])
    read = _read_tgi if target.kind == "tgi" else _read_openai
    outcome = Outcome(time.perf_counter(), prompt_tokens=ask.prompt_tokens)
    pieces: list[str] = []
    try:
        data = msgspec.json.encode(body_of(target, ask))
        outcome.asked = time.perf_counter()
        async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise _Incomplete(f"HTTP {response.status}: {_said(await response.read())}")
            await read(response.content, outcome, pieces)
    except _Incomplete as error:
        outcome.error = str(error)
    except asyncio.TimeoutError:
        outcome.error = "timeout: the answer was not complete in time"
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        outcome.error = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]
    outcome.ended = time.perf_counter()
    outcome.text = "".join(pieces)
    outcome.first = outcome.times[0] if outcome.times else None
    outcome.output_tokens = outcome.output_tokens or len(outcome.times)
    return outcome


def body_of(target: Target, ask: Ask) -> dict[str, Any]:
    """The JSON body of a request. Raises ValueError where `target` cannot be asked so."""
    if target.kind == "tgi":
        return _tgi_body(ask)
    chat = target.kind == "openai-chat"
    prompt = ask.prompt
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if chat != _is_messages(prompt):
        wanted = "messages or a text" if chat else "a text or token ids"
        raise ValueError(f"{target.kind} takes {wanted} as prompt, not {prompt!r:.60}")
    body = {
        "model": target.model,
        "messages" if chat else "prompt": prompt,
        "max_tokens": ask.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **ask.extra,
    }
    return {name: value for name, value in body.items() if value is not None}


def _is_messages(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


_TGI_NAMES = {"ignore_eos": "ignore_eos_token", "logprobs": "top_n_tokens"}
"""OpenAI's names of parameters that have another one in TGI."""


def _tgi_body(ask: Ask) -> dict[str, Any]:
    if not isinstance(ask.prompt, str):
        raise ValueError("TGI takes a text as prompt")
    parameters: dict[str, Any] = {"max_new_tokens": ask.max_tokens, "details": True}
    for name, value in ask.extra.items():
        if value is not None:
            parameters[_TGI_NAMES.get(name, name)] = value
    temperature = parameters.pop("temperature", None)
    parameters.setdefault("do_sample", bool(temperature))
    if temperature:
        parameters["temperature"] = temperature
    return {"inputs": ask.prompt, "parameters": parameters}


async def _read_openai(content: aiohttp.StreamReader, outcome: Outcome, pieces: list[str]) -> None:
    finished = False
    async for line in content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = msgspec.json.decode(data)
        if event.get("error"):
            raise _Incomplete(_said(data))
        for choice in event.get("choices") or ():
            text = _text_of(choice)
            if text:
                outcome.times.append(time.perf_counter())
                pieces.append(text)
            finished = finished or choice.get("finish_reason") is not None
        if usage := event.get("usage"):
            outcome.output_tokens = usage.get("completion_tokens") or 0
            outcome.prompt_tokens = usage.get("prompt_tokens") or outcome.prompt_tokens
    if not finished:
        raise _Incomplete("the connection ended before the answer was complete")


def _text_of(choice: Mapping[str, Any]) -> str | None:
    """The text of a chunk of a completion or a chat; what a model thinks is text as well."""
    delta = choice.get("delta")
    if delta is None:
        delta = {"content": choice.get("text")}
    text: str | None = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return text


async def _read_tgi(content: aiohttp.StreamReader, outcome: Outcome, pieces: list[str]) -> None:
    async for line in content:
        if not line.startswith(b"data:"):
            continue
        event = msgspec.json.decode(line[5:])
        if event.get("error"):
            raise _Incomplete(_said(line[5:]))
        token = event["token"]
        if token["text"] and not token.get("special"):
            outcome.times.append(time.perf_counter())
            pieces.append(token["text"])
        if event.get("generated_text") is not None:
            details = event.get("details") or {}
            outcome.output_tokens = details.get("generated_tokens") or 0
            outcome.prompt_tokens = details.get("input_length") or outcome.prompt_tokens
            return
    raise _Incomplete("the connection ended before the answer was complete")


def _said(data: bytes) -> str:
    """What a refusal says, in one line."""
    try:
        error = msgspec.json.decode(data)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = data.decode("utf-8", "replace")
    return " ".join(text.split())[:_LONGEST_ERROR]


async def load(
    target: Target,
    asks: Sequence[Ask],
    *,
    starts: Sequence[float] | None = None,
    concurrency: int | None = None,
    on_done: Callable[[Outcome], None] | None = None,
    timeout: float | None = None,
) -> list[Outcome]:
    """Send all `asks` and wait for every answer.

    Args:
        starts: seconds after the beginning at which each is sent; None for all at once.
        concurrency: how many are under way at a time; one that has to wait for its turn is asked when it is sent.
        on_done: gets each outcome as it comes.
        timeout: seconds that one request may take.

    Returns:
        The outcomes in the order of `asks`.
    """
    loop = asyncio.get_running_loop()
    turns = asyncio.Semaphore(concurrency or max(len(asks), 1))
    said: list[asyncio.Future[tuple[Prompt, Outcome]]] = [loop.create_future() for _ in asks]

    async def one(index: int, begun: float, session: aiohttp.ClientSession) -> Outcome:
        item = asks[index]
        before = None if item.after is None else await said[item.after]
        if starts is not None:
            await asyncio.sleep(begun + starts[index] - loop.time())
        if before is not None:
            item = _continued(item, *before)
        if before is not None and before[1].error is not None:
            now = time.perf_counter()
            outcome = Outcome(now, ended=now, error="not sent: the answer before it failed")
        else:
            async with turns:
                outcome = await ask(session, target, item)
        said[index].set_result((item.prompt, outcome))
        if on_done is not None:
            on_done(outcome)
        return outcome

    async with open_session(target, timeout) as session:
        begun = loop.time()
        return list(await asyncio.gather(*(one(index, begun, session) for index in range(len(asks)))))


def _continued(item: Ask, prompt: Prompt, outcome: Outcome) -> Ask:
    """`item` with the prompt and the answer before it."""
    if isinstance(prompt, str) and isinstance(item.prompt, str):
        return replace(item, prompt=prompt + outcome.text + item.prompt)
    messages: Any = [*prompt, {"role": "assistant", "content": outcome.text}, *item.prompt]
    return replace(item, prompt=messages)
