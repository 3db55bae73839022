"""The service under cancellation, failures, drain and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from controller.runtime.generation import TokenEvent
from costmodel.hygiene import RejectReason
from engine.ports import EngineView
from engine.request import FinishReason
from engine.step import StepPlan
from store.records import EventRecord, RequestRecord
from tests.controller.service_rig import Rig, collect, running_service, until


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running_service() as started:
        yield started


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
    # A failed step teaches nothing, and is counted.
    assert len(rig.model.seen) == 4
    assert rig.model.rejected == [RejectReason.FAILED_STEP]


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
    # Readers come first, records after: the thread has written them when it has ended.
    rig.service.stop(10.0)
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
        # The loop is held inside a step until stop has given up waiting.
        await until(lambda: not rig.service.health().is_live)
        rig.runner.gate.set()
        end = (await collect(stream))[-1]
        await stopping
        return end

    end = asyncio.run(scenario())
    assert (end.reason, end.failure) == (FinishReason.ERROR, "the server was stopped")
    assert end.num_output_tokens < 100
    assert rig.pool.num_used == 0


def test_whoever_comes_after_the_stop_gets_an_ending(rig: Rig) -> None:
    rig.service.stop(10.0)

    async def scenario() -> Any:
        return (await collect(rig.service.submit(rig.ask())))[-1]

    end = asyncio.run(scenario())
    assert (end.reason, end.failure) == (FinishReason.ERROR, "the server was stopped")


def test_an_engine_that_never_plans_anything_is_stuck(rig: Rig) -> None:
    passes: list[int] = []

    def nothing(view: EngineView) -> StepPlan:
        passes.append(view.step_no)
        return StepPlan()

    usual, rig.planner.plan_with = rig.planner.plan_with, nothing

    async def scenario() -> None:
        rig.service.submit(rig.ask())
        await until(lambda: len(passes) >= 2)
        assert rig.service.health().is_live
        rig.clock.advance(1000.0)
        await until(lambda: len(passes) >= 4)
        assert not rig.service.health().is_live
        rig.planner.plan_with = usual

    asyncio.run(scenario())


def test_a_device_that_fails_every_step_turns_health_red_until_one_succeeds(rig: Rig) -> None:
    async def scenario() -> None:
        rig.runner.error = RuntimeError("sticky")
        for count in range(5):
            assert rig.service.health().is_live, count
            await collect(rig.service.submit(rig.ask()))
        await until(lambda: not rig.service.health().is_live)
        assert "5 steps in a row have failed" in rig.service.health().reason
        rig.runner.error = None
        await collect(rig.service.submit(rig.ask()))
        await until(lambda: rig.service.health().is_ready)

    asyncio.run(scenario())


def test_idle_time_before_a_request_is_not_held_against_it(rig: Rig) -> None:
    async def scenario() -> None:
        rig.runner.gate.clear()
        rig.clock.advance(5000.0)
        stream = rig.service.submit(rig.ask())
        assert rig.service.health().is_live
        rig.runner.gate.set()
        await collect(stream)

    asyncio.run(scenario())


def test_a_listener_that_fails_harms_nobody(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a metric's bug")

    rig.tally.on_step = broken  # type: ignore[method-assign,assignment]

    async def scenario() -> Any:
        return (await collect(rig.service.submit(rig.ask())))[-1]

    assert asyncio.run(scenario()).reason is FinishReason.LENGTH
    assert "a listener failed in step 1" in caplog.text
    assert rig.service.health().is_ready
