"""Marks, strokes and labels of a chart: what tells policies apart besides their colour.

Owns shapes, dashes, the extent of text, and where labels go so that none covers another. Must not
know what is drawn; colours come from the page's style.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

NUM_COLOURS: Final = 8
FONT_PX: Final = 13.0
# Of a wide sans serif, in em: labels that fit by this measure fit in any usual font.
_NARROW, _WIDE, _USUAL = 0.36, 0.92, 0.64
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3", "9 3 2 3")
# Unit shapes around the origin; every one has a radius near 1.
_SHAPES: Final = (
    "",
    "M-.85-.85H.85V.85H-.85Z",
    "M0-1.1L1.05.8H-1.05Z",
    "M0-1.25L1.1 0 0 1.25-1.1 0Z",
    "M0 1.1L1.05-.8H-1.05Z",
    "M-.35-1.1H.35V-.35H1.1V.35H.35V1.1H-.35V.35H-1.1V-.35H-.35Z",
    "M-1.1-.55L-.55-1.1 0-.55.55-1.1 1.1-.55.55 0 1.1.55.55 1.1 0 .55-.55 1.1-1.1.55-.55 0Z",
    "M0-1.2L.35-.4 1.2-.35.5.2.75 1.05 0 .55-.75 1.05-.5.2-1.2-.35-.35-.4Z",
)
_RADII: Final = (9.0, 17.0, 28.0, 42.0, 58.0, 76.0)
_NUM_DIRECTIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        """Whether the two share any area."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def is_within(self, other: Box) -> bool:
        """Whether `other` holds all of it."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.top >= other.top
            and self.bottom <= other.bottom
        )


@dataclass(frozen=True, slots=True)
class Label:
    """A text whose middle stands at `x`, with its baseline at `y`; `is_far` asks for a leader."""

    x: float
    y: float
    is_far: bool


def text_width(text: str, font_px: float = FONT_PX) -> float:
    """Return about how many pixels a text takes, rather more than fewer."""
    return font_px * sum(
        _NARROW if c in " .,:;'|!()[]ijlt" else _WIDE if c in "mwMW@%µ" else _USUAL for c in text
    )


def text_box(text: str, x: float, y: float, anchor: str = "middle") -> Box:
    """Return the extent of a text whose baseline is at `y`, by its anchor: start, middle or end."""
    width = text_width(text)
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    return Box(left, y - 0.8 * FONT_PX, left + width, y + 0.25 * FONT_PX)


def place_labels(
    texts: Sequence[str], points: Sequence[tuple[float, float]], area: Box
) -> list[Label | None]:
    """Return a place in `area` for the label of each point, earlier ones first.

    No label covers another one or a point; None where there is no such place.
    """
    taken = [Box(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    found: list[Label | None] = []
    for text, (x, y) in zip(texts, points, strict=True):
        label = None
        for place in _places(text, x, y):
            box = text_box(text, place.x, place.y)
            if box.is_within(area) and not any(box.overlaps(other) for other in taken):
                label = place
                taken.append(box)
                break
        found.append(label)
    return found


def _places(text: str, x: float, y: float) -> Iterable[Label]:
    """Yield places around a point, nearest first; beside it before above or below."""
    half = text_width(text) / 2
    for radius in _RADII:
        for turn in range(_NUM_DIRECTIONS):
            # 0, 1/2, 1/4, 3/4 … of a circle would be fairer; right, then round, reads well enough.
            angle = 2 * math.pi * turn / _NUM_DIRECTIONS
            dx, dy = math.cos(angle), math.sin(angle)
            # The nearest edge of the text is at the radius, wherever it stands. To the tenth that
            # is written: what just touches here must not overlap there.
            yield Label(
                round(x + radius * dx + half * max(-1.0, min(1.0, 1.6 * dx)), 1),
                round(y + radius * dy + FONT_PX * (0.3 + 0.35 * dy), 1),
                radius > _RADII[0],
            )


def marker(group: int, x: float, y: float, radius: float, title: str = "") -> str:
    """Return the mark of a group: a shape of its own, hollow once the shapes have run out."""
    index = group % NUM_COLOURS
    classes = f"dot c{index}" + (" hollow" if group >= NUM_COLOURS else "")
    inner = f"<title>{title}</title>" if title else ""
    if not _SHAPES[index]:
        return (
            f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{inner}</circle>'
        )
    return (
        f'<path class="{classes}" transform="translate({x:.1f} {y:.1f}) scale({radius:g})"'
        f' d="{_SHAPES[index]}">{inner}</path>'
    )


def stroke(group: int) -> str:
    """Return the attributes of a group's curve: dashes of its own, the first one thicker."""
    dash = _DASHES[group % NUM_COLOURS]
    width = 3 if group == 0 else 2
    return f'stroke-width="{width}"' + (f' stroke-dasharray="{dash}"' if dash else "")
