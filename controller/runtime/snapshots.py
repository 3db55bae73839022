"""Where the cost model starts, and how its life outlasts the server's.

Owns saving snapshots at intervals, finding one at start-up and the choice between it and a warm-up
sweep. Must not speak SQL or know how a model learns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from costmodel.fields import SnapshotError
from costmodel.judged import JudgedPlanes
from costmodel.prior import Sample, SweepShape, fit_prior, flat_prior
from costmodel.refitted import RefittedLeastSquares
from costmodel.snapshot import SnapshotKey, dump_model, load_model
from costmodel.warmstart import fit_to_speed, judge_restored
from engine.clock import Clock
from engine.request import Request
from engine.step import StepReport
from store.errors import StoreError
from store.records import ModelSnapshotRecord

logger = logging.getLogger("paceline")

SAVE_EVERY_S = 60.0
# A model that has seen less than this is worth less than the sweep that made it.
LEAST_OBSERVED = 100
# Of the sweep's shapes, sorted by size, every so many is enough to see whether a stored model still
# holds.
CHECK_STRIDE = 3

Offer = Callable[[ModelSnapshotRecord], bool]
RunSweep = Callable[[Sequence[SweepShape]], list[Sample]]


class SnapshotReader(Protocol):
    """Finds what earlier runs stored."""

    def model_snapshot(self, key: Mapping[str, str | int]) -> dict[str, Any] | None:
        """Return the newest row under exactly that key, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """The model to serve with, and where it comes from.

    `origin` is `restored`, `sweep` or `flat`; `problem` says why a stored model was refused, None
    if there was none or it was taken. `num_sweep_steps` shapes were timed.
    """

    model: RefittedLeastSquares
    origin: str
    problem: str | None
    num_sweep_steps: int
    numbers: dict[str, float | int | str | None]


def start_model(
    reader: SnapshotReader, key: SnapshotKey, shapes: Sequence[SweepShape], run_sweep: RunSweep
) -> Start:
    """Return a stored model of the same key if a short sweep agrees with it, else one fitted to the
    whole sweep.

    `shapes` may be empty (no warm-up): then a stored model is taken as it is, and without one the
    flat prior starts. What `run_sweep` raises is the caller's.
    """
    restored, problem, numbers = _restore(reader, key)
    if restored is not None:
        samples = run_sweep(shapes[::CHECK_STRIDE]) if shapes else []
        verdict = judge_restored(restored, samples)
        numbers |= {"scale": verdict.scale, "spread": verdict.spread}
        if verdict.problem is None:
            fit_to_speed(restored, verdict)
            return Start(restored, "restored", None, len(samples), numbers)
        problem = verdict.problem
    if problem is not None:
        logger.warning("the stored cost model is not used: %s", problem)
    if not shapes:
        return Start(flat_prior(RefittedLeastSquares), "flat", problem, 0, numbers)
    samples = run_sweep(shapes)
    model = fit_prior(samples, RefittedLeastSquares)
    return Start(model, "sweep", problem, len(samples), numbers)


def _restore(
    reader: SnapshotReader, key: SnapshotKey
) -> tuple[RefittedLeastSquares | None, str | None, dict[str, float | int | str | None]]:
    """Return the stored model or why it cannot be used, and what is told of it."""
    try:
        row = reader.model_snapshot(asdict(key))
    except StoreError as error:
        return None, str(error), {}
    if row is None:
        return None, None, {}
    numbers: dict[str, float | int | str | None] = {
        "stored_run_id": row["run_id"],
        "stored_at": row["at"],
        "stored_observed": row["num_observed"],
    }
    try:
        model = load_model(row["document"], key)
    except SnapshotError as error:
        return None, str(error), numbers
    if not isinstance(model, RefittedLeastSquares):
        return None, f"kind: is {model.kind!r}, served is {RefittedLeastSquares.kind!r}", numbers
    return model, None, numbers


class SnapshotKeeper:
    """A `StepListener` that offers the model to telemetry now and then, and once more at the end.

    Runs on the loop's thread, where the model may be read; what is offered are copies.
    """

    def __init__(
        self, model: JudgedPlanes, key: SnapshotKey, run_id: str, offer: Offer, clock: Clock
    ) -> None:
        self._model = model
        self._key = key
        self._run_id = run_id
        self._offer = offer
        self._clock = clock
        self._saved_at = clock.now()
        self._saved_version = model.version

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Offer a snapshot if the last one is old enough."""
        if report.started_at + report.duration_s - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> bool:
        """Offer the model as it is; False if it has learnt nothing since, or too little in all."""
        self._saved_at = self._clock.now()
        quality = self._model.quality()
        if quality.num_observed < LEAST_OBSERVED or quality.version == self._saved_version:
            return False
        self._saved_version = quality.version
        return self._offer(
            ModelSnapshotRecord(
                run_id=self._run_id,
                at=self._clock.epoch_ms(),
                learner=self._model.kind,
                version=quality.version,
                num_observed=quality.num_observed,
                mape=quality.mape,
                coverage=quality.coverage,
                key=asdict(self._key),
                document=dump_model(self._model, self._key),
            )
        )
