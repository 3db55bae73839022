"""Which point is tried next: knobs alone, then what gained, further the same way, and around it.

Owns the order in which a search looks around what is known. Must not remember or simulate: the same
trials and the same random numbers give the same point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from controller.tuning.effects import effects_alone
from controller.tuning.space import Knob, neighbour
from controller.tuning.trial import Trial, best_trial

Point = dict[str, float]


def propose(
    knobs: Sequence[Knob],
    first: Mapping[str, float],
    trials: Sequence[Trial],
    rng: np.random.Generator,
) -> Point | None:
    """Return the point after `trials`, which began with `first`; None leaves it to a sampler.

    First every knob is moved alone. What gained is then tried together, and a point that is better
    than all before it sends the next one twice as far from `first`. Otherwise the sampler takes
    turns with points near the best, which move knobs that have been seen to do something.
    """
    number = len(trials)
    if number == 0:
        return dict(first)
    if number <= len(knobs):
        return neighbour(knobs, first, number - 1, rng, is_alone=True)
    best = best_trial(trials)
    bold = []
    if number == len(knobs) + 1:
        bold.append(together(first, trials))
    if best.number in (number - 1, *range(1, len(knobs) + 1)):
        bold.append(further(knobs, first, best.point))
    for point in bold:
        if all(each.point != point for each in trials):
            return point
    if number % 2:
        return None
    moving = {each.knob for each in effects_alone(trials) if not each.is_none}
    near = [knob for knob in knobs if knob.name in moving] or knobs
    return neighbour(near, best.point, number // 2, rng)


def together(first: Mapping[str, float], trials: Sequence[Trial]) -> Point:
    """Return `first` with every knob where it gained most alone; `first` if none gained."""
    point = dict(first)
    # The largest gain of a knob is written last.
    for effect in reversed(effects_alone(trials)):
        if effect.gain > 0.0 and not effect.is_none:
            value = effect.value
            point[effect.knob] = int(value) if isinstance(first[effect.knob], int) else value
    return point


def further(knobs: Sequence[Knob], first: Mapping[str, float], best: Mapping[str, float]) -> Point:
    """Return the point twice as far from `first` as `best`, as far as the ranges go.

    Ratios where the knob is searched by ratios.
    """
    point = dict(best)
    for knob in knobs:
        start, here = first[knob.name], best[knob.name]
        if start == here:
            continue
        value = here * here / start if knob.is_log else 2.0 * here - start
        value = min(max(value, knob.low), knob.high)
        point[knob.name] = round(value) if knob.is_integer else value
    return point
