"""The values every part of Octavo shares: plain data that can cross a process boundary.

A `Request` becomes a sequence; each step the scheduler writes a `StepPlan`; an `Executor` turns the plan into a
`StepResult`; the scheduler commits it and the client receives `Delta`s. Nothing here computes: no arrays, no devices.

Shapes are told in words: a *position* is the absolute index of a token in its sequence (0 = first prompt token);
a *slot* is the row of the runner's per-sequence state (block tables, token history, sampler row) that a running
sequence occupies; a *KV group* is a set of layers that share one block table (full attention is group 0; layers
with a sliding window form a group of their own).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from octavo import buckets
from octavo.buckets import Counts
from octavo.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asked, with every default resolved; enough to run, or to run again, the request anywhere.

    `sampling` is the user's own object; the fields beside it are what it means for this model: ids instead of
    strings, numbers instead of None. Stop *strings* are not here: the front end looks for them in the text and
    aborts.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """64-bit seed of every draw; made by the front end when the user gave none."""
    max_tokens: int
    """Output tokens at most, already cut to what the context length allows (>= 0; 0 only with prompt logprobs)."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a sequence (several are common); empty with `ignore_eos`."""
    stop_ids: tuple[int, ...] = ()
    """`sampling.stop_token_ids`; ends a sequence too, with the id as its stop reason."""
    masked_ids: tuple[int, ...] = ()
    """Ids that may not be drawn while fewer than `sampling.min_tokens` are out: EOS and stop ids, also those that
    `ignore_eos` keeps out of `eos_ids`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    n: int = 1
    """How many choices; choice i of a request draws with key (seed, i)."""
    resume: tuple[tuple[int, ...], ...] = ()
    """Per choice the output tokens already delivered in an earlier life of the engine; they count as output."""
    arrival: int = 0
    """Order of arrival, given by the front end."""
    priority: int = 0
    """Lower runs first, where the scheduling policy is `priority`."""
    salt: str = ""
    """Requests with different salts never share prefix blocks."""
    adapter: int = 0
    read_prefix_cache: bool = True


class TokenLogprobs(NamedTuple):
    """What is reported for one token: its own logprob and rank (1 = most probable) and the most probable others."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    """(id, logprob), most probable first; ties by lower id."""


class Delta(msgspec.Struct, array_like=True, omit_defaults=True):
    """News of one choice of a request, from the engine to whoever asked."""

    request: str
    choice: int = 0
    start: int = 0
    """Index among the choice's output tokens of `tokens[0]`; duplicates are dropped by it."""
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """One per token of `tokens`, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token (None first), whole, in the first delta of choice 0."""
    finish: FinishReason | None = None
    stop_reason: int | None = None
    """The stop token id that ended the choice; None for EOS."""
    cached: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    error: str | None = None
    queued: float = 0.0
    """In the first delta of a choice: seconds that its request waited until the first of its choices was scheduled."""


class Work(NamedTuple):
    """Compute tokens [start, start + n) of the sequence in `slot`, and say what to return for it."""

    slot: int
    start: int
    n: int
    tokens: tuple[int, ...]
    """Those of [start, start + n) that the host knows, from the front; the rest (at most the last one, drafts
    excepted) were sampled by an earlier plan that is still in flight, and the runner has them."""
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Per KV group (first table index, block ids to write there): only what is new since the slot's last Work."""
    copies: tuple[tuple[int, int, int], ...] = ()
    """(KV group, source block, destination block): whole-block copies to make before anything is computed."""
    sample: bool = False
    """Draw a token after the last computed one (and verify the drafts before it)."""
    prompt_logprobs: bool = False
    """Also score, for each position p in [start, start + n) with p + 1 < prompt length, the prompt token p + 1."""
    drafts: int = 0
    """How many of the last tokens are guesses to verify."""
    adapter: int = 0


class Enter(NamedTuple):
    """A sequence takes a slot: the runner forgets what the slot held and reads this."""

    slot: int
    request: Request
    choice: int
    tokens: tuple[int, ...]
    """All known tokens, prompt and output: the history that penalties and bad words look at."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step: slots that leave, sequences that enter, then the work, in this order."""

    work: tuple[Work, ...]
    enter: tuple[Enter, ...] = ()
    leave: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.work)


class Sampled(NamedTuple):
    """What one Work gave back."""

    tokens: tuple[int, ...] = ()
    """Empty unless `sample`; one token, or accepted drafts plus one."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, when the request asked for logprobs."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    """The row itself failed (NaN or infinity in its logits, a bad parameter): only this sequence is lost."""


class StepResult(msgspec.Struct, frozen=True):
    """One `Sampled` per Work of the plan, in its order."""

    rows: tuple[Sampled, ...]


class KVGroup(NamedTuple):
    """Layers that share a block table. `window` is the number of tokens a query sees, itself included (0 = all)."""

    layers: tuple[int, ...]
    """Numbers among the layers that have keys and values of their own."""
    window: int = 0


class Future(Protocol):
    def result(self) -> StepResult: ...

    """Waits for the step; raises what the step raised."""


class Executor(Protocol):
    """Turns plans into tokens, strictly in the order submitted. One that raises must leave itself usable: the
    scheduler releases every sequence of the plans in flight and runs them again from their known tokens."""

    def submit(self, plan: StepPlan) -> Future: ...

    def close(self) -> None: ...


class BlockUse(NamedTuple):
    """The blocks of one KV group."""

    total: int
    used: int
    """Held by live sequences."""
    cached: int
    """With content that a new prompt can share, whether held or free."""


class EngineStats(msgspec.Struct):
    """A snapshot of the engine's gauges and running totals, for metrics and logs."""

    running: int = 0
    waiting: int = 0
    held_back: int = 0
    """Of those waiting, the ones that wait for a sibling to compute their prompt rather than for room."""
    blocks_total: int = 0
    blocks_used: int = 0
    """Blocks some live sequence holds, all KV groups."""
    kv_slots_allocated: int = 0
    """Token places in those blocks, each block counted once however many sequences share it."""
    kv_slots_filled: int = 0
    """Of these, the places that hold a token."""
    groups: list[BlockUse] = []
    """Per KV group."""
    steps: int = 0
    failed_steps: int = 0
    failed_rows: int = 0
    """Sequences lost because their logits were not finite."""
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache; with prefix_hits the hit rate."""
    prefix_hits: int = 0
    generation_tokens: int = 0
    finished: dict[str, int] = {}
    """Choices ended, by finish reason."""
    step_tokens: Counts = msgspec.field(default_factory=lambda: Counts.of(buckets.STEP_TOKENS))
    """Tokens computed per step."""
    choice_preemptions: Counts = msgspec.field(default_factory=lambda: Counts.of(buckets.PREEMPTIONS))
    """Preemptions of each choice that ended."""
    step_seconds: float = 0.0
    host_seconds: float = 0.0
    """Time spent in plan and commit."""
    extra: dict[str, Any] = {}
