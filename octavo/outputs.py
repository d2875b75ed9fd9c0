"""What a request gives back, in the shape of vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """One token of a distribution."""

    logprob: float
    """Natural logarithm of its probability under the model's own (raw) distribution."""
    rank: int | None = None
    """1 for the most probable token."""
    decoded_token: str | None = None


TokenLogprobDict = dict[int, Logprob]
"""Logprobs at one position, by token id; the token that stands there is always among them."""


@dataclass(slots=True)
class RequestStateStats:
    """When things happened to a request. `*_ts` are seconds of the monotonic clock, `arrival_time` of the wall clock;
    0 means not yet."""

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token."""
    is_corrupted: bool = False


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobDict] | None = None
    """One entry per token, when asked for."""
    finish_reason: str | None = None
    """"stop", "length", "abort", "error" or "repetition"; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for EOS and other ends."""
    lora_request: Any | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All choices of a request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[TokenLogprobDict | None] | None = None
    """One entry per prompt token, the first None, when asked for."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestStateStats | None = None
    lora_request: Any | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""
    error: str | None = None
    """What went wrong, where a choice has finish reason "error"."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: `tokens` begin with the prompt's."""

    tokens: list[int]
    logprobs: list[TokenLogprobDict] = field(default_factory=list)
    """One entry per generated token."""
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]

    def __iter__(self) -> Iterator[BeamSearchSequence]:
        return iter(self.sequences)
