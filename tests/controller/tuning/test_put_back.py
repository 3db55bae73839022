"""Settings that were found say which of their changes gained something, and keep no others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controller.simulation.run import SimulationError
from controller.tuning import job
from controller.tuning.effects import moved_knobs
from controller.tuning.job import Progress as Tell
from controller.tuning.job import Search, put_back, search
from controller.tuning.objective import Outcome, Progress
from controller.tuning.space import DEFAULTS, KNOBS, TunedSettings, point_of, settings_at
from controller.tuning.study import Study, StudyError
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


@contextmanager
def study(folder: Path, tried: TuningTask | None = None) -> Iterator[Study]:
    fingerprint = (tried or task(crowd(10))).fingerprint()
    with Study.open(folder / "study", KNOBS, point_of(DEFAULTS, KNOBS), fingerprint, 0) as opened:
        yield opened


def put_back_in(folder: Path, found: Search, progress: Tell | None = None) -> Search:
    """Put back with a study in `folder`, closed again."""
    tried = task(crowd(10))
    with study(folder, tried) as opened:
        return put_back(tried, opened, found, progress)


def scored(
    monkeypatch: pytest.MonkeyPatch, scores: Mapping[str, float], interrupted_at: int | None = None
) -> list[str]:
    """Let points score by the names of their changes; returns what was simulated."""
    seen: list[str] = []

    def run(_: TuningTask, settings: TunedSettings, *__: object) -> Outcome:
        if len(seen) == interrupted_at:
            raise KeyboardInterrupt
        seen.append(" ".join(sorted(settings.changes_from(DEFAULTS))))
        if seen[-1] not in scores:
            raise SimulationError("nothing to do")
        return outcome(scores[seen[-1]])

    monkeypatch.setattr(job, "run_scene", run)
    return seen


def outcome(value: float) -> Outcome:
    return Outcome(value, {}, {}, 1.0, None, None, None)


def scoring(value: float, usual: float = 0.5, **changes: float) -> Search:
    """A search whose best trial has these changes and this score, the defaults `usual`."""
    first = point_of(DEFAULTS, KNOBS)
    point = first | changes
    trials = (
        Trial(0, "complete", first, usual, (outcome(usual),), None, 0),
        Trial(1, "complete", point, value, (outcome(value),), None, 0),
    )
    return Search(trials, trials[1], settings_at(point), is_interrupted=False)


NOT_ADDED_UP = {
    "bank knee_share pace": 0.7,
    # Pace is missed beside the two others ...
    "bank knee_share": 0.6,
    "knee_share pace": 0.7,
    "pace": 0.6,
    # ... and no more once the bank was put back.
    "knee_share": 0.7,
}
THREE = {"pace": 0.8, "knee_share": 0.6, "bank": 0.5}


def found_at(**changes: float) -> Search:
    """A search whose first trial is at these changes, and scores what `at_fast_pace` says."""
    first = point_of(DEFAULTS, KNOBS)
    usual, value = (
        0.5 + (0.95 - each["pace"]) + (1.0 - each["knee_share"]) / 10
        for each in (first, first | changes)
    )
    return scoring(value, usual, **changes)


def test_changes_that_gain_nothing_are_put_back_and_the_others_say_what_they_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_fast_pace(monkeypatch)
    told: list[tuple[str, float, float]] = []
    found = found_at(pace=0.8, bank=0.5, knee_share=0.6, max_running=96)
    left = put_back_in(tmp_path, found, lambda *what: told.append(what))
    assert left.settings == settings_at({"pace": 0.8, "knee_share": 0.6})
    assert [(each.knob, each.value) for each in left.worth] == [("pace", 0.8), ("knee_share", 0.6)]
    usual = DEFAULTS.planner.knee_share
    assert [e.gain for e in left.worth] == pytest.approx([0.15, (usual - 0.6) / 10])
    assert [e.kept for e in left.worth] == pytest.approx([e.gain for e in left.worth])
    assert [e.guards for e in left.worth] == [(), ()]
    assert (left.best, left.trials) == (found.best, found.trials)
    names = ("pace", "knee_share", "bank", "max_running")
    assert {what for what, _, _ in told[:-1]} == {f"without the change of {name}" for name in names}
    # Four changes, and the two that are left once more.
    assert [done for _, done, _ in told] == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.0]
    assert [total for _, _, total in told] == [4, 4, 4, 4, 6, 6, 6]


def test_what_was_missed_only_beside_a_change_that_went_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = scored(monkeypatch, NOT_ADDED_UP)
    left = put_back_in(tmp_path, scoring(0.7, **THREE))
    assert left.settings == settings_at({"knee_share": 0.6})
    assert [each.knob for each in left.worth] == ["knee_share"]
    assert [each.gain for each in left.worth] == pytest.approx([0.2])
    # No point twice, and the defaults' never.
    assert seen == ["bank knee_share", "knee_share pace", "pace", "knee_share"]


def test_what_is_left_is_worth_what_it_gains_beside_the_others_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = NOT_ADDED_UP | {"knee_share": 0.55, "pace": 0.68}
    scored(monkeypatch, scores)
    left = put_back_in(tmp_path, scoring(0.7, **THREE))
    assert left.settings == settings_at({"pace": 0.8, "knee_share": 0.6})
    assert [e.knob for e in left.worth] == ["pace", "knee_share"]
    assert [e.gain for e in left.worth] == pytest.approx([0.15, 0.02])
    assert [e.kept for e in left.worth] == pytest.approx([0.15, 0.02])


def test_a_point_that_a_trial_tried_is_not_simulated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scoring(0.7, **THREE)
    first = dict(found.trials[0].point)
    others = (
        Trial(2, "complete", first | {"knee_share": 0.6}, 0.7, (outcome(0.7),), None, 0),
        Trial(3, "failed", first | {"knee_share": 0.6, "bank": 0.5}, None, (), "nothing to do", 0),
        Trial(4, "failed", first | {"pace": 7.0}, None, (), "pace must be at most 1", 0),
        # Given up early: nobody knows the rest.
        Trial(5, "pruned", first | {"pace": 0.8}, 0.9, (outcome(0.9),), None, 0),
    )
    seen = scored(monkeypatch, NOT_ADDED_UP)
    left = put_back_in(tmp_path, replace(found, trials=found.trials + others))
    assert seen == ["knee_share pace", "pace"]
    assert left.settings == settings_at({"knee_share": 0.6})


def test_what_was_interrupted_goes_on_and_ends_as_if_it_had_never_been_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without pace nothing can be done beside the other two: that is remembered as well.
    scores = {name: value for name, value in NOT_ADDED_UP.items() if name != "bank knee_share"}
    found, folders = scoring(0.7, **THREE), [tmp_path / "whole", tmp_path / "parts"]
    at_fast_pace(monkeypatch)
    for folder in folders:
        folder.mkdir()
        with study(folder) as opened:
            search(task(crowd(10)), opened, 1)
    whole_seen = scored(monkeypatch, scores)
    whole = put_back_in(folders[0], found)
    parts_seen = []
    for num_more in (1, 2):
        seen = scored(monkeypatch, scores, interrupted_at=num_more)
        with pytest.raises(KeyboardInterrupt):
            put_back_in(folders[1], found)
        parts_seen += seen
    seen = scored(monkeypatch, scores)
    assert put_back_in(folders[1], found) == whole
    assert parts_seen + seen == whole_seen
    assert whole_seen == ["bank knee_share", "knee_share pace", "pace", "knee_share"]
    assert whole.settings == settings_at({"knee_share": 0.6})
    # Another best trial asks for nothing that is known.
    seen = scored(monkeypatch, {})
    other = put_back_in(folders[1], scoring(0.7, knee_share=0.6, pace=0.8))
    assert (other.settings, other.worth) == (whole.settings, whole.worth)
    assert seen == []


def test_a_search_that_goes_on_after_changes_were_put_back_is_the_same_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_fast_pace(monkeypatch)
    small, runs = task(crowd(10)), []
    for name, stops in (("whole", (24,)), ("parts", (21, 24))):
        folder = tmp_path / name
        folder.mkdir()
        for num_trials in stops:
            with study(folder) as opened:
                found = search(small, opened, num_trials)
                left = put_back(small, opened, found)
        assert len(found.trials) == 24
        runs.append(([(each.point, each.score) for each in found.trials], left.settings))
        with study(folder) as opened:
            assert opened.beside
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "damage",
    [
        {"outcomes": []},
        {"outcomes": [7]},
        {"point": {"pace": 0.8}},
        {"point": 7},
    ],
)
def test_what_was_put_back_and_is_damaged_is_told_when_the_study_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict[str, object]
) -> None:
    at_fast_pace(monkeypatch)
    small = task(crowd(10))
    with study(tmp_path) as opened:
        search(small, opened, 1)
        put_back(small, opened, scoring(0.7, pace=0.8, bank=0.5))
    file = tmp_path / "study"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if '"beside 0"' in line)
    entry = json.loads(lines[index])
    entry["user_attr"]["beside 0"] |= damage
    lines[index] = json.dumps(entry) + "\n"
    file.write_text("".join(lines), encoding="utf-8")
    with pytest.raises(StudyError, match=r"damaged: .*name another file"), study(tmp_path):
        pass


def test_the_only_change_is_compared_with_the_defaults_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = at_fast_pace(monkeypatch)
    left = put_back_in(tmp_path, found_at(pace=0.9))
    assert left.settings == settings_at({"pace": 0.9})
    assert [each.gain for each in left.worth] == pytest.approx([0.05])
    assert seen == []


def test_a_change_without_which_nothing_goes_stays_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_fast_pace(monkeypatch, must_bank=True)
    left = put_back_in(tmp_path, found_at(pace=0.8, bank=0.5))
    assert left.settings == settings_at({"pace": 0.8, "bank": 0.5})
    assert [each.knob for each in left.worth] == ["pace"]


def test_where_nothing_was_found_there_is_nothing_to_put_back(tmp_path: Path) -> None:
    found = found_at(pace=0.9)
    nothing = replace(found, best=found.trials[0], settings=DEFAULTS)
    assert put_back_in(tmp_path, nothing) is nothing


def test_the_first_round_moves_each_knob_alone_and_whatever_is_better_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_fast_pace(monkeypatch)
    small, names = task(crowd(10)), [knob.name for knob in KNOBS]
    told: list[tuple[int, float]] = []
    with study(tmp_path, small) as opened:
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
