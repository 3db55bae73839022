"""Which knobs matter: only what one knob alone did, on the same scenes as the defaults."""

from __future__ import annotations

import pytest

from controller.tuning.effects import effects_alone
from controller.tuning.influence import Effect
from controller.tuning.objective import Outcome
from controller.tuning.trial import Trial

FIRST = {"pace": 0.95, "bank": 0.0, "max_running": 64}


def outcome(attainment: float, gap_s: float = 0.1) -> Outcome:
    return Outcome(attainment, {}, {}, 1.0, gap_s, None, None)


def trial(
    number: int, changes: dict[str, float], score: float | None, *attainments: float
) -> Trial:
    state = "failed" if score is None else "complete"
    return Trial(number, state, FIRST | changes, score, tuple(map(outcome, attainments)), None, 0)


def test_one_knob_alone_is_compared_on_the_scenes_that_it_did_the_largest_gain_first() -> None:
    effects = effects_alone(
        [
            trial(0, {}, 0.6, 0.5, 0.7),
            trial(1, {"bank": 0.1}, 0.2, 0.2),  # given up after the first scene
            trial(2, {"max_running": 96}, 0.7, 0.7, 0.7),
            trial(3, {"pace": 0.9}, 0.6, 0.5, 0.7),
            trial(4, {"pace": 0.9, "bank": 0.1}, 0.9, 0.9, 0.9),
            trial(5, {"pace": 0.8}, None),
        ]
    )
    assert [(each.knob, each.value) for each in effects] == [
        ("max_running", 96.0), ("pace", 0.9), ("bank", 0.1),
    ]  # fmt: skip
    assert [each.gain for each in effects] == pytest.approx([0.1, 0.0, -0.3])
    assert [each.kept for each in effects] == pytest.approx([0.1, 0.0, -0.3])
    assert [each.guards for each in effects] == [(), (), ()]
    assert [each.is_none for each in effects] == [False, True, False]


def test_what_guards_find_is_told_apart_from_promises() -> None:
    late = Trial(1, "complete", FIRST | {"bank": 0.1}, 0.2, (outcome(0.7, gap_s=0.2),), None, 0)
    (effect,) = effects_alone([trial(0, {}, 0.6, 0.6), late])
    assert [effect.gain, effect.kept] == pytest.approx([-0.4, 0.1])
    assert effect.guards == ("longest gap",)


def test_a_search_that_is_only_the_defaults_says_nothing() -> None:
    assert effects_alone([trial(0, {}, 0.6, 0.6)]) == ()
    # Exactly nothing is nothing; half a millionth is something.
    assert not Effect("pace", 0.9, 5e-7, 5e-7).is_none
