"""A stored run as a task: its arrivals, its promises, and the machine that its cost model learnt.

Owns what is replayed, and what had to be assumed because nobody wrote it down. Must not search.

Not in the database, and so assumed: how long the answers would have been that were refused or
broken off (drawn from those of the same class that ended by themselves), and which prompts begin
alike (none do).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from controller.config import DEMO_MODEL
from controller.policy.slo import OnInfeasible, Slo, SloClass
from controller.runtime.tuned_for import TunedFor
from controller.simulation.fitting import profile_of_snapshot
from controller.simulation.hardware import HardwareProfile
from controller.simulation.run import engine_for
from controller.tuning.task import Scene, TuningTask, cut_in_time
from controller.workload.arrivals import Arrival, Workload, sorted_workload
from controller.workload.draws import rng_for
from store.queries import JsonRow, TelemetryReader

LATEST: Final = "latest"
_ENDED: Final = frozenset({"stop", "length"})
_PAGE: Final = 1000


class ReplayError(ValueError):
    """A stored run cannot be replayed; the message says what is missing."""


class RunRows(NamedTuple):
    """What a database holds of one run: its row, its requests by arrival, its KV pool and model.

    `key` and `document` are the cost model's (None without one), `num_blocks` the pool's.
    """

    run: JsonRow
    requests: tuple[JsonRow, ...]
    num_blocks: int | None
    key: Mapping[str, Any] | None
    document: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """A task, the run's id, and whom it belongs to (named like the profile to be)."""

    task: TuningTask
    run_id: str
    tuned_for: TunedFor


def read_run(reader: TelemetryReader, run_id: str, max_requests: int | None = None) -> RunRows:
    """Read a run (`latest` is the newest that has requests), its first `max_requests` at most.

    ReplayError if there is none, or nobody was served in it; StoreError from the reader.
    """
    runs = reader.runs(limit=_PAGE)
    if run_id != LATEST:
        runs = tuple(run for run in runs if run["run_id"] == run_id)
    for run in runs:
        requests = _requests(reader, run["run_id"])
        if requests:
            break
    else:
        what = "no run with requests" if run_id == LATEST else f"no requests of a run {run_id!r}"
        raise ReplayError(f"{what} in the database")
    steps = reader.steps(run_id=run["run_id"], limit=1).rows
    # This run's own: under the same key another run may have stored a later one.
    snapshot = reader.newest_model(run["run_id"])
    return RunRows(
        run,
        requests[:max_requests],
        steps[0]["num_blocks_total"] if steps else None,
        None if snapshot is None else snapshot["key"],
        None if snapshot is None else snapshot["document"],
    )


def task_of_run(
    rows: RunRows,
    name: str,
    *,
    hardware: HardwareProfile | None = None,
    seed: int = 0,
    num_seeds: int = 3,
    num_held_out_seeds: int = 5,
    held_out_share: float = 0.4,
) -> ReplayedRun:
    """Return the task of tuning profile `name` for the server that wrote `rows`.

    The last `held_out_share` of the time is held out; seeds draw the machine's noise. `hardware`
    replaces the machine that the run's cost model learnt. ReplayError says what is missing.
    """
    run = rows.run
    if hardware is None:
        if rows.document is None:
            raise ReplayError(
                f"run {run['run_id']} has stored no cost model: name a machine with --hardware"
            )
        hardware = profile_of_snapshot(rows.document)
    classes, names = _classes(rows)
    workload = _workload(rows, names)
    first, rest = cut_in_time(workload, held_out_share)
    held_out = range(seed + num_seeds, seed + num_seeds + num_held_out_seeds)
    task = TuningTask(
        name=workload.name,
        hardware=hardware,
        engine=engine_for(hardware, **_limits(rows)),
        classes=classes,
        default_class=classes[0].name,
        tuning=tuple(Scene(first, each) for each in range(seed, seed + num_seeds)),
        held_out=tuple(Scene(rest, each) for each in held_out),
        max_tokens=int(statistics.median_high(row["max_tokens"] for row in rows.requests)),
    )
    dtype = None if rows.key is None else rows.key.get("dtype")
    source = (run["settings"] or {}).get("model")
    owner = TunedFor(name, run["model"], run["device"], dtype, run["attention_backend"], source)
    return ReplayedRun(task, run["run_id"], owner)


def _requests(reader: TelemetryReader, run_id: str) -> tuple[JsonRow, ...]:
    found: list[JsonRow] = []
    cursor = None
    while True:
        page = reader.requests(run_id=run_id, limit=_PAGE, cursor=cursor)
        found += page.rows
        cursor = page.next_cursor
        if cursor is None:
            return tuple(sorted(found, key=lambda row: (row["arrived_clock_s"], row["request_id"])))


def _limits(rows: RunRows) -> dict[str, int | bool]:
    """Return the engine's limits as far as the run tells them."""
    settings = rows.run["settings"] or {}
    limits = {
        # A knob: replaced by what is tried, and below any budget until then.
        "max_num_seqs": 1,
        "block_size": None if rows.key is None else rows.key.get("block_size"),
        "num_blocks": rows.num_blocks,
        "max_num_batched_tokens": settings.get("max_num_batched_tokens"),
        "max_waiting_requests": settings.get("max_waiting_requests"),
        "max_model_len": settings.get("max_model_len"),
        "is_prefix_cache_enabled": settings.get("is_prefix_caching_enabled"),
    }
    return {name: value for name, value in limits.items() if value is not None}


def _classes(rows: RunRows) -> tuple[tuple[SloClass, ...], list[str]]:
    """Return a class per name and targets, and each request's class.

    Targets of a request's own make a class of their own beside the one that it named.
    """
    settings = (rows.run["settings"] or {}).get("slo_class") or ()
    known = {each["name"]: each for each in settings}
    made: dict[tuple[Any, ...], SloClass] = {}
    counts: dict[str, int] = {}
    names = []
    for row in rows.requests:
        base = row["slo_class"]
        targets = tuple(row[f"{kind}_target_s"] for kind in ("ttft", "tpot", "e2e"))
        if (base, *targets) not in made:
            number = counts[base] = counts.get(base, 0) + 1
            given = known.get(base, {})
            made[(base, *targets)] = SloClass(
                base if number == 1 else f"{base}#{number}",
                Slo(*targets),
                float(given.get("weight", 1.0)),
                OnInfeasible(given.get("on_infeasible", OnInfeasible.REJECT)),
            )
        names.append(made[(base, *targets)].name)
    return tuple(made.values()), names


def _workload(rows: RunRows, names: Sequence[str]) -> Workload:
    ended: dict[str, list[int]] = {}
    for row in rows.requests:
        if row["finish_reason"] in _ENDED and row["num_output_tokens"] > 0:
            ended.setdefault(row["slo_class"], []).append(row["num_output_tokens"])
    everybody = [length for lengths in ended.values() for length in lengths]
    if not everybody:
        raise ReplayError(f"no request of run {rows.run['run_id']} has ended by itself")
    rng = rng_for("answers that nobody saw", 0)
    start_s = rows.requests[0]["arrived_clock_s"]
    arrivals = []
    for row, name in zip(rows.requests, names, strict=True):
        if row["finish_reason"] in _ENDED and row["num_output_tokens"] > 0:
            num_output = row["num_output_tokens"]
        else:
            lengths = ended.get(row["slo_class"], everybody)
            num_output = min(lengths[int(rng.integers(len(lengths)))], max(1, row["max_tokens"]))
        arrivals.append(
            Arrival(
                row["arrived_clock_s"] - start_s, max(1, row["num_prompt_tokens"]), num_output, name
            )
        )
    model = rows.run["model"]
    title = f"run {rows.run['run_id']} of {'the demo model' if model == DEMO_MODEL else model}"
    return sorted_workload(title, arrivals)
