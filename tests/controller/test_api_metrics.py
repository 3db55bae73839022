"""Metrics: what a step, a promise and a refusal leave behind, and what a scrape shows."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.api.app import create_app
from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass
from controller.runtime.metrics import Metrics
from costmodel.base import ModelQuality, RegimeQuality
from costmodel.features import Regime
from engine.request import FinishReason, Request, RequestPhase, SamplingParams
from engine.step import (
    Admission,
    AdmissionAction,
    EmittedToken,
    Preemption,
    StepDecision,
    StepPlan,
    StepReport,
    StepWork,
    WorkKind,
)
from tests.controller.service_double import ScriptedService, call

CHAT = SloClass("chat", Slo(ttft_s=1.0, tpot_s=0.1))
TTFT_BUCKETS = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TPOT_BUCKETS = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
COMPATIBLE = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:cache_config_info
vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:request_time_per_output_token_seconds_bucket vllm:e2e_request_latency_seconds_bucket
vllm:request_queue_time_seconds_bucket vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:request_success_total vllm:num_preemptions_total vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total vllm:iteration_tokens_total_bucket
"""


def new_metrics(**kwargs: Any) -> Metrics:
    return Metrics("tiny", block_size=16, num_blocks=8, **kwargs)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    if name.startswith("vllm:"):
        labels = {"model_name": "tiny", "engine": "0", **labels}
    return metrics.registry.get_sample_value(name, labels)


def request(name: str = "r", *, arrived_at: float = 10.0, slo: Slo = CHAT.slo) -> Request:
    made = Request(name, (1, 2, 3), 5, arrived_at, SamplingParams())
    made.promise = Promise(slo, CHAT, arrived_at)
    return made


def report(step_no: int, **kwargs: Any) -> StepReport:
    defaults: dict[str, Any] = {
        "started_at": 10.0, "duration_s": 0.1, "planner_s": 0.0001, "execute_s": 0.09,
        "plan": StepPlan(), "is_executed": True, "num_running": 1, "num_waiting": 2,
        "num_preempted": 1, "num_blocks_used": 2, "num_blocks_total": 8,
    }  # fmt: skip
    return StepReport(step_no=step_no, **{**defaults, **kwargs})


def decision(**kwargs: Any) -> StepDecision:
    defaults: dict[str, Any] = {
        "policy": "slo", "token_budget": 64, "lower_bound_tokens": 0, "upper_bound_tokens": 64,
        "binding_constraint": "decode_slack", "slack_s": -0.5, "predicted_mean_s": 0.08,
        "predicted_upper_s": 0.09,
    }  # fmt: skip
    return StepDecision(**{**defaults, **kwargs})


def serve(metrics: Metrics, made: Request, instants: list[float], reason: FinishReason) -> None:
    """Play one request's steps: a prefill that emits, then decodes, then the end."""
    promise = made.promise
    assert isinstance(promise, Promise)
    made.move(RequestPhase.RUNNING)
    made.first_scheduled_at = made.arrived_at + 0.25
    for index, at in enumerate(instants):
        made.output_token_ids.append(7)
        made.first_token_at = instants[0]
        made.last_token_at = at
        promise.record_token(at)
        kind = WorkKind.DECODE if index else WorkKind.PREFILL
        work = StepWork(made.request_id, kind, 1 if index else 3, 0)
        is_last = index == len(instants) - 1
        if is_last:
            made.move(RequestPhase.FINISHED)
            made.finish_reason, made.finished_at = reason, at
        metrics.on_step(
            report(
                index + 1,
                plan=StepPlan(work=(work,), decision=decision()),
                tokens=(EmittedToken(made.request_id, 7, index, at),),
                finished=(made.request_id,) if is_last else (),
            ),
            {made.request_id: made},
        )


def test_a_served_request_is_counted_under_its_class_and_for_dashboards() -> None:
    metrics = new_metrics()
    serve(metrics, request(), [10.5, 10.6, 10.7], FinishReason.STOP)
    assert value(metrics, "vllm:prompt_tokens_total") == 3
    assert value(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 2
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(0.7)
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == pytest.approx(0.25)
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 5
    assert value(metrics, "vllm:num_requests_running") == 1
    assert value(metrics, "vllm:num_requests_waiting") == 3
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    for kind in ("ttft", "tpot", "all"):
        assert slo_count(metrics, kind, "met") == 1
    assert slo_count(metrics, "e2e", "met") is None
    assert value(metrics, "paceline_goodput_tokens_total", slo_class="chat") == 3
    assert value(metrics, "paceline_steps_total", regime="prefill_only") == 1
    assert value(metrics, "paceline_steps_total", regime="decode_only") == 2


def slo_count(metrics: Metrics, kind: str, outcome: str) -> float | None:
    labels = {"slo_class": "chat", "kind": kind, "outcome": outcome}
    return value(metrics, "paceline_slo_total", **labels)


def test_a_broken_promise_is_missed_and_a_client_that_left_does_not_count() -> None:
    metrics = new_metrics()
    serve(metrics, request(), [12.0, 12.05], FinishReason.LENGTH)
    assert slo_count(metrics, "ttft", "missed") == 1
    assert slo_count(metrics, "tpot", "met") == 1
    assert slo_count(metrics, "all", "missed") == 1
    assert value(metrics, "paceline_goodput_tokens_total", slo_class="chat") is None
    serve(metrics, request("left"), [12.0], FinishReason.CANCELLED)
    assert slo_count(metrics, "all", "missed") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1


def test_a_refusal_is_a_missed_promise_and_a_verdict_with_its_reason() -> None:
    metrics = new_metrics()
    made = request()
    made.move(RequestPhase.FINISHED)
    made.finish_reason = FinishReason.REJECTED
    refused = Admission("r", AdmissionAction.REJECT, "overloaded")
    metrics.on_step(
        report(1, plan=StepPlan(admissions=(refused,)), is_executed=False, finished=("r",)),
        {"r": made},
    )
    labels = {"decision": "reject", "reason": "overloaded"}
    assert value(metrics, "paceline_admissions_total", **labels) == 1
    assert slo_count(metrics, "all", "missed") == 1
    labels = {"slo_class": "chat", "finish_reason": "rejected"}
    assert value(metrics, "paceline_requests_finished_total", **labels) == 1
    assert value(metrics, "vllm:iteration_tokens_total_count") == 0


def test_a_request_that_waits_for_many_steps_waits_once() -> None:
    metrics = new_metrics()
    waits = Admission("r", AdmissionAction.WAIT, "queued")
    for step_no in range(5):
        metrics.on_step(report(step_no, plan=StepPlan(admissions=(waits,))), {"r": request()})
    assert value(metrics, "paceline_admissions_total", decision="wait", reason="queued") == 1


def test_predictions_are_held_against_what_happened() -> None:
    metrics = new_metrics()
    work = (StepWork("r", WorkKind.DECODE, 1, 5), StepWork("s", WorkKind.PREFILL, 8, 0))
    for step_no, duration_s in enumerate((0.08, 0.1)):
        plan = StepPlan(work=work, decision=decision())
        named = {name: request(name) for name in "rs"}
        metrics.on_step(report(step_no, plan=plan, duration_s=duration_s), named)
    assert value(metrics, "paceline_steps_over_predicted_upper_total", regime="mixed") == 1
    name = "paceline_step_prediction_error_ratio"
    assert value(metrics, f"{name}_count", regime="mixed") == 2
    assert value(metrics, f"{name}_sum", regime="mixed") == pytest.approx(0.2)
    assert value(metrics, "paceline_min_slack_seconds") == -0.5
    assert value(metrics, "paceline_token_budget") == 64
    constraint = "paceline_steps_by_constraint_total"
    assert value(metrics, constraint, constraint="decode_slack") == 2


def test_no_deadline_is_not_a_slack_of_zero() -> None:
    metrics = new_metrics()
    assert math.isnan(value(metrics, "paceline_min_slack_seconds") or 0.0)
    plan = StepPlan(decision=decision(slack_s=None))
    metrics.on_step(report(1, plan=plan), {})
    assert math.isnan(value(metrics, "paceline_min_slack_seconds") or 0.0)


def test_failures_and_preemptions_are_counted() -> None:
    metrics = new_metrics()
    plan = StepPlan(preemptions=(Preemption("r"), Preemption("s")))
    metrics.on_step(report(1, plan=plan, is_executed=False, failure="boom"), {})
    assert value(metrics, "paceline_step_failures_total") == 1
    assert value(metrics, "vllm:num_preemptions_total") == 2
    assert value(metrics, "paceline_requests_preempted") == 1


def test_without_a_mixed_step_there_is_no_ratio_of_mixing() -> None:
    metrics = new_metrics(quality=lambda: ModelQuality(3, 9, 0.05, 0.9, (), {}))
    metrics.on_step(report(1), {})
    assert value(metrics, "paceline_model_version") == 3
    assert value(metrics, "paceline_model_mixing_ratio") is None


def test_the_models_quality_is_asked_on_the_loops_thread_only() -> None:
    asked: list[int] = []

    def quality() -> ModelQuality:
        asked.append(1)
        regime = RegimeQuality(Regime.MIXED, 7, 0.04, 0.91, 0.2)
        return ModelQuality(3, 9, 0.05, 0.9, (regime,), {"warm_up": 2}, 0.8, 0.7)

    metrics = new_metrics(quality=quality)
    assert value(metrics, "paceline_model_version") is None
    metrics.on_step(report(1), {})
    assert value(metrics, "paceline_model_version") == 3
    assert value(metrics, "paceline_model_observed_steps", regime="all") == 9
    assert value(metrics, "paceline_model_mape_ratio", regime="mixed") == 0.04
    assert value(metrics, "paceline_model_coverage_ratio", regime="mixed") == 0.91
    assert value(metrics, "paceline_model_coverage_target_ratio") == 0.8
    assert value(metrics, "paceline_model_mixing_ratio") == 0.7
    assert value(metrics, "paceline_model_margin_ratio", regime="mixed") == 0.2
    assert value(metrics, "paceline_model_samples_rejected_total", reason="warm_up") == 2
    assert asked == [1]


def test_the_writer_is_asked_at_each_scrape() -> None:
    counts = SimpleNamespace(num_rows_queued=1, num_dropped_by_reason={"full": 2})
    metrics = new_metrics(telemetry_counts=lambda: counts)
    counts.num_rows_queued = 5
    assert value(metrics, "paceline_telemetry_queued_rows") == 5
    assert value(metrics, "paceline_telemetry_dropped_rows_total", reason="full") == 2


def test_a_scrape_has_every_compatible_name_and_its_buckets() -> None:
    metrics = new_metrics()
    serve(metrics, request(), [10.5, 10.6], FinishReason.STOP)
    answer = call(create_app(ScriptedService(), metrics=metrics), "GET", "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    samples = [s for f in text_string_to_metric_families(answer.text) for s in f.samples]
    names = {sample.name for sample in samples}
    assert set(COMPATIBLE.split()) <= names
    for name, expected in (
        ("vllm:time_to_first_token_seconds", TTFT_BUCKETS),
        ("vllm:inter_token_latency_seconds", TPOT_BUCKETS),
        ("vllm:request_time_per_output_token_seconds", TPOT_BUCKETS),
        ("paceline_time_to_first_token_seconds", TTFT_BUCKETS),
    ):
        bounds = [float(s.labels["le"]) for s in samples if s.name == f"{name}_bucket"]
        assert bounds == [*map(float, expected.split()), math.inf]
    for sample in samples:
        assert not {"request_id", "tenant", "user"} & sample.labels.keys()


def test_two_servers_in_one_process_do_not_share_numbers() -> None:
    first, second = new_metrics(), new_metrics()
    first.on_disconnect()
    assert value(first, "paceline_client_disconnects_total") == 1
    assert value(second, "paceline_client_disconnects_total") == 0
