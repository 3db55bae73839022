"""What is tried next: knobs alone, what gained together, further, then around the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from controller.tuning.effects import moved_knobs
from controller.tuning.objective import Outcome
from controller.tuning.proposals import further, propose, together
from controller.tuning.space import DEFAULTS, knobs_named, point_of
from controller.tuning.trial import Trial

KNOBS = knobs_named(["pace", "kv_reserve", "drain_steps", "max_running"])
FIRST = point_of(DEFAULTS, KNOBS)


def trial(number: int, point: Mapping[str, float], score: float) -> Trial:
    outcome = Outcome(score, {}, {}, 1.0, None, None, None)
    return Trial(number, "complete", point, score, (outcome,), None, 0)


def after(*scores: float, points: Any = ()) -> tuple[Trial, ...]:
    """The defaults, each knob alone at a value of its own, then `points`, with these scores."""
    alone: list[dict[str, float]] = [
        {"pace": 0.9},
        {"kv_reserve": 0.1},
        {"drain_steps": 16.0},
        {"max_running": 160},
    ]
    tried = [FIRST, *(FIRST | change for change in alone), *points]
    return tuple(trial(i, tried[i], score) for i, score in enumerate(scores))


def proposed(trials: tuple[Trial, ...]) -> dict[str, float] | None:
    return propose(KNOBS, FIRST, trials, np.random.default_rng(len(trials)))


def test_the_defaults_come_first_and_then_each_knob_alone() -> None:
    assert proposed(()) == FIRST
    for number, knob in enumerate(KNOBS, 1):
        point = proposed(after(*[0.5] * number))
        assert point is not None
        assert moved_knobs(point, FIRST) == [knob.name]


def test_what_gained_alone_is_tried_together_each_knob_where_it_gained_most() -> None:
    trials = after(0.5, 0.6, 0.5, 0.4, 0.7)
    point = proposed(trials)
    assert point == FIRST | {"pace": 0.9, "max_running": 160}
    assert isinstance(point["max_running"], int)
    more = (*trials, trial(5, FIRST | {"pace": 0.8}, 0.65))
    assert together(FIRST, more) == FIRST | {"pace": 0.8, "max_running": 160}
    assert together(FIRST, after(0.5, 0.4, 0.5)) == FIRST


def test_better_than_all_before_goes_on_twice_as_far_until_it_is_no_better() -> None:
    # One knob alone gained: together with nothing else it has been tried.
    trials = after(0.5, 0.5, 0.5, 0.4, 0.7)
    for running, score in ((200, 0.75), (256, 0.7)):
        point = proposed(trials)
        assert point == FIRST | {"max_running": running}
        trials = (*trials, trial(len(trials), point, score))
    # 256 was no better than 200, and what lies beyond 200 has been tried.
    point = proposed((*trials, trial(len(trials), FIRST | {"pace": 0.7}, 0.1)))
    assert point is not None
    assert point["max_running"] != 256


def test_twice_as_far_is_a_ratio_where_ratios_are_searched_and_ends_at_the_range() -> None:
    best = FIRST | {"pace": 0.9, "kv_reserve": 0.15, "drain_steps": 2 * FIRST["drain_steps"]}
    point = further(KNOBS, FIRST, best)
    assert round(point["pace"], 9) == 0.85
    assert point["kv_reserve"] == 0.2
    assert point["drain_steps"] == 4 * FIRST["drain_steps"]
    assert point["max_running"] == FIRST["max_running"]


def test_afterwards_the_sampler_takes_turns_with_neighbours_along_knobs_that_do_something() -> None:
    for number in range(6, 16):
        rest = [FIRST | {"pace": 0.9 - number / 1e3, "kv_reserve": 0.1} for number in range(16)]
        scores = (0.5, 0.4, 0.5, 0.5, 0.45, *[0.3] * (number - 5))
        point = proposed(after(*scores, points=rest))
        assert (point is None) == (number % 2 == 1)
        if point is not None:
            assert set(moved_knobs(point, FIRST)) <= {"pace", "max_running"}
            assert moved_knobs(point, FIRST)


def test_where_no_knob_does_anything_all_of_them_go_on_being_moved() -> None:
    seen = set()
    for number in range(6, 22, 2):
        points = [FIRST | {"pace": 0.8, "kv_reserve": n / 1e3} for n in range(1, 20)]
        point = proposed(after(*[0.5] * number, points=points))
        assert point is not None
        seen |= set(moved_knobs(point, FIRST))
    assert seen == {knob.name for knob in KNOBS}
