"""The service: streams, and what feedback tells whom, on a real loop thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from controller.policy.promise import Promise
from controller.policy.slo import Slo, SloClass
from controller.runtime.generation import AdmissionEvent, FinishedEvent, TokenEvent
from controller.runtime.streams import Stream, StreamHub
from engine.ports import EngineView
from engine.request import FinishReason, Request
from engine.step import Admission, AdmissionAction, EmittedToken, StepPlan, StepReport
from store.records import EventRecord, RequestRecord, StepRecord
from tests.controller.service_rig import STEP_S, Rig, collect, running_service


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running_service() as started:
        yield started


def test_a_stream_tells_a_life_in_order(rig: Rig) -> None:
    async def scenario() -> list[Any]:
        return await collect(rig.service.submit(rig.ask(slo_class="chat")))

    events = asyncio.run(scenario())
    assert isinstance(events[0], AdmissionEvent)
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert [(token.token_id, token.index) for token in tokens] == [(40, 0), (41, 1), (42, 2)]
    # Six prompt tokens at four a step: the first token comes with the second step.
    assert [token.at for token in tokens] == [50.5, 50.75, 51.0]
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert (end.reason, end.num_prompt_tokens, end.num_output_tokens) == (FinishReason.LENGTH, 6, 3)
    assert (end.ttft_s, end.tpot_s, end.queue_s) == (0.5, 0.25, 0.0)
    assert (end.is_ttft_met, end.is_tpot_met, end.is_e2e_met) == (True, True, None)
    assert len([event for event in events if isinstance(event, FinishedEvent)]) == 1


def test_the_loops_thread_settles_in_before_the_service_has_started() -> None:
    settled: list[str] = []
    with running_service(lambda: settled.append(threading.current_thread().name)) as rig:
        # At once, not with the first request, and where the steps will be.
        assert settled == ["paceline-loop"]
        assert rig.service.health().is_ready
        asyncio.run(collect_one(rig))
    assert settled == ["paceline-loop"]


async def collect_one(rig: Rig) -> list[Any]:
    return await collect(rig.service.submit(rig.ask()))


def test_own_targets_go_over_the_class_field_by_field(rig: Rig) -> None:
    async def scenario() -> Any:
        request = rig.ask(slo_class="chat", slo=Slo(tpot_s=0.2), priority=4)
        return (await collect(rig.service.submit(request)))[-1]

    promise = asyncio.run(scenario()).promise
    assert promise.slo == Slo(ttft_s=10.0, tpot_s=0.2)
    assert (promise.slo_class.name, promise.priority, promise.arrived_at) == ("chat", 4, 50.0)


def test_an_unknown_class_is_refused_before_anything_happens(rig: Rig) -> None:
    async def scenario() -> None:
        with pytest.raises(KeyError, match="gold"):
            rig.service.submit(rig.ask(slo_class="gold"))

    asyncio.run(scenario())
    assert rig.service.num_unfinished == 0


def test_feedback_reaches_model_lengths_and_telemetry(rig: Rig) -> None:
    async def scenario() -> None:
        await collect(rig.service.submit(rig.ask(slo_class="chat")))

    asyncio.run(scenario())
    rig.service.stop(10.0)
    assert [(f.num_prefill_tokens, f.num_decode_requests) for f, _ in rig.model.seen] == [
        (4.0, 0.0),
        (2.0, 0.0),
        (0.0, 1.0),
        (0.0, 1.0),
    ]
    assert [latency for _, latency in rig.model.seen] == [STEP_S] * 4
    assert rig.lengths.expected("chat") == 3
    steps = [record for record in rig.records if isinstance(record, StepRecord)]
    (request,) = [record for record in rig.records if isinstance(record, RequestRecord)]
    assert [step.step_no for step in steps] == [1, 2, 3, 4]
    assert sum(step.num_emitted_tokens for step in steps) == request.num_output_tokens == 3
    assert (request.decision, request.finish_reason, request.attained) == ("admit", "length", True)
    assert (request.queue_s, request.prefill_s, request.decode_s) == (0.0, 0.5, 0.5)
    assert request.ended_at - request.arrived_at == 1000
    assert (rig.tally.num_steps, rig.tally.num_tokens, rig.tally.num_finished) == (4, 3, 1)


def test_a_rejection_is_the_only_event_and_is_told_with_its_reason(rig: Rig) -> None:
    def reject(view: EngineView) -> StepPlan:
        return StepPlan(
            admissions=tuple(
                Admission(
                    request.request_id, AdmissionAction.REJECT, "overloaded", "busy", 3.0, 2.0
                )
                for request in view.waiting
            )
        )

    rig.planner.plan_with = reject

    async def scenario() -> list[Any]:
        return await collect(rig.service.submit(rig.ask(slo_class="chat")))

    (end,) = asyncio.run(scenario())
    assert (end.reason, end.admission.reason) == (FinishReason.REJECTED, "overloaded")
    assert end.admission.retry_after_s == 2.0
    rig.service.stop(10.0)
    (event,) = [record for record in rig.records if isinstance(record, EventRecord)]
    assert (event.event_kind, event.reason) == ("refusal", "overloaded")
    (request,) = [record for record in rig.records if isinstance(record, RequestRecord)]
    # A refused promise is a missed one: attainment is over what was offered.
    assert (request.decision, request.attained, request.predicted_ttft_s) == ("reject", False, 3.0)
    assert rig.tally.num_refused == 1
    assert rig.model.seen == []


def test_degrading_marks_the_promise_and_is_told_once_per_request(rig: Rig) -> None:
    inner = rig.planner.plan_with

    def degrade(view: EngineView) -> StepPlan:
        told = [
            Admission(
                each.request_id, AdmissionAction.WAIT, "overloaded", "late", 12.5, is_degraded=True
            )
            for each in view.waiting
            if each.admission is None
        ]
        if told:
            return StepPlan(admissions=tuple(told))
        plan: StepPlan = inner(view)
        # The verdict that starts a degraded request repeats that it is one.
        return replace(
            plan, admissions=tuple(replace(a, is_degraded=True) for a in plan.admissions)
        )

    rig.planner.plan_with = degrade

    async def scenario() -> list[Any]:
        return [
            (await collect(rig.service.submit(rig.ask(slo_class="chat"))))[-1] for _ in range(2)
        ]

    assert all(end.promise.is_degraded for end in asyncio.run(scenario()))
    rig.service.stop(10.0)
    events = [record for record in rig.records if isinstance(record, EventRecord)]
    rows = [record for record in rig.records if isinstance(record, RequestRecord)]
    assert [row.is_degraded for row in rows] == [True, True]
    assert [(event.event_kind, event.reason) for event in events] == [
        ("relegation", "overloaded")
    ] * 2
    assert [event.request_id for event in events] == [row.request_id for row in rows]
    assert events[0].numbers == {
        "predicted_ttft_s": 12.5, "ttft_target_s": 10.0, "tpot_target_s": 0.3, "e2e_target_s": None,
    }  # fmt: skip


def test_a_step_wakes_each_event_loop_once() -> None:
    calls: list[int] = []

    class FakeLoop:
        def call_soon_threadsafe(self, function: Any, deliveries: list[Any]) -> None:
            calls.append(len(deliveries))

    hub, event_loop = StreamHub(), FakeLoop()
    requests = {}
    for name in "abc":
        stream = Stream(name, event_loop, lambda *_: None)  # type: ignore[arg-type]
        promise = Promise(Slo(), SloClass("default"), 0.0)
        requests[name] = Request(name, (1,), 5, 0.0, promise=promise)
        hub.register(stream, requests[name])
    tokens = tuple(EmittedToken(name, 1, 0, 0.0) for name in "abc")
    report = StepReport(1, 0, 0, 0, 0, StepPlan(), True, 3, 0, 0, 0, 9, tokens=tokens)
    hub.on_step(report, requests)
    assert calls == [3]


def test_a_drift_alarm_becomes_an_event(rig: Rig) -> None:
    rig.model.alarms_at = {2}

    async def scenario() -> None:
        await collect(rig.service.submit(rig.ask()))

    asyncio.run(scenario())
    rig.service.stop(10.0)
    (event,) = [record for record in rig.records if isinstance(record, EventRecord)]
    assert (event.event_kind, event.step_no) == ("drift_alarm", 2)
    assert event.numbers["actual_s"] == STEP_S
