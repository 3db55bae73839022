"""`Study`: the trials of one search, kept in a journal file of their own so that it can go on.

Owns Optuna: which trial is given up early, what is remembered, and which point is tried next where
`controller.tuning.proposals` names none. Must not simulate, and must not touch the telemetry
database.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from controller.tuning.objective import Outcome
from controller.tuning.proposals import propose
from controller.tuning.space import Knob
from controller.tuning.trial import Trial
from store.errors import DatabaseBusyError, StoreError
from store.lockfile import WriterLock

STUDY_NAME: Final = "paceline"
_JOURNAL_START: Final = b'{"op_code":'
_FINGERPRINT: Final = "fingerprint"
_OUTCOMES: Final = "outcomes"
_REASON: Final = "reason"
_POINT: Final = "point"
# Begins the names of what was simulated beside the trials; a number follows.
_BESIDE: Final = "beside "
# Trials before one is given up.
_NUM_UNPRUNED: Final = 5
_STATES: Final = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


Beside = tuple[dict[str, float], tuple[Outcome, ...] | None]
"""A point that is no trial, and its outcomes; None where it cannot be simulated."""


class StudyError(ValueError):
    """A study cannot be used or continued; the message says why and what to do."""


class Study:
    """One search over `knobs`, open until `close()` or the end of a `with` block.

    The same knobs, seed and scores make the same trials, whether the search was interrupted or not:
    what is tried next depends on the seed, the number of the trial and what was tried before.
    """

    def __init__(
        self,
        study: optuna.Study,
        knobs: Sequence[Knob],
        first: Mapping[str, float],
        seed: int,
        lock: WriterLock,
    ) -> None:
        self._study = study
        self._knobs = tuple(knobs)
        self._first = dict(first)
        self._seed = seed
        self._lock = lock
        self._running: optuna.Trial | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        knobs: Sequence[Knob],
        first: Mapping[str, float],
        fingerprint: Mapping[str, str],
        seed: int,
    ) -> Study:
        """Begin a study in `path`, or go on with the one that is there; trial 0 is `first`.

        StudyError if it was made for another task (`fingerprint` names the part that differs), for
        other knobs or another seed, if it is no study or a damaged one, or if somebody else is at
        it. A last line that a killed process left half written is cut off.
        """
        if not path.parent.is_dir():
            raise StudyError(f"--study {path}: no directory {path.parent}")
        lock = WriterLock(path)
        try:
            lock.acquire()
        except DatabaseBusyError as error:
            raise StudyError(f"--study {path}: another process tunes into it") from error
        except StoreError as error:
            raise StudyError(f"--study {path}: {error}") from error
        try:
            _mend(path)
            study = _load(path)
            wanted = {
                **fingerprint,
                "knobs": ", ".join(f"{k.name} {k.low:g}..{k.high:g}" for k in knobs),
                "seed": str(seed),
            }
            _check_fingerprint(study, wanted, path)
            opened = cls(study, knobs, first, seed, lock)
            opened._check_trials(path)
            opened._give_up_unfinished()
        except BaseException:
            lock.release()
            raise
        return opened

    def close(self) -> None:
        """Let others at the file; a trial that was not ended is forgotten."""
        self._give_up_unfinished()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Trials that have ended, in their order; one that was interrupted never was."""
        ended = [each for each in self._study.get_trials(deepcopy=False) if _has_ended(each)]
        return tuple(_trial(number, each) for number, each in enumerate(ended))

    @property
    def beside(self) -> tuple[Beside, ...]:
        """What was simulated beside the trials, in its order."""
        attributes = self._study.user_attrs
        found = [value for name, value in attributes.items() if name.startswith(_BESIDE)]
        return tuple(_beside(value) for value in found)

    def keep_beside(self, point: Mapping[str, float], outcomes: Sequence[Outcome] | None) -> None:
        """Remember what came of a point that is no trial; None if it cannot be simulated.

        No later trial depends on it.
        """
        ended = None if outcomes is None else [each.to_json() for each in outcomes]
        name = f"{_BESIDE}{len(self.beside)}"
        self._study.set_user_attr(name, {_POINT: dict(point), _OUTCOMES: ended})

    def ask(self) -> dict[str, float]:
        """Return the next point to try; it must be ended by `complete`, `prune` or `fail`."""
        trials = self.trials
        number = len(trials)
        # A stream of its own for every trial: what it draws depends on nothing but the seed, the
        # number and the trials before, so that a study that goes on is the one that never stopped.
        stream = np.random.SeedSequence([self._seed, number])
        # A process that was killed right here may have left this very point.
        if not self._study.get_trials(False, (TrialState.WAITING,)):
            rng = np.random.Generator(np.random.PCG64(stream))
            point = propose(self._knobs, self._first, trials, rng)
            if point is not None:
                self._study.enqueue_trial(point)
        self._study.sampler = optuna.samplers.TPESampler(
            seed=int(stream.generate_state(1)[0]),
            n_startup_trials=len(self._knobs),
            constant_liar=False,
        )
        self._running = self._study.ask({k.name: _distribution(k) for k in self._knobs})
        return dict(self._running.params)

    def report(self, score: float, num_scenes: int) -> bool:
        """Tell the score after some of the scenes; whether the trial is worth going on with.

        It is not if it is below the median of what other trials had after as many scenes.
        """
        trial = self._open_trial()
        trial.report(score, num_scenes)
        return not trial.should_prune()

    def complete(self, score: float, outcomes: Sequence[Outcome]) -> None:
        """End the trial with its score."""
        self._end(TrialState.COMPLETE, outcomes, score)

    def prune(self, outcomes: Sequence[Outcome]) -> None:
        """Give the trial up, with the score that it was told last."""
        self._end(TrialState.PRUNED, outcomes)

    def fail(self, reason: str) -> None:
        """End a trial whose settings cannot be tried."""
        self._open_trial().set_user_attr(_REASON, reason)
        self._end(TrialState.FAIL, ())

    def _end(
        self, state: TrialState, outcomes: Sequence[Outcome], score: float | None = None
    ) -> None:
        trial = self._open_trial()
        trial.set_user_attr(_OUTCOMES, [each.to_json() for each in outcomes])
        self._study.tell(trial, score, state)
        self._running = None

    def _open_trial(self) -> optuna.Trial:
        if self._running is None:
            raise RuntimeError("no trial is running: ask first")
        return self._running

    def _check_trials(self, path: Path) -> None:
        """StudyError for trials that no search of ours can have written."""
        try:
            trials, beside = self.trials, self.beside
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StudyError(f"--study {path}: damaged: {error}; name another file") from error
        # What a later trial is judged by is what the first one did on the same scenes.
        num = len(trials[0].outcomes) if trials else 0
        is_short = any(len(each.outcomes) > num for each in trials)
        if is_short or any(known is not None and len(known) != num for _, known in beside):
            raise StudyError(f"--study {path}: damaged: outcomes are missing; name another file")
        names = {knob.name for knob in self._knobs}
        if any(point.keys() != names for point, _ in beside):
            raise StudyError(f"--study {path}: damaged: a point lacks knobs; name another file")

    def _give_up_unfinished(self) -> None:
        """Fail what a killed process left running, so that no sampler waits for it."""
        self._running = None
        for each in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(each.number, state=TrialState.FAIL)


class _AlreadyLocked(JournalFileOpenLock):
    """The study's lock is held from opening to closing, and its file has the name of Optuna's.

    Optuna's own outlives a killed process and then costs half a minute.
    """

    def acquire(self) -> bool:
        """Say that it is held."""
        return True

    def release(self) -> None:
        """Keep it."""


def _mend(path: Path) -> None:
    """Cut off the end of a line that was never written to its end; the lock is held.

    Optuna would append to it, and the line of both would be lost, with all that depends on it. A
    file that does not begin as a journal is left as it is.
    """
    if not path.is_file():
        return
    try:
        with path.open("r+b") as file:
            text = file.read()
            length = text.rfind(b"\n") + 1
            if length == len(text):
                return
            if not text.startswith(_JOURNAL_START):
                raise StudyError(f"--study {path}: not a study; name another file")
            file.truncate(length)
    except OSError as error:
        raise StudyError(f"--study {path}: {error.strerror}") from error


def _load(path: Path) -> optuna.Study:
    with _quiet():
        try:
            storage = JournalStorage(JournalFileBackend(str(path), _AlreadyLocked(str(path))))
            return optuna.create_study(
                storage=storage,
                study_name=STUDY_NAME,
                direction="maximize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(n_startup_trials=_NUM_UNPRUNED),
            )
        except OSError as error:
            raise StudyError(f"--study {path}: {error.strerror}") from error
        # Whatever a damaged journal makes Optuna say, it is the file's fault.
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StudyError(f"--study {path}: not a study: {error}; name another file") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's messages off the terminal, and the host program's logging as it was."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _check_fingerprint(study: optuna.Study, wanted: Mapping[str, str], path: Path) -> None:
    known = study.user_attrs.get(_FINGERPRINT)
    if known is None:
        study.set_user_attr(_FINGERPRINT, dict(wanted))
        return
    for name, value in wanted.items():
        if known.get(name) != value:
            raise StudyError(
                f"--study {path}: its {name} is {known.get(name, 'unknown')}, now it would be"
                f" {value}; name another file, or repeat the arguments it was begun with"
            )


def _distribution(knob: Knob) -> BaseDistribution:
    if knob.is_integer:
        return IntDistribution(int(knob.low), int(knob.high), log=knob.is_log)
    return FloatDistribution(knob.low, knob.high, log=knob.is_log)


def _beside(value: Mapping[str, Any]) -> Beside:
    outcomes = value[_OUTCOMES]
    known = None if outcomes is None else tuple(Outcome.from_json(each) for each in outcomes)
    return dict(value[_POINT]), known


def _has_ended(trial: FrozenTrial) -> bool:
    if trial.state is TrialState.FAIL:
        return _REASON in trial.user_attrs
    return trial.state in _STATES


def _trial(number: int, trial: FrozenTrial) -> Trial:
    score = trial.value
    if trial.state is TrialState.PRUNED:
        score = trial.intermediate_values[max(trial.intermediate_values)]
    ended_at = trial.datetime_complete
    return Trial(
        number=number,
        state=_STATES[trial.state],
        point=dict(trial.params),
        score=score,
        outcomes=tuple(Outcome.from_json(each) for each in trial.user_attrs.get(_OUTCOMES, ())),
        reason=trial.user_attrs.get(_REASON),
        ended_at_ms=0 if ended_at is None else round(ended_at.timestamp() * 1000),
    )
