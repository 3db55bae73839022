"""Small charts as SVG text: lines with their spread, and labelled points.

Owns how a chart is put together: axes, curves, levels, labels, and its words for whoever cannot see
it. Must not know what is drawn; colours come from the page's style.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from controller.simulation.digits import plain, share
from controller.simulation.svg_marks import (
    FONT_PX,
    Box,
    marker,
    place_labels,
    stroke,
    text_box,
    text_width,
)
from controller.simulation.svg_scale import Scale, spans_widely

_WIDTH: Final = 400
_HEIGHT: Final = 270
_RIGHT, _TOP, _BOTTOM = 16, 30, 44
_NUM_LETTERS: Final = 26


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve; `low` and `high` bound it at each point (empty = no band).

    `group` chooses colour, dashes and mark.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A point called `name`; `label` is written beside it, `group` None draws it as one of many."""

    name: str
    x: float
    y: float
    group: int | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """A dashed line across the chart, with its words."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis says: its label with the unit, and names for 1, 2, 3 … instead of numbers.

    `reach` are values that it holds whatever is drawn.
    """

    label: str
    names: tuple[str, ...] = ()
    reach: tuple[float, ...] = ()


@dataclass(slots=True)
class _Frame:
    """The plot's area: pixels of values, and the parts drawn so far."""

    x_scale: Scale
    y_scale: Scale
    left: float = 0.0
    y_words: str = ""
    parts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ticks = [self.y_scale.text(value) for value in self.y_scale.ticks()]
        self.left = 10 + max((text_width(text) for text in ticks), default=0.0)

    @property
    def area(self) -> Box:
        return Box(self.left, _TOP, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM)

    def x(self, value: float) -> float:
        """Return the pixel from the left."""
        return self.left + self.x_scale.position(value) * (_WIDTH - _RIGHT - self.left)

    def y(self, value: float) -> float:
        """Return the pixel from the top."""
        return _HEIGHT - _BOTTOM - self.y_scale.position(value) * (_HEIGHT - _TOP - _BOTTOM)

    def text(self, text: str, x: float, y: float, anchor: str = "middle", kind: str = "") -> None:
        """Write a text; what would stick out of the picture is moved in."""
        x = _moved_in(text, x, anchor)
        classes = " ".join(filter(None, (anchor, kind)))
        self.parts.append(
            f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'
        )

    def axes(self, x: Axis, y: Axis) -> None:
        """Draw the grid with its numbers and the axes' labels."""
        area = self.area
        for value in self.y_scale.ticks():
            pixel = self.y(value)
            self.parts.append(
                f'<line class="grid" x1="{area.left:.1f}" x2="{area.right}"'
                f' y1="{pixel:.1f}" y2="{pixel:.1f}"/>'
            )
            self.text(self.y_scale.text(value), area.left - 6, pixel + 4.5, "end")
        self._x_ticks(x)
        logarithmic = ", log scale"
        self.text(x.label + logarithmic * self.x_scale.is_log, _middle(area), _HEIGHT - 8)
        self.y_words = y.label + logarithmic * self.y_scale.is_log
        self.text(self.y_words, 2, 15, "start")

    def _x_ticks(self, axis: Axis) -> None:
        """Numbers, or a name for each whole one; whatever would touch its neighbour is left out."""
        area = self.area
        ticks = (
            [float(i) for i in range(1, len(axis.names) + 1)]
            if axis.names
            else self.x_scale.ticks()
        )
        reach = float("-inf")
        for value in ticks:
            pixel = self.x(value)
            self.parts.append(
                f'<line class="grid" x1="{pixel:.1f}" x2="{pixel:.1f}"'
                f' y1="{area.top}" y2="{area.bottom}"/>'
            )
            name = axis.names[int(value) - 1] if axis.names else self.x_scale.text(value)
            box = text_box(name, _moved_in(name, pixel, "middle"), 0)
            if box.left > reach:
                self.text(name, pixel, area.bottom + 19)
                reach = box.right + 3

    def level(self, level: Level) -> None:
        """Draw a dashed line and its words, above it where there is room."""
        area, pixel = self.area, self.y(level.value)
        right = area.right - 2
        self.parts.append(
            f'<line class="level" x1="{area.left:.1f}" x2="{area.right}"'
            f' y1="{pixel:.1f}" y2="{pixel:.1f}"/>'
        )
        label = text_box(level.label, right, pixel - 4, "end")
        is_free = not label.overlaps(text_box(self.y_words, 2, 15, "start"))
        self.text(level.label, right, pixel - 4 if is_free else pixel + FONT_PX, "end", "note")

    def picture(self, title: str, words: str) -> str:
        """Return the figure; `words` tell what is to be seen."""
        name = html.escape(title)
        return (
            f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}"'
            f' role="img"><title>{name}</title><desc>{html.escape(words)}</desc>'
            f"{''.join(self.parts)}</svg></figure>"
        )


def line_chart(
    title: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    is_share: bool = False,
    may_be_log: bool = False,
    levels: Sequence[Level] = (),
    crossings: Sequence[tuple[float, float]] = (),
    nothing: str = "Nothing to show.",
) -> str:
    """Return a chart of curves over a common axis; `is_share` fixes y to 0–100 %.

    `may_be_log` takes a logarithmic axis where values differ by more than thirty times. `levels`
    are drawn where they are on the scale, which reaches for those near the curves; `crossings` are
    points that get the letters A, B, C … Without a point there is the note `nothing` instead.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return note_figure(title, nothing)
    ys = [value for _, value in points]
    ys += [value for line in lines for value in (*line.low, *line.high)]
    ys += [level.value for level in levels if level.value <= 2 * max(ys)]
    xs = [float(i) for i in range(1, len(x.names) + 1)] or [
        *x.reach,
        *(value for value, _ in points),
    ]
    if is_share:
        y_scale = Scale.shares()
    elif may_be_log and spans_widely(ys):
        y_scale = Scale.around(ys, is_log=True)
    else:
        # Seconds and the like begin at zero, or half a difference looks like all of it.
        y_scale = Scale.around([0.0, *ys]).up_to_a_tick()
    # Marks do not sit on the axis.
    frame = _Frame(Scale.around(xs).padded(0.03), y_scale)
    frame.axes(x, y)
    for line in lines:
        _draw(frame, line, is_share=is_share)
    for level in levels:
        if y_scale.holds(level.value):
            frame.level(level)
    for index, (at, value) in enumerate(crossings):
        pixel_x, pixel_y = frame.x(at), frame.y(value)
        frame.parts.append(
            f'<circle class="crossing" cx="{pixel_x:.1f}" cy="{pixel_y:.1f}" r="6"/>'
        )
        frame.text(letter(index), pixel_x, pixel_y - 10, "middle", "note strong")
    return frame.picture(title, _words(lines, x, y, is_share=is_share))


def scatter_chart(
    title: str,
    marks: Sequence[Mark],
    x: Axis,
    y: Axis,
    *,
    chains: Sequence[Sequence[tuple[float, float]]] = (),
    targets: tuple[float | None, float | None] = (None, None),
    nothing: str = "Nothing to show.",
) -> str:
    """Return a chart of labelled points on logarithmic axes; values must be positive.

    `chains` are points to join by a thin line, `targets` an x and a y to draw a dashed line at.
    """
    if not marks:
        return note_figure(title, nothing)
    target_x, target_y = targets
    xs = [mark.x for mark in marks] + [target_x] * (target_x is not None)
    ys = [mark.y for mark in marks] + [target_y] * (target_y is not None)
    frame = _Frame(
        Scale.around([v for v in xs if v is not None], is_log=True),
        Scale.around([v for v in ys if v is not None], is_log=True),
    )
    frame.axes(x, y)
    area = frame.area
    if target_x is not None:
        pixel = frame.x(target_x)
        frame.parts.append(
            f'<line class="level" x1="{pixel:.1f}" x2="{pixel:.1f}"'
            f' y1="{area.top}" y2="{area.bottom}"/>'
        )
    if target_y is not None:
        pixel = frame.y(target_y)
        frame.parts.append(
            f'<line class="level" x1="{area.left:.1f}" x2="{area.right}"'
            f' y1="{pixel:.1f}" y2="{pixel:.1f}"/>'
        )
    for chain in chains:
        path = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in chain)
        frame.parts.append(f'<polyline class="chain" points="{path}"/>')
    pixels = [(frame.x(mark.x), frame.y(mark.y)) for mark in marks]
    _label_marks(frame, marks, pixels)
    for mark, (pixel_x, pixel_y) in reversed(list(zip(marks, pixels, strict=True))):
        text = html.escape(f"{mark.name}: {plain(mark.x)}, {plain(mark.y)}")
        if mark.group is None:
            frame.parts.append(
                f'<circle class="dot other" cx="{pixel_x:.1f}" cy="{pixel_y:.1f}" r="3">'
                f"<title>{text}</title></circle>"
            )
        else:
            frame.parts.append(marker(mark.group, pixel_x, pixel_y, 5, text))
    spoken = "; ".join(f"{mark.name} at {plain(mark.x)}, {plain(mark.y)}" for mark in marks)
    return frame.picture(title, f"{y.label} against {x.label}. {spoken}.")


def _label_marks(
    frame: _Frame, marks: Sequence[Mark], pixels: Sequence[tuple[float, float]]
) -> None:
    texts = [mark.label or mark.name for mark in marks]
    placed = place_labels(texts, pixels, frame.area)
    for text, label, (pixel_x, pixel_y) in zip(texts, placed, pixels, strict=True):
        if label is None:
            continue
        if label.is_far:
            frame.parts.append(
                f'<line class="leader" x1="{pixel_x:.1f}" y1="{pixel_y:.1f}"'
                f' x2="{label.x:.1f}" y2="{label.y - 0.3 * FONT_PX:.1f}"/>'
            )
        frame.text(text, label.x, label.y, "middle", "note")


def legend(names: Sequence[str]) -> str:
    """Return the names beside their strokes and marks, in the order of their groups."""
    items = (
        '<li><svg class="key" viewBox="0 0 34 14" aria-hidden="true">'
        f'<line class="line c{index % 8}" {stroke(index)} x1="1" x2="33" y1="7" y2="7"/>'
        f"{marker(index, 17, 7, 4.5)}</svg>{html.escape(name)}</li>"
        for index, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def letter(index: int) -> str:
    """Return A, B, C …, then AA, AB …"""
    rest, last = divmod(index, _NUM_LETTERS)
    return ("" if rest == 0 else letter(rest - 1)) + chr(ord("A") + last)


def note_figure(title: str, words: str) -> str:
    """Return a figure without a picture: its title and why there is none."""
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<p class="nothing">{html.escape(words)}</p></figure>'
    )


def _draw(frame: _Frame, line: Line, *, is_share: bool) -> None:
    colour = f"c{line.group % 8}"
    xs = [frame.x(x) for x, _ in line.points]
    path = " ".join(f"{x:.1f},{frame.y(y):.1f}" for x, (_, y) in zip(xs, line.points, strict=True))
    if line.low and line.high:
        above = [f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(xs, line.high, strict=True)]
        below = [f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(xs, line.low, strict=True)]
        frame.parts.append(
            f'<polygon class="band {colour}" points="{" ".join(above + below[::-1])}"/>'
        )
    frame.parts.append(f'<polyline class="line {colour}" {stroke(line.group)} points="{path}"/>')
    for x, y in line.points:
        text = f"{line.name} at {plain(x)}: {_number(y, is_share=is_share)}"
        frame.parts.append(marker(line.group, frame.x(x), frame.y(y), 3.5, html.escape(text)))


def _words(lines: Sequence[Line], x: Axis, y: Axis, *, is_share: bool) -> str:
    """Say what a chart shows: every curve's first and last value."""
    spoken = []
    for line in lines:
        if line.points:
            (x_first, first), (x_last, last) = line.points[0], line.points[-1]
            spoken.append(
                f"{line.name}: {_number(first, is_share=is_share)} at {plain(x_first)},"
                f" {_number(last, is_share=is_share)} at {plain(x_last)}"
            )
    return f"{y.label} against {x.label}. {'; '.join(spoken)}."


def _moved_in(text: str, x: float, anchor: str) -> float:
    """Return where a text is to be written so that it does not stick out of the picture."""
    box = text_box(text, x, 0, anchor)
    return x + max(0.0, 2 - box.left) - max(0.0, box.right - (_WIDTH - 2))


def _number(value: float, *, is_share: bool) -> str:
    return share(value) if is_share else plain(value)


def _middle(area: Box) -> float:
    return (area.left + area.right) / 2
