"""POST /v1/completions: text, or token ids, in; text on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
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
    sampling_of,
    start,
    stream_answer,
    whole_answer,
)
from octavo.api.errors import bad_request
from octavo.api.frontend import service_of
from octavo.api.generation import Generation, Job, News
from octavo.api.logprobs import CompletionLogprobs, prompt_entries
from octavo.api.prompts import beside
from octavo.api.schemas import CompletionBody
from octavo.sampling_params import SamplingParams
from octavo.types import TokenLogprobs

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16


@dataclass
class CompletionPlan:
    """A checked call and its prompts."""

    call: Call
    body: CompletionBody
    jobs: list[Job]
    echoes: list[str]
    """What to say before the answer to each prompt; empty strings without `echo`."""
    top: int | None
    """How many of the most probable tokens to show with each token; None shows no logprobs."""
    prompt_tops: dict[int, Sequence[TokenLogprobs | None]] = field(default_factory=dict)
    """Scores of the prompts that have come."""

    @property
    def echoes_scores(self) -> bool:
        """Whether the tokens of the prompt are shown with theirs."""
        return bool(self.body.echo) and self.top is not None

    @property
    def waits_for_scores(self) -> bool:
        """Whether an answer begins with the scores of its prompt."""
        return self.echoes_scores or self.body.prompt_logprobs is not None

    @property
    def made(self) -> int:
        """Choices to generate per prompt: more than are returned, where the best ones are chosen."""
        return self.jobs[0].request.n


async def create(http: HttpRequest) -> Any:
    service = service_of(http)
    service.ready()
    body = await parse(http, CompletionBody, service.config.max_request_bytes)
    call = begin(http, service, body)
    plan = await plan_completion(call, body)
    if body.stream:
        return stream_answer(call, _chunks(plan))
    return await whole_answer(http, call, partial(_whole, plan))


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a call: one string, strings, one list of ids, or lists of ids.

    Raises:
        ApiError: anything else, none at all, or more than 1024.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists of "
            "token ids, and not empty.",
            "prompt",
        )
    if _are_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"There are {len(prompt)} prompts; at most {MAX_PROMPTS} may be sent at once.", "prompt")
    if all(isinstance(item, str) for item in prompt) or all(
        isinstance(item, list) and _are_ids(item) for item in prompt
    ):
        return list(prompt)
    raise bad_request("The elements of prompt must all be strings, all token ids, or all lists of token ids.", "prompt")


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


async def plan_completion(call: Call, body: CompletionBody, fit: bool = False) -> CompletionPlan:
    """The checked plan of a call. `fit`: more tokens than the context has room for are not refused but cut, and without
    `max_tokens` it is filled."""
    given = len(body.prompt) if isinstance(body.prompt, list) else 0
    prompts = await beside(given, prompts_of, body.prompt)
    size = sum(map(len, prompts))
    check_settings(body, len(prompts))
    max_tokens = body.max_tokens if body.max_tokens is not None or fit else DEFAULT_MAX_TOKENS
    nothing_new = max_tokens == 0
    if nothing_new and not body.echo:
        raise bad_request("max_tokens must be at least 1, got 0 (0 is allowed with echo).", "max_tokens")
    if nothing_new and body.min_tokens:
        raise bad_request("min_tokens must be less than or equal to max_tokens=0.", "min_tokens")
    shown = len(body.logprob_token_ids) if body.logprob_token_ids else body.logprobs
    scores = shown if body.echo else None
    if nothing_new and scores is None:
        scores = 0  # a request that generates nothing must at least score its prompt
    sampling = sampling_of(call, 1 if nothing_new else max_tokens, body.logprobs, scores)
    top = sampling.logprobs
    if body.best_of is None:
        check_choices(len(prompts), sampling.n, "n")
    else:
        check_choices(len(prompts), body.best_of, "best_of")
        sampling = _with_rivals(sampling, body.best_of)
    jobs, echoes = [], []
    for index, prompt in enumerate(prompts):
        job = await make_job(
            call,
            index,
            prompt,
            sampling,
            add_special_tokens=body.add_special_tokens is not False,
            cut_max_tokens=fit or body.max_tokens is None,
            size=size,
        )
        if nothing_new:
            job = job._replace(request=msgspec.structs.replace(job.request, max_tokens=0))
        jobs.append(job)
        echoes.append(_echo(call, prompt, list(job.request.prompt)) if body.echo else "")
    return CompletionPlan(call, body, jobs, echoes, top)


def _with_rivals(sampling: SamplingParams, best_of: int) -> SamplingParams:
    """Parameters that make `best_of` choices, with what it takes to compare them."""
    if best_of == 1:
        return sampling
    if sampling.greedy:
        raise bad_request(
            f"best_of must be 1 when using greedy sampling, got {best_of}: all choices would be the same.", "best_of"
        )
    return msgspec.structs.replace(sampling, n=best_of, logprobs=sampling.logprobs or 0)


def _echo(call: Call, prompt: str | list[int], ids: list[int]) -> str:
    if isinstance(prompt, str) and call.body.truncate_prompt_tokens is None:
        return prompt
    return call.front.tokenizer.decode(ids, skip_special_tokens=call.body.skip_special_tokens is not False)


class _Choice:
    """One choice of the answer, part by part."""

    def __init__(self, plan: CompletionPlan, prompt: int, choice: int) -> None:
        self.index = prompt * plan.made + choice
        self.score = 0.0
        """Logprob of all its tokens together."""
        self._plan = plan
        self._prompt = prompt
        self._started = False
        self._logprobs = None if plan.top is None else CompletionLogprobs(plan.top, plan.call.names())

    def part(self, news: News) -> dict[str, Any]:
        """What `news` adds, in the form of `choices[]`."""
        plan, piece = self._plan, news.piece
        first, self._started = not self._started, True
        self.score += sum(entry.logprob for entry in piece.logprobs or ())
        text = piece.text
        tokens: list[int] = list(piece.token_ids)
        entries: list[TokenLogprobs | None] = list(piece.logprobs or ())
        if first:
            text = plan.echoes[self._prompt] + text
            if plan.echoes_scores:
                tokens = [*plan.jobs[self._prompt].request.prompt, *tokens]
                entries = [*plan.prompt_tops[self._prompt], *entries]
        part: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.part(tokens, entries),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if plan.body.return_token_ids:
            part["token_ids"] = list(piece.token_ids)
            if first:
                part["prompt_token_ids"] = list(plan.jobs[self._prompt].request.prompt)
        shown = plan.body.prompt_logprobs
        if first and shown is not None:
            part["prompt_logprobs"] = prompt_entries(plan.prompt_tops[self._prompt], shown, plan.call.names())
        return part


class _Choices:
    """All choices of the answer."""

    def __init__(self, plan: CompletionPlan) -> None:
        self._plan = plan
        self._made: dict[tuple[int, int], _Choice] = {}

    def part(self, news: News) -> dict[str, Any]:
        """What `news` adds to its choice."""
        key = (news.prompt, news.choice)
        if key not in self._made:
            self._made[key] = _Choice(self._plan, *key)
        return self._made[key].part(news)

    def best(self, parts: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """The choices to return of those made, by their index in `parts`: of each prompt the most probable ones, the
        best one first. Without `best_of` all are returned, in the order of their indices."""
        if self._plan.body.best_of is None:
            return [parts[index] for index in sorted(parts)]
        kept = []
        for prompt in range(len(self._plan.jobs)):
            rivals = [choice for key, choice in sorted(self._made.items()) if key[0] == prompt]
            rivals.sort(key=lambda choice: choice.score, reverse=True)
            kept += rivals[: self._plan.body.n or 1]
        return [{**parts[choice.index], "index": index} for index, choice in enumerate(kept)]


async def _news(plan: CompletionPlan, generation: Generation) -> AsyncGenerator[News, None]:
    """The news of `generation`; where answers begin with the scores of a prompt, nothing comes before they have."""
    held: dict[int, list[News]] = {}
    async with aclosing(generation.news()) as source:
        async for news in source:
            if news.prompt_logprobs is not None:
                plan.prompt_tops[news.prompt] = news.prompt_logprobs
            if plan.waits_for_scores and news.prompt not in plan.prompt_tops:
                held.setdefault(news.prompt, []).append(news)
                continue
            for earlier in held.pop(news.prompt, ()):
                yield earlier
            yield news


async def _whole(plan: CompletionPlan) -> dict[str, Any]:
    generation = start(plan.call, plan.jobs)
    choices: dict[int, dict[str, Any]] = {}
    makers = _Choices(plan)
    async with aclosing(_news(plan, generation)) as source:
        async for news in source:
            part = makers.part(news)
            _join(choices.setdefault(part["index"], {}), part)
    return {
        **plan.call.envelope("cmpl", "text_completion"),
        "choices": makers.best(choices),
        **closing_fields(plan.call, generation),
    }


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Append the `part` of a choice to what is there of it."""
    if not whole:
        whole.update(part)
        return
    whole["text"] += part["text"]
    if part["logprobs"] is not None:
        for name, values in part["logprobs"].items():
            whole["logprobs"][name] += values
    if "token_ids" in part:
        whole["token_ids"] += part["token_ids"]
    whole["finish_reason"], whole["stop_reason"] = part["finish_reason"], part["stop_reason"]


async def _chunks(plan: CompletionPlan) -> AsyncGenerator[dict[str, Any], None]:
    generation = start(plan.call, plan.jobs)
    usage = StreamUsage(plan.call, generation, plan.made * len(plan.jobs))
    envelope = plan.call.envelope("cmpl", "text_completion")
    makers = _Choices(plan)
    async with aclosing(_news(plan, generation)) as source:
        async for news in source:
            part = makers.part(news)
            told = part["text"] or part["finish_reason"] or part["logprobs"] or part.get("token_ids")
            if told or "prompt_logprobs" in part:
                yield usage.add({**envelope, "choices": [part]})
    for chunk in usage.last(envelope):
        yield chunk
