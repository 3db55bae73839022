"""The rows of the trial's table, its time boxes, and how both are printed and kept.

Owns the words of a result. Must not run anything.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.clock import Clock

Number = float | int | str | None


class Verdict(enum.StrEnum):
    """What a row means for whoever only reads the last column."""

    OK = "ok"
    OFF = "OFF"
    REFUSED = "refused"
    MEASURED = "measured"
    SKIPPED = "skipped"
    FAILED = "FAILED"

    @property
    def is_bad(self) -> bool:
        """Whether the trial as a whole cannot pass with this row in it."""
        return self in (Verdict.OFF, Verdict.FAILED)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `numbers` are for the JSON file, `text` for the reader."""

    what: str
    text: str
    verdict: Verdict = Verdict.MEASURED
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "what": self.what,
            "text": self.text,
            "verdict": self.verdict.value,
            "numbers": dict(self.numbers),
        }


class TimeBox:
    """Seconds that a part may take, counted on a clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._started_at = clock.now()
        self._ends_at = self._started_at + seconds

    @property
    def spent_s(self) -> float:
        """Seconds since the box was opened."""
        return self._clock.now() - self._started_at

    @property
    def left_s(self) -> float:
        """Seconds left, 0 at least."""
        return max(0.0, self._ends_at - self._clock.now())

    @property
    def is_over(self) -> bool:
        """Whether nothing new may be begun."""
        return self._clock.now() >= self._ends_at

    def part(self, share: float) -> TimeBox:
        """Return a box for `share` of what is left."""
        return TimeBox(self._clock, self.left_s * share)


def table(parts: Mapping[str, Iterable[Row]]) -> str:
    """Return all rows as one table of plain text."""
    lines = [(name, row.what, row.text, row.verdict.value) for name, rows in parts.items()
             for row in rows]  # fmt: skip
    head = ("part", "what", "result", "verdict")
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(4)]

    def draw(line: Iterable[str]) -> str:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([draw(head), draw("-" * width for width in widths), *map(draw, lines)])


def line_of(error: BaseException) -> str:
    """Return an error as one line of at most 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
