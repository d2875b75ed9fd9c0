"""Plots as SVG for a page: text stays text, colours come from the page's style (classes `s0` to `s5`, light and dark),
and what a mark means can be read by pointing at it.

Axes of sizes begin at 0; a logarithmic one says so in its label.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = 6
"""Classes of colours; a seventh series has the first one again, with dashes."""
_SMALL = (340, 216)
"""Width and height of a small plot, in pixels of a page at its full width."""
_WIDE = 1060
_NAME = 108
"""Room for the name of a series beside its bar."""
_CURVE = 160
"""Most points of a curve."""
_DASHES = ("", "7 3", "2 3")


@dataclass(frozen=True)
class Series:
    """Who a mark belongs to."""

    name: str
    index: int

    @property
    def style(self) -> str:
        """Its class."""
        return f"s{self.index % COLOURS}"

    @property
    def dashes(self) -> str:
        dashes = _DASHES[self.index // COLOURS % len(_DASHES)]
        return f' stroke-dasharray="{dashes}"' if dashes else ""


@dataclass(frozen=True)
class Bar:
    series: Series
    value: float
    low: float
    high: float
    points: Sequence[float] = ()
    """Single measurements, shown on the bar."""


@dataclass(frozen=True)
class Block:
    """Something that took from `begun` to `ended`, in seconds."""

    series: Series
    begun: float
    ended: float
    label: str
    title: str
    failed: bool = False


# -- numbers


def number(value: float) -> str:
    """In three significant digits, with separators between thousands."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"


def ticks(highest: float, wanted: int = 4) -> list[float]:
    """Round numbers from 0 to `highest` or a little beyond."""
    if highest <= 0:
        return [0.0, 1.0]
    raw = highest / wanted
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= raw * 0.999)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def log_ticks(lowest: float, highest: float) -> list[float]:
    """Powers of ten between two positive numbers, with 2 and 5 between them where there are few."""
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(highest))
    factors = (1,) if last - first > 3 else (1, 3) if last - first > 2 else (1, 2, 5)
    found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [tick for tick in found if lowest * 0.999 <= tick <= highest * 1.001]


def _tick(value: float) -> str:
    return f"{value:,.6g}" if abs(value) < 1e6 else number(value)


def spans_decades(values: Iterable[float]) -> bool:
    """Whether values are so far apart that only a logarithmic axis shows them all."""
    positive = sorted(value for value in values if value > 0)
    if len(positive) < 2:
        return False
    low, high = positive[len(positive) // 20], positive[-1]
    return high > 30 * low


# -- marks


def _svg(kind: str, label: str, width: float, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg class="plot" data-plot="{escape(kind)}" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, style: str = "tick", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _upright(x: float, y: float, text: str) -> str:
    """A label of a vertical axis."""
    return (
        f'<text transform="translate({x:g} {y:g}) rotate(-90)" class="label" text-anchor="middle">{escape(text)}</text>'
    )


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _cut(name: str, room: int) -> str:
    return name if len(name) <= room else name[: room - 1] + "…"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


# -- plots


def bars(kind: str, entries: Sequence[Bar], unit: str) -> str:
    """A bar for each series from 0 to its value, the range of its measurements as a line, each of them as a dot."""
    width, row, left, right, top = _SMALL[0], 34, _NAME, 14, 4
    height = top + row * len(entries) + 40
    grid = ticks(max((bar.high for bar in entries), default=1) * 1.18)
    room = width - left - right

    def at(value: float) -> float:
        return left + room * value / grid[-1]

    parts = []
    bottom = top + row * len(entries)
    for tick in grid:
        parts.append(_line(at(tick), top, at(tick), bottom, "axis" if tick == 0 else "grid"))
        parts.append(_text(at(tick), bottom + 15, _tick(tick)))
    for index, bar in enumerate(entries):
        y = top + row * index
        said = f"{bar.series.name}: {number(bar.value)} {unit}"
        if bar.points:
            said += f"; rounds: {', '.join(map(number, bar.points))}"
        parts.append(f'<g class="{bar.series.style}">{_title(said)}')
        parts.append(_text(left - 8, y + row / 2 + 4, _cut(bar.series.name, 15), "name", "end"))
        parts.append(
            f'<rect x="{left}" y="{y + 7}" width="{max(at(bar.value) - left, 0.5):.1f}" height="{row - 14}" rx="2" '
            'class="bar"/>'
        )
        if bar.high > bar.low:
            middle = y + row / 2
            parts.append(_line(at(bar.low), middle, at(bar.high), middle, "range"))
            parts += [_line(at(end), middle - 4, at(end), middle + 4, "range") for end in (bar.low, bar.high)]
        if len(bar.points) > 1:
            parts += [f'<circle cx="{at(value):.1f}" cy="{y + row / 2:g}" r="2" class="dot"/>' for value in bar.points]
        parts.append(_text(at(max(bar.value, bar.high)) + 6, y + row / 2 + 4, number(bar.value), "value", "start"))
        parts.append("</g>")
    parts.append(_text(left + room / 2, bottom + 33, unit, "label"))
    return _svg(kind, f"{kind}, {unit}", width, height, parts)


def shares(kind: str, curves: Sequence[tuple[Series, Sequence[float]]], label: str, logarithmic: bool) -> str:
    """For each series, which share of its values is not above x."""
    width, height = _SMALL
    left, right, top, bottom = 56, 12, 8, height - 42
    every = [value for _, values in curves for value in values]
    highest = max(every, default=1.0) or 1.0
    if logarithmic:
        positive = [value for value in every if value > 0] or [1.0]
        lowest = max(min(positive), highest / 1e4)
        highest = max(highest, lowest * 1.5)
        grid = log_ticks(lowest, highest)
    else:
        lowest, grid = 0.0, ticks(highest, 4)
        highest = grid[-1]

    def at(value: float) -> float:
        if not logarithmic:
            return left + (width - left - right) * value / highest
        return left + (width - left - right) * math.log(max(value, lowest) / lowest) / math.log(highest / lowest)

    def height_of(share: float) -> float:
        return bottom - (bottom - top) * share

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(_line(left, height_of(share), width - right, height_of(share), "axis" if share == 0 else "grid"))
        parts.append(_text(left - 6, height_of(share) + 4, f"{share:.0%}", "tick", "end"))
    for tick in grid:
        parts.append(_line(at(tick), top, at(tick), bottom, "grid"))
        parts.append(_text(at(tick), bottom + 15, _tick(tick)))
    for series, values in curves:
        if not values:
            continue
        ordered = sorted(values)
        points = [(at(value), height_of(share)) for value, share in _steps(ordered)]
        median, late = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99))
        said = f"{series.name}: half within {number(median)}, 99 % within {number(late)}"
        parts.append(f'<path d="{_path(points)}" class="curve {series.style}"{series.dashes}>{_title(said)}</path>')
    parts.append(_upright(12, (top + bottom) / 2, "share within"))
    scale = " (log scale)" if logarithmic else ""
    parts.append(_text((left + width - right) / 2, height - 6, label + scale, "label"))
    return _svg(kind, f"{kind}: share of values within a {label}{scale}", width, height, parts)


def _steps(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of the staircase of shares; of many values only some, the ends always among them."""
    count = len(ordered)
    kept = range(count) if count <= _CURVE else sorted({round(i * (count - 1) / _CURVE) for i in range(_CURVE + 1)})
    corners = [(ordered[0], 0.0)]
    for index in kept:
        corners += [(ordered[index], corners[-1][1]), (ordered[index], (index + 1) / count)]
    return corners


def lines(
    kind: str, series: Sequence[tuple[Series, Sequence[tuple[float, float, float, float]]]], y_label: str, x_label: str
) -> str:
    """A line for each series through (x, y, lowest y, highest y); x is logarithmic."""
    width, height = _SMALL
    left, right, top, bottom = 64, 12, 10, height - 42
    every = [point for _, points in series for point in points]
    xs = sorted({point[0] for point in every}) or [1.0]
    grid = ticks(max((point[3] for point in every), default=1.0))
    span = math.log(xs[-1] / xs[0]) or 1.0

    def at(x: float) -> float:
        return left + 12 + (width - left - right - 24) * math.log(x / xs[0]) / span

    def height_of(y: float) -> float:
        return bottom - (bottom - top) * y / grid[-1]

    parts = []
    for tick in grid:
        parts.append(_line(left, height_of(tick), width - right, height_of(tick), "axis" if tick == 0 else "grid"))
        parts.append(_text(left - 6, height_of(tick) + 4, _tick(tick), "tick", "end"))
    free = -math.inf
    for x in xs:
        if at(x) - free > 26:
            parts.append(_text(at(x), bottom + 15, _tick(x)))
            free = at(x)
    for owner, points in series:
        corners = [(at(x), height_of(y)) for x, y, _, _ in points]
        if len(corners) > 1:
            parts.append(f'<path d="{_path(corners)}" class="curve {owner.style}"{owner.dashes}/>')
        for (x, y, low, high), (across, up) in zip(points, corners, strict=True):
            parts.append(f'<g class="{owner.style}">{_title(f"{owner.name}, {_tick(x)} at a time: {number(y)}")}')
            if high > low:
                parts.append(_line(across, height_of(low), across, height_of(high), "whisker"))
            parts.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.6" class="point"/></g>')
    parts.append(_upright(12, (top + bottom) / 2, y_label))
    parts.append(_text((left + width - right) / 2, height - 6, f"{x_label} (log scale)", "label"))
    return _svg(kind, f"{kind}: {y_label} over {x_label}", width, height, parts)


def timeline(kind: str, lanes: Sequence[Series], blocks: Sequence[Block], end: float) -> str:
    """A lane for each series, with blocks where it was at work; a failed one is hatched."""
    row, left, right, top = 34, _NAME, 16, 6
    bottom = top + row * len(lanes)
    parts = [
        '<defs><pattern id="failed" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="failed-ground"/><rect width="2.5" height="6" class="failed-stripe"/>'
        "</pattern></defs>"
    ]
    at = _time_axis(parts, left, right, top, bottom, end)
    for index, lane in enumerate(lanes):
        y = top + row * index
        parts.append(f'<g class="{lane.style}">')
        parts.append(_text(left - 8, y + row / 2 + 4, _cut(lane.name, 15), "name", "end"))
        for block in blocks:
            if block.series == lane:
                x, wide = at(block.begun), max(at(block.ended) - at(block.begun), 1.5)
                style = "failed" if block.failed else "bar"
                parts.append(f"<g>{_title(block.title)}")
                parts.append(
                    f'<rect x="{x:.1f}" y="{y + 5}" width="{wide:.1f}" height="{row - 10}" rx="2" class="{style}"/>'
                )
                if wide > 8 * len(block.label) + 6:
                    parts.append(_text(x + wide / 2, y + row / 2 + 4, block.label, "on-bar"))
                parts.append("</g>")
        parts.append("</g>")
    parts.append(_text((left + _WIDE - right) / 2, bottom + 34, "seconds since the comparison began", "label"))
    return _svg(kind, f"{kind} of the turns", _WIDE, bottom + 42, parts)


def traces(
    kind: str, series: Sequence[tuple[Series, Sequence[Sequence[tuple[float, float]]]]], end: float, unit: str
) -> str:
    """For each series some pieces of a line over the time, on the time axis of `timeline`."""
    height, left, right, top = 190, _NAME, 16, 10
    bottom = height - 44
    highest = max((y for _, pieces in series for piece in pieces for _, y in piece), default=1.0)
    grid = ticks(highest, 4)

    def height_of(y: float) -> float:
        return bottom - (bottom - top) * y / grid[-1]

    parts: list[str] = []
    for tick in grid:
        parts.append(_line(left, height_of(tick), _WIDE - right, height_of(tick), "axis" if tick == 0 else "grid"))
        parts.append(_text(left - 8, height_of(tick) + 4, _tick(tick), "tick", "end"))
    at = _time_axis(parts, left, right, top, bottom, end)
    for owner, pieces in series:
        for piece in pieces:
            points = [(at(x), height_of(y)) for x, y in piece]
            if len(points) > 1:
                parts.append(
                    f'<path d="{_path(points)}" class="curve {owner.style}"{owner.dashes}>{_title(owner.name)}</path>'
                )
    parts.append(_upright(16, (top + bottom) / 2, unit))
    parts.append(_text((left + _WIDE - right) / 2, height - 8, "seconds since the comparison began", "label"))
    return _svg(kind, f"{kind}, {unit}", _WIDE, height, parts)


class _TimeAxis:
    """Where a time is, from left to right."""

    def __init__(self, left: float, right: float, end: float) -> None:
        self._left = left
        self._scale = (_WIDE - left - right) / (end or 1.0)

    def __call__(self, seconds: float) -> float:
        return self._left + seconds * self._scale


def _time_axis(parts: list[str], left: float, right: float, top: float, bottom: float, end: float) -> _TimeAxis:
    """Draws the axis."""
    at = _TimeAxis(left, right, end)
    for tick in ticks(end, 8):
        if tick <= end * 1.001:
            parts.append(_line(at(tick), top, at(tick), bottom, "axis" if tick == 0 else "grid"))
            parts.append(_text(at(tick), bottom + 16, _tick(tick)))
    return at
