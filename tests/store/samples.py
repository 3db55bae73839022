"""Records of a small plausible server life, for the tests of the store and of its doors."""

from __future__ import annotations

import dataclasses
from typing import Any

from store.records import (
    EventRecord,
    ModelSnapshotRecord,
    Record,
    RequestRecord,
    RunRecord,
    StepRecord,
    StepWorkRecord,
)
from store.writer import WriterStats

RUN_AT = 1_700_000_000_000
SNAPSHOT_KEY: dict[str, str | int] = {"model": "demo", "device": "cpu", "block_size": 16}


def make_run(run_id: str = "run-a", started_at: int = RUN_AT, **changes: Any) -> RunRecord:
    """A run of a tiny model."""
    record = RunRecord(
        run_id=run_id,
        started_at=started_at,
        model="demo",
        device="cpu",
        attention_backend="reference",
        policy="slo",
        code_version="0.1.0",
        settings={"max_tokens": 8, "api_key": "hunter2"},
    )
    return dataclasses.replace(record, **changes)


def make_step(
    step_no: int,
    *,
    run_id: str = "run-a",
    work: tuple[StepWorkRecord, ...] | None = None,
    **changes: Any,
) -> StepRecord:
    """Step number `step_no`, 100 ms after the one before; one decode of `req-1` by default."""
    if work is None:
        work = (StepWorkRecord("req-1", "decode", 1, 100 + step_no, step_no, 0.09),)
    prefill = sum(item.num_tokens for item in work if item.work_kind == "prefill")
    decodes = [item for item in work if item.work_kind == "decode"]
    record = StepRecord(
        run_id=run_id,
        step_no=step_no,
        at=RUN_AT + 100 * step_no,
        clock_s=50.0 + 0.1 * step_no,
        duration_s=0.1,
        planner_s=0.0001,
        execute_s=0.09,
        prefill_tokens=prefill,
        decode_requests=len(decodes),
        decode_context_tokens=sum(item.num_computed_tokens + 1 for item in decodes),
        chunk_past_tokens=0,
        chunk_squared_tokens=prefill * prefill,
        num_emitted_tokens=sum(item.token_index is not None for item in work),
        num_running=1,
        num_waiting=0,
        num_preempted=0,
        num_blocks_used=7,
        num_blocks_total=64,
        policy="slo",
        token_budget=256,
        lower_bound_tokens=0,
        upper_bound_tokens=128,
        binding_constraint="decode_slack",
        tightest_request_id="req-1",
        slack_s=0.02,
        predicted_mean_s=0.11,
        predicted_upper_s=0.12,
        model_version=3,
        work=work,
    )
    return dataclasses.replace(record, **changes)


def make_request(
    request_id: str = "req-1", *, run_id: str = "run-a", **changes: Any
) -> RequestRecord:
    """A chat request that kept its promise."""
    record = RequestRecord(
        run_id=run_id,
        request_id=request_id,
        slo_class="chat",
        num_prompt_tokens=96,
        num_output_tokens=3,
        max_tokens=8,
        arrived_at=RUN_AT,
        arrived_clock_s=50.0,
        ended_at=RUN_AT + 500,
        finish_reason="stop",
        decision="admit",
        reason="feasible",
        ttft_target_s=1.0,
        tpot_target_s=0.2,
        admitted_at=RUN_AT + 1,
        first_token_at=RUN_AT + 290,
        queue_s=0.1,
        prefill_s=0.19,
        decode_s=0.2,
        ttft_s=0.29,
        tpot_s=0.1,
        e2e_s=0.49,
        longest_gap_s=0.1,
        fluidity=1.0,
        predicted_ttft_s=0.3,
        is_ttft_met=True,
        is_tpot_met=True,
        attained=True,
    )
    return dataclasses.replace(record, **changes)


def make_event(event_kind: str = "preemption", **changes: Any) -> EventRecord:
    """A preemption."""
    record = EventRecord("run-a", RUN_AT + 250, event_kind, "kv_blocks", "req-1", 2, {"blocks": 3})
    return dataclasses.replace(record, **changes)


def make_snapshot(version: int, *, run_id: str = "run-a", **changes: Any) -> ModelSnapshotRecord:
    """A cost model after `version` updates."""
    values: dict[str, Any] = {
        "run_id": run_id, "at": RUN_AT + version, "learner": "recursive", "version": version,
        "num_observed": 10 * version, "mape": 0.02, "coverage": 0.9, "key": SNAPSHOT_KEY,
        "document": {"format": 2, "state": {"numbers": [0.1 + version, 1e-300]}},
    }  # fmt: skip
    return ModelSnapshotRecord(**{**values, **changes})


def life_of_a_request() -> list[Record]:
    """`req-1`: two chunks (the second one samples), two decodes, a preemption, its end."""
    chunk_1 = (StepWorkRecord("req-1", "prefill", 64, 0),)
    chunk_2 = (
        StepWorkRecord("req-1", "prefill", 32, 64, 0, 0.09),
        StepWorkRecord("req-0", "decode", 1, 40, 5, 0.09),
    )
    decode_1 = (StepWorkRecord("req-1", "decode", 1, 96, 1, 0.09),)
    decode_2 = (StepWorkRecord("req-1", "decode", 1, 97, 2, 0.095),)
    works = (chunk_1, chunk_2, decode_1, decode_2)
    steps = [make_step(number + 1, work=work) for number, work in enumerate(works)]
    return [*steps, make_event(), make_request()]


def is_balanced(stats: WriterStats) -> bool:
    """Whether offered = committed + dropped + queued for every kind of row."""
    return all(
        counts.offered == counts.committed + counts.dropped + counts.queued
        for counts in stats.kinds.values()
    )
