"""What the two generating endpoints share: from a body to sampling parameters and jobs, and how an answer is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.api.errors import bad_request
from octavo.api.frontend import Frontend, Service
from octavo.api.generation import Generation, Job, News
from octavo.api.logprobs import TokenNames, prompt_entries
from octavo.api.middleware import clean_request_id, explain
from octavo.api.prompts import beside
from octavo.api.schemas import GenerationBody
from octavo.api.sse import DONE, EventStream, frame, gone
from octavo.sampling_params import MAX_CHOICES, RepetitionDetectionParams, SamplingParams
from octavo.text.request import RequestFactory

_SAMPLING_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "logprob_token_ids",
    "thinking_token_budget",
)


@dataclass
class Call:
    """One request to a generating endpoint, checked."""

    service: Service
    front: Frontend
    body: GenerationBody
    model: str
    """The name to report."""
    request_id: str
    created: int
    warnings: list[str]

    def internal_id(self, prompt: int) -> str:
        """An id for the engine: unique even when two callers give the same X-Request-Id."""
        return f"{self.request_id}/{self.service.next_serial()}.{prompt}"

    def names(self) -> TokenNames:
        tokenizer = self.front.tokenizer
        hidden = tokenizer.special_ids if self.body.skip_special_tokens is not False else frozenset()
        return TokenNames(tokenizer.token_bytes, hidden, bool(self.body.return_tokens_as_token_ids))

    def envelope(self, prefix: str, kind: str) -> dict[str, Any]:
        """The fields every answer and every chunk starts with."""
        return {"id": f"{prefix}-{self.request_id}", "object": kind, "created": self.created, "model": self.model}

    def headers(self) -> dict[str, str]:
        return {"X-Octavo-Warnings": " ".join(self._ignored())} if self.warnings else {}

    def _ignored(self) -> list[str]:
        return ["ignored:", ", ".join(header_text(name) for name in self.body.unknown())]


def header_text(name: str) -> str:
    """A field name that may stand in a header."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:80])


def begin(http: HttpRequest, service: Service, body: GenerationBody) -> Call:
    """Check what does not depend on the prompt.

    Raises:
        ApiError: an unknown model, a field that cannot be honoured, a busy server.
    """
    front = service.ready()
    model = front.check_model(body.model)
    body.refuse()
    service.check_room()
    request_id = clean_request_id(body.request_id) if body.request_id else http.state.request_id
    warnings = [f"The field `{name}` is not known here and was ignored." for name in body.unknown()]
    return Call(service, front, body, model, request_id, int(time.time()), warnings)


def sampling_of(
    call: Call, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    """The sampling parameters of the body over the model's defaults.

    Raises:
        ParameterError: one is out of its range.
    """
    body, values = call.body, defaults_of(call.front.factory)
    values.update({name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None})
    if prompt_logprobs is not None:
        asked = values.get("prompt_logprobs", 0)
        values["prompt_logprobs"] = -1 if -1 in (asked, prompt_logprobs) else max(asked, prompt_logprobs)
    if body.repetition_detection:
        try:
            values["repetition_detection"] = msgspec.convert(body.repetition_detection, RepetitionDetectionParams)
        except msgspec.ValidationError as error:
            raise bad_request(f"repetition_detection: {error}", "repetition_detection") from None
    return SamplingParams.from_optional(**values, max_tokens=max_tokens, logprobs=logprobs)


def defaults_of(factory: RequestFactory) -> dict[str, Any]:
    """Sampling parameters that the model's generation_config puts in place of the usual defaults."""
    return {name: value for name, value in factory.default_sampling.items() if name != "max_tokens"}


async def make_job(
    call: Call,
    index: int,
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    *,
    add_special_tokens: bool,
    cut_max_tokens: bool,
    size: int,
) -> Job:
    """What runs prompt number `index` of the call.

    Args:
        add_special_tokens: whether text gets BOS and EOS where the model wants them.
        cut_max_tokens: lower `max_tokens` to what fits; for one that nobody asked for.
        size: characters or tokens of the whole call, to tell whether this takes long.

    Raises:
        ParameterError: an empty prompt, an id outside the vocabulary, too many tokens.
    """
    body, factory = call.body, call.front.factory
    size += sum(map(len, [*(sampling.bad_words or ()), *(sampling.stop or ())]))
    request = await beside(
        size,
        factory.make,
        call.internal_id(index),
        prompt,
        sampling,
        add_special_tokens=add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        cut_max_tokens=cut_max_tokens,
        arrival=call.service.next_serial(),
        priority=body.priority or 0,
        salt=body.cache_salt or "",
    )
    return Job(request, await beside(size, factory.output, request))


def check_choices(prompts: int, sampling: SamplingParams) -> None:
    """Refuse a call that would start more sequences than one may ask for."""
    if prompts * sampling.n > MAX_CHOICES:
        raise bad_request(
            f"{prompts} prompts with n={sampling.n} are {prompts * sampling.n} choices; at most "
            f"{MAX_CHOICES} may be asked for at once.",
            "n",
        )


def prompt_scores(call: Call, news: News) -> list[Any] | None:
    """vLLM's `prompt_logprobs` where the caller asked for them and they have come."""
    top = call.body.prompt_logprobs
    if top is None or news.prompt_logprobs is None:
        return None
    return prompt_entries(news.prompt_logprobs, top, call.names())


def start(call: Call, jobs: Sequence[Job]) -> Generation:
    """The generation that answers `call`."""
    return Generation(call.front.engine, jobs, call.front.metrics)


async def whole_answer(
    http: HttpRequest, call: Call, answer: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
) -> Response:
    """Wait for `answer()` and send it; stop it at once when the client is gone."""
    with call.service.admitted():
        work = asyncio.create_task(answer())
        watcher = asyncio.create_task(gone(http.receive))
        try:
            await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            if not work.done():
                work.cancel()
            await asyncio.gather(work, watcher, return_exceptions=True)
    if work.cancelled():
        return Response(status_code=499)
    data = work.result()
    if call.warnings:
        data["warnings"] = call.warnings
    return Response(msgspec.json.encode(data), headers=call.headers(), media_type="application/json")


def stream_answer(call: Call, chunks: AsyncGenerator[dict[str, Any], None]) -> EventStream:
    """Send `chunks` as they come, then `[DONE]`."""
    return EventStream(_frames(call, chunks), call.headers(), explain)


async def _frames(call: Call, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    warnings = call.warnings
    with call.service.admitted():
        async with aclosing(chunks):
            async for chunk in chunks:
                if warnings:
                    chunk["warnings"], warnings = warnings, []
                yield frame(chunk)
        yield DONE


class StreamUsage:
    """The usage fields of a stream: none, a last chunk, or every chunk."""

    def __init__(self, call: Call, generation: Generation) -> None:
        options = call.body.stream_options
        self._asked = bool(options and options.include_usage)
        self._continuous = self._asked and bool(options and options.continuous_usage_stats)
        self._usage = generation.usage

    def add(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """`chunk` with what a chunk in the middle says."""
        if self._asked:
            chunk["usage"] = self._usage.as_json() if self._continuous else None
        return chunk

    def last(self, envelope: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunk after all others, if asked for."""
        return [{**envelope, "choices": [], "usage": self._usage.as_json()}] if self._asked else []
