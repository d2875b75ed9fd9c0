"""The story of one call as metrics, logs and traces tell it: what was asked, when what came, how each choice ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.api.metrics import RequestNumbers
from octavo.types import Delta, Request


class Origin(NamedTuple):
    """Where a call comes from."""

    request_id: str
    route: str
    model: str
    """The name it is answered under."""
    client: str
    """Address of whoever sent it."""
    arrived: float
    """Seconds of the monotonic clock."""
    trace: dict[str, str]
    """The headers `traceparent` and `tracestate`, where given."""


@dataclass(slots=True)
class ChoiceStory:
    """One choice. Times are seconds of the monotonic clock, 0 before they are known."""

    scheduled: float = 0.0
    """When the first step of its request began, as nearly as the front end can tell."""
    first: float = 0.0
    """First token."""
    last: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    reason: str | None = None
    text: list[str] = field(default_factory=list)
    """What was generated, where somebody listens who wants it."""


class Listener(Protocol):
    """Whoever is told of every call."""

    wants_text: bool

    def began(self, record: Record) -> None: ...

    def ended(self, record: Record) -> None: ...


class Record:
    """What happens to the requests of one call; `numbers` and `listeners` learn of it here and nowhere else.

    Call `began` once, `took` for what comes, `choice_ended` once for every choice, then `ended`.
    """

    def __init__(
        self, origin: Origin, requests: Sequence[Request], numbers: RequestNumbers, listeners: Sequence[Listener] = ()
    ) -> None:
        self.origin = origin
        self.requests = requests
        self.choices = {(i, c): ChoiceStory() for i, request in enumerate(requests) for c in range(request.n)}
        """By prompt and choice."""
        self._numbers = numbers
        self._listeners = listeners
        self._keeps_text = any(listener.wants_text for listener in listeners)
        self._taken = 0.0
        """When the engine got the requests."""
        self._read: set[int] = set()
        """Prompts that have been read."""

    def began(self) -> None:
        """The requests go to the engine now."""
        self._taken = time.monotonic()
        for request in self.requests:
            self._numbers.asked_choices.add(request.n)
            self._numbers.asked_tokens.add(request.max_tokens)
        for listener in self._listeners:
            listener.began(self)

    def took(self, prompt: int, choice: int, delta: Delta, tokens: int, text: str) -> None:
        """`delta` has come for a choice; it brought so many new tokens, and `text`."""
        numbers, story, now = self._numbers, self.choices[prompt, choice], time.monotonic()
        if not story.scheduled:
            story.scheduled = min(self._taken + delta.queued, now)
            story.cached = delta.cached
            if prompt not in self._read:
                self._read.add(prompt)
                numbers.prompt_tokens += len(self.requests[prompt].prompt)
                numbers.cached_tokens += delta.cached
        if self._keeps_text and text:
            story.text.append(text)
        if not tokens:
            return
        if not story.tokens:
            story.first = now
            numbers.first_token.add(now - self.origin.arrived)
            if tokens > 1:
                numbers.between_tokens.add(0.0, tokens - 1)
        else:
            numbers.between_tokens.add((now - story.last) / tokens, tokens)
        story.last = now
        story.tokens += tokens
        numbers.generated_tokens += tokens

    def choice_ended(self, prompt: int, choice: int, reason: str) -> None:
        """A choice is over, for whatever reason."""
        numbers, story, size = self._numbers, self.choices[prompt, choice], len(self.requests[prompt].prompt)
        story.reason = reason
        story.ended = time.monotonic()
        numbers.finished[reason] += 1
        numbers.latency.add(story.ended - self.origin.arrived)
        numbers.prompt_sizes.add(size)
        numbers.answer_sizes.add(story.tokens)
        if story.scheduled:
            numbers.queue.add(story.scheduled - self._taken)
            numbers.computed_sizes.add(size - story.cached)
        if story.tokens:
            numbers.prefill.add(story.first - story.scheduled)
            numbers.decode.add(story.last - story.first)
            numbers.inference.add(story.last - story.scheduled)
        if story.tokens > 1:
            numbers.per_token.add((story.last - story.first) / (story.tokens - 1))

    def ended(self) -> None:
        """Every choice has ended."""
        for prompt, request in enumerate(self.requests):
            self._numbers.longest_answers.add(max(self.choices[prompt, c].tokens for c in range(request.n)))
        for listener in self._listeners:
            listener.ended(self)

    # -- the call as a whole ------------------------------------------------------------------------------------
    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def generated_tokens(self) -> int:
        return sum(story.tokens for story in self.choices.values())

    @property
    def cached_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        found = dict.fromkeys(range(len(self.requests)), 0)
        for (prompt, _), story in self.choices.items():
            found[prompt] = max(found[prompt], story.cached)
        return sum(found.values())

    @property
    def seconds(self) -> float:
        """From arrival to the end of the last choice."""
        return max(story.ended for story in self.choices.values()) - self.origin.arrived

    def times(self) -> dict[str, float | None]:
        """`metrics` of an answer: milliseconds, and tokens of all choices per second since the call came; null where
        there is too little to tell."""
        stories = [story for story in self.choices.values() if story.tokens]
        queued, first = self.queued, self.first_token
        last = max((story.last for story in stories), default=0.0) - self.origin.arrived
        between = self.generated_tokens - len(stories)
        waits = sum(story.last - story.first for story in stories)
        return {
            "queue_time_ms": None if queued is None else queued * 1000,
            "time_to_first_token_ms": None if first is None else first * 1000,
            "generation_time_ms": None if first is None else (last - first) * 1000,
            "mean_itl_ms": waits / between * 1000 if between else None,
            "tokens_per_second": self.generated_tokens / max(last, 1e-9) if stories else None,
        }

    @property
    def queued(self) -> float | None:
        """Seconds until the first choice was scheduled, after the engine had got it; None if none was."""
        times = [story.scheduled for story in self.choices.values() if story.scheduled]
        return min(times) - self._taken if times else None

    @property
    def first_token(self) -> float | None:
        """Seconds from arrival to the first token of any choice; None if none came."""
        times = [story.first for story in self.choices.values() if story.tokens]
        return min(times) - self.origin.arrived if times else None
