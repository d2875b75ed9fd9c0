"""When requests are sent."""

from __future__ import annotations

import math

import numpy as np


def arrivals(
    count: int,
    rate: float,
    burstiness: float,
    seed: int,
    ramp: tuple[str, float, float] | None = None,
) -> list[float]:
    """Seconds after the beginning at which each of `count` requests is sent, in ascending order.

    The times between them are drawn from a gamma distribution of shape `burstiness` whose mean is one over the rate;
    without a ramp they are scaled so that the last request is sent after exactly `count` / `rate` seconds.

    Args:
        rate: requests per second; inf for all at once.
        ramp: in place of `rate`: linear or exponential, and the rates of the first and after the last request.
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * count
    rates = np.full(count, rate) if ramp is None else _rates(count, *ramp)
    times = np.cumsum(np.random.default_rng(seed).gamma(burstiness, 1 / (rates * burstiness)))
    if ramp is None and times[-1] > 0:
        times *= count / rate / times[-1]
    return [float(time) for time in times]


def _rates(count: int, strategy: str, first: float, last: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Requests per second when each request is drawn."""
    progress = np.arange(count) / count
    if strategy == "linear":
        return first + (last - first) * progress
    return first * (last / first) ** progress
