"""What the two generating endpoints share: from a body to sampling parameters and jobs, and how an answer is sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.api.dialect import Dialect
from octavo.api.errors import bad_request
from octavo.api.frontend import Frontend, Service
from octavo.api.generation import Generation, Job, News
from octavo.api.logprobs import TokenNames, prompt_entries
from octavo.api.middleware import clean_request_id, explain, key_of, route_path
from octavo.api.prompts import beside
from octavo.api.record import Origin, Record
from octavo.api.schemas import Body, GenerationBody, Ignored, RepetitionDetection
from octavo.api.sse import EventStream, Pace, gone
from octavo.logs import REQUEST_ID
from octavo.sampling_params import MAX_CHOICES, RepetitionDetectionParams, SamplingParams
from octavo.text.request import RequestFactory

MOST_SETTINGS = 4 << 20
"""Characters and entries of lists that steer sampling, over all prompts of a call."""
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
    ignored: list[Ignored]
    """Fields without an effect."""
    key: int | None
    """Which API key the caller has."""
    origin: Origin
    dialect: Dialect
    pace: Pace = field(default_factory=Pace)

    def internal_id(self, prompt: int) -> str:
        """An id for the engine: unique even when two callers give the same X-Request-Id."""
        return f"{self.request_id}/{self.service.next_serial()}.{prompt}"

    def names(self) -> TokenNames:
        tokenizer = self.front.tokenizer
        hidden = tokenizer.special_ids if self.body.skip_special_tokens is not False else frozenset()
        asked, usual = self.body.return_tokens_as_token_ids, self.service.config.return_tokens_as_token_ids
        return TokenNames(tokenizer.token_bytes, hidden, usual if asked is None else asked)

    def seconds(self) -> float | None:
        """How long the answer may take; None for ever."""
        limits = [self.body.timeout, self.service.config.request_timeout]
        return min((limit for limit in limits if limit is not None), default=None)

    def admitted(self) -> AbstractContextManager[None]:
        """Counts the call while it is answered.

        Raises:
            ApiError: the server, or the caller's key, has too many already.
        """
        return self.service.admitted(self.key)

    def envelope(self, prefix: str, kind: str) -> dict[str, Any]:
        """The fields every answer and every chunk starts with."""
        return {"id": f"{prefix}-{self.request_id}", "object": kind, "created": self.created, "model": self.model}

    def headers(self) -> dict[str, str]:
        return warning_headers(self.ignored)

    def warnings(self) -> list[str]:
        """A sentence for each field without an effect."""
        return [ignored.why for ignored in self.ignored]


def warning_headers(ignored: Sequence[Ignored]) -> dict[str, str]:
    """The header that names fields without an effect; none where there are none."""
    if not ignored:
        return {}
    names = ["".join(c if "!" <= c <= "~" else "?" for c in field) or '""' for field, _ in ignored]
    return {"X-Octavo-Warnings": f"ignored: {', '.join(names)}"}


def begin(http: HttpRequest, service: Service, body: GenerationBody, asked: Body | None = None) -> Call:
    """Check what does not depend on the prompt. `asked` is what came over the wire, where `body` is its translation.

    Raises:
        ApiError: an unknown model, a field that cannot be honoured, a busy server.
    """
    front = service.ready()
    model = front.check_model(body.model)
    body.refuse()
    if len(body.allowed_token_ids or ()) > front.info.vocab_size:
        raise bad_request(
            f"allowed_token_ids may hold at most {front.info.vocab_size} ids, as many as the vocabulary has, got "
            f"{len(body.allowed_token_ids or ())}.",
            "allowed_token_ids",
        )
    key = key_of(http.scope)
    service.check_room(key)
    request_id = clean_request_id(body.request_id) if body.request_id else http.state.request_id
    ignored = (asked or body).ignored()
    if body.priority and service.config.scheduling_policy != "priority":
        why = "requests run in the order they come; the server can be started with --scheduling-policy priority"
        ignored.append(Ignored("priority", f"The field `priority` has no effect: {why}."))
    origin = origin_of(http, request_id, model)
    return Call(service, front, body, model, request_id, int(time.time()), ignored, key, origin, http.state.dialect)


def origin_of(http: HttpRequest, request_id: str, model: str) -> Origin:
    """What logs and traces say of where a call comes from; from here on log lines carry `request_id`."""
    REQUEST_ID.set(request_id)
    trace = {name: value for name in ("traceparent", "tracestate") if (value := http.headers.get(name))}
    client = f"{http.client.host}:{http.client.port}" if http.client else ""
    return Origin(request_id, route_path(http.scope), model, client, time.monotonic(), trace)


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
    if body.repetition_detection is not None:
        values["repetition_detection"] = _repetition(body.repetition_detection)
    return SamplingParams.from_optional(**values, max_tokens=max_tokens, logprobs=logprobs)


def _repetition(asked: RepetitionDetection) -> RepetitionDetectionParams:
    given = {name: value for name in RepetitionDetection.model_fields if (value := getattr(asked, name)) is not None}
    if "max_pattern_size" not in given:
        raise bad_request("repetition_detection needs max_pattern_size.", "repetition_detection")
    return RepetitionDetectionParams(**given)


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
    known: bool = False,
) -> Job:
    """What runs prompt number `index` of the call.

    Args:
        add_special_tokens: whether text gets BOS and EOS where the model wants them.
        cut_max_tokens: lower `max_tokens` to what fits; for one that nobody asked for.
        size: characters or tokens of the whole call that are yet to be looked at, to tell whether this takes long.
        known: the prompt are ids that the tokenizer made.

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
        known=known,
        add_special_tokens=add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        cut_max_tokens=cut_max_tokens,
        arrival=call.service.next_serial(),
        priority=body.priority or 0,
        salt=body.cache_salt or "",
    )
    return Job(request, await beside(size, factory.output, request))


def check_choices(prompts: int, choices: int, field: str) -> None:
    """Refuse a call that would start more sequences than one may ask for; `field` sets how many each prompt has."""
    if prompts * choices > MAX_CHOICES:
        raise bad_request(
            f"{prompts} prompts with {field}={choices} are {prompts * choices} choices; at most "
            f"{MAX_CHOICES} may be asked for at once.",
            field,
        )


def check_settings(body: GenerationBody, prompts: int) -> None:
    """Refuse a call whose lists would be copied too often: each prompt goes to the engine with all of them."""
    texts = [*([body.stop] if isinstance(body.stop, str) else body.stop or ()), *(body.bad_words or ())]
    lists = (body.stop_token_ids, body.logit_bias, body.allowed_token_ids, body.logprob_token_ids)
    size = sum(map(len, texts)) + sum(len(items) for items in lists if items is not None)
    if prompts * size > MOST_SETTINGS:
        raise bad_request(
            f"stop, bad_words, stop_token_ids, logit_bias, allowed_token_ids and logprob_token_ids have {size} "
            f"characters and entries together, times {prompts} prompts: more than {MOST_SETTINGS}. Send fewer prompts "
            "at once, or less with them.",
        )


def prompt_scores(call: Call, news: News) -> list[Any] | None:
    """vLLM's `prompt_logprobs` where the caller asked for them and they have come."""
    top = call.body.prompt_logprobs
    if top is None or news.prompt_logprobs is None:
        return None
    return prompt_entries(news.prompt_logprobs, top, call.names())


def start(call: Call, jobs: Sequence[Job]) -> Generation:
    """The generation that answers `call`."""
    front, service = call.front, call.service
    record = Record(call.origin, [job.request for job in jobs], service.metrics.requests, service.listeners)
    if service.stats_log is not None:
        service.stats_log.poke()
    return Generation(front.engine, jobs, record, call.pace, call.seconds())


def closing_fields(call: Call, generation: Generation) -> dict[str, Any]:
    """What a whole answer ends with."""
    return {"usage": generation.usage.as_json(), **times_of(call, generation)}


def times_of(call: Call, generation: Generation) -> dict[str, Any]:
    """How long things took, where the server tells it."""
    return {"metrics": generation.record.times()} if call.service.config.enable_per_request_metrics else {}


async def whole_answer(http: HttpRequest, call: Call, answer: Callable[[], Coroutine[Any, Any, Any]]) -> Response:
    """Wait for `answer()` and send it; stop it at once when the client is gone."""
    with call.admitted():
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
    if call.ignored and call.dialect.warns:
        data["warnings"] = call.warnings()
    return Response(msgspec.json.encode(data), headers=call.headers(), media_type="application/json")


def stream_answer(call: Call, chunks: AsyncGenerator[dict[str, Any], None]) -> EventStream:
    """Send `chunks` as they come, as the dialect writes them."""
    keep_alive = call.service.config.sse_keep_alive_interval
    return EventStream(_frames(call, chunks), call.dialect, call.headers(), explain, call.pace, keep_alive)


async def _frames(call: Call, chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    warnings = call.warnings() if call.dialect.warns else []
    with call.admitted():
        async with aclosing(chunks):
            async for chunk in chunks:
                if warnings:
                    chunk["warnings"], warnings = warnings, []
                yield call.dialect.event(chunk)
        if call.dialect.end:
            yield call.dialect.end


class StreamUsage:
    """The usage fields of a stream (none, a last chunk, or every chunk), and its `metrics` where the server tells them:
    in the very last chunk.

    Args:
        choices: how many choices there are; the chunk that ends the last of them may be the last one.
    """

    def __init__(self, call: Call, generation: Generation, choices: int) -> None:
        options, config = call.body.stream_options, call.service.config
        self._asked = bool(options and options.include_usage) or config.enable_force_include_usage
        self._continuous = self._asked and bool(options and options.continuous_usage_stats)
        self._measured = config.enable_per_request_metrics
        self._generation = generation
        self._left = choices

    def add(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """`chunk` with what a chunk in the middle says."""
        if self._asked:
            chunk["usage"] = self._generation.usage.as_json() if self._continuous else None
        self._left -= sum(choice["finish_reason"] is not None for choice in chunk["choices"])
        if self._measured and not self._asked and not self._left:
            chunk["metrics"] = self._generation.record.times()
        return chunk

    def last(self, envelope: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunk after all others, if asked for."""
        if not self._asked:
            return []
        chunk = {**envelope, "choices": [], "usage": self._generation.usage.as_json()}
        return [{**chunk, "metrics": self._generation.record.times()} if self._measured else chunk]
