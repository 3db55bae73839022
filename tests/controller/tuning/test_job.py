"""The search: trial 0 first, the same trials every time, interruptions that lose nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controller.simulation.run import SimulationError
from controller.tuning import job
from controller.tuning.job import Comparison, TuningError, compare, search
from controller.tuning.objective import Outcome, run_scene
from controller.tuning.profile import Verdict
from controller.tuning.space import DEFAULTS, TunedSettings, knobs_named, point_of, settings_at
from controller.tuning.study import Study, StudyError
from controller.tuning.task import TuningTask
from controller.tuning.trial import Trial
from tests.controller.tuning.tuning_tasks import crowd, task

SEATS = knobs_named(["max_running"])
CROWDED = task(
    crowd(800, 0.0005, output=20),
    held_out=(crowd(760, 0.0005, output=20), crowd(840, 0.0005, output=20)),
)
"""More chats at once than the default has seats for, on a machine that could hold them."""


@contextmanager
def study(
    path: Path, tried: TuningTask = CROWDED, seed: int = 0, names: Sequence[str] = ("max_running",)
) -> Iterator[Study]:
    knobs = knobs_named(names)
    with Study.open(
        path / "study", knobs, point_of(DEFAULTS, knobs), tried.fingerprint(), seed
    ) as opened:
        yield opened


def points(trials: Sequence[Trial]) -> list[tuple[str, dict[str, float], float | None]]:
    return [(each.state, dict(each.point), each.score) for each in trials]


def test_something_better_is_found_where_there_is_something_and_holds_on_what_was_held_out(
    tmp_path: Path,
) -> None:
    with study(tmp_path) as opened:
        found = search(CROWDED, opened, 6)
    assert found.trials[0].point == {"max_running": 128}
    assert found.has_found
    assert not found.is_interrupted
    assert found.settings.max_num_seqs > 128
    assert found.settings == settings_at(found.best.point)
    judged = compare(CROWDED, found.settings)
    assert judged.verdict is Verdict.BETTER
    assert min(judged.differences) > 0.05


def test_a_study_that_goes_on_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    small = task(crowd(240, 0.00025, output=12))
    names = ("pace", "knee_share", "max_running")
    runs = []
    for name, stops in (("whole", (6,)), ("parts", (1, 4, 6))):
        folder = tmp_path / name
        folder.mkdir()
        for num_trials in stops:
            with study(folder, small, names=names) as opened:
                found = search(small, opened, num_trials)
                assert len(found.trials) == num_trials
        runs.append(points(found.trials))
    assert runs[0] == runs[1]
    with study(tmp_path, small, seed=1, names=names) as opened:
        assert points(search(small, opened, 3).trials)[1:] != runs[0][1:3]


def interrupting(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Let the simulation numbered `after` (from 0) raise, once."""
    count = iter(range(1000))

    def run(tried: TuningTask, settings: TunedSettings, *rest: object) -> Outcome:
        if next(count) == after:
            raise error
        return run_scene(tried, settings, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(job, "run_scene", run)


def test_an_interruption_keeps_what_is_done_and_the_same_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = task(crowd(30), crowd(31))
    with study(tmp_path, small) as opened, monkeypatch.context() as patched:
        # The second scene of the third trial.
        interrupting(patched, 5, KeyboardInterrupt())
        found = search(small, opened, 5)
    assert found.is_interrupted
    assert len(found.trials) == 2
    with study(tmp_path, small) as opened:
        resumed = search(small, opened, 5)
    assert not resumed.is_interrupted
    assert points(resumed.trials)[:2] == points(found.trials)
    other = tmp_path / "never stopped"
    other.mkdir()
    with study(other, small) as opened:
        assert points(search(small, opened, 5).trials) == points(resumed.trials)


def test_an_interruption_of_the_first_trial_leaves_the_defaults_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = task(crowd(10))
    with study(tmp_path, small) as opened, monkeypatch.context() as patched:
        interrupting(patched, 0, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            search(small, opened, 2)
    with study(tmp_path, small) as opened:
        assert search(small, opened, 2).trials[0].point == {"max_running": 128}
        with pytest.raises(ValueError, match="num_trials"):
            search(small, opened, 0)


def test_settings_that_cannot_be_simulated_fail_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = task(crowd(10))
    with study(tmp_path, small) as opened, monkeypatch.context() as patched:
        interrupting(patched, 2, SimulationError("no work for anybody"))
        trials = search(small, opened, 4).trials
    assert [each.state for each in trials] == ["complete", "complete", "failed", "complete"]
    assert (trials[2].score, trials[2].reason) == (None, "no work for anybody")
    with study(tmp_path, small) as opened:
        assert opened.trials == trials


def test_defaults_that_cannot_be_simulated_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = task(crowd(10))
    with study(tmp_path, small) as opened, monkeypatch.context() as patched:
        interrupting(patched, 0, ValueError("no such class"))
        with pytest.raises(TuningError, match="shipped defaults cannot be simulated: no such"):
            search(small, opened, 4)


def test_hopeless_trials_are_given_up_early_and_never_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = task(crowd(10), crowd(11), crowd(12))
    scenes = []

    def run(tried: TuningTask, settings: TunedSettings, *rest: object) -> Outcome:
        num_running = settings.planner.max_running or settings.max_num_seqs
        scenes.append(num_running)
        value = min(num_running / 256, 1.0)
        return Outcome(value, {}, {}, 1.0, None, None, None)

    monkeypatch.setattr(job, "run_scene", run)
    with study(tmp_path, small) as opened:
        found = search(small, opened, 12)
    pruned = [each for each in found.trials if each.state == "pruned"]
    assert pruned
    assert all(0 < len(each.outcomes) < 3 and each.score is not None for each in pruned)
    assert len(scenes) == sum(len(each.outcomes) for each in found.trials)
    assert found.best.score == max(each.score or 0.0 for each in found.trials)
    assert found.best.state == "complete"


def test_where_nothing_is_better_the_defaults_win(tmp_path: Path) -> None:
    easy = task(crowd(10, 0.2))
    with study(tmp_path, easy, names=("pace", "bank")) as opened:
        found = search(easy, opened, 3)
    assert {each.score for each in found.trials} == {1.0}
    assert not found.has_found
    assert found.settings == DEFAULTS
    assert compare(easy, found.settings).verdict is Verdict.UNCLEAR


def test_progress_rises_to_all_simulations(tmp_path: Path) -> None:
    small = task(crowd(10), crowd(11))
    told: list[tuple[str, float, float]] = []
    with study(tmp_path, small) as opened:
        found = search(small, opened, 3, lambda *what: told.append(what))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1] == ("searched", 6, 6)
    assert told[0][0] == "trial 1 of 3"
    assert any("trial 3 of 3, best +0.00 points" in label for label, _, _ in told)
    told.clear()
    compare(small, found.settings, lambda *what: told.append(what))
    assert told[-1] == ("judged", 4, 4)


def outcome(attainment: float, gap_s: float = 0.1) -> Outcome:
    return Outcome(attainment, {"a": attainment}, {"a": 1000}, 1.0, gap_s, None, None)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([0.5, 0.6, 0.7], [0.6, 0.7, 0.8], Verdict.BETTER),
        ([0.5, 0.6, 0.7], [0.9, 0.3, 0.7], Verdict.UNCLEAR),
        ([0.5, 0.6, 0.7], [0.5, 0.6, 0.7], Verdict.UNCLEAR),
        ([0.5, 0.6, 0.7], [0.4, 0.5, 0.6], Verdict.WORSE),
        # Nobody knows the spread of a single scene.
        ([0.5], [0.9], Verdict.UNCLEAR),
        ([0.5], [0.495], Verdict.UNCLEAR),
    ],
)
def test_the_verdict_weighs_the_mean_against_its_error(
    before: list[float], after: list[float], verdict: Verdict
) -> None:
    compared = Comparison(tuple(map(outcome, before)), tuple(map(outcome, after)))
    assert compared.verdict is verdict


def test_a_harm_makes_it_worse_whatever_was_gained() -> None:
    compared = Comparison((outcome(0.5, 0.1),), (outcome(0.9, 0.4),))
    assert compared.harms == {"longest gap": 1.0}
    assert compared.verdict is Verdict.WORSE


def test_a_study_is_for_one_task_one_seed_and_one_process(tmp_path: Path) -> None:
    small = task(crowd(10))
    with (
        study(tmp_path, small),
        pytest.raises(StudyError, match="another process tunes"),
        study(tmp_path, small),
    ):
        pass
    for changes, part in (
        ({"tried": replace(small, max_tokens=7)}, "max_tokens is null, now it would be 7"),
        ({"seed": 1}, "seed is 0, now it would be 1"),
        ({"names": ("pace",)}, "knobs is .*name another file"),
    ):
        arguments = {"tried": small, **changes}
        with (
            pytest.raises(StudyError, match=f"its {part}"),
            study(tmp_path, **arguments),  # type: ignore[arg-type]
        ):
            pass
    with study(tmp_path, small) as opened:
        assert opened.trials == ()


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study").write_text("dear diary\n")
    with pytest.raises(StudyError, match="not a study"), study(tmp_path):
        pass
    with pytest.raises(StudyError, match="no directory"), study(tmp_path / "nowhere"):
        pass


def test_a_line_that_a_killed_process_left_half_written_costs_that_line_alone(
    tmp_path: Path,
) -> None:
    small = task(crowd(10))
    with study(tmp_path, small) as opened:
        search(small, opened, 3)
    file = tmp_path / "study"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    # The line in which trial 2 ended; trials 0 and 1 stand before it.
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    for num_trials in (3, 4, 5):
        with study(tmp_path, small) as opened:
            assert len(opened.trials) == num_trials - 1
            search(small, opened, num_trials)
    file.write_bytes(whole[:30])
    with study(tmp_path, small) as opened:
        assert opened.trials == ()


@pytest.mark.parametrize("words", [b"dear diary", b"\n\ndear diary", b"[1, 2"])
def test_a_file_that_is_no_study_is_left_as_it_is(tmp_path: Path, words: bytes) -> None:
    file = tmp_path / "study"
    file.write_bytes(words)
    with pytest.raises(StudyError, match="not a study"), study(tmp_path):
        pass
    assert file.read_bytes() == words


@pytest.mark.parametrize(
    "outcomes",
    [
        '[{"attainment": 1.0}]', "[7]", "7", '"text"', "[]",
        '[{"attainment": "1", "attainment_by_class": {}, "num_offered": {},'
        ' "useful_tokens_per_s": 1.0, "gap_p99_s": null, "ttft_p99_s": null, "tpot_p99_s": null}]',
        '[{"attainment": 1.0, "attainment_by_class": [], "num_offered": {},'
        ' "useful_tokens_per_s": 1.0, "gap_p99_s": null, "ttft_p99_s": null, "tpot_p99_s": null}]',
    ],
)  # fmt: skip
def test_outcomes_that_are_damaged_are_told_when_the_study_is_opened(
    tmp_path: Path, outcomes: str
) -> None:
    small = task(crowd(10))
    with study(tmp_path, small) as opened:
        search(small, opened, 2)
    file = tmp_path / "study"
    lines = file.read_text().splitlines(keepends=True)
    first = next(index for index, line in enumerate(lines) if '"outcomes"' in line)
    entry = json.loads(lines[first])
    entry["user_attr"]["outcomes"] = json.loads(outcomes)
    lines[first] = json.dumps(entry) + "\n"
    file.write_text("".join(lines))
    with (
        pytest.raises(StudyError, match=r"damaged: .*name another file"),
        study(tmp_path, small),
    ):
        pass


def test_a_process_that_was_killed_leaves_nothing_that_is_waited_for(tmp_path: Path) -> None:
    small = task(crowd(10))
    expected = tmp_path / "never stopped"
    expected.mkdir()
    with study(expected, small) as opened:
        whole = points(search(small, opened, 3).trials)
    with study(tmp_path, small) as opened:
        search(small, opened, 1)
        # As if killed between two lines, and in the middle of a trial.
        opened._study.enqueue_trial({"max_running": whole[1][1]["max_running"]})
        opened._lock.release()
    with study(tmp_path, small) as opened:
        assert len(opened.trials) == 1
        opened.ask()
        opened._lock.release()
    with study(tmp_path, small) as opened:
        assert points(search(small, opened, 3).trials) == whole
