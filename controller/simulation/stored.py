"""A stored run as a workload: its arrivals, its promises, its limits, and its learnt machine.

Owns what is read of a run, what is replayed, and what had to be assumed because nobody wrote it
down. Must not write to a database, simulate or search.

Not in the database, and so assumed: how long the answers would have been that were refused or
broken off (drawn from those of the same class that ended by themselves), and which prompts begin
alike (none do).
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from controller.config import DEMO_MODEL
from controller.policy.slo import OnInfeasible, Slo, SloClass
from controller.simulation.fitting import profile_of_snapshot
from controller.simulation.hardware import HardwareProfile
from controller.simulation.recorded_noise import MAX_STEPS, RecordedNoise
from controller.simulation.stored_steps import features_of, is_lesson, read_steps
from controller.workload.arrivals import Arrival, Workload, sorted_workload
from controller.workload.draws import rng_for
from costmodel.features import StepFeatures
from store.queries import JsonRow, TelemetryReader

NEWEST: Final = ("last", "latest")
"""Words for the newest run that has what is asked for."""

_ENDED: Final = frozenset({"stop", "length"})
_PAGE: Final = 5000
MAX_RUNS: Final = 1000
_NUM_TOLD: Final = 5


class StoredRunError(ValueError):
    """A run cannot be simulated again; the message says what is missing."""


class RunRows(NamedTuple):
    """What a database holds of one run: its row, its requests by arrival, its KV pool and model.

    `key` and `document` are the cost model's (None without one), `num_blocks` the pool's, `steps`
    the newest ones, oldest first.
    """

    run: JsonRow
    requests: tuple[JsonRow, ...]
    num_blocks: int | None
    key: Mapping[str, Any] | None
    document: Mapping[str, Any] | None
    steps: tuple[JsonRow, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What a run tells of itself.

    `limits` are fields of `EngineConfig` as far as they are known, `max_tokens` is what its clients
    asked for at the median, `document` the cost model that it kept (None = none), `steps` what its
    last steps computed and how many seconds they took.
    """

    run_id: str
    workload: Workload
    classes: tuple[SloClass, ...]
    limits: dict[str, int | bool]
    max_tokens: int
    document: Mapping[str, Any] | None
    steps: tuple[tuple[StepFeatures, float], ...] = ()

    def machine(self, instead: HardwareProfile | None = None) -> HardwareProfile:
        """Return `instead`, or else the machine that the run's cost model learnt, with the noise of
        the run's own steps if there are enough of them.

        StoredRunError if it kept none, HardwareError if what it kept is damaged.
        """
        if instead is not None:
            return instead
        if self.document is None:
            raise StoredRunError(
                f"run {self.run_id} has stored no cost model: name a machine with --hardware"
            )
        learnt = profile_of_snapshot(self.document)
        noise = RecordedNoise.of(
            (features.regime, taken_s, learnt.seconds(features)) for features, taken_s in self.steps
        )
        return replace(learnt, recorded=noise)


def read_run(reader: TelemetryReader, run_id: str) -> RunRows:
    """Read a run by its id, or by a word of `NEWEST`: the newest one that has requests.

    StoredRunError if it is unknown or nobody's request has ended in it; StoreError from the reader.
    """
    wanted: tuple[JsonRow, ...]
    if run_id in NEWEST:
        wanted = reader.runs(limit=MAX_RUNS)
    else:
        found = reader.run(run_id)
        if found is None:
            newest = reader.runs(limit=_NUM_TOLD)
            known = ", ".join(run["run_id"] for run in newest) or "none"
            raise StoredRunError(f"no run {run_id!r} is stored; the newest are: {known}")
        wanted = (found,)
    for run in wanted:
        requests = _requests(reader, run["run_id"])
        if requests:
            break
    else:
        what = "no stored run has a" if run_id in NEWEST else f"run {run_id} has no"
        raise StoredRunError(f"{what} request that ended")
    steps = read_steps(reader, run["run_id"], MAX_STEPS)
    # This run's own: under the same key another run may have stored a later one.
    snapshot = reader.newest_model(run["run_id"])
    return RunRows(
        run,
        requests,
        steps[-1]["num_blocks_total"] if steps else None,
        None if snapshot is None else snapshot["key"],
        None if snapshot is None else snapshot["document"],
        tuple(steps),
    )


def stored_run(rows: RunRows) -> StoredRun:
    """Return what `rows` tell; the same rows always tell the same.

    Targets are those that each request had: where requests of one class had different ones, the
    class stands for the most frequent, and `NAME#2` and so on for the others. Weights, and what is
    done with the infeasible, come from the run's settings. StoredRunError if no answer ended by
    itself, so that nobody knows how long they are.
    """
    run = rows.run
    names = _class_names(rows.requests)
    start_s = rows.requests[0]["arrived_clock_s"]
    arrivals = [
        Arrival(
            row["arrived_clock_s"] - start_s,
            max(1, row["num_prompt_tokens"]),
            num_output,
            names[_terms(row)],
        )
        for row, num_output in zip(rows.requests, _output_lengths(rows), strict=True)
    ]
    model = "the demo model" if run["model"] == DEMO_MODEL else run["model"]
    return StoredRun(
        run["run_id"],
        sorted_workload(f"run {run['run_id']} of {model}", arrivals),
        tuple(_classes(names, run["settings"] or {})),
        _limits(rows),
        max(1, int(statistics.median_high(row["max_tokens"] for row in rows.requests))),
        rows.document,
        tuple((features_of(row), float(row["duration_s"])) for row in rows.steps if is_lesson(row)),
    )


def _requests(reader: TelemetryReader, run_id: str) -> tuple[JsonRow, ...]:
    found: list[JsonRow] = []
    cursor = None
    while True:
        page = reader.requests(run_id=run_id, limit=_PAGE, cursor=cursor)
        found += page.rows
        cursor = page.next_cursor
        if cursor is None:
            return tuple(sorted(found, key=lambda row: (row["arrived_clock_s"], row["request_id"])))


class _Terms(NamedTuple):
    """A class and the targets that requests of it had, in seconds."""

    slo_class: str
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


def _terms(row: JsonRow) -> _Terms:
    return _Terms(row["slo_class"], row["ttft_target_s"], row["tpot_target_s"], row["e2e_target_s"])


def _class_names(requests: Sequence[JsonRow]) -> dict[_Terms, str]:
    """Name each combination of class and targets.

    The most frequent one keeps the class's name, whoever came first: a report is then of `chat`
    for nearly everybody, whichever of them it begins with. The others are numbered by how frequent
    they are, those that tie by arrival.
    """
    # Most common first; among equals, `Counter` keeps the order of their first arrival.
    found = Counter(_terms(row) for row in requests).most_common()
    taken = {terms.slo_class for terms, _ in found}
    names: dict[_Terms, str] = {}
    numbers: dict[str, int] = {}
    for terms, _ in found:
        base = name = terms.slo_class
        if base in numbers:
            # A class may be called `chat#2` by its operator.
            while name in taken:
                numbers[base] += 1
                name = f"{base}#{numbers[base]}"
            taken.add(name)
        else:
            numbers[base] = 1
        names[terms] = name
    return names


def _classes(names: Mapping[_Terms, str], settings: Mapping[str, Any]) -> Iterator[SloClass]:
    known = {each["name"]: each for each in settings.get("slo_class") or ()}
    for terms, name in names.items():
        given = known.get(terms.slo_class, {})
        yield SloClass(
            name,
            Slo(terms.ttft_s, terms.tpot_s, terms.e2e_s),
            float(given.get("weight", 1.0)),
            OnInfeasible(given.get("on_infeasible", OnInfeasible.REJECT)),
        )


def _output_lengths(rows: RunRows) -> Iterator[int]:
    """Yield each answer's length: what was given where it ended by itself, else a draw.

    Drawn are lengths of the same class (of all where nobody's of it ended) that are longer than
    what was given before it broke off, up to what the client asked for.
    """
    by_class: dict[str, list[int]] = {}
    for row in rows.requests:
        if row["finish_reason"] in _ENDED and row["num_output_tokens"]:
            by_class.setdefault(row["slo_class"], []).append(row["num_output_tokens"])
    everybody = sorted(length for lengths in by_class.values() for length in lengths)
    if not everybody:
        raise StoredRunError(f"no request of run {rows.run['run_id']} has ended by itself")
    for lengths in by_class.values():
        lengths.sort()
    rng = rng_for("answers that nobody saw", 0)
    for row in rows.requests:
        given: int = row["num_output_tokens"]
        if row["finish_reason"] not in _ENDED:
            lengths = by_class.get(row["slo_class"], everybody)
            num_shorter = bisect_right(lengths, given)
            if num_shorter < len(lengths):
                drawn = lengths[int(rng.integers(num_shorter, len(lengths)))]
                given = min(drawn, row["max_tokens"])
        yield max(1, given)


def _limits(rows: RunRows) -> dict[str, int | bool]:
    """Return the engine's limits as far as the run tells them."""
    settings = rows.run["settings"] or {}
    block_size = settings.get("block_size") if rows.key is None else rows.key.get("block_size")
    limits = {
        "block_size": block_size,
        # Blocks of nobody knows how many tokens are no pool.
        "num_blocks": None if block_size is None else rows.num_blocks,
        "max_model_len": settings.get("max_model_len"),
        "max_num_seqs": settings.get("max_num_seqs"),
        "max_num_batched_tokens": settings.get("max_num_batched_tokens"),
        "max_waiting_requests": settings.get("max_waiting_requests"),
        "is_prefix_cache_enabled": settings.get("is_prefix_caching_enabled"),
    }
    return {name: value for name, value in limits.items() if value is not None}
