"""Edges of the histograms of requests, as vLLM has them, for the server's metrics and for `LLM.get_metrics`."""

from __future__ import annotations

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
"""Seconds of whole requests."""
# fmt: off
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
# fmt: on
"""Seconds to the first token."""
