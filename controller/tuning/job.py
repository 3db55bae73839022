"""`tune`: the search from trial 0, the shipped defaults, to settings that are judged on the rest.

Owns the order: try, put back what gains nothing, judge on the held-out part. Must not read a file
or a database, nor print.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from controller.simulation.run import SimulationError
from controller.tuning.effects import kept, moved_knobs
from controller.tuning.influence import Effect, by_gain
from controller.tuning.objective import Outcome, overstepped, run_scene, score
from controller.tuning.profile import Verdict
from controller.tuning.space import DEFAULTS, TunedSettings, settings_at
from controller.tuning.study import Study
from controller.tuning.task import TuningTask
from controller.tuning.trial import Trial, best_trial

Progress = Callable[[str, float, float], None]
"""Called with what is being done, how many simulations are done, and how many there are."""

# Scores that differ by less are the same: what is left of sums in another order.
_TIE: Final = 1e-9


class TuningError(ValueError):
    """Tuning cannot go on; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found. `best` is trial 0 where nothing was better than the shipped defaults.

    `is_interrupted` says that it was stopped before its last trial. `settings` are the best
    trial's, without those of its changes that `put_back` took back; `worth` is what each of the
    others gains beside all others that are left.
    """

    trials: tuple[Trial, ...]
    best: Trial
    settings: TunedSettings
    is_interrupted: bool
    worth: tuple[Effect, ...] = ()

    @property
    def has_found(self) -> bool:
        """Whether something was better than the defaults on the tuning part."""
        return self.best.number != 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The defaults and the settings that were found on the same held-out scenes, in order.

    `differences` are attainments by weight, after − before, scene by scene. `verdict` is `better`
    where their mean exceeds its standard error and no guard of the objective is overstepped,
    `worse` where a guard is or the mean is below minus its standard error, else `unclear`: so is
    a single scene without harm, whatever it shows.
    """

    before: tuple[Outcome, ...]
    after: tuple[Outcome, ...]

    @property
    def differences(self) -> tuple[float, ...]:
        """Attainment after − before, per scene."""
        pairs = zip(self.before, self.after, strict=True)
        return tuple(after.attainment - before.attainment for before, after in pairs)

    @property
    def harms(self) -> dict[str, float]:
        """Guards that the settings overstep, and by how much."""
        return overstepped(self.after, self.before)

    @property
    def verdict(self) -> Verdict:
        """Whether the settings are better on requests that did not choose them."""
        mean = statistics.fmean(self.differences)
        error = standard_error(self.differences)
        if self.harms or mean < -max(error, _TIE):
            return Verdict.WORSE
        return Verdict.BETTER if mean > max(error, _TIE) else Verdict.UNCLEAR


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; infinite for one value, whose spread nobody knows."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def search(
    task: TuningTask,
    study: Study,
    num_trials: int,
    progress: Progress | None = None,
    on_best: Callable[[Trial, float], None] | None = None,
) -> Search:
    """Try points until the study holds `num_trials`, the shipped defaults first.

    `on_best` is told each trial that is better than all before, and by how much it is better than
    the defaults.

    A KeyboardInterrupt ends the search after the last trial that was finished; what was done stays
    in the study, and the same call goes on from there; it is passed on if not even the defaults
    were finished. TuningError if they cannot be simulated, ValueError if no trial is asked for.
    """
    if num_trials < 1:
        raise ValueError(f"num_trials must be at least 1, got {num_trials}")
    is_interrupted = False
    scenes = task.tuning
    try:
        while len(trials := study.trials) < num_trials:
            _try_next(task, study, trials, _ahead(progress, trials, num_trials, len(scenes)))
            if trials and on_best is not None:
                best = best_trial(study.trials)
                if best.number == len(trials):
                    on_best(best, _gain(best, trials))
    except KeyboardInterrupt:
        if not study.trials:
            raise
        is_interrupted = True
    trials = study.trials
    best = best_trial(trials)
    if progress is not None:
        progress("searched", num_trials * len(scenes), num_trials * len(scenes))
    settings = settings_at(best.point) if best.number else DEFAULTS
    return Search(trials, best, settings, is_interrupted)


def put_back(
    task: TuningTask, study: Study, found: Search, progress: Progress | None = None
) -> Search:
    """Return what was found without the changes that gain nothing on the tuning part.

    One change after the other is made as shipped, and stays so where the score is no lower than the
    best so far; as long as one did, those that are left are tried again. So each of them has shown
    that it is missed, and by how much, beside the very others that are left; or nothing can be
    simulated without it.

    No point is simulated to its end twice. What is simulated is kept in `study`: after a
    KeyboardInterrupt the same call goes on.
    """
    first = found.trials[0]
    if not found.has_found:
        return found
    known = _Known(task, study, found.trials)
    point, top = dict(found.best.point), found.best.score or 0.0
    outcomes = found.best.outcomes
    missed: dict[str, tuple[Outcome, ...]] = {}
    num, num_done, is_over = len(task.tuning), 0, False
    # Every round but the last puts at least one change back.
    while not is_over:
        is_over, missed = True, {}
        names = moved_knobs(point, first.point)
        total = (num_done + len(names)) * num
        for name in names:
            without = point | {name: first.point[name]}
            tell = None
            if progress is not None:
                tell = _within(progress, f"without the change of {name}", num_done * num, total)
            others = known.outcomes(without, tell)
            num_done += 1
            if others is None:
                # The change is what makes the others possible.
                continue
            other = score(others, first.outcomes)
            if other >= top - _TIE:
                point, outcomes, top, is_over = without, others, max(top, other), False
            else:
                missed[name] = others
    if progress is not None:
        progress("put back", num_done * num, num_done * num)
    value = score(outcomes, first.outcomes)
    worth = [
        Effect(
            name,
            float(point[name]),
            gain=value - score(others, first.outcomes),
            kept=kept(outcomes) - kept(others),
            guards=tuple(overstepped(others, first.outcomes)),
        )
        for name, others in missed.items()
    ]
    return replace(found, settings=settings_at(point), worth=by_gain(worth))


def compare(
    task: TuningTask, settings: TunedSettings, progress: Progress | None = None
) -> Comparison:
    """Run the shipped defaults and `settings` on every held-out scene."""
    pairs = [(scene, tried) for scene in task.held_out for tried in (DEFAULTS, settings)]
    outcomes: list[Outcome] = []
    for done, (scene, tried) in enumerate(pairs):
        label = "judging on what was held out"
        tell = None if progress is None else _part(progress, label, done, len(pairs))
        same = tried == DEFAULTS and done % 2 == 1
        # The same settings on the same scene end the same way.
        outcomes.append(outcomes[-1] if same else run_scene(task, tried, scene, tell))
    if progress is not None:
        progress("judged", len(pairs), len(pairs))
    return Comparison(tuple(outcomes[::2]), tuple(outcomes[1::2]))


def _try_next(
    task: TuningTask, study: Study, trials: Sequence[Trial], progress: Progress | None
) -> None:
    point = study.ask()
    is_first = not trials
    outcomes: list[Outcome] = []
    defaults: Sequence[Outcome] = outcomes if is_first else trials[0].outcomes
    num = len(task.tuning)
    try:
        settings = DEFAULTS if is_first else settings_at(point)
        for index, scene in enumerate(task.tuning):
            tell = None if progress is None else _part(progress, "", index, num)
            outcomes.append(run_scene(task, settings, scene, tell))
            is_hopeful = study.report(score(outcomes, defaults), index + 1)
            if not is_first and not is_hopeful and index + 1 < num:
                study.prune(outcomes)
                return
    except (ValueError, SimulationError) as error:
        if is_first:
            raise TuningError(f"the shipped defaults cannot be simulated: {error}") from error
        study.fail(str(error))
        return
    study.complete(score(outcomes, defaults), outcomes)


class _Known:
    """What points did on the tuning part: of trials, of before, or simulated now and kept."""

    def __init__(self, task: TuningTask, study: Study, trials: Sequence[Trial]) -> None:
        self._task = task
        self._study = study
        self._known: dict[TunedSettings, tuple[Outcome, ...] | None] = {}
        # Of a trial that was given up early nobody knows the rest.
        ended = [each for each in trials[1:] if each.state != "pruned"]
        for point, outcomes in (*((t.point, t.outcomes or None) for t in ended), *study.beside):
            # A trial may have failed because its numbers are no settings.
            with contextlib.suppress(ValueError):
                self._known[settings_at(point)] = outcomes
        self._known[DEFAULTS] = trials[0].outcomes

    def outcomes(
        self, point: Mapping[str, float], progress: Progress | None
    ) -> tuple[Outcome, ...] | None:
        """Return what a point did, scene by scene; None if it cannot be simulated."""
        try:
            settings = settings_at(point)
        except ValueError:
            return None
        if settings not in self._known:
            self._known[settings] = outcomes = self._simulate(settings, progress)
            self._study.keep_beside(point, outcomes)
        return self._known[settings]

    def _simulate(
        self, settings: TunedSettings, progress: Progress | None
    ) -> tuple[Outcome, ...] | None:
        scenes = self._task.tuning
        outcomes = []
        try:
            for index, scene in enumerate(scenes):
                tell = None if progress is None else _part(progress, "", index, len(scenes))
                outcomes.append(run_scene(self._task, settings, scene, tell))
        except (ValueError, SimulationError):
            return None
        return tuple(outcomes)


def _gain(trial: Trial, trials: Sequence[Trial]) -> float:
    """Return by how much a trial's score exceeds that of the shipped defaults."""
    return (trial.score or 0.0) - (trials[0].score or 0.0)


def _ahead(
    progress: Progress | None, trials: Sequence[Trial], num_trials: int, num_scenes: int
) -> Progress | None:
    """Return a progress of one trial's scenes within the whole search."""
    if progress is None:
        return None
    done = len(trials)
    best = f", best {_gain(best_trial(trials), trials) * 100:+.2f} points" if trials else ""
    label = f"trial {done + 1} of {num_trials}{best}"
    return _within(progress, label, done * num_scenes, num_trials * num_scenes)


def _within(progress: Progress, label: str, done: int, total: int) -> Progress:
    """Return a progress of a few simulations after `done` others."""
    return lambda _, part, __: progress(label, done + part, total)


def _part(progress: Progress, label: str, done: int, total: int) -> Callable[[float], None]:
    return lambda share: progress(label, done + share, total)
