"""The API of Hugging Face's text-generation-inference: POST /generate, /generate_stream and /, GET /info.

Defaults are those of that server, whatever the model's generation config says: greedy unless something asks for
sampling, at most 100 tokens, stop texts left in the answer. A body without `parameters` samples, as there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import RootModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import octavo
from octavo.api.answers import Answer
from octavo.api.body import parse
from octavo.api.call import begin, start, stream_answer, whole_answer
from octavo.api.completions import MAX_PROMPTS, CompletionPlan, plan_completion
from octavo.api.dialect import Dialect
from octavo.api.errors import OVERLOADED, ApiError, bad_request, given_as
from octavo.api.frontend import service_of
from octavo.api.generation import News
from octavo.api.logprobs import best, finite
from octavo.api.models import json_response
from octavo.api.openapi import Operation
from octavo.api.schemas import MOST_ITEMS, Body, CompletionBody, Nested, about
from octavo.sampling_params import MAX_CHOICES
from octavo.text.output import Piece
from octavo.text.stream import Detokenizer
from octavo.types import TokenLogprobs

DEFAULT_MAX_NEW_TOKENS = 100


class TgiParameters(Nested):
    """How to generate."""

    not_built = {
        "adapter_id": ((), "Choosing an adapter"),
        "grammar": ((), "Constrained (structured) output"),
        "typical_p": ((1,), "Typical sampling"),
        "watermark": ((False,), "Watermarking"),
    }

    best_of: Annotated[int | None, about("Generate so many answers and return the most probable one.", minimum=1)] = (
        None
    )
    do_sample: Annotated[bool | None, about("Draw tokens. Default: only where another field asks for it.")] = None
    temperature: Annotated[float | None, about("Default: 1.", exclusiveMinimum=0, maximum=2)] = None
    top_k: Annotated[int | None, about("Draw from so many tokens.", minimum=1)] = None
    top_p: Annotated[float | None, about("Draw from this share of the probability.", exclusiveMinimum=0, maximum=1)] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, about("Divides the logits of tokens in prompt and output; 1: off.", exclusiveMinimum=0)
    ] = None
    frequency_penalty: Annotated[
        float | None, about("Taken once per time a token is in the output.", minimum=-2, maximum=2)
    ] = None
    max_new_tokens: Annotated[int | None, about("Most tokens. Default: 100, or what fits.", minimum=1)] = None
    return_full_text: Annotated[
        bool | None, about("Begin the answer with the prompt. Default: false; true at the path /.")
    ] = None
    stop: Annotated[
        list[str] | None, about("Texts that end the answer, and stay in it.", maxItems=MOST_ITEMS["stop"])
    ] = None
    truncate: Annotated[int | None, about("Keep so many tokens of the prompt, the last ones.", minimum=1)] = None
    details: Annotated[bool | None, about("Tell of each token, and why the answer ended.")] = None
    decoder_input_details: Annotated[bool | None, about("Tell of the tokens of the prompt too.")] = None
    seed: Annotated[int | None, about("The same seed draws the same tokens.", minimum=0)] = None
    top_n_tokens: Annotated[int | None, about("Tell so many of the most probable tokens with each.", minimum=0)] = None


class TgiBody(Body):
    """POST /generate, /generate_stream and /."""

    without_effect = {}
    unread = frozenset()

    inputs: Annotated[str, about("The prompt.", minLength=1)]
    parameters: Annotated[TgiParameters | None, about("How to generate.")] = None
    stream: Annotated[bool | None, about("Send the answer token by token, as server-sent events.")] = None
    add_special_tokens: Annotated[bool | None, about("Begin the prompt with the model's BOS. Default: true.")] = None


class TgiPromptToken(Answer):
    id: int
    text: str
    logprob: float | None


class TgiToken(Answer):
    id: int
    text: str
    logprob: float
    special: bool


FinishReason = Literal["length", "eos_token", "stop_sequence"]


class TgiSequence(Answer):
    finish_reason: FinishReason
    generated_tokens: int
    seed: Annotated[int | None, about("Null where nothing was drawn.")]
    prefill: Annotated[list[TgiPromptToken], about("The prompt, with decoder_input_details.")]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] = []


class TgiRival(TgiSequence):
    """An answer that was not the best one."""

    generated_text: str


class TgiDetails(TgiSequence):
    best_of_sequences: list[TgiRival] = []


class TgiAnswer(Answer):
    generated_text: str
    details: TgiDetails | None = None


class TgiAnswers(RootModel[list[TgiAnswer]]):
    """At the path / the answer is a list of one."""


class TgiStreamDetails(Answer):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class TgiEvent(Answer):
    """One token."""

    index: Annotated[int, about("1 for the first one.")]
    token: TgiToken
    top_tokens: list[TgiToken] = []
    generated_text: Annotated[str | None, about("The whole answer, with the last token.")]
    details: Annotated[TgiStreamDetails | None, about("With the last token, where they were asked for.")]


class TgiError(Answer):
    error: str
    error_type: str


class TgiInfo(Answer):
    model_id: str
    model_sha: None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_length: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    validation_workers: int
    router: str
    version: str
    sha: None
    docker_label: None


_NAMES = {
    "prompt": "inputs",
    "max_tokens": "max_new_tokens",
    "logprobs": "top_n_tokens",
    "truncate_prompt_tokens": "truncate",
}
"""What this API calls fields of completions."""


def _status(error: ApiError) -> int:
    if error.status == 503 and error.code == OVERLOADED:
        return 429
    return {400: 422, 500: 424}.get(error.status, error.status)


def _problem(error: ApiError) -> dict[str, Any]:
    kinds = {422: "validation", 424: "generation", 408: "incomplete_generation", 429: "overloaded", 503: "unavailable"}
    return {"error": error.message, "error_type": kinds.get(_status(error), "validation")}


DIALECT = Dialect(problem=_problem, error=TgiError, status=_status)


async def generate(http: HttpRequest, stream: bool = False, at_root: bool = False) -> Any:
    """An answer, or a stream where `stream` or the body says so; `at_root` the answer is a list of one and begins with
    the prompt, unless the body says otherwise."""
    service = service_of(http)
    service.ready()
    asked = await parse(http, TgiBody, service.config.max_request_bytes)
    stream = stream or bool(asked.stream)
    parameters = asked.parameters or TgiParameters(do_sample=True)
    _refuse(parameters, stream)
    with given_as(_NAMES):
        body = _translated(asked, parameters, stream)
        call = begin(http, service, body, asked)
        plan = await plan_completion(call, body, fit=parameters.max_new_tokens is None)
    full = at_root if parameters.return_full_text is None else parameters.return_full_text
    opening = asked.inputs if full else ""
    if stream:
        return stream_answer(call, _events(plan, parameters, opening))
    return await whole_answer(http, call, partial(_whole, plan, parameters, opening, at_root))


def _refuse(parameters: TgiParameters, stream: bool) -> None:
    """Raise 400 for what this API does not have."""
    parameters.refuse_unbuilt("parameters.")
    for name, least in (
        ("max_new_tokens", 1),
        ("top_k", 1),
        ("truncate", 1),
        ("best_of", 1),
        ("seed", 0),
        ("top_n_tokens", 0),
    ):
        value = getattr(parameters, name)
        if value is not None and value < least:
            raise bad_request(f"`{name}` must be at least {least}, got {value}.", name)
    if parameters.temperature is not None and parameters.temperature <= 0:
        raise bad_request("`temperature` must be strictly positive; leave it out for greedy decoding.", "temperature")
    if stream and parameters.decoder_input_details:
        raise bad_request("`decoder_input_details` cannot be streamed.", "decoder_input_details")


def _translated(asked: TgiBody, parameters: TgiParameters, stream: bool) -> CompletionBody:
    draws = bool(parameters.do_sample)
    draws = draws or any(getattr(parameters, name) is not None for name in ("temperature", "top_k", "top_p"))
    shown = stream or _detailed(parameters)
    return CompletionBody(
        model=asked.model,
        prompt=asked.inputs,
        stream=stream,
        add_special_tokens=asked.add_special_tokens,
        max_tokens=parameters.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        temperature=(1.0 if parameters.temperature is None else parameters.temperature) if draws else 0.0,
        top_k=parameters.top_k or -1,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        min_p=0.0,
        repetition_penalty=1.0 if parameters.repetition_penalty is None else parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        presence_penalty=0.0,
        stop=parameters.stop,
        include_stop_str_in_output=True,
        seed=parameters.seed,
        best_of=parameters.best_of,
        truncate_prompt_tokens=parameters.truncate,
        logprobs=parameters.top_n_tokens or 0 if shown else None,
        prompt_logprobs=0 if parameters.decoder_input_details else None,
    )


def _detailed(parameters: TgiParameters) -> bool:
    return bool(parameters.details or parameters.decoder_input_details)


class _Choice:
    """One answer, token by token. The texts of its tokens, special ones left out, are its text."""

    def __init__(self, plan: CompletionPlan) -> None:
        request = plan.jobs[0].request
        self._tokenizer = plan.call.front.tokenizer
        self._detokenizer = Detokenizer(self._tokenizer, request.prompt)
        self._top = request.sampling.logprobs or 0
        self._seed = None if request.sampling.greedy else request.seed
        self._told = 0
        """Characters in the texts of the tokens."""
        self.text = ""
        self.score = 0.0
        """Logprob of all tokens together."""
        self.tokens: list[dict[str, Any]] = []
        self.rivals: list[list[dict[str, Any]]] = []
        """Per token the most probable ones."""
        self.finish_reason: FinishReason | None = None

    def take(self, piece: Piece) -> int:
        """Add what came; returns how many tokens that were."""
        self.text += piece.text
        entries: Sequence[TokenLogprobs | None] = piece.logprobs or [None] * len(piece.token_ids)
        for at, (token, entry) in enumerate(zip(piece.token_ids, entries, strict=True), 1):
            last = piece.finish_reason is not None and at == len(piece.token_ids)
            self._add(token, entry, last)
        if piece.finish_reason is not None:
            stopped = "stop_sequence" if isinstance(piece.stop_reason, str) else "eos_token"
            self.finish_reason = "length" if piece.finish_reason == "length" else stopped  # type: ignore[assignment]
        return len(piece.token_ids)

    def _add(self, token: int, entry: TokenLogprobs | None, last: bool) -> None:
        text = self._detokenizer.push((token,))
        special = token in self._tokenizer.special_ids
        if last and not special:  # what was left open, without what follows a stop text
            text = self.text[self._told :]
        self._told += len(text)
        self.score += entry.logprob if entry else 0.0
        logprob = finite(entry.logprob) if entry else 0.0
        shown = self._tokenizer.token(token) if special else text
        self.tokens.append({"id": token, "text": shown, "logprob": logprob, "special": special})
        self.rivals.append([self._rival(*rival) for rival in best(entry, self._top)] if entry else [])

    def _rival(self, token: int, logprob: float) -> dict[str, Any]:
        special = token in self._tokenizer.special_ids
        return {"id": token, "text": self._tokenizer.token(token), "logprob": finite(logprob), "special": special}

    def summary(self) -> dict[str, Any]:
        """How it ended."""
        return {"finish_reason": self.finish_reason, "generated_tokens": len(self.tokens), "seed": self._seed}

    def details(self, prefill: list[dict[str, Any]]) -> dict[str, Any]:
        """All that is to be told of it."""
        details = {**self.summary(), "prefill": prefill, "tokens": self.tokens}
        return {**details, "top_tokens": self.rivals} if self._top else details


async def _whole(plan: CompletionPlan, parameters: TgiParameters, opening: str, listed: bool) -> Any:
    choices = [_Choice(plan) for _ in range(plan.made)]
    prefill: list[dict[str, Any]] = []
    async with aclosing(start(plan.call, plan.jobs).news()) as source:
        async for news in source:
            choices[news.choice].take(news.piece)
            prefill = prefill or _prefill(plan, news)
    winner, *others = sorted(choices, key=lambda choice: choice.score, reverse=True)
    answer: dict[str, Any] = {"generated_text": opening + winner.text}
    if _detailed(parameters):
        answer["details"] = winner.details(prefill)
        if others:
            answer["details"]["best_of_sequences"] = [
                {"generated_text": opening + other.text, **other.details(prefill)} for other in others
            ]
    return [answer] if listed else answer


def _prefill(plan: CompletionPlan, news: News) -> list[dict[str, Any]]:
    tokenizer = plan.call.front.tokenizer
    return [
        {"id": token, "text": tokenizer.token(token), "logprob": None if entry is None else finite(entry.logprob)}
        for token, entry in zip(plan.jobs[0].request.prompt, news.prompt_logprobs or (), strict=False)
    ]


async def _events(
    plan: CompletionPlan, parameters: TgiParameters, opening: str
) -> AsyncGenerator[dict[str, Any], None]:
    choice = _Choice(plan)
    async with aclosing(start(plan.call, plan.jobs).news()) as source:
        async for news in source:
            came = choice.take(news.piece)
            for index in range(len(choice.tokens) - came, len(choice.tokens)):
                event = {"index": index + 1, "token": choice.tokens[index], "generated_text": None, "details": None}
                if parameters.top_n_tokens:
                    event["top_tokens"] = choice.rivals[index]
                if choice.finish_reason and index + 1 == len(choice.tokens):
                    event["generated_text"] = opening + choice.text
                    if parameters.details:
                        size = len(plan.jobs[0].request.prompt)
                        event["details"] = {**choice.summary(), "input_length": size}
                yield event


async def info(http: HttpRequest) -> Response:
    """What is served."""
    service = service_of(http)
    front = service.ready()
    config, model = service.config, front.info
    return json_response(
        {
            "model_id": front.served[0],
            "model_sha": None,
            "model_dtype": model.quantization or config.dtype,
            "model_device_type": model.device or config.device,
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": config.max_num_queued_reqs or config.max_num_seqs,
            "max_best_of": MAX_CHOICES,
            "max_stop_sequences": MOST_ITEMS["stop"],
            "max_input_length": model.max_model_len - 1,
            "max_input_tokens": model.max_model_len - 1,
            "max_total_tokens": model.max_model_len,
            "max_client_batch_size": MAX_PROMPTS,
            "validation_workers": 1,
            "router": "octavo",
            "version": octavo.__version__,
            "sha": None,
            "docker_label": None,
        }
    )


_ERRORS = (404, 408, 413, 422, 424, 429, 503)

OPERATIONS = (
    Operation(
        "POST",
        "/",
        partial(generate, at_root=True),
        "Text generation inference: as /generate; a list of one answer, which begins with the prompt.",
        TgiAnswers,
        TgiBody,
        TgiEvent,
        _ERRORS,
        DIALECT,
    ),
    Operation(
        "POST",
        "/generate",
        generate,
        "Text generation inference: go on with a text.",
        TgiAnswer,
        TgiBody,
        TgiEvent,
        _ERRORS,
        DIALECT,
    ),
    Operation(
        "POST",
        "/generate_stream",
        partial(generate, stream=True),
        "Text generation inference: go on with a text, token by token.",
        "text/event-stream",
        TgiBody,
        TgiEvent,
        _ERRORS,
        DIALECT,
    ),
    Operation(
        "GET", "/info", info, "Text generation inference: what is served.", TgiInfo, errors=(503,), dialect=DIALECT
    ),
)
