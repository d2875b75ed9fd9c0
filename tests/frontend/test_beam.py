"""Beam search against the plain search without early end, and against all sequences there are."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from octavo.offline.beam import Beam, Search, search
from octavo.sampling_params import BeamSearchParams
from octavo.types import TokenLogprobs

VOCAB = 5
EOS = 0


def logprobs(tokens: tuple[int, ...], seed: int) -> list[float]:
    """A distribution over VOCAB tokens that depends on the whole history."""
    draw = random.Random(f"{seed}{tokens}")
    weights = [draw.random() ** 3 + 1e-6 for _ in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


class Model:
    """Answers like the engine; remembers how much it was asked."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.steps: list[int] = []

    def ask(self, prompts: list[tuple[int, ...]], k: int) -> list[TokenLogprobs]:
        self.steps.append(len(prompts))
        answers = []
        for prompt in prompts:
            ranked = sorted(enumerate(logprobs(prompt, self.seed)), key=lambda pair: -pair[1])
            answers.append(TokenLogprobs(ranked[0][0], ranked[0][1], 1, tuple(ranked[:k])))
        return answers


def run(model: Model, params: BeamSearchParams, prompt: tuple[int, ...] = (3, 3), eos: int = EOS) -> list[Beam]:
    one = Search(prompt, params, frozenset({eos}), params.max_tokens)
    search([one], model.ask)
    return one.done


def plain(seed: int, params: BeamSearchParams, prompt: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
    """The same search written without an early end: (score, tokens) of the best."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, prompt)]
    done: list[tuple[float, int, tuple[int, ...]]] = []
    for _ in range(params.max_tokens):
        grown = []
        for total, tokens in live:
            ranked = sorted(enumerate(logprobs(tokens, seed)), key=lambda pair: -pair[1])[: 2 * params.beam_width]
            for token, value in ranked:
                if token == EOS:
                    done.append((total + value, len(tokens), tokens))
                else:
                    grown.append((total + value, (*tokens, token)))
        grown.sort(key=lambda pair: -pair[0] / len(pair[1]) ** params.length_penalty)
        live = grown[: params.beam_width]
    done += [(total, len(tokens), tokens) for total, tokens in live]
    scored = [(total / length**params.length_penalty, tokens) for total, length, tokens in done]
    return sorted(scored, key=lambda pair: -pair[0])[: params.beam_width]


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(8))
def test_the_early_end_changes_nothing(seed: int, penalty: float) -> None:
    params = BeamSearchParams(3, 8, length_penalty=penalty)
    found = [(beam.score(penalty), beam.tokens) for beam in run(Model(seed), params)]
    expected = plain(seed, params, (3, 3))
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected])


def test_it_ends_early_where_nothing_can_change() -> None:
    ended = [
        model
        for seed in range(8)
        if (model := Model(seed)) and run(model, BeamSearchParams(1, 40, length_penalty=0.0)) and len(model.steps) < 40
    ]
    assert ended


def test_wide_beams_find_the_best_sequence_of_all() -> None:
    params = BeamSearchParams(VOCAB**3, 3, ignore_eos=True)
    best = max(
        itertools.product(range(VOCAB), repeat=3),
        key=lambda tokens: sum(logprobs((3, 3, *tokens[:i]), 1)[token] for i, token in enumerate(tokens)),
    )
    beams = run(Model(1), params)
    assert beams[0].tokens == (3, 3, *best)
    assert beams[0].stop is None
    assert len({beam.tokens for beam in beams}) == VOCAB**3


def test_sequences_say_how_they_ended() -> None:
    for include in (False, True):
        one = Search((3,), BeamSearchParams(4, 6, include_stop_str_in_output=include), frozenset({EOS}), 6)
        search([one], Model(2).ask)
        found = one.sequences()
        assert {sequence.finish_reason for sequence in found} == {"stop"} | {
            "length" for beam in one.done if beam.stop is None
        }
        assert any(sequence.finish_reason == "stop" for sequence in found)
        for sequence in found:
            ended = sequence.finish_reason == "stop"
            assert sequence.stop_reason == (EOS if ended else None)
            assert (sequence.tokens[-1] == EOS) == (ended and include)
            assert len(sequence.logprobs) == len(sequence.tokens) - 1 + (ended and not include)
            generated = [*sequence.tokens[1:], *([EOS] if ended and not include else [])]
            total = sum(step[token].logprob for step, token in zip(sequence.logprobs, generated, strict=True))
            assert sequence.cum_logprob == pytest.approx(total)


def test_several_prompts_share_the_steps() -> None:
    model = Model(3)
    together = [Search((t,), BeamSearchParams(2, 5), frozenset({EOS}), limit) for t, limit in ((1, 5), (2, 3), (3, 0))]
    search(together, model.ask)
    alone = [Search((t,), BeamSearchParams(2, 5), frozenset({EOS}), limit) for t, limit in ((1, 5), (2, 3))]
    for one in alone:
        search([one], Model(3).ask)
    assert [one.done for one in together[:2]] == [one.done for one in alone]
    assert together[2].sequences() == []
    assert len(model.steps) <= 5
