"""A `Sequence` is one choice of a request on its way: the only mutable record of its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from octavo.engine.tables import Table
from octavo.types import FinishReason, Request, TokenLogprobs


class Place(Enum):
    """Where a sequence is: HELD_BACK until a sibling has computed their prompt, then WAITING, RUNNING, GONE."""

    HELD_BACK = 0
    WAITING = 1
    RUNNING = 2
    GONE = 3


class Family:
    """The choices of one request. They share a prompt, so one of them computes it before the others start."""

    __slots__ = ("request", "root", "held_back", "live", "cached", "added", "queued", "forking")

    def __init__(self, request: Request, root: bytes, added: float = 0.0) -> None:
        self.request = request
        self.root = root
        """Start of the hash chain: sequences share blocks only if their roots are equal."""
        self.held_back: list[Sequence] = []
        self.live: dict[int, Sequence] = {}
        """Choices not ended, by index."""
        self.cached: int | None = None
        """Prompt tokens found in the prefix cache when the first choice started."""
        self.added = added
        """When the request came."""
        self.queued = 0.0
        """Seconds from then until the first choice started."""
        self.forking = False
        """The prompt has been planned once: nobody is held back any more."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Progress of one choice. Positions count from the first prompt token."""

    family: Family
    choice: int
    order: tuple[int, int, int, int]
    """(priority, arrival, serial, choice): the smallest is served first and preempted last."""
    tokens: list[int]
    """All known tokens, prompt and output."""
    prompt: int
    """Prompt tokens."""
    goal: int
    """Length at which the sequence ends, prompt included."""
    tables: tuple[Table, ...]
    """Block table per KV group; all have the same length."""
    scores_prompt: bool = False
    """Its prompt logprobs are wanted."""
    computed: int = 0
    """Tokens whose KV is present or planned."""
    pending: int = 0
    """Tokens sampled by plans in flight: they exist, but the host does not know them yet."""
    in_flight: int = 0
    """Plans in flight that hold this sequence."""
    attempt: int = 0
    """Grows when planned work is thrown away; results for an older attempt are ignored."""
    draft: list[int] = field(default_factory=list)
    """Guessed next tokens, not planned yet."""
    verifying: bool = False
    """A plan in flight verifies drafts, so the length after it is not known."""
    slot: int = -1
    place: Place = Place.WAITING
    hashes: list[bytes] = field(default_factory=list)
    """Chained digest of every full block of known tokens."""
    published: int = 0
    """Full blocks offered to the prefix cache so far."""
    shared: int = 0
    """Blocks at the front of its tables that others computed."""
    farthest: int = 0
    """The most tokens ever computed, to count what preemption makes us compute again."""
    scores: list[TokenLogprobs] = field(default_factory=list)
    """Prompt logprobs so far, for prompt positions 1, 2, …"""
    answered: bool = False
    """Its first delta is out."""
    preemptions: int = 0
    refused: int = 0
    """Step in which a limit first refused it while it waited; 0 if none did."""
    retry: tuple[int, int, int] = (0, 0, 0)
    """(group, free blocks, step): where memory was short, admission is tried again when the group has that many free
    blocks, or in that step."""
    repeats: list[int] = field(default_factory=list)
    """Per pattern size of repetition detection: how many last tokens equal those one pattern earlier."""

    @property
    def request(self) -> Request:
        return self.family.request

    @property
    def outputs(self) -> int:
        """Output tokens known, resumed ones included."""
        return len(self.tokens) - self.prompt

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be drawn; one number for prompt chunks, decoding and drafts."""
        if self.verifying:
            return 0
        total = len(self.tokens) + self.pending
        if self.pending and total >= self.goal:
            return 0
        return total + len(self.draft) - self.computed

    def known(self, start: int, n: int) -> tuple[int, ...]:
        """The part of [start, start + n) that the host can name."""
        have = self.tokens[start : start + n]
        if self.draft and not self.pending:
            have += self.draft[: n - len(have)]
        return tuple(have)


def ending(seq: Sequence, token: int) -> tuple[FinishReason, int | None] | None:
    """Finish and stop reason, if `token`, just appended to `seq.tokens`, ends it. A stop wins over a length."""
    request = seq.request
    outputs = len(seq.tokens) - seq.prompt
    if outputs > request.sampling.min_tokens:
        if token in request.eos_ids:
            return "stop", None
        if token in request.stop_ids:
            return "stop", token
    if request.sampling.repetition_detection is not None and _repeats(seq):
        return "repetition", None
    if len(seq.tokens) >= seq.goal:
        return "length", None
    return None


def _repeats(seq: Sequence) -> bool:
    """Whether the last output tokens are `min_count` copies of one pattern. One comparison per pattern size and
    token: a run of tokens equal to those p earlier that reaches p * (count - 1) makes `count` copies."""
    rule = seq.request.sampling.repetition_detection
    assert rule is not None
    if not seq.repeats:
        most = min(rule.max_pattern_size, (seq.goal - seq.prompt) // rule.min_count)  # longer ones cannot come so often
        seq.repeats = [0] * (most - rule.min_pattern_size + 1)
    last = len(seq.tokens) - 1
    found = False
    for i, run in enumerate(seq.repeats):
        size = rule.min_pattern_size + i
        same = last - size >= seq.prompt and seq.tokens[last] == seq.tokens[last - size]
        seq.repeats[i] = run = run + 1 if same else 0
        found = found or run >= size * (rule.min_count - 1)
    return found
