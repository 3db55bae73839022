"""Feedback: which steps teach, what is told of requests that give way or fail alone."""

from __future__ import annotations

from typing import Any

import pytest

from controller.policy.lengths import OutputLengths
from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass
from controller.runtime.feedback import PromiseKeeper, Teacher, TelemetryFeed
from controller.runtime.metrics import Metrics
from costmodel.features import StepFeatures
from costmodel.hygiene import RejectReason
from engine.clock import VirtualClock
from engine.request import FinishReason, Request, RequestPhase, SamplingParams
from engine.step import (
    EmittedToken,
    Preemption,
    PreemptionMethod,
    PromptScores,
    PromptToken,
    StepPlan,
    StepReport,
    StepWork,
    WorkKind,
)
from store.records import EventRecord, RequestRecord, StepRecord
from store.rows import event_row
from tests.controller.service_rig import Spy

NUM_PROMPT = 100


def request(name: str, **changes: Any) -> Request:
    promise = Promise(Slo(), SloClass("default"), 1.0)
    made = Request(name, tuple(range(NUM_PROMPT)), 5, 1.0, promise=promise, **changes)
    made.move(RequestPhase.RUNNING)
    made.first_scheduled_at = 1.0
    return made


def ended(name: str, reason: FinishReason, failure: str | None = None, **changes: Any) -> Request:
    made = request(name, **changes)
    made.move(RequestPhase.FINISHED)
    made.finish_reason, made.failure, made.finished_at = reason, failure, 2.0
    return made


def chunk(name: str, num_tokens: int, num_computed: int = 0) -> StepWork:
    return StepWork(name, WorkKind.PREFILL, num_tokens, num_computed)


def report(*work: StepWork, **changes: Any) -> StepReport:
    values: dict[str, Any] = {
        "step_no": 1, "started_at": 1.0, "duration_s": 0.5, "planner_s": 0.0, "execute_s": 0.5,
        "plan": StepPlan(work=work), "is_executed": True, "num_running": 1, "num_waiting": 0,
        "num_preempted": 0, "num_blocks_used": 3, "num_blocks_total": 8,
    }  # fmt: skip
    return StepReport(**{**values, **changes})


def taught(made: StepReport) -> Spy:
    spy = Spy()
    Teacher(spy, OutputLengths()).on_step(made, {})
    return spy


def told(made: StepReport, *requests: Request) -> list[Any]:
    records: list[Any] = []

    def offer(record: Any) -> bool:
        records.append(record)
        return True

    feed = TelemetryFeed(offer, VirtualClock(3.0), "run", Spy())
    feed.on_step(made, {each.request_id: each for each in requests})
    return records


def test_a_step_teaches_the_work_that_was_computed_not_what_the_cache_spared() -> None:
    spy = taught(report(chunk("a", 4, NUM_PROMPT - 4)))
    # 96 tokens came from the cache: they are past that is read, not work.
    past = 4.0 * (NUM_PROMPT - 4)
    assert spy.seen == [(StepFeatures(4.0, 0.0, 0.0, past, 16.0, 1.0), 0.5)]


def test_prompts_that_end_or_are_scored_count_their_logits() -> None:
    scored = PromptScores("c", 0, (PromptToken(1, -1.0, 1),) * 6)
    tokens = (EmittedToken("a", 5, 0, 1.5), EmittedToken("d", 6, 3, 1.5))
    decode = StepWork("d", WorkKind.DECODE, 1, 9)
    spy = taught(
        report(chunk("a", 4), chunk("b", 4), chunk("c", 6), decode, tokens=tokens,
               prompt_scores=(scored,))
    )  # fmt: skip
    # One row for the end of `a`, none for `b`, six for `c`; the decode's own is not a prompt's.
    assert spy.seen[0][0] == StepFeatures(14.0, 1.0, 10.0, 0.0, 68.0, 3.0, 7.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_swapped_blocks": 2}, RejectReason.SWAP),
        ({"num_failed_swaps": 1}, RejectReason.SWAP),
        ({"num_retries": 1, "is_executed": False}, RejectReason.FAILED_STEP),
        ({"num_retries": 1, "num_swapped_blocks": 2}, RejectReason.FAILED_STEP),
        ({"failure": "boom", "is_executed": False}, RejectReason.FAILED_STEP),
    ],
)
def test_a_step_that_took_more_than_one_forward_never_teaches(
    changes: dict[str, Any], reason: RejectReason
) -> None:
    spy = taught(report(chunk("a", 4), **changes))
    assert spy.seen == []
    assert spy.rejected == [reason]


def test_a_pass_without_work_neither_teaches_nor_counts() -> None:
    spy = taught(report(is_executed=False))
    assert (spy.seen, spy.rejected) == ([], [])


def test_a_request_that_fails_alone_is_told_and_its_neighbour_is_not() -> None:
    poisoned = ended("a", FinishReason.ERROR, "RuntimeError: bad row", num_cached_tokens=16)
    served = ended("b", FinishReason.LENGTH)
    made = report(
        chunk("a", 4), chunk("b", 4), is_executed=False, num_retries=2, num_swapped_blocks=5,
        num_blocks_cached=1, finished=("a", "b"),
    )  # fmt: skip
    step, first, second, event = told(made, poisoned, served)
    assert isinstance(step, StepRecord)
    assert (step.num_retries, step.num_swapped_blocks, step.num_blocks_cached) == (2, 5, 1)
    assert isinstance(first, RequestRecord)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (16, 0)
    assert isinstance(event, EventRecord)
    assert (event.event_kind, event.request_id) == ("request_failure", "a")
    assert event.reason == "RuntimeError"
    assert event.numbers == {"num_retries": 2, "message": "RuntimeError: bad row"}


def test_a_step_that_fails_as_a_whole_is_one_event() -> None:
    failed = ended("a", FinishReason.ERROR, "boom")
    records = told(
        report(chunk("a", 4), is_executed=False, failure="boom", finished=("a",)), failed
    )
    events = [record for record in records if isinstance(record, EventRecord)]
    assert [event.event_kind for event in events] == ["step_failure"]


OUT_OF_MEMORY = (
    "StepMemoryError: out of memory on cpu: a step of 8 tokens of 2 requests asked for 1.5 GiB with"
    " 3 MiB free; lower --max-num-batched-tokens, --max-num-seqs or --kv-cache-memory-bytes"
)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [(OUT_OF_MEMORY, "StepMemoryError"), ("the logits: not finite", "the logits: not finite")],
)
def test_a_failure_keeps_its_numbers_beside_a_reason_that_can_be_counted(
    failure: str, reason: str
) -> None:
    whole = report(chunk("a", 4), is_executed=False, failure=failure, finished=("a",))
    alone = report(chunk("a", 4), is_executed=False, num_retries=1, finished=("a",))
    for made in (whole, alone):
        event = told(made, ended("a", FinishReason.ERROR, failure))[-1]
        row = event_row(event, 1)
        assert row["reason"] == reason
        assert row["numbers"]["message"] == failure


@pytest.mark.parametrize("method", list(PreemptionMethod))
def test_a_preemption_is_told_with_its_method(method: PreemptionMethod) -> None:
    victim = request("a", num_preemptions=2)
    plan = StepPlan(preemptions=(Preemption("a", method),))
    (event,) = told(report(plan=plan, is_executed=False), victim)
    assert (event.event_kind, event.request_id, event.reason) == ("preemption", "a", "kv_blocks")
    assert event.numbers == {"method": method.value, "num_preemptions": 2}


def new_metrics(**kwargs: Any) -> Metrics:
    return Metrics("tiny", block_size=16, num_blocks=8, **kwargs)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    if name.startswith("vllm:"):
        labels = {"model_name": "tiny", "engine": "0"}
    return metrics.registry.get_sample_value(name, labels)


def test_prefix_lookups_are_counted_in_tokens_once_per_request() -> None:
    metrics = new_metrics()
    hit, miss = request("a", num_cached_tokens=64), request("b")
    scored = request("c", sampling=SamplingParams(num_prompt_logprobs=1))
    named = {each.request_id: each for each in (hit, miss, scored)}
    metrics.on_step(report(chunk("a", 30, 64), chunk("b", 50), chunk("c", 10)), named)
    # A preempted request that starts again finds its own blocks: that is no second lookup.
    metrics.on_step(report(chunk("a", 6, 94), chunk("b", 50, 50)), named)
    assert value(metrics, "vllm:prefix_cache_queries_total") == 2 * NUM_PROMPT
    assert value(metrics, "vllm:prefix_cache_hits_total") == 64
    # The id is forgotten at the end.
    hit.move(RequestPhase.FINISHED)
    hit.finish_reason = FinishReason.CANCELLED
    metrics.on_step(report(is_executed=False, finished=("a",)), named)
    metrics.on_step(report(chunk("a", 30, 64)), {"a": request("a")})
    assert value(metrics, "vllm:prefix_cache_queries_total") == 3 * NUM_PROMPT


def test_nothing_is_looked_up_in_a_cache_that_is_off() -> None:
    metrics = new_metrics(is_prefix_cache_enabled=False)
    metrics.on_step(report(chunk("a", 30)), {"a": request("a")})
    assert value(metrics, "vllm:prefix_cache_queries_total") == 0
    labels = {
        "engine": "0", "block_size": "16", "num_gpu_blocks": "8", "enable_prefix_caching": "False",
    }  # fmt: skip
    assert metrics.registry.get_sample_value("vllm:cache_config_info", labels) == 1


def test_kv_memory_is_shown() -> None:
    metrics = new_metrics()
    swaps = (Preemption("a", PreemptionMethod.SWAP), Preemption("b"))
    made = report(
        plan=StepPlan(preemptions=swaps), num_swapped_blocks=7, num_retries=3, num_blocks_cached=4,
        num_host_blocks_used=7, num_host_blocks_total=20,
    )  # fmt: skip
    for _ in range(2):
        metrics.on_step(made, {})
    assert value(metrics, "paceline_swapped_blocks_total") == 14
    assert value(metrics, "paceline_isolation_retries_total") == 6
    assert value(metrics, "paceline_preemptions_total", method="swap") == 2
    assert value(metrics, "paceline_preemptions_total", method="recompute") == 2
    assert value(metrics, "paceline_kv_blocks_cached") == 4
    assert value(metrics, "paceline_host_kv_blocks_used") == 7
    assert value(metrics, "paceline_host_kv_blocks") == 20
    # Cached blocks are free: usage counts what requests hold.
    assert value(metrics, "vllm:kv_cache_usage_perc") == 3 / 8


def test_the_prompt_of_a_request_without_output_is_counted_too() -> None:
    metrics = new_metrics()
    metrics.on_step(
        report(chunk("a", NUM_PROMPT), finished=("a",)), {"a": ended("a", FinishReason.LENGTH)}
    )
    assert value(metrics, "vllm:prompt_tokens_total") == NUM_PROMPT


def test_a_scored_prompt_is_judged_by_its_end() -> None:
    made = ended("r", FinishReason.LENGTH)
    made.max_tokens = 0
    promise = Promise(Slo(ttft_s=1.5, tpot_s=0.1), SloClass("default"), 1.0)
    made.promise = promise
    PromiseKeeper().on_step(report(chunk("r", 4), finished=("r",)), {"r": made})
    judged = promise.judge()
    assert (judged.ttft_s, judged.attained) == (1.0, True)
    # Cancelled before its end it got nothing.
    gone = ended("g", FinishReason.CANCELLED)
    gone.max_tokens = 0
    gone.promise = Promise(Slo(ttft_s=1.5), SloClass("default"), 1.0)
    PromiseKeeper().on_step(report(chunk("g", 4), finished=("g",)), {"g": gone})
    assert gone.promise.judge().attained is False
