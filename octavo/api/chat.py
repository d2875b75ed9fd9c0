"""POST /v1/chat/completions: messages in, a message on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from octavo.api.body import parse
from octavo.api.call import (
    Call,
    StreamUsage,
    begin,
    check_choices,
    check_settings,
    closing_fields,
    make_job,
    prompt_scores,
    sampling_of,
    start,
    stream_answer,
    whole_answer,
)
from octavo.api.frontend import service_of
from octavo.api.generation import Job, News
from octavo.api.logprobs import chat_entries
from octavo.api.messages import checked_messages, last_text
from octavo.api.prompts import encode_chat
from octavo.api.schemas import ChatBody
from octavo.sampling_params import ParameterError


@dataclass
class ChatPlan:
    """A checked call."""

    call: Call
    body: ChatBody
    job: Job
    role: str
    echo: str
    """What the answer begins with before anything is generated; empty without `echo`."""

    @property
    def top(self) -> int:
        """How many of the most probable tokens to show with each token."""
        return self.job.request.sampling.logprobs or 0

    @property
    def n(self) -> int:
        return self.body.n or 1


async def create(http: HttpRequest) -> Any:
    service = service_of(http)
    service.ready()
    body = await parse(http, ChatBody, service.config.max_request_bytes)
    call = begin(http, service, body)
    try:
        plan = await plan_chat(call, body)
    except ParameterError as error:
        error.parameter = _given_as(body, error.parameter)
        raise
    if body.stream:
        return stream_answer(call, _chunks(plan))
    return await whole_answer(http, call, partial(_whole, plan))


def _given_as(body: ChatBody, parameter: str | None) -> str | None:
    """The field of a chat that `parameter` comes from."""
    if parameter == "max_tokens" and body.max_completion_tokens is not None:
        return "max_completion_tokens"
    return {"prompt": "messages", "logprobs": "top_logprobs"}.get(parameter or "", parameter)


async def plan_chat(call: Call, body: ChatBody, fit: bool = False) -> ChatPlan:
    """The checked plan of a call. `fit`: more tokens than the context has room for are not refused but cut."""
    messages = checked_messages(body.messages)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = body.top_logprobs if body.logprobs else None
    if body.logprobs and logprobs is None and not body.logprob_token_ids:
        logprobs = 0
    asked = max_tokens is not None
    if not asked:
        max_tokens = call.front.factory.default_sampling.get("max_tokens")
    sampling = sampling_of(call, max_tokens, logprobs)
    check_choices(1, sampling.n, "n")
    check_settings(body, 1)
    ids = await encode_chat(call.front, body, messages)
    cut = fit or not asked
    job = await make_job(call, 0, ids, sampling, add_special_tokens=False, cut_max_tokens=cut, size=0, known=True)
    role = messages[-1]["role"] if body.continue_final_message else call.front.config.response_role
    echo = last_text(messages) if body.echo and messages[-1]["role"] == role else ""
    return ChatPlan(call, body, job, role, echo)


def _logprobs(plan: ChatPlan, news: News) -> dict[str, Any] | None:
    if not plan.body.logprobs:
        return None
    return {"content": chat_entries(news.piece.logprobs or (), plan.top, plan.call.names())}


def _prompt_fields(plan: ChatPlan, news: News) -> dict[str, Any]:
    """What stands at the top of an answer about the prompt."""
    found: dict[str, Any] = {}
    scores = prompt_scores(plan.call, news)
    if scores is not None:
        found["prompt_logprobs"] = scores
    return found


async def _whole(plan: ChatPlan) -> dict[str, Any]:
    generation = start(plan.call, [plan.job])
    choices = [_empty_choice(plan, index) for index in range(plan.n)]
    answer = plan.call.envelope("chatcmpl", "chat.completion")
    if plan.body.return_token_ids:
        answer["prompt_token_ids"] = list(plan.job.request.prompt)
    async with aclosing(generation.news()) as source:
        async for news in source:
            choice, piece = choices[news.choice], news.piece
            choice["message"]["content"] += piece.text
            found = _logprobs(plan, news)
            if found is not None:
                choice["logprobs"]["content"] += found["content"]
            if plan.body.return_token_ids:
                choice["token_ids"] += piece.token_ids
            choice["finish_reason"], choice["stop_reason"] = piece.finish_reason, piece.stop_reason
            answer.update(_prompt_fields(plan, news))
    return {**answer, "choices": choices, **closing_fields(plan.call, generation)}


def _empty_choice(plan: ChatPlan, index: int) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": plan.role, "content": plan.echo, "refusal": None},
        "logprobs": {"content": []} if plan.body.logprobs else None,
        "finish_reason": None,
        "stop_reason": None,
    }
    if plan.body.return_token_ids:
        choice["token_ids"] = []
    return choice


async def _chunks(plan: ChatPlan) -> AsyncGenerator[dict[str, Any], None]:
    generation = start(plan.call, [plan.job])
    usage = StreamUsage(plan.call, generation, plan.n)
    envelope = plan.call.envelope("chatcmpl", "chat.completion.chunk")
    first = True
    async with aclosing(generation.news()) as source:
        async for news in source:
            if first:
                for index in range(plan.n):
                    yield usage.add({**envelope, **_opening(plan, index)})
                first = False
            part = _delta(plan, news)
            fields = _prompt_fields(plan, news)
            if fields or part["delta"] or part["finish_reason"] or part["logprobs"] or part.get("token_ids"):
                yield usage.add({**envelope, **fields, "choices": [part]})
    for chunk in usage.last(envelope):
        yield chunk


def _opening(plan: ChatPlan, index: int) -> dict[str, Any]:
    """The first chunk of a choice: who speaks."""
    opening: dict[str, Any] = {
        "choices": [
            {
                "index": index,
                "delta": {"role": plan.role, "content": plan.echo},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
    }
    if plan.body.return_token_ids and index == 0:
        opening["prompt_token_ids"] = list(plan.job.request.prompt)
    return opening


def _delta(plan: ChatPlan, news: News) -> dict[str, Any]:
    piece = news.piece
    part: dict[str, Any] = {
        "index": news.choice,
        "delta": {"content": piece.text} if piece.text else {},
        "logprobs": _logprobs(plan, news),
        "finish_reason": piece.finish_reason,
    }
    if piece.finish_reason is not None:
        part["stop_reason"] = piece.stop_reason
    if plan.body.return_token_ids:
        part["token_ids"] = list(piece.token_ids)
    return part
