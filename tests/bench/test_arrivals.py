"""When requests are sent: rates, burstiness, ramps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.arrivals import arrivals


def test_all_at_once() -> None:
    assert arrivals(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]


@given(st.integers(1, 200), st.floats(0.01, 1000), st.floats(0.05, 20), st.integers(0, 9))
def test_the_last_one_is_sent_when_the_rate_says(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrivals(count, rate, burstiness, seed)
    assert len(times) == count and times == sorted(times) and times[0] >= 0
    assert times[-1] == pytest.approx(count / rate)
    assert times == arrivals(count, rate, burstiness, seed)


def test_seeds_make_other_times() -> None:
    assert arrivals(9, 2.0, 1.0, 1) != arrivals(9, 2.0, 1.0, 2)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_spread_as_the_gamma_distribution_does(burstiness: float) -> None:
    gaps = np.diff([0.0, *arrivals(20_000, 5.0, burstiness, 3)])
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


@pytest.mark.parametrize("strategy, middle", [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_grows_from_one_rate_to_the_other(strategy: str, middle: float) -> None:
    count = 3000
    times = arrivals(count, math.inf, 100.0, 1, (strategy, 1.0, 100.0))
    gaps = np.diff([0.0, *times])
    assert 1 / gaps[:30].mean() == pytest.approx(1.0, rel=0.6)
    assert 1 / gaps[count // 2 - 30 : count // 2 + 30].mean() == pytest.approx(middle, rel=0.1)
    assert 1 / gaps[-30:].mean() == pytest.approx(100.0, rel=0.1)


def test_a_ramp_may_go_down() -> None:
    gaps = np.diff(arrivals(1000, math.inf, 1000.0, 1, ("linear", 10.0, 1.0)))
    assert gaps[-100:].mean() > 4 * gaps[:100].mean()
