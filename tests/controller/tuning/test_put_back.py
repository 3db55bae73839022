"""Settings that were found say which of their changes gained something, and keep no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controller.simulation.run import SimulationError
from controller.tuning import job
from controller.tuning.effects import moved_knobs
from controller.tuning.job import Search, put_back, search
from controller.tuning.objective import Outcome, Progress
from controller.tuning.space import DEFAULTS, KNOBS, TunedSettings, point_of, settings_at
from controller.tuning.study import Study
from controller.tuning.task import Scene, TuningTask
from controller.tuning.trial import Trial
from tests.controller.tuning.tuning_tasks import crowd, task


def at_fast_pace(monkeypatch: pytest.MonkeyPatch, *, must_bank: bool = False) -> list[str]:
    """Let pace and knee share alone count; returns what was simulated, by what is not shipped."""
    seen: list[str] = []

    def run(
        _: TuningTask, settings: TunedSettings, __: Scene, progress: Progress | None = None
    ) -> Outcome:
        seen.append(", ".join(settings.changes_from(DEFAULTS)))
        planner = settings.planner
        if must_bank and planner.pace < 0.95 and not planner.bank:
            raise SimulationError("nothing to do")
        if progress is not None:
            progress(0.5)
        value = 0.5 + (0.95 - planner.pace) + (1.0 - planner.knee_share) / 10
        return Outcome(value, {}, {}, 1.0, None, None, None)

    monkeypatch.setattr(job, "run_scene", run)
    return seen


def found_at(**changes: float) -> Search:
    """A search whose first trial is at these changes, and scores what `at_fast_pace` says."""
    first = point_of(DEFAULTS, KNOBS)
    point = first | changes
    usual, value = (
        0.5 + (0.95 - each["pace"]) + (1.0 - each["knee_share"]) / 10 for each in (first, point)
    )
    outcomes = [(Outcome(each, {}, {}, 1.0, None, None, None),) for each in (usual, value)]
    trials = (
        Trial(0, "complete", first, usual, outcomes[0], None, 0),
        Trial(1, "complete", point, value, outcomes[1], None, 0),
    )
    return Search(trials, trials[1], settings_at(point), is_interrupted=False)


def test_changes_that_gain_nothing_are_put_back_and_the_others_say_what_they_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_fast_pace(monkeypatch)
    told: list[tuple[str, float, float]] = []
    small = task(crowd(10))
    found = found_at(pace=0.8, bank=0.5, knee_share=0.6, max_running=96)
    left = put_back(small, found, lambda *what: told.append(what))
    assert left.settings == settings_at({"pace": 0.8, "knee_share": 0.6})
    assert [(each.knob, each.value) for each in left.worth] == [("pace", 0.8), ("knee_share", 0.6)]
    usual = DEFAULTS.planner.knee_share
    assert [e.gain for e in left.worth] == pytest.approx([0.15, (usual - 0.6) / 10])
    assert [e.kept for e in left.worth] == pytest.approx([e.gain for e in left.worth])
    assert [e.guards for e in left.worth] == [(), ()]
    assert (left.best, left.trials) == (found.best, found.trials)
    names = ("pace", "knee_share", "bank", "max_running")
    assert {what for what, _, _ in told} == {f"without the change of {name}" for name in names}
    assert [done for _, done, _ in told] == [0.5, 1.5, 2.5, 3.5]
    assert {total for _, _, total in told} == {4}


def test_the_only_change_is_compared_with_the_defaults_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = at_fast_pace(monkeypatch)
    left = put_back(task(crowd(10)), found_at(pace=0.9))
    assert left.settings == settings_at({"pace": 0.9})
    assert [each.gain for each in left.worth] == pytest.approx([0.05])
    assert seen == []


def test_a_change_without_which_nothing_goes_stays_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_fast_pace(monkeypatch, must_bank=True)
    left = put_back(task(crowd(10)), found_at(pace=0.8, bank=0.5))
    assert left.settings == settings_at({"pace": 0.8, "bank": 0.5})
    assert [each.knob for each in left.worth] == ["pace"]


def test_where_nothing_was_found_there_is_nothing_to_put_back() -> None:
    found = found_at(pace=0.9)
    nothing = replace(found, best=found.trials[0], settings=DEFAULTS)
    assert put_back(task(crowd(10)), nothing) is nothing


def test_the_first_round_moves_each_knob_alone_and_whatever_is_better_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_fast_pace(monkeypatch)
    small, names = task(crowd(10)), [knob.name for knob in KNOBS]
    told: list[tuple[int, float]] = []
    with Study.open(
        tmp_path / "study", KNOBS, point_of(DEFAULTS, KNOBS), small.fingerprint(), 0
    ) as opened:
        found = search(
            small, opened, 25, on_best=lambda best, gain: told.append((best.number, gain))
        )
    first = found.trials[0].point
    alone = [moved_knobs(each.point, first) for each in found.trials[1 : len(KNOBS) + 1]]
    # A draw may be what ships.
    assert [moved or [name] for moved, name in zip(alone, names, strict=True)] == [
        [name] for name in names
    ]
    assert any(len(moved_knobs(each.point, first)) > 1 for each in found.trials[len(KNOBS) + 1 :])
    assert [number for number, _ in told][-1] == found.best.number
    assert [gain for _, gain in told] == sorted(gain for _, gain in told)
    assert all(gain > 0 for _, gain in told)
