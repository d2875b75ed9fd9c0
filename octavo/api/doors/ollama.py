"""Ollama's API: POST /api/generate and /api/chat, and what its clients ask about models.

One model is served and stays loaded, so its names are those of --served-model-name, with or without the tag
`:latest`. Where neither the request nor the model says how to sample, Ollama's defaults count. Penalties look at the
whole text and not at its last tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Annotated, Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

import octavo
from octavo.api.answers import Answer
from octavo.api.body import parse
from octavo.api.call import Call, begin, sampling_of, start, stream_answer, warning_headers, whole_answer
from octavo.api.chat import plan_chat
from octavo.api.completions import plan_completion
from octavo.api.dialect import Dialect
from octavo.api.errors import ApiError, bad_request, given_as
from octavo.api.frontend import Frontend, service_of
from octavo.api.generation import Generation, Job, News
from octavo.api.logprobs import chat_entries
from octavo.api.models import json_response
from octavo.api.openapi import Operation
from octavo.api.prompts import encode_chat, encode_text
from octavo.api.schemas import (
    MOST_ITEMS,
    Body,
    ChatBody,
    CompletionBody,
    FrequencyPenalty,
    Nested,
    PresencePenalty,
    RepeatPenalty,
    about,
)

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Sampling where nobody says how."""
LATEST = ":latest"
_LOADED = "the model was loaded when the server started"
_PENALTIES = "penalties look at the whole text"
_NEVER = "9999-12-31T23:59:59Z"


class OllamaOptions(Nested):
    """How to generate."""

    without_effect = {
        **{
            name: ((), _LOADED)
            for name in (
                "embedding_only",
                "f16_kv",
                "logits_all",
                "low_vram",
                "main_gpu",
                "num_batch",
                "num_ctx",
                "num_gpu",
                "num_thread",
                "numa",
                "use_mlock",
                "use_mmap",
                "vocab_only",
            )
        },
        "mirostat_eta": ((), "it belongs to mirostat"),
        "mirostat_tau": ((), "it belongs to mirostat"),
        "num_keep": ((), "a context that is full is not cut"),
        "penalize_newline": ((True,), _PENALTIES),
        "repeat_last_n": ((-1, 0), _PENALTIES),
    }
    not_built = {
        "mirostat": ((0,), "Mirostat sampling"),
        "tfs_z": ((1,), "Tail-free sampling"),
        "typical_p": ((1,), "Typical sampling"),
    }

    temperature: Annotated[float | None, about("Default: the model's, or 0.8.", minimum=0, maximum=2)] = None
    top_k: Annotated[int | None, about("Default: the model's, or 40.")] = None
    top_p: Annotated[float | None, about("Default: the model's, or 0.9.", exclusiveMinimum=0, maximum=1)] = None
    min_p: Annotated[float | None, about("Least probability, relative to the best.", minimum=0, maximum=1)] = None
    repeat_penalty: RepeatPenalty = None
    presence_penalty: PresencePenalty = None
    frequency_penalty: FrequencyPenalty = None
    seed: Annotated[int | None, about("The same seed draws the same tokens; -1: another each time.")] = None
    num_predict: Annotated[int | None, about("Most tokens; 0 and below: until the context is full.")] = None
    stop: Annotated[str | list[str] | None, about("Texts that end the answer.", maxItems=MOST_ITEMS["stop"])] = None


class OllamaBody(Body):
    """What both ways of generating share."""

    without_effect = {"keep_alive": ((), "the model stays loaded")}
    unread = frozenset()
    not_built = {
        "format": (("",), "Constrained (structured) output"),
        "suffix": (("",), "Filling in the middle"),
        "template": (("",), "A template of Ollama's kind in a request"),
    }

    stream: Annotated[bool | None, about("Send the answer in parts, a JSON object per line. Default: true.")] = None
    think: Annotated[bool | str | None, about("false only: thinking is not separated from the answer here.")] = None
    options: Annotated[OllamaOptions | None, about("How to generate.")] = None
    logprobs: Annotated[bool | None, about("Logprobs of each token.")] = None
    top_logprobs: Annotated[int | None, about("So many of the most probable others with each.", minimum=0)] = None

    def refuse(self) -> None:
        """Raise 400 for what is not built."""
        self.refuse_unbuilt()
        if self.options is not None:
            self.options.refuse_unbuilt("options.")
        if self.think:
            raise bad_request(
                "Thinking is not separated from the answer in this server: leave `think` out, or send false.", "think"
            )
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")


class OllamaGenerateBody(OllamaBody):
    """POST /api/generate."""

    prompt: Annotated[str | None, about("Put in a chat as the user's message. Empty: nothing is generated.")] = None
    system: Annotated[str | None, about("The system message before it.")] = None
    raw: Annotated[bool | None, about("Go on with the prompt itself, without a chat.")] = None
    context: Annotated[list[int] | None, about("What an earlier answer gave: the conversation so far.")] = None
    images: Annotated[list[str] | None, about("Not built: empty only.", maxItems=0)] = None

    def refuse(self) -> None:
        super().refuse()
        _refuse_images(self.images, "images")
        if self.raw and (self.system or self.context):
            raise bad_request("raw does not go together with system or context: write all of it in prompt.", "raw")


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: Annotated[list[dict[str, Any]] | None, about("The conversation. Empty: nothing is generated.")] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions, for the chat template.")] = None


class OllamaShowBody(Body):
    """POST /api/show."""

    without_effect = {"verbose": ((False,), "there is nothing more to tell"), "options": (({},), _LOADED)}
    unread = frozenset()

    name: Annotated[str | None, about("An older name of `model`.")] = None


class OllamaToken(Answer):
    token: str
    logprob: float
    bytes: list[int]


class OllamaTokenWithRivals(OllamaToken):
    top_logprobs: list[OllamaToken]


class OllamaAnswer(Answer):
    """What whole answers, and the parts of streams, have in common; times are nanoseconds."""

    model: str
    created_at: str
    done: Annotated[bool, about("Whether this is all, or the last part.")]
    done_reason: Annotated[str | None, about("stop, length, or load where nothing was to be generated.")] = None
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: Annotated[int, about("Tokens of the prompt.")] = 0
    prompt_eval_duration: Annotated[int, about("Until the first token.")] = 0
    eval_count: Annotated[int, about("Tokens generated.")] = 0
    eval_duration: Annotated[int, about("From the first token to the last.")] = 0
    logprobs: list[OllamaTokenWithRivals] = []


class OllamaGenerated(OllamaAnswer):
    response: str
    context: Annotated[list[int], about("The conversation, for a request that goes on with it.")] = []


class OllamaMessage(Answer):
    role: str
    content: str


class OllamaChatted(OllamaAnswer):
    message: OllamaMessage


class OllamaDetails(Answer):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    name: str
    model: str
    modified_at: Annotated[str, about("When it was loaded.")]
    size: Annotated[int, about("Bytes of its weights.")]
    digest: Annotated[str, about("Stands for where it was loaded from, not for what is in it.")]
    details: OllamaDetails


class OllamaModels(Answer):
    models: list[OllamaModel]


class OllamaRunning(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(Answer):
    models: list[OllamaRunning]


class OllamaShown(Answer):
    license: str
    modelfile: str
    parameters: str
    template: Annotated[str, about("Its chat template; a Jinja one.")]
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Answer):
    version: Annotated[str, about("Octavo's.")]


class OllamaError(Answer):
    error: str


_encode = msgspec.json.Encoder().encode

DIALECT = Dialect(
    event=lambda data: _encode(data) + b"\n",
    problem=lambda error: {"error": error.message},
    error=OllamaError,
    media_type="application/x-ndjson",
    comment=b"",
)
ABSENT = (
    "Octavo serves the one model it was started with, and generates text: models are not pulled, created, copied or "
    "deleted over HTTP, and there are no embeddings."
)
"""What to say at other paths of this API."""
_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
"""What this API calls fields of completions and chats."""


def _refuse_images(images: Any, where: str) -> None:
    if images:
        raise ApiError(400, f"{where}: this model takes text only.", param=where, code="unsupported_content")


def _own_name(front: Frontend, name: str | None) -> str | None:
    """The name as it is served: tags are optional here."""
    if name and name not in front.served and name.removesuffix(LATEST) in front.served:
        return name.removesuffix(LATEST)
    return name


def _shown_name(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else name + LATEST


@dataclass
class _Plan:
    """A checked call, and how its answer is written."""

    call: Call
    job: Job
    model: str
    """As the caller named it."""
    write: Callable[[str], dict[str, Any]]
    """The field of some text."""
    top: int | None
    """How many of the most probable tokens to show with each token; None shows no logprobs."""
    gives_context: bool = False

    def part(self, text: str, news: News) -> dict[str, Any]:
        """What has come."""
        part = {"model": self.model, "created_at": _now(), **self.write(text), "done": False}
        if self.top is not None and news.piece.logprobs:
            part["logprobs"] = chat_entries(news.piece.logprobs, self.top, self.call.names())
        return part

    def closing(self, generation: Generation, news: News, tokens: list[int]) -> dict[str, Any]:
        """What the last part says beside."""
        record = generation.record
        story = record.choices[0, 0]
        prompt = self.job.request.prompt
        closing: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if news.piece.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(story.ended - record.origin.arrived),
            "load_duration": 0,
            "prompt_eval_count": len(prompt),
            "prompt_eval_duration": _nanoseconds(story.first - story.scheduled),
            "eval_count": len(tokens),
            "eval_duration": _nanoseconds(story.last - story.first),
        }
        return {**closing, "context": [*prompt, *tokens]} if self.gives_context else closing


def _nanoseconds(seconds: float) -> int:
    """At least 1: clients divide by it."""
    return max(int(seconds * 1e9), 1)


def _now() -> str:
    return _time(datetime.now(timezone.utc).timestamp())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


async def generate(http: HttpRequest) -> Any:
    service = service_of(http)
    front = service.ready()
    asked = await parse(http, OllamaGenerateBody, service.config.max_request_bytes, any_type=True)
    asked.refuse()
    top = asked.top_logprobs or 0 if asked.logprobs else None
    with given_as(_NAMES):
        body = CompletionBody(prompt=asked.prompt, logprobs=top, **_fields(front, asked))
        call = begin(http, service, body, asked)
        if not asked.prompt:
            return _loaded(call, asked, _response(""))
        if not asked.raw:
            body.prompt = await _prompt(front, asked)
        plan = await plan_completion(call, body, fit=True)
    return await _answer(
        http, asked, _Plan(call, plan.jobs[0], asked.model or call.model, _response, top, not asked.raw)
    )


def _response(text: str) -> dict[str, Any]:
    return {"response": text}


async def _prompt(front: Frontend, asked: OllamaGenerateBody) -> list[int]:
    """Token ids of the conversation so far and of what the user says now."""
    text = asked.prompt or ""
    if not front.template and not asked.system:
        ids = await encode_text(front, text, special=not asked.context)
    else:
        messages = [{"role": "system", "content": asked.system}] if asked.system else []
        messages.append({"role": "user", "content": text})
        chat = ChatBody(messages=messages, chat_template_kwargs=_variables(asked))
        ids = await encode_chat(front, chat, messages)
    return [*(asked.context or ()), *ids]


async def chat(http: HttpRequest) -> Any:
    service = service_of(http)
    front = service.ready()
    asked = await parse(http, OllamaChatBody, service.config.max_request_bytes, any_type=True)
    asked.refuse()
    with given_as(_NAMES):
        body = ChatBody(
            messages=[_translated(message, index) for index, message in enumerate(asked.messages or [])],
            tools=asked.tools,
            chat_template_kwargs=_variables(asked),
            logprobs=asked.logprobs,
            top_logprobs=asked.top_logprobs if asked.logprobs else None,
            **_fields(front, asked),
        )
        call = begin(http, service, body, asked)
        if not asked.messages:
            return _loaded(call, asked, _message("assistant", ""))
        plan = await plan_chat(call, body, fit=True)
    top = plan.top if asked.logprobs else None
    return await _answer(
        http, asked, _Plan(call, plan.job, asked.model or call.model, partial(_message, plan.role), top)
    )


def _message(role: str, text: str) -> dict[str, Any]:
    return {"message": {"role": role, "content": text}}


def _translated(message: dict[str, Any], index: int) -> dict[str, Any]:
    """A message of a chat, without what only Ollama has in one."""
    _refuse_images(message.get("images"), f"messages[{index}].images")
    kept = {name: value for name, value in message.items() if name not in ("images", "tool_name")}
    if message.get("tool_name") is not None:
        kept.setdefault("name", message["tool_name"])
    return kept


def _variables(asked: OllamaBody) -> dict[str, Any] | None:
    """What the chat template is told."""
    return None if asked.think is None else {"enable_thinking": False}


def _fields(front: Frontend, asked: OllamaBody) -> dict[str, Any]:
    """The fields that completions and chats share."""
    options = asked.options or OllamaOptions()
    unsaid = {name: value for name, value in DEFAULTS.items() if name not in front.factory.default_sampling}
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.top_k is not None:
        given["top_k"] = max(options.top_k, 0)
    penalty = 1.0 if (options.model_extra or {}).get("repeat_last_n") == 0 else options.repeat_penalty
    most = options.num_predict
    return {
        **unsaid,
        **given,
        "model": _own_name(front, asked.model),
        "repetition_penalty": penalty,
        "max_tokens": most if most is not None and most > 0 else None,
        "stream": asked.stream is not False,
    }


def _loaded(call: Call, asked: OllamaBody, empty: dict[str, Any]) -> Response:
    """The answer to a request that is only to load the model, which it is. What is wrong in it is still refused."""
    sampling_of(call, call.body.max_tokens, asked.top_logprobs)
    answer = {"model": asked.model or call.model, "created_at": _now(), **empty, "done": True, "done_reason": "load"}
    return json_response(answer, call.headers())


async def _answer(http: HttpRequest, asked: OllamaBody, plan: _Plan) -> Any:
    if asked.stream is not False:
        return stream_answer(plan.call, _parts(plan))
    return await whole_answer(http, plan.call, partial(_whole, plan))


async def _parts(plan: _Plan) -> AsyncGenerator[dict[str, Any], None]:
    generation = start(plan.call, [plan.job])
    tokens: list[int] = []
    async with aclosing(generation.news()) as source:
        async for news in source:
            tokens += news.piece.token_ids
            part = plan.part(news.piece.text, news)
            if news.piece.text or "logprobs" in part:
                yield part
            if news.piece.finish_reason is not None:
                last = {"model": plan.model, "created_at": _now(), **plan.write("")}
                yield {**last, **plan.closing(generation, news, tokens)}


async def _whole(plan: _Plan) -> dict[str, Any]:
    generation = start(plan.call, [plan.job])
    tokens: list[int] = []
    text, scores = "", []
    answer: dict[str, Any] = {}
    async with aclosing(generation.news()) as source:
        async for news in source:
            tokens += news.piece.token_ids
            text += news.piece.text
            answer = plan.part(text, news)
            scores += answer.pop("logprobs", [])
            if news.piece.finish_reason is not None:
                answer.update(plan.closing(generation, news, tokens))
    return answer if plan.top is None else {**answer, "logprobs": scores}


# -- about models ----------------------------------------------------------------------------------------------------


def _model(front: Frontend, name: str) -> dict[str, Any]:
    info = front.info
    return {
        "name": _shown_name(name),
        "model": _shown_name(name),
        "modified_at": _time(info.created),
        "size": info.weight_bytes,
        "digest": hashlib.sha256((info.path or info.model).encode("utf-8", "surrogateescape")).hexdigest(),
        "details": _details(front),
    }


def _details(front: Frontend) -> dict[str, Any]:
    info = front.info
    return {
        "parent_model": "",
        "format": "gguf" if info.path.endswith(".gguf") else "safetensors",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": "",
        "quantization_level": info.quantization or "",
    }


async def tags(http: HttpRequest) -> Response:
    """The models served."""
    front = service_of(http).ready()
    return json_response({"models": [_model(front, name) for name in front.served]})


async def ps(http: HttpRequest) -> Response:
    """The models loaded: the same."""
    front = service_of(http).ready()
    memory = 0 if front.info.device in ("", "cpu", "reference") else front.info.weight_bytes
    rest = {"expires_at": _NEVER, "size_vram": memory, "context_length": front.info.max_model_len}
    return json_response({"models": [{**_model(front, name), **rest} for name in front.served]})


async def show(http: HttpRequest) -> Response:
    """All there is to tell of a model."""
    service = service_of(http)
    front = service.ready()
    asked = await parse(http, OllamaShowBody, service.config.max_request_bytes, any_type=True)
    name = front.check_model(_own_name(front, asked.model or asked.name))
    info, template = front.info, front.tokenizer.chat_template or ""
    family = info.architecture or "model"
    answer = {
        "license": "",
        "modelfile": f"# Served by Octavo {octavo.__version__}\nFROM {info.model}\n",
        "parameters": "\n".join(f"{key} {value}" for key, value in sorted(front.factory.default_sampling.items())),
        "template": template,
        "details": _details(front),
        "model_info": {
            "general.architecture": info.architecture,
            "general.name": name,
            f"{family}.context_length": info.max_model_len,
            f"{family}.vocab_size": info.vocab_size,
        },
        "capabilities": ["completion", *(["tools"] if "tools" in template else [])],
        "modified_at": _time(info.created),
    }
    return json_response(answer, warning_headers(asked.ignored()))


async def version(http: HttpRequest) -> Response:
    return json_response({"version": octavo.__version__})


async def running(http: HttpRequest) -> Response:
    """The words by which Ollama's clients know that there is a server."""
    return PlainTextResponse("Ollama is running")


_ERRORS = (400, 404, 408, 413, 500, 503)


def _row(
    method: str,
    path: str,
    endpoint: Callable[[HttpRequest], Awaitable[Any]],
    summary: str,
    answer: type[Answer] | str,
    body: type[Body] | None = None,
    errors: tuple[int, ...] = (503,),
) -> Operation:
    event = answer if isinstance(answer, type) and issubclass(answer, OllamaAnswer) else None
    return Operation(method, path, endpoint, f"Ollama: {summary}", answer, body, event, errors, DIALECT)


OPERATIONS = (
    _row("GET", "/", running, "whether there is a server.", "text/plain", errors=()),
    _row("POST", "/api/generate", generate, "answer a prompt.", OllamaGenerated, OllamaGenerateBody, _ERRORS),
    _row("POST", "/api/chat", chat, "answer in a conversation.", OllamaChatted, OllamaChatBody, _ERRORS),
    _row("GET", "/api/tags", tags, "the models served.", OllamaModels),
    _row("GET", "/api/ps", ps, "the models loaded.", OllamaRunningModels),
    _row("POST", "/api/show", show, "one of them.", OllamaShown, OllamaShowBody, (400, 404, 413, 503)),
    _row("GET", "/api/version", version, "Octavo's version.", OllamaVersion, errors=()),
)
