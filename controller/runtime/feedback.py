"""Feedback: the one place that joins what happened to who wants to know.

Owns the translation of a step report into promises kept, samples for the cost model, telemetry rows
and metrics. Runs on the loop's thread: everything here is arithmetic or a bounded offer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from controller.policy.lengths import OutputLengths
from controller.policy.promise import Promise
from costmodel.features import StepFeatures
from costmodel.hygiene import RejectReason
from costmodel.refit import Refit
from engine.clock import Clock
from engine.request import FinishReason, Request
from engine.step import AdmissionAction, StepReport, WorkKind
from store.records import EventKind, EventRecord, Record, RequestRecord, StepRecord

_MAX_MESSAGE_CHARS = 2000


class PromiseKeeper:
    """Tells promises of their tokens and verdicts; must be the first listener of a step."""

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Record degradations and tokens; where no token was asked for, the end is the answer."""
        for admission in report.plan.admissions:
            if admission.is_degraded:
                promise_of(requests[admission.request_id]).is_degraded = True
        for token in report.tokens:
            promise = requests[token.request_id].promise
            # `promise_of`, written out: this runs for every token.
            assert isinstance(promise, Promise)  # noqa: S101 - as there
            promise.record_token(token.at)
        for request_id in report.finished:
            request = requests[request_id]
            if request.max_tokens == 0 and request.finish_reason is FinishReason.LENGTH:
                assert request.finished_at is not None  # noqa: S101 - it has ended
                promise_of(request).record_token(request.finished_at)


def features_of(report: StepReport) -> StepFeatures:
    """Return the features of an executed step, what it sampled and scored for prompts included."""
    prompts = [work.request_id for work in report.plan.work if work.kind is WorkKind.PREFILL]
    num_ends = 0
    if prompts:
        sampled = {token.request_id for token in report.tokens}
        num_ends = sum([request_id in sampled for request_id in prompts])
    num_scored = sum(len(scores.tokens) for scores in report.prompt_scores)
    return StepFeatures.of(report.plan.work, num_ends + num_scored)


class Learner(Protocol):
    """What feedback needs of a cost model that learns online."""

    @property
    def num_drift_alarms(self) -> int:
        """Changes of the machine's speed that were noticed."""
        ...

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        """Learn from one executed step."""
        ...

    def reject(self, reason: RejectReason) -> None:
        """Count a sample that must not teach."""
        ...


class Teacher:
    """Shows executed steps to the cost model and finished outputs to the planner's expectations."""

    def __init__(self, cost_model: Learner, output_lengths: OutputLengths) -> None:
        self._cost_model = cost_model
        self._output_lengths = output_lengths

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Observe the step's duration.

        A step without work teaches nothing; nor does one whose duration holds more than one forward
        of its work: forwards that failed, or KV that was moved or was to be.
        """
        if report.failure is not None or report.num_retries > 0:
            self._cost_model.reject(RejectReason.FAILED_STEP)
        elif report.is_executed and report.num_swapped_blocks + report.num_failed_swaps > 0:
            self._cost_model.reject(RejectReason.SWAP)
        elif report.is_executed:
            self._cost_model.observe(features_of(report), report.duration_s)
        for request_id in report.finished:
            request = requests[request_id]
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._output_lengths.observe(
                    promise_of(request).slo_class.name, request.num_output_tokens
                )


class Offer(Protocol):
    """Hands a record to telemetry without waiting; False if it was dropped (and counted)."""

    def __call__(self, record: Record) -> bool:
        """Offer one record."""
        ...


class TelemetryFeed:
    """Turns reports into telemetry rows and offers them."""

    def __init__(self, offer: Offer, clock: Clock, run_id: str, cost_model: Learner) -> None:
        self._offer = offer
        self._clock = clock
        self._run_id = run_id
        self._cost_model = cost_model
        self._num_drift_alarms = cost_model.num_drift_alarms
        # Degraded requests that have not ended: the verdict that starts one repeats it.
        self._degraded_ids: set[str] = set()

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Offer the step with its shares, then the requests that ended, then events."""
        to_epoch_ms = self._epoch_of()
        if report.plan.work:
            self._offer(
                StepRecord.from_report(
                    report,
                    run_id=self._run_id,
                    at=to_epoch_ms(report.started_at),
                    features=features_of(report),
                )
            )
        for request_id in report.finished:
            self._offer(request_record(requests[request_id], self._run_id, to_epoch_ms))
        for event in _events(report, requests, self._run_id, to_epoch_ms):
            self._offer(event)
        self._tell_relegations(report, requests, to_epoch_ms)
        self._tell_drift(report, to_epoch_ms)

    def record_endings(self, requests: tuple[Request, ...]) -> None:
        """Offer requests that no step will report (after a fatal error)."""
        to_epoch_ms = self._epoch_of()
        for request in requests:
            self._offer(request_record(request, self._run_id, to_epoch_ms))
            self._degraded_ids.discard(request.request_id)

    def tell_failure(self, failure: str) -> None:
        """Offer an event that says why the engine stopped though nobody asked it to."""
        self._offer(
            EventRecord(
                run_id=self._run_id,
                at=self._clock.epoch_ms(),
                event_kind=EventKind.ENGINE_STOPPED,
                reason=_kind_of(failure),
                numbers={"message": failure[:_MAX_MESSAGE_CHARS]},
            )
        )

    def tell_start(
        self, origin: str, problem: str | None, numbers: Mapping[str, float | int | str | None]
    ) -> None:
        """Offer an event that says where the cost model starts, and why not from a stored one."""
        self._offer(
            EventRecord(
                run_id=self._run_id,
                at=self._clock.epoch_ms(),
                event_kind=EventKind.WARM_START,
                reason=origin,
                numbers={**numbers, "problem": problem},
            )
        )

    def tell_refit(self, refit: Refit, report: StepReport) -> None:
        """Offer an event for coefficients that a refit replaced."""
        self._offer(
            EventRecord(
                run_id=self._run_id,
                at=self._epoch_of()(report.started_at + report.duration_s),
                event_kind=EventKind.MODEL_REFIT,
                reason="smaller error on held-out steps",
                step_no=report.step_no,
                numbers={
                    "error": refit.error,
                    "error_before": refit.current_error,
                    "num_held_out": refit.num_held_out,
                },
            )
        )

    def _tell_relegations(
        self,
        report: StepReport,
        requests: Mapping[str, Request],
        to_epoch_ms: Callable[[float], int],
    ) -> None:
        """Offer an event for each request that lost its promise now, once in its life."""
        for admission in report.plan.admissions:
            if not admission.is_degraded or admission.request_id in self._degraded_ids:
                continue
            self._degraded_ids.add(admission.request_id)
            slo = promise_of(requests[admission.request_id]).slo
            self._offer(
                EventRecord(
                    run_id=self._run_id,
                    at=to_epoch_ms(report.started_at + report.duration_s),
                    event_kind=EventKind.RELEGATION,
                    reason=admission.reason,
                    request_id=admission.request_id,
                    step_no=report.step_no,
                    numbers={
                        "predicted_ttft_s": admission.predicted_ttft_s,
                        "ttft_target_s": slo.ttft_s,
                        "tpot_target_s": slo.tpot_s,
                        "e2e_target_s": slo.e2e_s,
                    },
                )
            )
        self._degraded_ids.difference_update(report.finished)

    def _tell_drift(self, report: StepReport, to_epoch_ms: Callable[[float], int]) -> None:
        """Offer an event where the step just observed raised an alarm (the teacher comes first)."""
        num_alarms = self._cost_model.num_drift_alarms
        if num_alarms == self._num_drift_alarms:
            return
        self._num_drift_alarms = num_alarms
        decision = report.plan.decision
        self._offer(
            EventRecord(
                run_id=self._run_id,
                at=to_epoch_ms(report.started_at + report.duration_s),
                event_kind=EventKind.DRIFT_ALARM,
                reason="step latency changed",
                step_no=report.step_no,
                numbers={
                    "num_alarms": num_alarms,
                    "actual_s": report.duration_s,
                    "predicted_mean_s": None if decision is None else decision.predicted_mean_s,
                },
            )
        )

    def _epoch_of(self) -> Callable[[float], int]:
        now, now_ms = self._clock.now(), self._clock.epoch_ms()
        return lambda at: now_ms - round((now - at) * 1000)


def promise_of(request: Request) -> Promise:
    """Return the request's promise; every request of the service carries one."""
    promise = request.promise
    assert isinstance(promise, Promise)  # noqa: S101 - set by the service for every request
    return promise


def request_record(
    request: Request, run_id: str, to_epoch_ms: Callable[[float], int]
) -> RequestRecord:
    """Describe an ended request."""
    promise = promise_of(request)
    judged = promise.judge()
    admission = request.admission
    ended_at = request.arrived_at if request.finished_at is None else request.finished_at
    started_at, first_at = request.first_scheduled_at, request.first_token_at

    def span(start: float | None, stop: float | None) -> float | None:
        return None if start is None or stop is None else max(0.0, stop - start)

    def epoch(at: float | None) -> int | None:
        return None if at is None else to_epoch_ms(at)

    return RequestRecord(
        run_id=run_id,
        request_id=request.request_id,
        slo_class=promise.slo_class.name,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_tokens,
        max_tokens=request.max_tokens,
        arrived_at=to_epoch_ms(request.arrived_at),
        arrived_clock_s=request.arrived_at,
        ended_at=to_epoch_ms(ended_at),
        finish_reason=(request.finish_reason or FinishReason.ERROR).value,
        decision="" if admission is None else admission.action.value,
        reason="" if admission is None else admission.reason,
        is_degraded=promise.is_degraded,
        priority=promise.priority,
        ttft_target_s=promise.slo.ttft_s,
        tpot_target_s=promise.slo.tpot_s,
        e2e_target_s=promise.slo.e2e_s,
        admitted_at=epoch(request.admitted_at),
        first_token_at=epoch(first_at),
        queue_s=span(request.arrived_at, ended_at if started_at is None else started_at),
        prefill_s=span(started_at, first_at),
        decode_s=span(first_at, ended_at),
        ttft_s=judged.ttft_s,
        tpot_s=judged.tpot_s,
        e2e_s=judged.e2e_s,
        longest_gap_s=judged.longest_gap_s,
        fluidity=judged.fluidity,
        num_preemptions=request.num_preemptions,
        predicted_ttft_s=None if admission is None else admission.predicted_ttft_s,
        failure=request.failure,
        is_ttft_met=judged.is_ttft_met,
        is_tpot_met=judged.is_tpot_met,
        is_e2e_met=judged.is_e2e_met,
        attained=judged.attained,
    )


def _events(
    report: StepReport,
    requests: Mapping[str, Request],
    run_id: str,
    to_epoch_ms: Callable[[float], int],
) -> list[EventRecord]:
    at = to_epoch_ms(report.started_at + report.duration_s)
    events = [
        EventRecord(
            run_id=run_id,
            at=at,
            event_kind=EventKind.REFUSAL,
            reason=admission.reason,
            request_id=admission.request_id,
            step_no=report.step_no,
            numbers={
                "predicted_ttft_s": admission.predicted_ttft_s,
                "retry_after_s": admission.retry_after_s,
            },
        )
        for admission in report.plan.admissions
        if admission.action is AdmissionAction.REJECT
    ]
    events += [
        EventRecord(
            run_id=run_id,
            at=at,
            event_kind=EventKind.PREEMPTION,
            reason="kv_blocks",
            request_id=preemption.request_id,
            step_no=report.step_no,
            numbers={
                "method": preemption.method.value,
                "num_preemptions": requests[preemption.request_id].num_preemptions,
            },
        )
        for preemption in report.plan.preemptions
    ]
    if report.failure is None:
        # Who failed alone while the rest of the step went on, or in a later look for the culprit.
        events += [
            EventRecord(
                run_id=run_id,
                at=at,
                event_kind=EventKind.REQUEST_FAILURE,
                reason=_kind_of(requests[request_id].failure or "unknown"),
                request_id=request_id,
                step_no=report.step_no,
                numbers={
                    "num_retries": report.num_retries,
                    "message": (requests[request_id].failure or "unknown")[:_MAX_MESSAGE_CHARS],
                },
            )
            for request_id in report.finished
            if requests[request_id].finish_reason is FinishReason.ERROR
        ]
    if report.failure is not None:
        events.append(
            EventRecord(
                run_id=run_id,
                at=at,
                event_kind=EventKind.STEP_FAILURE,
                reason=_kind_of(report.failure),
                step_no=report.step_no,
                numbers={"message": report.failure[:_MAX_MESSAGE_CHARS]},
            )
        )
    return events


def _kind_of(failure: str) -> str:
    """Return what failures of a kind have in common: the error's name, or the text without one."""
    name, colon, _ = failure.partition(":")
    return name if colon and name.isidentifier() else failure
