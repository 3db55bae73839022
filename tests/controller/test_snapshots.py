"""Where the cost model starts: restored, refused with the reason, or swept; and how it is saved."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from controller.runtime import wiring
from controller.runtime.learnt import learnt_costs
from controller.runtime.snapshots import (
    CHECK_STRIDE,
    LEAST_OBSERVED,
    SAVE_EVERY_S,
    SnapshotKeeper,
    start_model,
)
from costmodel.prior import Sample, SweepShape, flat_prior, sweep_plan
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refitted import RefittedLeastSquares
from costmodel.snapshot import SnapshotKey, dump_model
from costmodel.synthetic import TWO_CORES, synthetic_steps
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.step import StepPlan, StepReport
from store import schema
from store.database import Database
from store.errors import DamagedDataError, DatabaseUnavailableError
from store.queries import TelemetryReader
from store.records import ModelSnapshotRecord
from tests.store.samples import make_snapshot
from tests.store.test_snapshots import write

KEY = SnapshotKey("demo", "cpu", "float32", "reference", 16, "0.1.0")
SHAPES = sweep_plan(256, 8, 1024)


def a_model(count: int = 300, learner: Any = RefittedLeastSquares) -> Any:
    model = flat_prior(learner)
    for step in islice(synthetic_steps(TWO_CORES), count):
        model.observe(step.features, step.measured_s)
    return model


class Stored:
    """A reader with one row at most."""

    def __init__(self, document: Any = None) -> None:
        self.document = document
        self.asked: list[dict[str, str | int]] = []

    def model_snapshot(self, key: Mapping[str, str | int]) -> dict[str, Any] | None:
        self.asked.append(dict(key))
        if self.document is None:
            return None
        return {"run_id": "old", "at": 5, "num_observed": 300, "document": self.document}


class Machine:
    """Times shapes as `TWO_CORES` would, `factor` times as slow."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.timed: list[SweepShape] = []

    def __call__(self, shapes: Sequence[SweepShape]) -> list[Sample]:
        self.timed += shapes
        return [(s.features(), TWO_CORES.latency_s(s.features()) * self.factor) for s in shapes]


def document_of(model: Any) -> Any:
    return json.loads(json.dumps(dump_model(model, KEY), allow_nan=False))


def test_without_a_stored_model_the_whole_sweep_starts() -> None:
    reader, machine = Stored(), Machine()
    start = start_model(reader, KEY, SHAPES, machine)
    assert (start.origin, start.problem, start.num_sweep_steps) == ("sweep", None, len(SHAPES))
    assert machine.timed == list(SHAPES)
    assert reader.asked == [asdict(KEY)]


def test_a_stored_model_of_the_same_key_is_restored_after_a_short_check() -> None:
    model, machine = a_model(), Machine()
    start = start_model(Stored(document_of(model)), KEY, SHAPES, machine)
    assert (start.origin, start.problem) == ("restored", None)
    assert start.model.coefficients == model.coefficients
    assert start.model.quality() == model.quality()
    assert machine.timed == list(SHAPES[::CHECK_STRIDE])
    assert start.num_sweep_steps == len(machine.timed) < len(SHAPES) / 2
    assert start.numbers["stored_run_id"] == "old"


def test_a_slower_machine_starts_from_the_stored_model_at_its_own_speed() -> None:
    model = a_model()
    start = start_model(Stored(document_of(model)), KEY, SHAPES, Machine(2.0))
    assert start.origin == "restored"
    scale = start.numbers["scale"]
    assert isinstance(scale, float)
    assert scale == pytest.approx(2.0, rel=0.1)
    before, after = model.marginals(), start.model.marginals()
    assert after.prefill_token_s == pytest.approx(scale * before.prefill_token_s)


def test_without_a_warm_up_a_stored_model_is_taken_as_it_is() -> None:
    machine = Machine()
    start = start_model(Stored(document_of(a_model())), KEY, (), machine)
    assert (start.origin, machine.timed) == ("restored", [])
    assert start_model(Stored(), KEY, (), machine).origin == "flat"


def _spoilt(path: str, value: Any) -> Any:
    document = copy.deepcopy(document_of(a_model()))
    *parents, last = path.split(".")
    part = document
    for name in parents:
        part = part[name]
    part[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (_spoilt("key.device", "NVIDIA H200"), "key.device: is 'NVIDIA H200'"),
        (_spoilt("key.engine_version", "0.0.1"), "key.engine_version"),
        (_spoilt("format", 1), "format: must be 2, got 1"),
        (_spoilt("state.planes.0.coefficients", [-1.0] * 9), "state.planes.0.coefficients"),
        (_spoilt("state.planes.1.coefficients", [float("nan")] * 9), "not finite"),
        (_spoilt("state.planes.1.coefficients", [float("inf")] * 9), "not finite"),
        (_spoilt("state.planes.1.coefficients", [1e308] * 9), "one is above 10000"),
        (_spoilt("state.margins.mixed.prior", 1e308), "state.margins.mixed.prior"),
        (_spoilt("state.version", 10**400), "state.version"),
        (_spoilt("kind", []), "kind: must be one of"),
        ("no object", "must be an object, got str"),
        (document_of(a_model(learner=RecursiveLeastSquares)), "kind: is 'recursive_least_squares'"),
    ],
)
def test_a_stored_model_that_does_not_fit_is_refused_with_the_reason(
    document: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    start = start_model(Stored(document), KEY, SHAPES, machine)
    assert start.origin == "sweep"
    assert start.problem is not None
    assert problem in start.problem
    assert problem in caplog.text
    assert machine.timed == list(SHAPES)


def test_a_stored_model_of_another_machine_is_refused_by_the_check() -> None:
    machine = Machine(30.0)
    start = start_model(Stored(document_of(a_model())), KEY, SHAPES, machine)
    assert start.origin == "sweep"
    assert "times what the stored model says" in (start.problem or "")


def test_a_database_that_cannot_be_read_costs_the_stored_model_only() -> None:
    class Broken(Stored):
        def model_snapshot(self, key: Mapping[str, str | int]) -> dict[str, Any] | None:
            raise DatabaseUnavailableError("gone")

    start = start_model(Broken(), KEY, SHAPES, Machine())
    assert (start.origin, start.problem) == ("sweep", "gone")


@pytest.mark.parametrize("bad", ['{"format":', "", "[" * 100_000])
def test_a_stored_cell_that_is_no_json_is_told_and_the_sweep_starts(
    tmp_path: Path, bad: str
) -> None:
    url = f"sqlite:///{tmp_path / 'p.db'}"
    schema.migrate(url)
    write(url, make_snapshot(1, key=asdict(KEY)))
    with Database.open_writer(url).begin() as connection:
        connection.execute(text("UPDATE model_snapshot SET document = :bad"), {"bad": bad})
    reader = TelemetryReader.open(url)
    start = start_model(reader, KEY, SHAPES, Machine())
    assert start.origin == "sweep"
    assert "is damaged: a cell holds no JSON" in (start.problem or "")
    with pytest.raises(DamagedDataError, match="is damaged"):
        learnt_costs(reader)
    reader.close()


class _Settings:
    is_warmup_enabled = True


def _start(reader: Any) -> Any:
    engine: Any = SimpleNamespace(runner=None)
    settings: Any = _Settings()
    config = EngineConfig(
        block_size=16, num_blocks=64, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64
    )
    clock: Any = VirtualClock()
    return wiring._start_model(settings, engine, config, clock, lambda *_: None, reader, KEY)


def test_only_the_sweep_is_told_as_a_warm_up_step_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Buggy(Stored):
        def model_snapshot(self, key: Mapping[str, str | int]) -> dict[str, Any] | None:
            raise OverflowError("a bug elsewhere")

    monkeypatch.setattr(wiring, "run_sweep", lambda *_: [])
    assert _start(Stored(_spoilt("kind", []))).origin == "sweep"
    with pytest.raises(OverflowError, match="a bug elsewhere"):
        _start(Buggy())

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of\n memory")

    monkeypatch.setattr(wiring, "run_sweep", fail)
    with pytest.raises(
        wiring.StartupError, match=r"a warm-up step failed \(RuntimeError: out of memory\)"
    ):
        _start(Stored())


def a_report(ends_at: float) -> StepReport:
    return StepReport(1, ends_at - 0.5, 0.5, 0.0, 0.5, StepPlan(), True, 0, 0, 0, 0, 1)


def test_the_model_is_offered_at_intervals_if_it_has_learnt() -> None:
    model, clock = a_model(LEAST_OBSERVED + 60), VirtualClock(100.0)
    offered: list[ModelSnapshotRecord] = []

    def offer(record: ModelSnapshotRecord) -> bool:
        offered.append(record)
        return True

    keeper = SnapshotKeeper(model, KEY, "run-1", offer, clock)
    for step in islice(synthetic_steps(TWO_CORES, 2), 8):
        model.observe(step.features, step.measured_s)
    keeper.on_step(a_report(100.0 + SAVE_EVERY_S - 1.0), {})
    assert offered == []
    clock.advance(SAVE_EVERY_S)
    keeper.on_step(a_report(clock.now()), {})
    (record,) = offered
    assert (record.run_id, record.version, record.learner) == ("run-1", model.version, model.kind)
    assert record.key == asdict(KEY)
    restored = start_model(Stored(document_of(model)), KEY, (), Machine()).model
    assert restored.coefficients == model.coefficients
    # Nothing new: nothing to write, neither at the next interval nor at the end.
    clock.advance(2 * SAVE_EVERY_S)
    keeper.on_step(a_report(clock.now()), {})
    assert not keeper.save()
    for step in islice(synthetic_steps(TWO_CORES, 3), 8):
        model.observe(step.features, step.measured_s)
    assert keeper.save()
    assert [record.version for record in offered] == sorted({r.version for r in offered})


def test_what_was_offered_does_not_change_with_the_model() -> None:
    model = a_model(150)
    offered: list[ModelSnapshotRecord] = []

    def offer(record: ModelSnapshotRecord) -> bool:
        offered.append(record)
        return True

    keeper = SnapshotKeeper(model, KEY, "run", offer, VirtualClock())
    keeper._saved_version = -1
    assert keeper.save()
    text = json.dumps(offered[0].document)
    for step in islice(synthetic_steps(TWO_CORES, 6), 50):
        model.observe(step.features, step.measured_s)
    assert json.dumps(offered[0].document) == text


def test_a_model_that_has_seen_little_is_not_worth_keeping() -> None:
    keeper = SnapshotKeeper(
        a_model(LEAST_OBSERVED - 1), KEY, "run", lambda record: True, VirtualClock()
    )
    keeper._saved_version = -1
    assert not keeper.save()


def test_keys_that_differ_are_different_rows() -> None:
    reader = Stored()
    start_model(reader, replace(KEY, block_size=32), (), Machine())
    assert reader.asked[0]["block_size"] == 32
