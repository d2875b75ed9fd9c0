"""The API of llama.cpp's server: POST /completion, /completions and /apply-template, GET /props.

Where neither the request nor the model says how to sample, that server's defaults count. Penalties look at the whole
text and not at its last tokens; prompts are always cached, and there are no slots to choose.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import RootModel, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import octavo
from octavo.api.answers import Answer
from octavo.api.body import parse
from octavo.api.call import begin, start, stream_answer, warning_headers, whole_answer
from octavo.api.completions import CompletionPlan, plan_completion
from octavo.api.dialect import Dialect
from octavo.api.errors import ApiError, bad_request, given_as
from octavo.api.frontend import Frontend, service_of
from octavo.api.generation import Generation, News
from octavo.api.logprobs import TokenNames, best, finite
from octavo.api.messages import checked_messages
from octavo.api.models import json_response
from octavo.api.openapi import Operation
from octavo.api.prompts import encode_text, render_chat
from octavo.api.schemas import (
    MOST_ITEMS,
    Body,
    ChatBody,
    CompletionBody,
    FrequencyPenalty,
    PresencePenalty,
    RepeatPenalty,
    about,
)
from octavo.sampling_params import SamplingParams
from octavo.types import TokenLogprobs

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Sampling where nobody says how."""
ANY_SEED = 0xFFFFFFFF
_PENALTIES = "penalties look at the whole text"
_MIXED = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]},
}
_TEXT = {"type": "object", "required": ["prompt_string"], "properties": {"prompt_string": {"type": "string"}}}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        _TEXT,
        _MIXED,
        {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _TEXT, _MIXED]}},
    ],
    "description": "A text, token ids, both mixed, or a list of prompts of these kinds (a list of texts is one).",
}
_BIAS = {
    "description": "Pairs of a token id or a text and what is added to the logits of its tokens; false: never.",
    "anyOf": [{"type": "array", "maxItems": MOST_ITEMS["logit_bias"]}, {"type": "object"}, {"type": "null"}],
}


class LlamacppBody(Body):
    """POST /completion."""

    without_effect = {
        "cache_prompt": ((True,), "prompts are always cached"),
        "dry_allowed_length": ((), "it belongs to DRY sampling"),
        "dry_base": ((), "it belongs to DRY sampling"),
        "dry_penalty_last_n": ((), "it belongs to DRY sampling"),
        "dry_sequence_breakers": ((), "it belongs to DRY sampling"),
        "dynatemp_exponent": ((), "it belongs to dynamic temperatures"),
        "id_slot": ((-1,), "there are no slots to choose"),
        "mirostat_eta": ((), "it belongs to mirostat"),
        "mirostat_tau": ((), "it belongs to mirostat"),
        "n_cache_reuse": ((0,), "prompts are always cached, by their beginnings"),
        "n_discard": ((0,), "a context that is full is not cut"),
        "n_keep": ((0,), "a context that is full is not cut"),
        "penalize_nl": ((True,), _PENALTIES),
        "repeat_last_n": ((-1, 0), _PENALTIES),
        "return_progress": ((False,), "there is nothing to tell of before the first token"),
        "samplers": ((), "samplers have one order here"),
        "sse_ping_interval": ((), "the server is started with --sse-keep-alive-interval"),
        "t_max_predict_ms": ((-1, 0), "the server is started with --request-timeout"),
        "timings_per_token": ((False,), "times are told at the end"),
        "xtc_threshold": ((), "it belongs to XTC sampling"),
    }
    unread = frozenset()
    not_built = {
        "dry_multiplier": ((0,), "DRY sampling"),
        "dynatemp_range": ((0,), "Dynamic temperature"),
        "grammar": (("",), "Constrained (structured) output"),
        "json_schema": ((), "Constrained (structured) output"),
        "lora": (([],), "Choosing an adapter"),
        "min_keep": ((0, 1), "Keeping a number of tokens in sampling"),
        "mirostat": ((0,), "Mirostat sampling"),
        "n_indent": ((0,), "Indentation of the answer"),
        "post_sampling_probs": ((False,), "Telling probabilities after sampling"),
        "response_fields": (([],), "Choosing the fields of the answer"),
        "top_n_sigma": ((-1, 0), "Top-n-sigma sampling"),
        "typical_p": ((1,), "Typical sampling"),
        "xtc_probability": ((0,), "XTC sampling"),
    }

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    n_predict: Annotated[
        int | None, about("Most tokens; 0: the prompt is read and cached only; default, and below 0: what fits.")
    ] = None
    n_cmpl: Annotated[int | None, about("Answers per prompt. Default: 1.", minimum=1)] = None
    temperature: Annotated[float | None, about("Default: the model's, or 0.8; 0 and below: greedy.", maximum=2)] = None
    top_k: Annotated[int | None, about("Default: the model's, or 40; 0 and below: all tokens.")] = None
    top_p: Annotated[float | None, about("Default: the model's, or 0.95.", exclusiveMinimum=0, maximum=1)] = None
    min_p: Annotated[float | None, about("Default: the model's, or 0.05.", minimum=0, maximum=1)] = None
    repeat_penalty: RepeatPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Annotated[int | None, about("The same seed draws the same tokens; -1 and 4294967295: another each time.")] = (
        None
    )
    stop: Annotated[str | list[str] | None, about("Texts that end the answer.", maxItems=MOST_ITEMS["stop"])] = None
    ignore_eos: Annotated[bool | None, about("Go on after the model's end token.")] = None
    logit_bias: Annotated[Any, WithJsonSchema(_BIAS)] = None
    n_probs: Annotated[int | None, about("Logprobs of each token, with so many of the most probable.", minimum=0)] = (
        None
    )
    return_tokens: Annotated[bool | None, about("Tell the token ids too; a stream always does.")] = None
    stream: Annotated[bool | None, about("Send the answer in parts, as server-sent events.")] = None


class LlamacppTemplateBody(Body):
    """POST /apply-template."""

    unread = frozenset()

    messages: Annotated[list[dict[str, Any]], about("The conversation.", minItems=1)]
    tools: Annotated[list[dict[str, Any]] | None, about("Functions, for the chat template.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the chat template.")] = None
    add_generation_prompt: Annotated[bool | None, about("Open the answer's turn. Default: true.")] = None


class LlamacppToken(Answer):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamacppTokenWithRivals(LlamacppToken):
    top_logprobs: list[LlamacppToken]


class LlamacppTimings(Answer):
    """Numbers of tokens, and milliseconds."""

    cache_n: Annotated[int, about("Tokens of the prompt that were in the cache.")]
    prompt_n: Annotated[int, about("Those that were computed.")]
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamacppPart(Answer):
    """What is new of an answer."""

    index: Annotated[int, about("Which answer: they are counted over all prompts.")]
    content: str
    tokens: list[int]
    stop: Annotated[bool, about("Whether this is the whole answer, or its last part.")]
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: Annotated[int, about("Tokens of the prompt.")]
    completion_probabilities: list[LlamacppTokenWithRivals] = []


class LlamacppCompletion(LlamacppPart):
    """An answer."""

    model: str
    prompt: str
    stop_type: Literal["eos", "word", "limit"]
    stopping_word: str
    has_new_line: bool
    truncated: Annotated[bool, about("Whether the context was full.")]
    tokens_cached: Annotated[int, about("Tokens of the prompt that were in the cache.")]
    timings: LlamacppTimings
    generation_settings: dict[str, Any]


class LlamacppCompletions(RootModel[LlamacppCompletion | list[LlamacppCompletion]]):
    """A list where there are several."""


class LlamacppEvent(RootModel[LlamacppCompletion | LlamacppPart]):
    """The last event of an answer tells all of it but its text."""


class LlamacppModalities(Answer):
    vision: bool
    audio: bool


class LlamacppProps(Answer):
    default_generation_settings: dict[str, Any]
    total_slots: Annotated[int, about("Sequences that run at once.")]
    model_alias: str
    model_path: str
    modalities: LlamacppModalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


class LlamacppPrompt(Answer):
    prompt: str


class LlamacppErrorDetail(Answer):
    code: int
    message: str
    type: str


class LlamacppError(Answer):
    error: LlamacppErrorDetail


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def _problem(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": error.status, "message": error.message, "type": kind}}


DIALECT = Dialect(problem=_problem, error=LlamacppError)
_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs", "n": "n_cmpl"}
"""What this API calls fields of completions."""


async def complete(http: HttpRequest) -> Any:
    service = service_of(http)
    front = service.ready()
    asked = await parse(http, LlamacppBody, service.config.max_request_bytes)
    asked.refuse_unbuilt()
    with given_as(_NAMES):
        body = await _translated(front, asked)
        call = begin(http, service, body, asked)
        plan = await plan_completion(call, body, fit=True)
    if asked.stream:
        return stream_answer(call, _parts(plan, asked))
    return await whole_answer(http, call, partial(_whole, plan, asked))


async def _translated(front: Frontend, asked: LlamacppBody) -> CompletionBody:
    unsaid = {name: value for name, value in DEFAULTS.items() if name not in front.factory.default_sampling}
    names = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(asked, name)) is not None}
    if asked.temperature is not None:
        given["temperature"] = max(asked.temperature, 0.0)
    if asked.top_k is not None:
        given["top_k"] = max(asked.top_k, 0)
    if asked.seed == ANY_SEED:
        given["seed"] = -1
    no_penalty = (asked.model_extra or {}).get("repeat_last_n") == 0
    return CompletionBody(
        model=asked.model,
        prompt=await _prompts(front, asked.prompt),
        n=asked.n_cmpl,
        max_tokens=None if asked.n_predict is None or asked.n_predict < 0 else asked.n_predict,
        echo=asked.n_predict == 0,
        repetition_penalty=1.0 if no_penalty else asked.repeat_penalty,
        logit_bias=_bias(front, asked.logit_bias),
        logprobs=asked.n_probs or None,
        stream=asked.stream,
        **{**unsaid, **given},
    )


async def _prompts(front: Frontend, prompt: Any) -> str | list[list[int]]:
    """One text, or the ids of each prompt."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and not _is_one(prompt):
        return [await _ids(front, item) for item in prompt]
    return [await _ids(front, prompt)]


def _is_one(prompt: list[Any]) -> bool:
    """Whether a list is a single prompt: token ids, or texts among them."""
    return any(type(item) is int for item in prompt) and all(isinstance(item, (int, str)) for item in prompt)


async def _ids(front: Frontend, prompt: Any) -> list[int]:
    """Token ids of a text, of ids, or of both mixed; the model's BOS comes before a text that begins it."""
    if isinstance(prompt, dict) and isinstance(prompt.get("prompt_string"), str):
        if prompt.get("multimodal_data"):
            raise ApiError(400, "This model takes text only.", param="prompt", code="unsupported_content")
        prompt = prompt["prompt_string"]
    parts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(parts, list) or not all(isinstance(part, str) or type(part) is int for part in parts):
        raise bad_request("prompt must be a text, token ids, both mixed, or a list of such prompts.", "prompt")
    characters = sum(len(part) for part in parts if isinstance(part, str))
    if characters > front.factory.most_characters:
        raise bad_request(
            f"This model's maximum context length is {front.info.max_model_len} tokens. However, your prompt has "
            f"{characters} characters, more than can fit. Please shorten the prompt.",
            "prompt",
            "context_length_exceeded",
        )
    ids: list[int] = []
    for at, part in enumerate(parts):
        ids += [part] if isinstance(part, int) else await encode_text(front, part, special=at == 0)
    return ids


def _bias(front: Frontend, bias: Any) -> dict[str, float] | None:
    """What is added to logits, by token id; a text stands for all of its tokens."""
    if not bias:
        return None
    pairs = bias.items() if isinstance(bias, dict) else bias if isinstance(bias, list) else [None]
    found: dict[str, float] = {}
    for token, value in map(_pair, pairs):
        if isinstance(token, str) and not (isinstance(bias, dict) and token.isdecimal()):
            ids = front.tokenizer.encode(token, add_special_tokens=False)
        else:
            ids = [int(token)]
        found.update(dict.fromkeys(map(str, ids), value))
    return found


def _pair(pair: Any) -> tuple[int | str, float]:
    token, value = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
    if isinstance(token, (int, str)) and not isinstance(token, bool):
        if value is False:
            return token, -100.0
        if isinstance(value, (int, float)) and value is not True:
            return token, float(value)
    raise bad_request("logit_bias must be a list of pairs [token id or text, number or false].", "logit_bias")


class _Answer:
    """One answer, part by part."""

    def __init__(self, plan: CompletionPlan, asked: LlamacppBody, prompt: int, choice: int) -> None:
        self._plan = plan
        self._asked = asked
        self._key = (prompt, choice)
        self._request = plan.jobs[prompt].request
        self._names = plan.call.names()
        self._index = prompt * plan.made + choice
        self._count = 0
        self.text = ""
        self.tokens: list[int] = []
        self.scores: list[dict[str, Any]] = []

    def part(self, news: News) -> dict[str, Any]:
        """What is new; also kept."""
        piece = news.piece
        self._count += len(piece.token_ids)
        scores = [_scored(entry, self._asked.n_probs or 0, self._names) for entry in piece.logprobs or ()]
        self.text += piece.text
        self.tokens += piece.token_ids
        self.scores += scores
        return self._part(piece.text, list(piece.token_ids), scores, stop=False)

    def _part(self, text: str, tokens: list[int], scores: list[dict[str, Any]], stop: bool) -> dict[str, Any]:
        part: dict[str, Any] = {
            "index": self._index,
            "content": text,
            "tokens": tokens,
            "stop": stop,
            "id_slot": -1,
            "tokens_predicted": self._count,
            "tokens_evaluated": len(self._request.prompt),
        }
        return {**part, "completion_probabilities": scores} if scores else part

    def whole(self, generation: Generation, news: News) -> dict[str, Any]:
        """The answer that `news` ended; of a stream without what has been sent."""
        sent, front = bool(self._asked.stream), self._plan.call.front
        tokens = self.tokens if self._asked.return_tokens and not sent else []
        reason = news.piece.stop_reason
        limit = news.piece.finish_reason == "length"
        full = len(self._request.prompt) + self._count >= front.info.max_model_len
        return {
            **self._part("" if sent else self.text, tokens, [] if sent else self.scores, stop=True),
            "model": self._plan.call.model,
            "prompt": front.tokenizer.decode(self._request.prompt, skip_special_tokens=False),
            "stop_type": "limit" if limit else "word" if isinstance(reason, str) else "eos",
            "stopping_word": reason if isinstance(reason, str) else "",
            "has_new_line": "\n" in self.text,
            "truncated": limit and full,
            "tokens_cached": generation.record.choices[self._key].cached,
            "timings": self._timings(generation),
            "generation_settings": {
                **_settings(self._request.sampling),
                "n_predict": self._request.max_tokens,
                "seed": self._request.seed,
                "stream": sent,
            },
        }

    def _timings(self, generation: Generation) -> dict[str, Any]:
        story = generation.record.choices[self._key]
        computed = len(self._request.prompt) - story.cached
        read = (story.first or story.ended) - story.scheduled
        return {
            "cache_n": story.cached,
            **_speed("prompt", computed, read),
            **_speed("predicted", self._count, story.last - story.first),
        }


def _speed(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    seconds = max(seconds, 1e-6)
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / max(tokens, 1),
        f"{name}_per_second": tokens / seconds,
    }


def _scored(entry: TokenLogprobs, top: int, names: TokenNames) -> dict[str, Any]:
    rivals = [_token(token, logprob, names) for token, logprob in best(entry, top)]
    return {**_token(entry.token, entry.logprob, names), "top_logprobs": rivals}


def _token(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "id": token,
        "token": names.text(token),
        "bytes": list(names.bytes(token)),
        "logprob": finite(logprob),
    }


def _settings(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters, as this API names them."""
    return {
        "n_predict": -1,
        "seed": ANY_SEED,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": sampling.stop or [],
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.logprobs or 0,
        "stream": False,
    }


async def _whole(plan: CompletionPlan, asked: LlamacppBody) -> Any:
    generation = start(plan.call, plan.jobs)
    keys = [(prompt, choice) for prompt in range(len(plan.jobs)) for choice in range(plan.made)]
    answers = {key: _Answer(plan, asked, *key) for key in keys}
    done: dict[tuple[int, int], dict[str, Any]] = {}
    async with aclosing(generation.news()) as source:
        async for news in source:
            key = (news.prompt, news.choice)
            answers[key].part(news)
            if news.piece.finish_reason is not None:
                done[key] = answers[key].whole(generation, news)
    return done[keys[0]] if len(keys) == 1 else [done[key] for key in keys]


async def _parts(plan: CompletionPlan, asked: LlamacppBody) -> AsyncGenerator[dict[str, Any], None]:
    generation = start(plan.call, plan.jobs)
    answers: dict[tuple[int, int], _Answer] = {}
    async with aclosing(generation.news()) as source:
        async for news in source:
            key = (news.prompt, news.choice)
            if key not in answers:
                answers[key] = _Answer(plan, asked, *key)
            part = answers[key].part(news)
            if part["content"] or part["tokens"]:
                yield part
            if news.piece.finish_reason is not None:
                yield answers[key].whole(generation, news)


async def props(http: HttpRequest) -> Response:
    """What the server is."""
    service = service_of(http)
    front = service.ready()
    factory, info, tokenizer = front.factory, front.info, front.tokenizer
    values = {name: value for name, value in factory.default_sampling.items() if name != "max_tokens"}
    sampling = SamplingParams(**{**DEFAULTS, **values})
    return json_response(
        {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": info.max_model_len,
                "is_processing": False,
                "params": _settings(sampling),
            },
            "total_slots": service.config.max_num_seqs,
            "model_alias": front.served[0],
            "model_path": info.path or info.model,
            "modalities": {"vision": False, "audio": False},
            "chat_template": tokenizer.chat_template or "",
            "bos_token": tokenizer.special_tokens.get("bos_token") or "",
            "eos_token": tokenizer.special_tokens.get("eos_token") or "",
            "build_info": f"octavo-{octavo.__version__}",
            "is_sleeping": False,
        }
    )


async def apply_template(http: HttpRequest) -> Response:
    """The text that a conversation becomes."""
    service = service_of(http)
    front = service.ready()
    asked = await parse(http, LlamacppTemplateBody, service.config.max_request_bytes)
    front.check_model(asked.model)
    body = ChatBody(
        messages=asked.messages,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
    )
    text = await render_chat(front, body, checked_messages(asked.messages))
    return json_response({"prompt": text}, warning_headers(asked.ignored()))


_ERRORS = (400, 404, 408, 413, 500, 503)
_COMPLETE = ("llama.cpp: go on with a text.", LlamacppCompletions, LlamacppBody, LlamacppEvent, _ERRORS, DIALECT)

OPERATIONS = (
    Operation("POST", "/completion", complete, *_COMPLETE),
    Operation("POST", "/completions", complete, *_COMPLETE),
    Operation("GET", "/props", props, "llama.cpp: what is served.", LlamacppProps, errors=(503,), dialect=DIALECT),
    Operation(
        "POST",
        "/apply-template",
        apply_template,
        "llama.cpp: the text that a conversation becomes.",
        LlamacppPrompt,
        LlamacppTemplateBody,
        errors=(400, 404, 413, 503),
        dialect=DIALECT,
    ),
)
