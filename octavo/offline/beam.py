"""Beam search, above the engine: each step asks it for one token of every live beam, with the most probable others.

A beam's tokens are a new prompt each time, which costs little where the prefix cache holds all but the last of them.
The search is that of vLLM's `LLM.beam_search`: candidates are ranked by cumulative logprob / length ** length_penalty,
where the length counts prompt and output, and a beam that ends leaves the search. Ties keep the order of the beams,
then that of the engine (lower ids first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.outputs import BeamSearchSequence, Logprob
from octavo.sampling_params import BeamSearchParams
from octavo.types import TokenLogprobs

Ask = Callable[[list[tuple[int, ...]], int], list[TokenLogprobs]]
"""(prompts, k) -> what comes after each prompt, with its k most probable tokens."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence in the search; `tokens` begin with the prompt."""

    tokens: tuple[int, ...]
    score_sum: float = 0.0
    """Cumulative logprob of the generated tokens."""
    steps: tuple[dict[int, Logprob], ...] = ()
    """The candidates at each generated token."""
    stop: int | None = None
    """The EOS id that ended it."""

    def score(self, length_penalty: float, length: int | None = None) -> float:
        return float(self.score_sum / (length or len(self.tokens)) ** length_penalty)


@dataclass
class Search:
    """The search for one prompt."""

    prompt: tuple[int, ...]
    params: BeamSearchParams
    eos_ids: frozenset[int]
    max_tokens: int
    live: list[Beam] = field(default_factory=list)
    done: list[Beam] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.live = [Beam(self.prompt)] if self.max_tokens else []

    def advance(self, answers: Sequence[TokenLogprobs]) -> None:
        """Take the next tokens of the live beams, in their order."""
        width, penalty = self.params.beam_width, self.params.length_penalty
        grown: list[Beam] = []
        for beam, answer in zip(self.live, answers, strict=True):
            step = {token: Logprob(logprob, rank) for rank, (token, logprob) in enumerate(answer.top, 1)}
            for token, logprob in answer.top[: 2 * width]:
                ends = token in self.eos_ids and not self.params.ignore_eos
                shown = not ends or self.params.include_stop_str_in_output
                grown.append(
                    Beam(
                        (*beam.tokens, token) if shown else beam.tokens,
                        beam.score_sum + logprob,
                        (*beam.steps, step),
                        token if ends else None,
                    )
                )
        self.done += [beam for beam in grown if beam.stop is not None]
        self.live = sorted((beam for beam in grown if beam.stop is None), key=lambda beam: -beam.score(penalty))[:width]
        self.done = self._best(self.done)
        if self.live and (len(self.live[0].steps) >= self.max_tokens or self._decided()):
            self.done, self.live = self._best([*self.done, *self.live]), []

    def sequences(self) -> list[BeamSearchSequence]:
        """The beams found, best first."""
        return [
            BeamSearchSequence(
                list(beam.tokens),
                list(beam.steps),
                beam.score_sum,
                finish_reason="length" if beam.stop is None else "stop",
                stop_reason=beam.stop,
            )
            for beam in self.done
        ]

    def _best(self, beams: list[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -beam.score(self.params.length_penalty))[: self.params.beam_width]

    def _decided(self) -> bool:
        """Whether no live beam can still get among the best: its cumulative logprob can only fall, so its score is
        at most what the shortest or the longest end would give it."""
        if len(self.done) < self.params.beam_width:
            return False
        penalty = self.params.length_penalty
        lengths = (len(self.live[0].tokens), len(self.prompt) + self.max_tokens)
        bound = max(beam.score(penalty, length) for beam in self.live for length in lengths)
        return self.done[-1].score(penalty) >= bound


def search(searches: Sequence[Search], ask: Ask) -> None:
    """Run all searches to their ends, their beams together in each step."""
    while active := [one for one in searches if one.live]:
        width = max(one.params.beam_width for one in active)
        answers = iter(ask([beam.tokens for one in active for beam in one.live], 2 * width))
        for one in active:
            one.advance([next(answers) for _ in one.live])
