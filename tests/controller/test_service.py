"""The service: streams, health, endings and what feedback tells whom, on a real loop thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from controller.policy.baselines import StaticPlanner
from controller.policy.lengths import OutputLengths
from controller.policy.slo import Slo, SloClass
from controller.runtime.feedback import PromiseKeeper, Teacher, TelemetryFeed
from controller.runtime.generation import (
    AdmissionEvent,
    FinishedEvent,
    GenerationRequest,
    ServedModel,
    TokenEvent,
)
from controller.runtime.service import PromiseTerms, Service
from controller.runtime.streams import StreamHub
from controller.runtime.tally import Tally
from costmodel.features import StepFeatures
from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import EngineView
from engine.request import FinishReason, Request
from engine.step import (
    Admission,
    AdmissionAction,
    SampledToken,
    StepPlan,
    StepReport,
)
from store.records import EventRecord, RequestRecord, StepRecord

CONFIG = EngineConfig(block_size=4, num_blocks=64, max_model_len=128, max_num_seqs=8)
STEP_S = 0.25


class GatedRunner:
    """Steps take 0.25 virtual seconds; `hold` lets a test stop the loop inside a step."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.gate = threading.Event()
        self.gate.set()
        self.is_inside = threading.Event()
        self.error: BaseException | None = None
        self.forgotten: list[str] = []
        self.released = threading.Event()
        self.holds: Callable[[Mapping[str, Request]], bool] = lambda requests: False

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> Sequence[SampledToken]:
        self.is_inside.set()
        assert self.gate.wait(30)
        assert not self.holds(requests) or self.released.wait(30)
        if self.error is not None:
            raise self.error
        self.clock.advance(STEP_S)
        return [
            SampledToken(work.request_id, 40 + requests[work.request_id].num_output_tokens)
            for work in plan.work
            if work.num_context_tokens == requests[work.request_id].num_known_tokens
        ]

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class Spy:
    """A cost model that only remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[StepFeatures, float]] = []

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        self.seen.append((features, latency_s))
        return True


@dataclass
class Rig:
    """A started service and everything around it."""

    service: Service
    runner: GatedRunner
    clock: VirtualClock
    pool: BlockPool
    planner: Any
    tally: Tally
    lengths: OutputLengths
    model: Spy
    records: list[Any] = field(default_factory=list)

    def ask(self, num_prompt: int = 6, max_tokens: int = 3, **kwargs: Any) -> GenerationRequest:
        return GenerationRequest(
            prompt_token_ids=tuple(range(num_prompt)),
            max_tokens=max_tokens,
            arrived_at=self.clock.now(),
            **kwargs,
        )


class SwitchPlanner:
    """The static baseline until a test replaces `plan_with`."""

    def __init__(self) -> None:
        self.plan_with: Callable[[EngineView], StepPlan] = StaticPlanner(4).plan

    def plan(self, view: EngineView) -> StepPlan:
        return self.plan_with(view)


@pytest.fixture
def rig() -> Any:
    clock = VirtualClock(50.0)
    runner, planner, hub, tally = GatedRunner(clock), SwitchPlanner(), StreamHub(), Tally()
    records: list[Any] = []

    def offer(record: Any) -> bool:
        records.append(record)
        return True

    model, lengths = Spy(), OutputLengths(default=99)
    feed = TelemetryFeed(offer, clock, "run")
    pool = BlockPool(CONFIG.num_blocks, CONFIG.block_size)
    listeners = (PromiseKeeper(), hub, Teacher(model, lengths), feed, tally)  # type: ignore[arg-type]
    loop = EngineLoop(planner, runner, pool, CONFIG, clock, listeners)
    service = Service(
        loop,
        hub,
        clock,
        ServedModel("m", "m", 0, 128, 256, (), False),
        None,  # type: ignore[arg-type]  # nothing here is text
        PromiseTerms(
            {
                "default": SloClass("default"),
                "chat": SloClass("chat", Slo(ttft_s=10.0, tpot_s=0.3)),
            },
            "default",
        ),
        run_id="run",
        on_abort=feed.record_endings,
    )
    service.start()
    yield Rig(service, runner, clock, pool, planner, tally, lengths, model, records)
    runner.gate.set()
    runner.released.set()
    service.stop(10.0)


async def collect(stream: Any) -> list[Any]:
    return [event async for event in stream]


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


def test_degrading_marks_the_promise(rig: Rig) -> None:
    inner = rig.planner.plan_with

    def degrade(view: EngineView) -> StepPlan:
        from dataclasses import replace

        plan: StepPlan = inner(view)
        return replace(
            plan, admissions=tuple(replace(a, is_degraded=True) for a in plan.admissions)
        )

    rig.planner.plan_with = degrade

    async def scenario() -> Any:
        return (await collect(rig.service.submit(rig.ask(slo_class="chat"))))[-1]

    assert asyncio.run(scenario()).promise.is_degraded


def test_leaving_mid_stream_frees_blocks_and_ends_once(rig: Rig) -> None:
    async def scenario() -> list[Any]:
        # Virtual steps take no real time: without a hold, all would be over before we look.
        rig.runner.holds = lambda requests: any(
            request.num_output_tokens > 5 for request in requests.values()
        )
        stream = rig.service.submit(rig.ask(max_tokens=100))
        other = rig.service.submit(rig.ask(max_tokens=4))
        events: list[Any] = []
        async for event in stream:
            events.append(event)
            if isinstance(event, TokenEvent) and event.index == 1:
                stream.finish(FinishReason.CANCELLED)
                stream.finish(FinishReason.CANCELLED)
                rig.runner.released.set()
        assert (await collect(other))[-1].reason is FinishReason.LENGTH
        return events

    events = asyncio.run(scenario())
    assert events[-1].reason is FinishReason.CANCELLED
    assert events[-1].num_output_tokens < 100
    rig.service.stop(10.0)
    assert rig.pool.num_used == 0
    assert sorted(rig.runner.forgotten) == ["run-1", "run-2"]


def test_a_reader_whose_event_loop_is_gone_is_cancelled(rig: Rig) -> None:
    async def submit_only() -> None:
        rig.runner.gate.clear()
        rig.service.submit(rig.ask(max_tokens=100))
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)

    asyncio.run(submit_only())
    rig.runner.gate.set()
    rig.service.stop(10.0)
    (request,) = [record for record in rig.records if isinstance(record, RequestRecord)]
    assert request.finish_reason == "cancelled"
    assert rig.pool.num_used == 0


def test_a_failed_step_ends_its_requests_and_the_next_is_served(rig: Rig) -> None:
    async def scenario() -> tuple[Any, Any]:
        rig.runner.error = RuntimeError("out of memory")
        failed = (await collect(rig.service.submit(rig.ask())))[-1]
        rig.runner.error = None
        served = (await collect(rig.service.submit(rig.ask())))[-1]
        return failed, served

    failed, served = asyncio.run(scenario())
    assert (failed.reason, failed.failure) == (FinishReason.ERROR, "RuntimeError: out of memory")
    assert served.reason is FinishReason.LENGTH
    assert rig.service.health().is_ready
    rig.service.stop(10.0)
    assert [e.event_kind for e in rig.records if isinstance(e, EventRecord)] == ["step_failure"]
    # A failed step teaches nothing.
    assert len(rig.model.seen) == 4


def test_a_planner_bug_ends_everything_and_turns_health_red(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(view: EngineView) -> StepPlan:
        raise ZeroDivisionError("oh no")

    async def scenario() -> tuple[list[Any], list[Any]]:
        rig.runner.gate.clear()
        first = rig.service.submit(rig.ask(max_tokens=50))
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)
        rig.planner.plan_with = broken
        rig.runner.gate.set()
        events = await collect(first)
        # The loop's thread is gone: a newcomer must still get its ending.
        return events, await collect(rig.service.submit(rig.ask()))

    events, late = asyncio.run(scenario())
    assert [events[-1].reason, late[-1].reason] == [FinishReason.ERROR] * 2
    assert "oh no" in events[-1].failure
    health = rig.service.health()
    assert (health.is_live, health.is_ready) == (False, False)
    assert "ZeroDivisionError: oh no" in health.reason
    assert "the engine stopped" in caplog.text
    requests = [record for record in rig.records if isinstance(record, RequestRecord)]
    assert [record.finish_reason for record in requests] == ["error", "error"]


def test_health_tells_stuck_from_idle_and_busy(rig: Rig) -> None:
    async def scenario() -> None:
        assert rig.service.health().is_ready
        rig.clock.advance(10_000.0)
        assert rig.service.health().is_live, "idle is not stuck"
        rig.runner.gate.clear()
        stream = rig.service.submit(rig.ask())
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)
        rig.clock.advance(30.0)
        assert rig.service.health().is_live, "a long step is not stuck"
        rig.clock.advance(1000.0)
        health = rig.service.health()
        assert not health.is_live
        assert "no step has ended for" in health.reason
        rig.runner.gate.set()
        await collect(stream)

    asyncio.run(scenario())


def test_draining_lets_running_requests_end_and_refuses_new_ones(rig: Rig) -> None:
    async def scenario() -> tuple[Any, Any]:
        rig.runner.gate.clear()
        running = rig.service.submit(rig.ask(max_tokens=5))
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)
        rig.service.drain()
        health = rig.service.health()
        assert (health.is_live, health.is_ready, health.reason) == (True, False, "draining")
        late = rig.service.submit(rig.ask())
        rig.runner.gate.set()
        return (await collect(running))[-1], (await collect(late))[-1]

    running, late = asyncio.run(scenario())
    assert (running.reason, running.num_output_tokens) == (FinishReason.LENGTH, 5)
    assert (late.reason, late.admission.reason) == (FinishReason.REJECTED, "draining")


def test_stopping_ends_what_does_not_end_in_time(rig: Rig) -> None:
    async def scenario() -> Any:
        rig.runner.gate.clear()
        stream = rig.service.submit(rig.ask(max_tokens=100))
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)
        stopping = asyncio.create_task(asyncio.to_thread(rig.service.stop, 0.0))
        rig.runner.gate.set()
        end = (await collect(stream))[-1]
        await stopping
        return end

    end = asyncio.run(scenario())
    assert end.reason in (FinishReason.ERROR, FinishReason.LENGTH)
    assert rig.pool.num_used == 0


def test_a_step_wakes_each_event_loop_once() -> None:
    calls: list[int] = []

    class FakeLoop:
        def call_soon_threadsafe(self, function: Any, deliveries: list[Any]) -> None:
            calls.append(len(deliveries))

    from controller.policy.slo import Promise
    from controller.runtime.streams import Stream
    from engine.step import EmittedToken

    hub, event_loop = StreamHub(), FakeLoop()
    requests = {}
    for name in "abc":
        hub.register(Stream(name, event_loop, lambda *_: None))  # type: ignore[arg-type]
        promise = Promise(Slo(), SloClass("default"), 0.0)
        requests[name] = Request(name, (1,), 5, 0.0, promise=promise)
    tokens = tuple(EmittedToken(name, 1, 0, 0.0) for name in "abc")
    report = StepReport(1, 0, 0, 0, 0, StepPlan(), True, 3, 0, 0, 0, 9, tokens=tokens)
    hub.on_step(report, requests)
    assert calls == [3]
