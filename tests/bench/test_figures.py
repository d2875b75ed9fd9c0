"""The arithmetic from outcomes to figures, on outcomes that are made up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.client import Outcome
from octavo.bench.figures import Distribution, Figures, is_good, peak_concurrency, tpot, ttft


def made(asked: float, *times: float, ended: float | None = None, tokens: int | None = None) -> Outcome:
    """An answer whose pieces came at `times`, with 10 tokens before it."""
    return Outcome(
        asked,
        times[0] if times else None,
        list(times),
        ended if ended is not None else (times[-1] if times else asked),
        "x" * len(times),
        10,
        len(times) if tokens is None else tokens,
    )


FAILED = Outcome(0.5, ended=3.0, error="HTTP 500")
TWO = [made(0.0, 1.0, 1.5, 2.0, ended=2.0), made(1.0, 1.2, ended=1.25), FAILED]
"""Latencies of the first: 1000, 500, [500, 500], 2000 ms; of the second: 200, none, [], 250 ms."""


def test_figures_of_two_answers_and_a_failure() -> None:
    figures = Figures.of(TWO, percentiles=(0, 50, 100))
    assert (figures.completed, figures.failed) == (2, 1)
    assert figures.duration == 3.0  # from the first request to the end of the last, failed or not
    assert (figures.total_input_tokens, figures.total_output_tokens) == (20, 4)
    assert figures.request_throughput == pytest.approx(2 / 3)
    assert figures.output_throughput == pytest.approx(4 / 3)
    assert figures.total_token_throughput == pytest.approx(8)
    assert figures.request_goodput is None
    assert figures.max_concurrent_requests == 3
    assert figures.max_output_tokens_per_s == 3  # between 1 s and 2 s: 1.0, 1.5, 1.2
    found = figures.latencies
    assert (found["ttft"].mean, found["ttft"].median, found["ttft"].std) == pytest.approx((600, 600, 400))
    assert found["ttft"].percentiles == pytest.approx({0: 200, 50: 600, 100: 1000})
    assert found["tpot"].mean == pytest.approx(500) and found["tpot"].std == 0
    assert found["itl"].mean == pytest.approx(500) and found["e2el"].mean == pytest.approx(1125)


def test_the_duration_may_be_given() -> None:
    assert Figures.of(TWO, duration=8.0).output_throughput == pytest.approx(0.5)


def test_tokens_count_as_the_server_says_not_by_events() -> None:
    outcome = made(0.0, 1.0, 2.0, ended=3.0, tokens=5)  # three tokens had no text of their own
    figures = Figures.of([outcome])
    assert figures.total_output_tokens == 5
    assert tpot(outcome) == pytest.approx(500)
    assert figures.latencies["itl"].mean == pytest.approx(1000)


def test_answers_without_text_or_with_one_token() -> None:
    silent = made(0.0, ended=1.0, tokens=3)
    assert ttft(silent) is None and tpot(silent) is None
    single = made(0.0, 0.25, ended=1.0)
    assert ttft(single) == 250 and tpot(single) is None
    figures = Figures.of([silent, single])
    assert figures.latencies["ttft"].mean == 250 and figures.latencies["tpot"].mean == 0
    assert figures.latencies["e2el"].mean == 1000


@pytest.mark.parametrize(
    "limits, good",
    [
        ({"ttft": 1000}, 2),
        ({"ttft": 999}, 1),
        ({"ttft": 1000, "tpot": 499}, 1),  # the answer of one token has a TPOT of 0
        ({"e2el": 250}, 1),
        ({"e2el": 2000, "tpot": 500, "ttft": 1000}, 2),
        ({"e2el": 1}, 0),
    ],
)
def test_goodput_counts_answers_that_meet_every_limit(limits: dict[str, float], good: int) -> None:
    assert Figures.of(TWO, duration=2.0, goodput=limits).request_goodput == good / 2


def test_no_failure_is_good_and_silence_meets_no_limit_on_the_first_token() -> None:
    assert not is_good(FAILED, {"e2el": 1e9})
    assert not is_good(made(0.0, ended=0.1), {"ttft": 1e9})
    assert is_good(made(0.0, ended=0.1), {"e2el": 1e9})


def test_names_of_the_result_file() -> None:
    names = set(Figures.of(TWO, percentiles=(50, 99, 99.9)).as_json(["ttft", "itl"]))
    assert names == {
        *("completed", "failed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput"),
        *("output_throughput", "total_token_throughput", "request_goodput", "max_output_tokens_per_s"),
        *("max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p50_ttft_ms", "p99_ttft_ms"),
        *("p99.9_ttft_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p50_itl_ms", "p99_itl_ms", "p99.9_itl_ms"),
    }


def test_no_outcomes() -> None:
    figures = Figures.of([])
    assert (figures.completed, figures.output_throughput, figures.max_concurrent_requests) == (0, 0, 0)
    assert figures.latencies["ttft"] == Distribution(0, 0, 0, {99: 0})


def by_hand(values: Sequence[float], p: float) -> float:
    """A percentile by its definition: the place p / 100 of the way from the first to the last of the sorted values."""
    ordered = sorted(values)
    place = p / 100 * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


NUMBERS = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(NUMBERS, st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_distributions_are_what_their_definitions_say(values: list[float], percentiles: list[float]) -> None:
    found = Distribution.of(values, percentiles)
    assert found.mean == pytest.approx(sum(values) / len(values))
    assert found.median == pytest.approx(by_hand(values, 50))
    assert found.std == pytest.approx(math.sqrt(sum((v - found.mean) ** 2 for v in values) / len(values)), abs=1e-6)
    assert set(found.percentiles) == set(percentiles)
    for p, value in found.percentiles.items():
        assert value == pytest.approx(by_hand(values, p), rel=1e-9, abs=1e-9)
        assert value == float(np.percentile(values, p))


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=20)


@given(SPANS)
def test_peak_concurrency_is_the_most_at_any_moment(spans: list[tuple[int, int]]) -> None:
    outcomes = [Outcome(float(start), ended=float(start + length)) for start, length in spans]
    moments = [sum(start <= at < start + length for start, length in spans) for at in range(61)]
    assert peak_concurrency(outcomes) == max(moments)


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=8))
def test_sums_and_the_busiest_second(answers: list[list[int]]) -> None:
    outcomes = [made(0.0, *(0.25 * quarter for quarter in sorted(quarters))) for quarters in answers]
    figures = Figures.of(outcomes, duration=10.0)
    flat = [quarter for quarters in answers for quarter in quarters]
    assert figures.total_output_tokens == len(flat) and figures.output_throughput == pytest.approx(len(flat) / 10)
    assert figures.max_output_tokens_per_s == max(sum(q // 4 == second for q in flat) for second in range(11))
