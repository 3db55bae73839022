"""A step's report becomes its record without loss."""

from __future__ import annotations

import dataclasses

import pytest

from costmodel.features import FEATURE_NAMES, StepFeatures
from engine.step import EmittedToken, StepDecision, StepPlan, StepReport, StepWork, WorkKind
from store.records import StepRecord, StepWorkRecord

_WORK = (
    StepWork("a", WorkKind.DECODE, 1, 31),
    StepWork("b", WorkKind.PREFILL, 16, 64),
    StepWork("c", WorkKind.PREFILL, 8, 0),
)
_DECISION = StepDecision("slo", 256, 8, 64, "ttft_demand", "a", -0.01, 0.1, 0.12, 7)


def make_report(decision: StepDecision | None) -> StepReport:
    """A mixed step that sampled for `a` and `b`."""
    return StepReport(
        step_no=9,
        started_at=100.0,
        duration_s=0.2,
        planner_s=0.001,
        execute_s=0.19,
        plan=StepPlan(work=_WORK, decision=decision),
        is_executed=True,
        num_running=3,
        num_waiting=2,
        num_preempted=1,
        num_blocks_used=10,
        num_blocks_total=20,
        tokens=(EmittedToken("b", 5, 0, 100.25), EmittedToken("a", 6, 4, 100.25)),
        failure=None,
        num_retries=2,
        num_swapped_blocks=3,
        num_blocks_cached=4,
        num_failed_swaps=5,
    )


def test_report_to_record() -> None:
    features = StepFeatures.of(_WORK, 1)
    record = StepRecord.from_report(
        make_report(_DECISION), run_id="r", at=1_700_000_000_000, features=features
    )
    # The cost model's order, which the store must not import.
    own = {field.name for field in dataclasses.fields(StepRecord)}
    names = [name if name in own else name.removeprefix("num_") for name in FEATURE_NAMES]
    assert [getattr(record, name) for name in names] == list(features)
    for field in dataclasses.fields(StepDecision):
        assert getattr(record, field.name) == getattr(_DECISION, field.name)
    assert record.work == (
        StepWorkRecord("a", "decode", 1, 31, 4, 0.25),
        StepWorkRecord("b", "prefill", 16, 64, 0, 0.25),
        StepWorkRecord("c", "prefill", 8, 0),
    )
    assert (record.clock_s, record.num_emitted_tokens) == (100.0, 2)
    moved = (record.num_retries, record.num_swapped_blocks, record.num_blocks_cached)
    assert moved == (2, 3, 4)
    assert record.num_failed_swaps == 5


def test_a_planner_that_gives_no_account() -> None:
    features = (24, 1, 32, 0, 0, 2, 1)
    record = StepRecord.from_report(make_report(None), run_id="r", at=1, features=features)
    assert record.policy is None
    assert record.predicted_mean_s is None


def test_features_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        StepRecord.from_report(make_report(None), run_id="r", at=1, features=(1.0, 2.0))
