"""Prometheus metrics of one server: our own (`paceline_*`) and the `vllm:*` names that dashboards
know.

Owns a registry of its own and the translation of a step's report into it. Written on the loop's
thread, read by scrapes on others. Never a label per request or tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.policy.promise import Promise
from controller.runtime.memory_metrics import MemoryMetrics
from controller.runtime.vllm_metrics import LATENCY_BUCKETS, VllmMetrics
from costmodel.base import ModelQuality
from costmodel.features import regime_of
from engine.request import FinishReason, Request
from engine.step import AdmissionAction, StepReport

STEP_BUCKETS = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 10.0,
)  # fmt: skip
PLANNER_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
_QUALITY_EVERY_STEPS = 32


class TelemetryCounts(Protocol):
    """What a scrape asks of the telemetry writer."""

    @property
    def num_rows_queued(self) -> int:
        """Rows that wait to be written."""
        ...

    @property
    def num_dropped_by_reason(self) -> Mapping[str, int]:
        """Rows lost so far."""
        ...


class Metrics:
    """Counts one server's life; a `StepListener`.

    `quality` is asked on the loop's thread, every few steps; `telemetry_counts` at each scrape.
    """

    def __init__(
        self,
        model_name: str,
        *,
        block_size: int,
        num_blocks: int,
        is_prefix_cache_enabled: bool = True,
        quality: Callable[[], ModelQuality] | None = None,
        telemetry_counts: Callable[[], TelemetryCounts] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._vllm = VllmMetrics(
            self.registry,
            model_name,
            block_size=block_size,
            num_blocks=num_blocks,
            is_prefix_cache_enabled=is_prefix_cache_enabled,
        )
        self._quality = quality
        self._model = _ModelCollector()
        self._waiting: set[str] = set()
        self._num_steps = 0
        self._make_metrics()
        self.registry.register(self._model)
        if telemetry_counts is not None:
            self.registry.register(_TelemetryCollector(telemetry_counts))

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Take one step's report, after the promises were told of it."""
        self._vllm.on_step(report, requests)
        self._count_step(report)
        for admission in report.plan.admissions:
            self._count_admission(admission.request_id, admission.action, admission.reason)
        for token in report.tokens:
            if token.index == 0:
                request = requests[token.request_id]
                self._ttft.labels(_class_of(request)).observe(token.at - request.arrived_at)
        for request_id in report.finished:
            self.on_request_finished(requests[request_id])
        if self._quality is not None and self._num_steps % _QUALITY_EVERY_STEPS == 0:
            self.set_model_quality(self._quality())
        self._num_steps += 1

    def on_admission(self, action: AdmissionAction, reason: str) -> None:
        """Count one verdict; `reason` must be one of the stable words."""
        self._admissions.labels(action.value, reason).inc()

    def on_request_finished(self, request: Request) -> None:
        """Count how a request ended and whether its promise was kept (refusals count as missed)."""
        self._waiting.discard(request.request_id)
        self._vllm.on_request_finished(request)
        slo_class = _class_of(request)
        reason = request.finish_reason or FinishReason.ERROR
        self._finished.labels(slo_class, reason.value).inc()
        if not isinstance(request.promise, Promise) or reason is FinishReason.CANCELLED:
            # Whoever leaves is neither kept waiting nor served.
            return
        judged = request.promise.judge()
        verdicts = {
            "ttft": judged.is_ttft_met, "tpot": judged.is_tpot_met, "e2e": judged.is_e2e_met,
            "all": judged.attained,
        }  # fmt: skip
        for kind, is_met in verdicts.items():
            if is_met is not None:
                self._slo.labels(slo_class, kind, "met" if is_met else "missed").inc()
        if judged.tpot_s is not None:
            self._tpot.labels(slo_class).observe(judged.tpot_s)
        if judged.attained:
            self._good_tokens.labels(slo_class).inc(request.num_output_tokens)

    def on_abort(self, requests: Sequence[Request]) -> None:
        """Count requests that no step will report (after a fatal error): nobody runs any more."""
        for request in requests:
            self.on_request_finished(request)
        self._preempted.set(0)
        self._vllm.on_abort()

    def on_slo_ignored(self, count: int) -> None:
        """Count targets that the lenient mode left out."""
        self._slo_ignored.inc(count)

    def on_disconnect(self) -> None:
        """Count a client that went away before its answer was complete."""
        self._disconnects.inc()

    def set_model_quality(self, quality: ModelQuality) -> None:
        """Show the cost model's error, coverage and counts."""
        self._model.quality = quality

    def _make_metrics(self) -> None:
        registry = self.registry
        self._steps = Counter("paceline_steps", "Executed steps", ["regime"], registry=registry)
        self._step_failures = Counter(
            "paceline_step_failures", "Steps that failed in the runner", registry=registry
        )
        self._step = Histogram(
            "paceline_step_seconds", "Duration of a step, start to start", ["regime"],
            buckets=STEP_BUCKETS, registry=registry,
        )  # fmt: skip
        self._step_error = Histogram(
            "paceline_step_prediction_error_ratio",
            "|actual - predicted mean| / actual of a step", ["regime"],
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0), registry=registry,
        )  # fmt: skip
        self._over_upper = Counter(
            "paceline_steps_over_predicted_upper", "Steps beyond their upper bound", ["regime"],
            registry=registry,
        )  # fmt: skip
        self._planner = Histogram(
            "paceline_planner_seconds", "Time spent on choosing a step",
            buckets=PLANNER_BUCKETS, registry=registry,
        )  # fmt: skip
        self._binding = Counter(
            "paceline_steps_by_constraint", "Steps by the constraint that bound their budget",
            ["constraint"], registry=registry,
        )  # fmt: skip
        self._predicted_mean = self._gauge(
            "paceline_step_predicted_mean_seconds", "Predicted mean duration of the last step"
        )
        self._predicted_upper = self._gauge(
            "paceline_step_predicted_upper_seconds", "Predicted upper bound of the last step"
        )
        self._budget = self._gauge("paceline_token_budget", "Token budget of the last step")
        self._slack = self._gauge(
            "paceline_min_slack_seconds", "Slack of the tightest decode, negative = late"
        )
        self._slack.set(float("nan"))
        self._preempted = self._gauge("paceline_requests_preempted", "Requests that gave way")
        self._memory = MemoryMetrics(registry)
        self._admissions = Counter(
            "paceline_admissions", "Verdicts on requests", ["decision", "reason"],
            registry=registry,
        )  # fmt: skip
        self._finished = Counter(
            "paceline_requests_finished", "Ended requests", ["slo_class", "finish_reason"],
            registry=registry,
        )  # fmt: skip
        self._slo = Counter(
            "paceline_slo", "Judged targets of offered requests; kind all = every target",
            ["slo_class", "kind", "outcome"], registry=registry,
        )  # fmt: skip
        self._good_tokens = Counter(
            "paceline_goodput_tokens", "Output tokens of requests that met every target",
            ["slo_class"], registry=registry,
        )  # fmt: skip
        self._ttft = Histogram(
            "paceline_time_to_first_token_seconds", "From arrival to the first token",
            ["slo_class"], buckets=LATENCY_BUCKETS["ttft"], registry=registry,
        )  # fmt: skip
        self._tpot = Histogram(
            "paceline_time_per_output_token_seconds", "Mean time per token after the first",
            ["slo_class"], buckets=LATENCY_BUCKETS["tpot"], registry=registry,
        )  # fmt: skip
        self._slo_ignored = Counter(
            "paceline_slo_ignored", "Malformed targets left out in lenient mode",
            registry=registry,
        )  # fmt: skip
        self._disconnects = Counter(
            "paceline_client_disconnects", "Clients that left before the end", registry=registry
        )

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(name, documentation, registry=self.registry)

    def _count_step(self, report: StepReport) -> None:
        plan, decision = report.plan, report.plan.decision
        self._preempted.set(report.num_preempted)
        self._memory.on_step(report)
        self._planner.observe(report.planner_s)
        if report.failure is not None:
            self._step_failures.inc()
        if decision is not None:
            self._budget.set(decision.token_budget)
            self._binding.labels(decision.binding_constraint).inc()
            # NaN is Prometheus' way to say that there is no such thing now.
            self._slack.set(float("nan") if decision.slack_s is None else decision.slack_s)
        if not report.is_executed:
            return
        regime = regime_of(plan.num_prefill_tokens, plan.num_decode_tokens).value
        self._steps.labels(regime).inc()
        self._step.labels(regime).observe(report.duration_s)
        if decision is None or decision.predicted_mean_s is None:
            return
        self._predicted_mean.set(decision.predicted_mean_s)
        if report.duration_s > 0:
            error = abs(report.duration_s - decision.predicted_mean_s) / report.duration_s
            self._step_error.labels(regime).observe(error)
        if decision.predicted_upper_s is not None:
            self._predicted_upper.set(decision.predicted_upper_s)
            if report.duration_s > decision.predicted_upper_s:
                self._over_upper.labels(regime).inc()

    def _count_admission(self, request_id: str, action: AdmissionAction, reason: str) -> None:
        # A planner may repeat that a request waits, step after step; it waits once.
        if action is AdmissionAction.WAIT:
            if request_id in self._waiting:
                return
            self._waiting.add(request_id)
        self.on_admission(action, reason)


def _class_of(request: Request) -> str:
    promise = request.promise
    return promise.slo_class.name if isinstance(promise, Promise) else "none"


class _ModelCollector(Collector):
    """Shows the last `ModelQuality` that it was given."""

    quality: ModelQuality | None = None

    def collect(self) -> Iterator[Metric]:
        quality = self.quality
        if quality is None:
            return
        yield GaugeMetricFamily(
            "paceline_model_version", "Version of the cost model", value=quality.version
        )
        # Kept as gauges: the model forgets, so these may fall.
        observed = GaugeMetricFamily(
            "paceline_model_observed_steps", "Steps behind the numbers", labels=["regime"]
        )
        error = GaugeMetricFamily(
            "paceline_model_mape_ratio", "Mean absolute relative error", labels=["regime"]
        )
        coverage = GaugeMetricFamily(
            "paceline_model_coverage_ratio", "Share of steps under their bound", labels=["regime"]
        )
        yield GaugeMetricFamily(
            "paceline_model_coverage_target_ratio",
            "Share of steps that are to stay under their bound",
            value=quality.target_coverage,
        )
        if quality.mixing_ratio is not None:
            yield GaugeMetricFamily(
                "paceline_model_mixing_ratio",
                "Seconds of mixed steps over those of their decodes and prompts in two steps",
                value=quality.mixing_ratio,
            )
        margin = GaugeMetricFamily(
            "paceline_model_margin_ratio", "Safety added to the mean", labels=["regime"]
        )
        rows = [("all", quality.num_observed, quality.mape, quality.coverage)]
        rows += [(r.regime.value, r.num_observed, r.mape, r.coverage) for r in quality.regimes]
        for regime, num_observed, mape, covered in rows:
            observed.add_metric([regime], num_observed)
            error.add_metric([regime], mape)
            coverage.add_metric([regime], covered)
        for row in quality.regimes:
            margin.add_metric([row.regime.value], row.margin)
        yield from (observed, error, coverage, margin)
        rejected = CounterMetricFamily(
            "paceline_model_samples_rejected", "Samples that did not teach", labels=["reason"]
        )
        for reason, count in quality.num_rejected.items():
            rejected.add_metric([reason], count)
        yield rejected


class _TelemetryCollector(Collector):
    """Asks the telemetry writer at each scrape."""

    def __init__(self, counts: Callable[[], TelemetryCounts]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        yield GaugeMetricFamily(
            "paceline_telemetry_queued_rows",
            "Rows waiting to be written",
            value=counts.num_rows_queued,
        )
        dropped = CounterMetricFamily(
            "paceline_telemetry_dropped_rows", "Rows lost to the database", labels=["reason"]
        )
        for reason, count in counts.num_dropped_by_reason.items():
            dropped.add_metric([reason], count)
        yield dropped
