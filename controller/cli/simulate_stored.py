"""A stored run as a simulation: its arrivals, its promises, and the machine that it learnt.

Owns what is read from telemetry, what is guessed where nothing was stored, and the file that other
processes read. Must not write to a database or simulate.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from controller.cli.database import store_errors
from controller.policy.slo import OnInfeasible, Slo, SloClass
from controller.simulation.fitting import profile_of_snapshot
from controller.simulation.hardware import HardwareProfile
from controller.workload.arrivals import Arrival, Workload, sorted_workload
from controller.workload.traces import write_trace
from store.queries import JsonRow, TelemetryReader

_PAGE_ROWS: Final = 5000
_SERVED: Final = ("stop", "length")
# Of a run that finished nothing: as long as anybody's answer.
_UNKNOWN_OUTPUT: Final = 128


class StoredRunError(ValueError):
    """A run cannot be simulated again; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What a run tells of itself.

    `machine` is None where no cost model was kept; `limits` are fields of `EngineConfig` as far as
    they are known.
    """

    workload: Workload
    classes: tuple[SloClass, ...]
    machine: HardwareProfile | None
    limits: dict[str, int]


def open_run(run_id: str, db: str) -> StoredRun:
    """Read a run from a database; what the store says ends the command with one line."""
    with store_errors(), contextlib.closing(TelemetryReader.open(db)) as reader:
        return read_run(reader, run_id)


def keep_arrivals(workload: Workload, out: Path | None, trace: str | None) -> str:
    """Write a run's arrivals to `out`, or to a folder that goes when this process ends, so that
    other processes can read them; ValueError if another trace was named too.
    """
    if trace is not None:
        raise ValueError("give --trace or --replay, not both")
    if out is None:
        folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    else:
        folder = out
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / "arrivals.csv"
    write_trace(workload, path)
    return str(path)


def read_run(reader: TelemetryReader, run_id: str) -> StoredRun:
    """Read a run, `last` being the newest one; StoredRunError if it is unknown or served nobody.

    Targets are those that each request had: a class whose requests had different ones becomes
    several classes. Weights and what is done with the infeasible come from the run's settings. An
    answer that was not given in full counts as long as the median of its class, at least as long as
    what was given. What prompts shared was not stored: they share nothing.
    """
    runs = reader.runs()
    run = next((row for row in runs if run_id in ("last", row["run_id"])), None)
    if run is None:
        known = ", ".join(row["run_id"] for row in runs[:5]) or "none"
        raise StoredRunError(f"no run {run_id!r} is stored; the newest are: {known}")
    rows = list(_requests(reader, run["run_id"]))
    if not rows:
        raise StoredRunError(f"run {run['run_id']} has no request that ended")
    names = _class_names(rows)
    outputs = _typical_outputs(rows)
    start_s = min(row["arrived_clock_s"] for row in rows)
    arrivals = [
        Arrival(
            row["arrived_clock_s"] - start_s,
            max(1, row["num_prompt_tokens"]),
            _num_output(row, outputs),
            names[_terms(row)],
        )
        for row in rows
    ]
    machine, limits = _machine(reader, run)
    return StoredRun(
        sorted_workload(f"run {run['run_id']}", arrivals),
        tuple(_classes(names, run["settings"] or {})),
        machine,
        limits,
    )


_Terms = tuple[str, float | None, float | None, float | None]


def _requests(reader: TelemetryReader, run_id: str) -> Iterator[JsonRow]:
    cursor = None
    while True:
        page = reader.requests(run_id=run_id, limit=_PAGE_ROWS, cursor=cursor)
        yield from page.rows
        if page.next_cursor is None:
            return
        cursor = page.next_cursor


def _terms(row: JsonRow) -> _Terms:
    return (row["slo_class"], row["ttft_target_s"], row["tpot_target_s"], row["e2e_target_s"])


def _class_names(rows: list[JsonRow]) -> dict[_Terms, str]:
    """Name each combination of class and targets, by the class alone where there is only one."""
    by_class: dict[str, dict[_Terms, None]] = {}
    # Rows come newest first; numbers should follow the order of arrival.
    for row in reversed(rows):
        by_class.setdefault(row["slo_class"], {})[_terms(row)] = None
    return {
        terms: name if len(found) == 1 else f"{name}-{number}"
        for name, found in by_class.items()
        for number, terms in enumerate(found, start=1)
    }


def _classes(names: Mapping[_Terms, str], settings: Mapping[str, Any]) -> Iterator[SloClass]:
    stored = {each["name"]: each for each in settings.get("slo_class") or ()}
    for (class_name, ttft_s, tpot_s, e2e_s), name in names.items():
        kept = stored.get(class_name, {})
        yield SloClass(
            name,
            Slo(ttft_s, tpot_s, e2e_s),
            kept.get("weight", 1.0),
            OnInfeasible(kept.get("on_infeasible", OnInfeasible.REJECT)),
        )


def _typical_outputs(rows: list[JsonRow]) -> dict[str, int]:
    """Median length of the answers given in full, by class and (as "") over all."""
    lengths: dict[str, list[int]] = {}
    for row in rows:
        if row["finish_reason"] in _SERVED and row["num_output_tokens"]:
            for name in (row["slo_class"], ""):
                lengths.setdefault(name, []).append(row["num_output_tokens"])
    return {name: round(statistics.median(values)) for name, values in lengths.items()}


def _num_output(row: JsonRow, typical: Mapping[str, int]) -> int:
    given: int = row["num_output_tokens"]
    if row["finish_reason"] in _SERVED and given:
        return given
    return max(1, given, typical.get(row["slo_class"], typical.get("", _UNKNOWN_OUTPUT)))


def _machine(
    reader: TelemetryReader, run: JsonRow
) -> tuple[HardwareProfile | None, dict[str, int]]:
    settings = run["settings"] or {}
    limits = {
        name: settings[name]
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting_requests")
        if isinstance(settings.get(name), int)
    }
    # This run's own: under the same key another run may have stored a later one.
    found = reader.newest_model(run["run_id"])
    if found is None:
        return None, limits
    steps = reader.steps(run_id=run["run_id"], limit=1).rows
    block_size = found["key"].get("block_size")
    if steps and isinstance(block_size, int):
        limits |= {"block_size": block_size, "num_blocks": steps[0]["num_blocks_total"]}
    return profile_of_snapshot(found["document"]), limits
