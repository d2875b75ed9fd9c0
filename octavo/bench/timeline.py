"""A page that shows when each request waited, and how fast its tokens came: one SVG, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from octavo.bench.client import Outcome

_WIDTH = 1200
"""Of the drawing, in pixels."""
_ROW = 12
_LEFT = 60
_TOP = 30
_TICKS = 10
_COLOURS = ("#2a9d4a", "#e0a100", "#d1431f", "#7b1fa2")
"""Of gaps between tokens, from short to long; those beyond the last threshold share the last one."""
_WAITING = "#b8bcc4"
_FAILED = "#111111"


def page(outcomes: Sequence[Outcome], thresholds: Sequence[float], title: str) -> str:
    """HTML.

    Args:
        thresholds: milliseconds between two tokens from which the colour changes, in ascending order.
    """
    begun = min((outcome.asked for outcome in outcomes), default=0.0)
    seconds = max((outcome.ended for outcome in outcomes), default=begun) - begun or 1.0
    rows = sorted(outcomes, key=lambda outcome: outcome.asked)
    height = _TOP + _ROW * len(rows) + 10
    scale = (_WIDTH - _LEFT - 10) / seconds
    shapes = [
        shape
        for index, outcome in enumerate(rows)
        for shape in _bar(outcome, index, begun, scale, thresholds[: len(_COLOURS) - 1])
    ]
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>Timeline: {escape(title)}</title>',
            "<style>body{font:14px sans-serif;margin:24px}i{display:inline-block;width:12px;height:12px;margin:0 4px 0 "
            "16px}text{font:11px sans-serif;fill:#555}</style></head>",
            f"<body><h1>Requests over time</h1><p>{escape(title)}; {len(rows)} requests in {seconds:.2f} s, in the "
            "order in which they were sent.</p>",
            f"<p>{_legend(thresholds[: len(_COLOURS) - 1])}</p>",
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" role="img" '
            'aria-label="Requests over time">',
            *_axis(seconds, scale, height),
            *shapes,
            "</svg></body></html>",
            "",
        ]
    )


def _legend(thresholds: Sequence[float]) -> str:
    edges = ["0", *(f"{value:g}" for value in thresholds)]
    names = [f"{low} to {high} ms between tokens" for low, high in zip(edges, edges[1:], strict=False)]
    names.append(f"from {edges[-1]} ms between tokens")
    entries = [(_WAITING, "before the first token"), *zip(_COLOURS, names, strict=False), (_FAILED, "failed")]
    return "".join(f'<i style="background:{colour}"></i>{name}' for colour, name in entries)


def _axis(seconds: float, scale: float, height: int) -> Iterator[str]:
    for tick in range(_TICKS + 1):
        at = seconds * tick / _TICKS
        x = _LEFT + at * scale
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{height}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{_TOP - 10}" text-anchor="middle">{at:.3g} s</text>'


def _bar(outcome: Outcome, index: int, begun: float, scale: float, thresholds: Sequence[float]) -> Iterator[str]:
    """The row of a request: neighbouring gaps of one colour are one piece."""
    y = _TOP + index * _ROW
    yield f'<text x="{_LEFT - 8}" y="{y + _ROW - 2}" text-anchor="end">{index + 1}</text>'
    about = escape(outcome.error or f"{outcome.prompt_tokens} tokens in, {outcome.output_tokens} out")
    waited = outcome.ended if outcome.first is None else outcome.first
    pieces = [(_FAILED if outcome.error else _WAITING, outcome.asked, waited)]
    for earlier, later in zip(outcome.times, outcome.times[1:], strict=False):
        colour = _COLOURS[sum(1000 * (later - earlier) >= threshold for threshold in thresholds)]
        if pieces[-1][0] == colour:
            pieces[-1] = (colour, pieces[-1][1], later)
        else:
            pieces.append((colour, earlier, later))
    yield f"<g><title>Request {index + 1}: {about}</title>"
    for colour, start, end in pieces:
        x, width = _LEFT + (start - begun) * scale, max((end - start) * scale, 0.5)
        yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 2}" fill="{colour}"/>'
    yield "</g>"
