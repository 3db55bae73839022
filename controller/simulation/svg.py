"""Small charts as SVG text: lines with their spread, and labelled points.

Owns scales, ticks and marks. Must not know what is drawn; colours come from the page's style.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_WIDTH: Final = 560
_HEIGHT: Final = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 44
NUM_COLOURS: Final = 8
_NUM_TICKS: Final = 6
_MAX_LOG_TICKS: Final = 9


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve; `low` and `high` bound it at each point (empty = no band)."""

    name: str
    points: tuple[tuple[float, float], ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled point; `group` chooses its colour."""

    label: str
    x: float
    y: float
    group: int = 0


class _Frame:
    """The plot's area: from values to pixels, with ticks that are round numbers."""

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        y_bounds: tuple[float, float] | None,
        *,
        is_log: bool = False,
    ) -> None:
        self.is_log = is_log
        self._x = _bounds(xs, is_log=is_log)
        self._y = y_bounds or _bounds(ys, is_log=is_log)

    def x(self, value: float) -> float:
        """Return the pixel from the left."""
        return _LEFT + self._share(value, self._x) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Return the pixel from the top."""
        return _HEIGHT - _BOTTOM - self._share(value, self._y) * (_HEIGHT - _TOP - _BOTTOM)

    def _share(self, value: float, bounds: tuple[float, float]) -> float:
        low, high = bounds
        if self.is_log:
            value, low, high = (math.log(max(each, 1e-12)) for each in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def grid(self, x_label: str, y_label: str, *, is_share: bool) -> list[str]:
        """Return the axes with ticks and labels."""
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        parts = []
        for value in _ticks(self._y, is_log=self.is_log):
            y = self.y(value)
            text = f"{value:.0%}" if is_share else f"{value:g}"
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{text}</text>')
        for value in _ticks(self._x, is_log=self.is_log):
            x = self.x(value)
            parts.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
            )
            parts.append(f'<text class="mid" x="{x:.1f}" y="{bottom + 16}">{value:g}</text>')
        parts.append(
            f'<text class="mid" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}">'
            f"{html.escape(x_label)}</text>"
        )
        middle = (_TOP + bottom) / 2
        parts.append(
            f'<text class="mid" transform="translate(14 {middle}) rotate(-90)">'
            f"{html.escape(y_label)}</text>"
        )
        return parts


def line_chart(
    title: str,
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    *,
    is_share: bool = False,
    level: float | None = None,
) -> str:
    """Return a chart of curves over a common axis; `is_share` fixes y to 0–100 %.

    `level` draws a dashed line. Nothing to draw gives a note instead.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return _nothing(title)
    ys = [y for _, y in points] + [y for line in lines for y in (*line.low, *line.high)]
    # Seconds and the like begin at zero, or half a difference looks like all of it.
    frame = _Frame([x for x, _ in points], [0.0, *ys], (0.0, 1.0) if is_share else None)
    parts = frame.grid(x_label, y_label, is_share=is_share)
    if level is not None:
        y = frame.y(level)
        parts.append(
            f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    for index, line in enumerate(lines):
        parts += _curve(frame, line, index, is_share=is_share)
    return _wrap(title, parts)


def scatter_chart(title: str, marks: Sequence[Mark], x_label: str, y_label: str) -> str:
    """Return a chart of labelled points on logarithmic axes; values must be positive."""
    if not marks:
        return _nothing(title)
    frame = _Frame([m.x for m in marks], [m.y for m in marks], None, is_log=True)
    parts = frame.grid(x_label, y_label, is_share=False)
    for mark in marks:
        x, y = frame.x(mark.x), frame.y(mark.y)
        label = html.escape(mark.label)
        side = "end" if x > _WIDTH - 120 else "start"
        parts.append(
            f'<circle class="dot c{mark.group % NUM_COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{label}: {mark.x:g}, {mark.y:g}</title></circle>"
            f'<text class="{side}" x="{x + (-7 if side == "end" else 7):.1f}" y="{y - 5:.1f}">'
            f"{label}</text>"
        )
    return _wrap(title, parts)


def legend(names: Sequence[str]) -> str:
    """Return the names beside their colours, in the order of the lines."""
    items = (
        f'<li><span class="key k{index % NUM_COLOURS}"></span>{html.escape(name)}</li>'
        for index, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _curve(frame: _Frame, line: Line, index: int, *, is_share: bool) -> list[str]:
    colour = f"c{index % NUM_COLOURS}"
    xs = [frame.x(x) for x, _ in line.points]
    path = " ".join(f"{x:.1f},{frame.y(y):.1f}" for x, (_, y) in zip(xs, line.points, strict=True))
    parts = []
    if line.low and line.high:
        above = [f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(xs, line.high, strict=True)]
        below = [f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(xs, line.low, strict=True)]
        parts.append(f'<polygon class="band {colour}" points="{" ".join(above + below[::-1])}"/>')
    parts.append(f'<polyline class="line {colour}" points="{path}"/>')
    for x, y in line.points:
        text = f"{y:.1%}" if is_share else f"{y:g}"
        parts.append(
            f'<circle class="dot {colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5">'
            f"<title>{html.escape(line.name)} at {x:g}: {text}</title></circle>"
        )
    return parts


def _wrap(title: str, parts: Sequence[str]) -> str:
    name = html.escape(title)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' role="img" aria-label="{name}">{"".join(parts)}</svg></figure>'
    )


def _nothing(title: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption><p>nothing to show</p></figure>"


def _bounds(values: Sequence[float], *, is_log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if is_log:
        # A little room on either side, and a span even for a single point.
        return max(low, 1e-12) / 1.25, max(high, 1e-12) * 1.25
    # A span that ticks could not tell apart is none.
    least = 1e-9 * max(1.0, abs(low), abs(high))
    return (low, high) if high - low > least else (low - 0.5, high + 0.5)


def _ticks(bounds: tuple[float, float], *, is_log: bool) -> list[float]:
    low, high = bounds
    if is_log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**power for power in powers for m in (1.0, 2.0, 5.0)]
        inside = [value for value in found if low <= value <= high]
        if len(inside) > _MAX_LOG_TICKS:
            every = math.ceil(len(powers) / _MAX_LOG_TICKS)
            return [value for p in powers[::every] if low <= (value := 10.0**p) <= high]
        if len(inside) > 1:
            return inside
        # A short stretch of a logarithmic axis is as good as straight.
    raw = (high - low) / _NUM_TICKS
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if size * m >= raw)
    first = math.ceil(low / step - 1e-9)
    # Rounded to the step's digits, or 0.1 · 3 would be written with seventeen of them.
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
