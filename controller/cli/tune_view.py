"""What `paceline tune` says while it works: what it tunes on, what it found, how it went.

Owns words only, on standard error: results go to standard output. Must not search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from controller.simulation.digits import plain

if TYPE_CHECKING:
    from controller.tuning.space import Knob
    from controller.tuning.task import Scene, TuningTask
    from controller.tuning.trial import Trial

# As many of a point's knobs as a line has room for.
_MAX_MOVED = 4


def introduce(
    task: TuningTask, knobs: Sequence[Knob], study: Path, num_done: int, num_trials: int
) -> None:
    """Say what is tuned on and judged on, and where trials are kept."""
    from controller.tuning.space import DEFAULTS

    seats = task.num_seats(DEFAULTS)
    _say(f"{task.name}, on {task.hardware.name}; trial 0 is what ships, with {seats} seats")
    _say(f"{_scenes(task.tuning)} to tune, {_scenes(task.held_out)} to judge")
    goes_on = f", {num_done} of them done" if num_done else ""
    num_requests = sum(scene.workload.num_requests for scene in task.tuning)
    _say(
        f"{_count(num_trials, 'trial')} over {_count(len(knobs), 'knob')}, each up to"
        f" {num_requests:,} simulated requests, in {study}{goes_on}; Ctrl-C keeps those that have"
        " ended"
    )


def tell_best(trial: Trial, gain: float, first: Mapping[str, float]) -> None:
    """Say that a trial is better than all before it, and what it moved."""
    moved = [name for name, value in trial.point.items() if value != first[name]]
    words = [f"{name} {trial.point[name]:.4g}" for name in moved[:_MAX_MOVED]]
    if len(moved) > _MAX_MOVED:
        words.append(f"{len(moved) - _MAX_MOVED} more")
    _say(f"trial {trial.number}: {gain * 100:+.2f} points on the tuning part: {', '.join(words)}")


def tell_ends(trials: Sequence[Trial]) -> None:
    """Say how many trials ended how."""
    states = Counter(each.state for each in trials)
    words = {"complete": "whole", "pruned": "given up early", "failed": "failed"}
    ends = ", ".join(f"{states[key]} {word}" for key, word in words.items() if states[key])
    _say(f"{_count(len(trials), 'trial')}: {ends}")
    reasons = Counter(each.reason for each in trials if each.reason is not None)
    for reason, num in reasons.most_common(3):
        _say(f"{num} failed: {reason}")


def _scenes(scenes: Sequence[Scene]) -> str:
    sizes = [scene.workload.num_requests for scene in scenes]
    spans = [scene.workload.duration_s for scene in scenes]
    num = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    return f"{_count(len(scenes), 'scene')} of {num} requests in {plain(max(spans))} s"


def _count(num: int, noun: str) -> str:
    return f"{num} {noun}{'' if num == 1 else 's'}"


def _say(text: str) -> None:
    typer.echo(f"paceline: {text}", err=True)
