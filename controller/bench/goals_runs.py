"""`Runs`: the simulations of the goals, each at most once, in processes that stay.

Owns processes, the results file and what is told of progress. Must not know what is measured.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, TypeVar

from controller.simulation.run import SimulationError
from controller.simulation.sweep import ResultsFile, Scene, SweepRow, SweepTask

T = TypeVar("T")
# Threads only wait for processes: enough of them that no process idles while one decides.
_THREADS_PER_WORKER: Final = 3
# Between the key of a run and the measure for whose sake it was run once more.
_AGAIN: Final = "+"

Listener = Callable[[str, int, int], None]
"""Called with (what was done last, runs done, runs asked for so far)."""


class NotMeasuredError(Exception):
    """A part of the study has no result: it may not be simulated, or there is nothing to run."""


class Missing(str):
    """Stands for a part of the study that there is no result of; the text says why."""

    __slots__ = ()


class Runs:
    """Answers for tasks from `results`, simulating what is not there.

    `is_readonly`: nothing is simulated, NotMeasuredError instead. `policy_rows` keeps what was
    answered, by policy, for measures over all runs; `num_absent` counts what was asked for in vain.
    A context: leaving it ends the processes.
    """

    def __init__(
        self,
        results: ResultsFile,
        *,
        workers: int = 1,
        is_readonly: bool = False,
        listener: Listener | None = None,
    ) -> None:
        self._results = results
        self._workers = workers
        self._is_readonly = is_readonly
        self._listener = listener
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[SweepRow]] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._asked: set[str] = set()
        self._told: set[str] = set()
        self.policy_rows: dict[str, dict[str, SweepRow]] = {}
        self.num_done = 0
        self.num_simulated = 0
        self.num_absent = 0

    def __enter__(self) -> Runs:
        if self._workers > 1 and not self._is_readonly:
            # Spawned, not forked: nothing of this process leaks into a worker.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def rows(
        self,
        scene: Scene,
        tasks: Sequence[SweepTask],
        label: str = "",
        *,
        needed: Sequence[str] = (),
    ) -> list[SweepRow]:
        """Return the rows of the tasks, in order; `needed` names measures that they must have, one
        within another with a dot between.

        Raises what `Scene.run` raises.
        """
        keys = [self._key(scene, task, needed) for task in tasks]
        with self._lock:
            self._asked.update(keys)
        waiting = [self._start(scene, task, key) for task, key in zip(tasks, keys, strict=True)]
        found = []
        for task, key, future in zip(tasks, keys, waiting, strict=True):
            row = scene.run(task) if future is None else future.result()
            self._keep(task, key, row, label)
            found.append(row)
        return found

    def _key(self, scene: Scene, task: SweepTask, needed: Sequence[str]) -> str:
        key = scene.key(task)
        # A row that was kept before all of that was measured: others count on it as it is, so it is
        # run once more beside it.
        while (row := self._results.get(key)) is not None and not all(
            _has(row.measures, name) for name in needed
        ):
            key = f"{key}{_AGAIN}{needed[0]}"
        return key

    def together(self, jobs: Sequence[Callable[[], T]]) -> list[T | Missing]:
        """Run jobs that ask for rows at the same time; a job that cannot go on is a `Missing`."""
        if self._pool is None:
            return [_attempt(job) for job in jobs]
        with ThreadPoolExecutor(self._workers * _THREADS_PER_WORKER) as threads:
            futures = [threads.submit(_attempt, job) for job in jobs]
            try:
                return [future.result() for future in futures]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self._pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _start(self, scene: Scene, task: SweepTask, key: str) -> Future[SweepRow] | None:
        """Return where the row will be; None if it is to be simulated here."""
        with self._lock:
            row = self._results.get(key)
            if row is not None:
                done: Future[SweepRow] = Future()
                done.set_result(row)
                return done
            if self._is_readonly:
                self.num_absent += 1
                raise NotMeasuredError(f"{task.policy} at {task.load:.3g} times its rate")
            if self._pool is None:
                return None
            if key not in self._under_way:
                self._under_way[key] = self._pool.submit(scene.run, task)
            return self._under_way[key]

    def _keep(self, task: SweepTask, key: str, row: SweepRow, label: str) -> None:
        with self._lock:
            if self._results.get(key) is None:
                self._results.add(key, row)
                self.num_simulated += 1
            self._under_way.pop(key, None)
            # A run that is there once more counts as one.
            self.policy_rows.setdefault(task.policy, {}).setdefault(key.partition(_AGAIN)[0], row)
            if key not in self._told:
                self._told.add(key)
                self.num_done += 1
                if self._listener is not None:
                    self._listener(label or task.policy, self.num_done, len(self._asked))


def _has(measures: Mapping[str, Any], name: str) -> bool:
    found: Any = measures
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    return True


def _attempt(job: Callable[[], T]) -> T | Missing:
    try:
        return job()
    except NotMeasuredError as error:
        return Missing(f"not measured: {error}")
    except SimulationError as error:
        return Missing(f"failed: {error}")
