"""Steps against the machine's limit, and what the engine costs by itself: tables and sums.

Owns every word that a person reads about them. Must not measure: timings come as the fields that
`engine.device.step_timing` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from controller.bench.overhead import Overhead


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One timed shape: medians in seconds, None where the forward was not seen.

    `share` is the part of the machine's limit that the step reached.
    """

    num_decodes: int
    num_context: int
    num_chunk: int
    num_steps: int
    step_s: float
    forward_s: float | None
    overhead_s: float | None
    num_bytes: int
    num_multiply_adds: int
    limit_s: float
    share: float

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> TimedStep:
        """Return the step that one `timing` event tells of; KeyError if a field is missing."""
        rest = {name: fields[name] for name in cls.__slots__ if name not in fields["shape"]}
        return cls(**fields["shape"], **rest)

    @property
    def label(self) -> str:
        """What the step holds, in words."""
        if self.num_chunk:
            return f"prompt of {self.num_chunk}"
        decodes = "1 decode" if self.num_decodes == 1 else f"{self.num_decodes} decodes"
        return f"{decodes}, context {self.num_context}"


def growth_per_unit(steps: Sequence[TimedStep], unit: str, quantity: str) -> float | None:
    """Return the slope of a quantity in seconds per unit of work, by least squares over decodes.

    `unit` is `request` (decodes of a step) or `token` (context tokens of all its decodes);
    `quantity` a field such as `step_s`. None with fewer than two different amounts of work.
    """
    points = [
        (
            step.num_decodes * (step.num_context if unit == "token" else 1),
            getattr(step, quantity),
        )
        for step in steps
        if step.num_decodes and getattr(step, quantity) is not None
    ]
    if len({x for x, _ in points}) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope: float = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return slope


def render_limits(limits: Mapping[str, float]) -> str:
    """Return the machine's two limits in one line."""
    return (
        f"This machine reads {limits['bytes_per_s'] / 1e9:.1f} GB/s and does"
        f" {limits['multiply_adds_per_s'] / 1e9:.1f} billion multiply-adds per second (best of"
        " several large reads and products)"
    )


def render_steps(steps: Sequence[TimedStep], limits: Mapping[str, float], title: str) -> Table:
    """Return the table of steps for a terminal, in milliseconds."""
    table = Table(title=title, title_justify="left")
    table.add_column("step", no_wrap=True)
    for heading in (
        "measured, ms",
        "limit, ms",
        "share reached",
        "bound by",
        "forward, ms",
        "engine's own, ms",
        "of the step",
    ):
        table.add_column(heading, justify="right")
    for step in steps:
        own = step.overhead_s
        table.add_row(
            step.label,
            f"{step.step_s * 1000:.1f}",
            f"{step.limit_s * 1000:.1f}",
            f"{step.share:.0%}",
            bound_by(step, limits),
            "–" if step.forward_s is None else f"{step.forward_s * 1000:.1f}",
            "–" if own is None else f"{own * 1000:.2f}",
            "–" if own is None else f"{own / step.step_s:.1%}",
        )
    return table


def bound_by(step: TimedStep, limits: Mapping[str, float]) -> str:
    """Return which of the two the machine would be busy with at its limit."""
    reading_s = step.num_bytes / limits["bytes_per_s"]
    multiplying_s = step.num_multiply_adds / limits["multiply_adds_per_s"]
    return "reading" if reading_s >= multiplying_s else "multiplying"


def render_steps_markdown(steps: Sequence[TimedStep]) -> str:
    """Return a Markdown table of shares only: absolute times of a shared machine are not quoted."""
    lines = ["| step | share of the limit | engine's own part |", "|---|---|---|"]
    for step in steps:
        own = "–" if step.overhead_s is None else f"{step.overhead_s / step.step_s:.1%}"
        lines.append(f"| {step.label} | {step.share:.0%} | {own} |")
    return "\n".join(lines)


def render_overheads(overheads: Sequence[Overhead]) -> Table:
    """Return the table of planner and loop for a terminal, in microseconds."""
    table = Table(
        title="Planner and loop, without execution: medians in microseconds", title_justify="left"
    )
    for heading in ("planner", "targets", "running", "waiting", "plan, µs", "loop, µs"):
        table.add_column(heading, justify="left" if heading in {"planner", "targets"} else "right")
    for row in overheads:
        table.add_row(
            row.planner,
            "yes" if row.has_targets else "no",
            str(row.num_running),
            str(row.num_waiting),
            f"{row.planner_s * 1e6:.0f}",
            f"{row.loop_s * 1e6:.0f}",
        )
    return table


def render_growth(steps: Sequence[TimedStep]) -> list[str]:
    """Return how steps and the engine's own part grow with decodes and with context.

    Decodes are compared at the shortest context, contexts at the largest batch.
    """
    decodes = [step for step in steps if step.num_decodes]
    if not decodes:
        return []
    shortest = min(step.num_context for step in decodes)
    largest = max(step.num_decodes for step in decodes)
    notes = []
    for words, chosen, unit in (
        (
            f"one more decode at context {shortest}",
            [step for step in decodes if step.num_context == shortest],
            "request",
        ),
        (
            f"1000 more context tokens at {largest} decodes",
            [step for step in decodes if step.num_decodes == largest],
            "token",
        ),
    ):
        scale = 1000.0 * (1000 if unit == "token" else 1)
        whole = growth_per_unit(chosen, unit, "step_s")
        own = growth_per_unit(chosen, unit, "overhead_s")
        bound = growth_per_unit(chosen, unit, "limit_s")
        if whole is None or bound is None:
            continue
        text = f"{words}: {whole * scale:.2f} ms (limit {bound * scale:.2f} ms"
        notes.append(text + (f", engine's own {own * scale:.3f} ms)" if own is not None else ")"))
    return notes
