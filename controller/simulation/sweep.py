"""A sweep: policies × loads × seeds, in worker processes; its results survive an interruption.

Owns the list of tasks, the results file and the search for a static budget. Must not print.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from controller.simulation.hardware import HardwareProfile
from controller.simulation.measures import measure
from controller.simulation.parts import simulate_in_parts
from controller.simulation.run import Progress, SimulationConfig
from controller.simulation.source import WorkloadSource
from controller.workload.arrivals import Workload

# 2: mean steps among the measures.
SWEEP_FORMAT: Final = 2
_COARSE_BUDGETS: Final = (64, 128, 256, 512, 1024, 2048)
_BUDGET_STEP: Final = 16


class ResultsError(ValueError):
    """A results file cannot be used; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class SweepTask:
    """One simulation of a sweep: a policy's name, a load relative to the workload's own, a seed."""

    policy: str
    load: float
    seed: int


@dataclass(frozen=True, slots=True)
class SweepRow:
    """What one task gave. `rate` is the offered rate in requests per second; `measures` are
    `Measures.to_json()`; `wall_s` is real time.
    """

    task: SweepTask
    rate: float
    measures: dict[str, Any]
    event_hash: str
    wall_s: float

    @property
    def attainment(self) -> float:
        """Share of offered requests that met every target."""
        value: float = self.measures["overall"]["attainment"]
        return value


@dataclass(frozen=True, slots=True)
class Scene:
    """What all tasks of a sweep share; can be sent to another process. Each simulation is cut into
    `num_parts` (`parts.py`).
    """

    source: WorkloadSource
    hardware: HardwareProfile
    config: SimulationConfig
    num_parts: int = 1

    def workload(self, load: float, seed: int) -> Workload:
        """Return the workload of a task."""
        return self.source.workload(load, seed)

    def run(self, task: SweepTask, progress: Progress | None = None) -> SweepRow:
        """Simulate one task. Raises what `WorkloadSource.workload` and `simulate` raise."""
        return self.run_with(1, task, progress)

    def run_with(self, workers: int, task: SweepTask, progress: Progress | None = None) -> SweepRow:
        """Do as `run` does, the parts of the simulation in so many processes."""
        result = simulate_in_parts(
            self.workload(task.load, task.seed),
            task.policy,
            self.hardware,
            replace(self.config, seed=task.seed),
            self.num_parts,
            progress,
            workers=workers,
        )
        measures = measure(result, self.hardware).to_json()
        return SweepRow(task, result.offered_rate, measures, result.event_hash, result.wall_s)

    def key(self, task: SweepTask) -> str:
        """Return a name for everything that the task's result depends on: a trace's bytes too."""
        parts = [
            SWEEP_FORMAT,
            self.source.to_json(),
            [_digest(path) for path in self.source.files],
            self.hardware.to_json(),
            asdict(replace(self.config, seed=task.seed)),
            asdict(task),
            *([self.num_parts] if self.num_parts > 1 else []),
        ]
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


TaskProgress = Callable[[int, int, str], None]
"""Called with (tasks done, tasks in all, what was done last)."""


def run_sweep_tasks(
    scene: Scene,
    tasks: Iterable[SweepTask],
    *,
    workers: int = 1,
    results: ResultsFile | None = None,
    progress: TaskProgress | None = None,
) -> list[SweepRow]:
    """Run the tasks that `results` does not hold yet and return all rows, in the tasks' order.

    More than one worker are processes of their own, started afresh. A task's failure ends the
    sweep; what was finished before is kept in `results`.
    """
    ordered = list(dict.fromkeys(tasks))
    keys = {task: scene.key(task) for task in ordered}
    rows = {
        task: row
        for task in ordered
        if results is not None and (row := results.get(keys[task])) is not None
    }
    left = [task for task in ordered if task not in rows]
    if progress is not None:
        progress(len(rows), len(ordered), "")
    for task, row in _run(scene, left, workers):
        rows[task] = row
        if results is not None:
            results.add(keys[task], row)
        if progress is not None:
            progress(len(rows), len(ordered), f"{task.policy} at {task.load:g}x")
    return [rows[task] for task in ordered]


def _run(
    scene: Scene, tasks: Sequence[SweepTask], workers: int
) -> Iterator[tuple[SweepTask, SweepRow]]:
    """Yield each task with its row as soon as it is done."""
    if workers <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, scene.run(task)
        return
    # Spawned, not forked: nothing of this process (threads, open files) leaks into a worker.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context)
    try:
        futures: dict[Future[SweepRow], SweepTask] = {
            pool.submit(scene.run, task): task for task in tasks
        }
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class ResultsFile:
    """Rows as JSON lines, appended as they come; reopening it continues where it ended.

    A last line that was cut off by an interruption is dropped. ResultsError names a line that is
    broken otherwise.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, SweepRow] = {}
        if not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                document = json.loads(line)
                self._rows[document["key"]] = _row_of(document)
            except (ValueError, KeyError, TypeError) as error:
                raise ResultsError(f"{path}: line {number} is no result: {error}") from error
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: str) -> SweepRow | None:
        """Return the row of that key, None if it is not there."""
        return self._rows.get(key)

    def add(self, key: str, row: SweepRow) -> None:
        """Append a row."""
        self._rows[key] = row
        document = {"key": key} | asdict(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(document, allow_nan=False) + "\n")


@dataclass(frozen=True, slots=True)
class BudgetSearch:
    """The best static budget of a family, and the score of every budget that was tried."""

    family: str
    best: int
    scores: dict[int, tuple[float, ...]]

    @property
    def policy(self) -> str:
        """The name of the best one."""
        return f"{self.family}-{self.best}"


def search_budget(
    family: str,
    score: Callable[[Sequence[str]], Sequence[tuple[float, ...]]],
    *,
    coarse: Sequence[int] = _COARSE_BUDGETS,
    rounds: int = 2,
) -> BudgetSearch:
    """Find the budget of `family` (`fcfs`, `edf`, `edf-shed`) with the highest score.

    `score` returns one tuple per policy name, compared in order; it is asked for all budgets of a
    round at once. After the coarse ones, each round tries the budgets half-way (by ratio) to the
    neighbours of the best so far, in steps of 16 tokens. Of equal scores the smaller budget wins:
    its steps are shorter. ValueError without a coarse budget.
    """
    if not coarse:
        raise ValueError("coarse must name at least one budget")
    scores: dict[int, tuple[float, ...]] = {}
    wanted = sorted(set(coarse))
    for round_no in range(rounds + 1):
        found = score([f"{family}-{budget}" for budget in wanted])
        scores.update(zip(wanted, found, strict=True))
        tried = sorted(scores)
        best = max(tried, key=lambda budget: (scores[budget], -budget))
        if round_no == rounds:
            break
        index = tried.index(best)
        around = {_between(best, tried[i]) for i in (index - 1, index + 1) if 0 <= i < len(tried)}
        wanted = sorted(around - set(tried))
        if not wanted:
            break
    return BudgetSearch(family, best, dict(sorted(scores.items())))


def _between(a: int, b: int) -> int:
    middle: int = round((a * b) ** 0.5 / _BUDGET_STEP) * _BUDGET_STEP
    return max(1, middle)


def _row_of(document: dict[str, Any]) -> SweepRow:
    task = document["task"]
    return SweepRow(
        SweepTask(str(task["policy"]), float(task["load"]), int(task["seed"])),
        float(document["rate"]),
        dict(document["measures"]),
        str(document["event_hash"]),
        float(document["wall_s"]),
    )


def _digest(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError:
        # Reading it as a trace says what is wrong with it.
        return ""
