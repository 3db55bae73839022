"""An engine-fatal error: every request is ended at once, health turns 503, newcomers are told.

Nothing waits for time to pass: the loop's thread ends its requests before it ends itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from controller.api.app import create_app
from controller.config import Settings
from controller.runtime.generation import TokenEvent
from controller.runtime.wiring import build_runtime
from engine.ports import DeviceLostError, EngineView
from engine.request import FinishReason, Request
from engine.step import StepPlan
from store.queries import TelemetryReader
from store.records import EventKind, EventRecord, RequestRecord
from tests.controller.service_double import ByteTokenizer, Wire, call, run_async, sse
from tests.controller.service_rig import Rig, collect, running_service, until
from tests.controller.test_api_engine import save_tiny_model

COMPLETIONS = "/v1/completions"


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running_service() as started:
        started.service._tokenizer = ByteTokenizer()
        yield started


def app_of(rig: Rig) -> Starlette:
    return create_app(rig.service)


def lose_device(view: EngineView) -> StepPlan:
    raise DeviceLostError("the context is gone")


def holds_after(num_tokens: int) -> Any:
    return lambda requests: any(r.num_output_tokens >= num_tokens for r in requests.values())


@pytest.mark.parametrize("where", ["plan", "execute"])
def test_a_lost_device_ends_everybody_running_waiting_and_new(rig: Rig, where: str) -> None:
    async def scenario() -> list[Any]:
        rig.runner.holds = holds_after(1)
        running = rig.service.submit(rig.ask(max_tokens=50))
        async for event in running:
            if isinstance(event, TokenEvent):
                break
        waiting = [rig.service.submit(rig.ask(max_tokens=50)) for _ in range(20)]
        if where == "plan":
            rig.planner.plan_with = lose_device
        else:
            rig.runner.error = DeviceLostError("the context is gone")
        rig.runner.released.set()
        ends = [(await collect(stream))[-1] for stream in (running, *waiting)]
        # The loop is gone for good; whoever comes now gets an ending, too.
        ends.append((await collect(rig.service.submit(rig.ask())))[-1])
        return ends

    ends = asyncio.run(scenario())
    assert {end.reason for end in ends} == {FinishReason.ERROR}
    assert all("the context is gone" in end.failure for end in ends)
    health = rig.service.health()
    assert (health.is_live, health.is_ready) == (False, False)
    assert "DeviceLostError: the context is gone" in health.reason
    # Readers come first, records after: the thread has written them when it has ended.
    rig.service.stop(10.0)
    rows = [record for record in rig.records if isinstance(record, RequestRecord)]
    assert len(rows) == len({row.request_id for row in rows}) == len(ends)
    (event,) = [record for record in rig.records if isinstance(record, EventRecord)]
    assert (event.event_kind, event.reason) == ("engine_stopped", "DeviceLostError")
    assert event.numbers == {"message": "DeviceLostError: the context is gone"}
    assert rig.pool.num_used == 0
    answer = call(app_of(rig), "GET", "/health")
    assert answer.status_code == 503
    assert "the context is gone" in answer.text


def test_a_thread_that_cannot_settle_in_keeps_nobody_waiting() -> None:
    def fail() -> None:
        raise DeviceLostError("the context is gone")

    async def ask(rig: Rig) -> Any:
        return (await collect(rig.service.submit(rig.ask())))[-1]

    with running_service(fail) as rig:
        end = asyncio.run(ask(rig))
        assert (end.reason, end.failure) == (
            FinishReason.ERROR,
            "DeviceLostError: the context is gone",
        )
        health = rig.service.health()
        assert (health.is_live, health.is_ready) == (False, False)


def test_a_request_that_arrives_during_the_abort_is_ended_once(rig: Rig) -> None:
    ended: list[Request] = []
    late: list[Any] = []
    usual = rig.service._on_abort

    async def scenario() -> list[Any]:
        event_loop = asyncio.get_running_loop()

        def abort_and_ask(requests: tuple[Request, ...]) -> None:
            is_first = not ended
            ended.extend(requests)
            usual(requests)
            if is_first:
                # The loop's thread stands in the middle of its abort while this one is handed in.
                future = asyncio.run_coroutine_threadsafe(ask(), event_loop)
                late.append(future.result(30))

        async def ask() -> Any:
            return rig.service.submit(rig.ask())

        rig.service._on_abort = abort_and_ask
        rig.runner.gate.clear()
        first = rig.service.submit(rig.ask())
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)
        rig.planner.plan_with = lose_device
        rig.runner.gate.set()
        events = await collect(first)
        await until(lambda: len(late) == 1)
        return [events[-1], *(await collect(late[0]))]

    ends = asyncio.run(scenario())
    rig.service.stop(10.0)
    assert [end.reason for end in ends] == [FinishReason.ERROR] * 2
    assert sorted(request.request_id for request in ended) == ["run-1", "run-2"]
    assert rig.service.num_unfinished == 0


def test_a_device_that_cannot_even_forget_keeps_nobody_waiting(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request_id: str) -> None:
        raise DeviceLostError("still gone")

    async def scenario() -> list[Any]:
        rig.runner.gate.clear()
        streams = [rig.service.submit(rig.ask()) for _ in range(3)]
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)
        rig.runner.forget = broken  # type: ignore[method-assign]
        rig.planner.plan_with = lose_device
        rig.runner.gate.set()
        return [(await collect(stream))[-1] for stream in streams]

    ends = asyncio.run(scenario())
    rig.service.stop(10.0)
    assert {end.reason for end in ends} == {FinishReason.ERROR}
    assert not rig.service.health().is_live
    assert caplog.records


def test_telemetry_that_fails_in_the_abort_harms_nobody(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(requests: tuple[Request, ...]) -> None:
        raise ZeroDivisionError("a bug")

    async def scenario() -> Any:
        rig.service._on_abort = broken
        rig.planner.plan_with = lose_device
        first = (await collect(rig.service.submit(rig.ask())))[-1]
        return first, (await collect(rig.service.submit(rig.ask())))[-1]

    first, second = asyncio.run(scenario())
    rig.service.stop(10.0)
    assert (first.reason, second.reason) == (FinishReason.ERROR, FinishReason.ERROR)
    assert "could not be recorded" in caplog.text


def test_a_stream_under_way_gets_an_error_event_and_an_end(rig: Rig) -> None:
    rig.runner.holds = holds_after(2)

    async def run() -> Wire:
        body = {"prompt": "hello", "max_tokens": 50, "stream": True, "ignore_eos": True}
        wire = Wire(COMPLETIONS, body)
        exchange = asyncio.ensure_future(app_of(rig)(wire.scope, wire.receive, wire.send))
        while wire.text.count("data: ") < 2:
            wire.has_sent.clear()
            await wire.has_sent.wait()
        rig.planner.plan_with = lose_device
        rig.runner.released.set()
        await exchange
        return wire

    async def scenario() -> None:
        wire = await run()
        assert wire.status == 200
        *chunks, error = sse(wire.text)
        assert all("choices" in chunk for chunk in chunks)
        assert error["error"]["code"] == "dead"
        assert error["error"]["type"] == "server_error"
        assert "the context is gone" in error["error"]["message"]
        assert "[DONE]" not in wire.text

    run_async(scenario())


@pytest.mark.parametrize("is_stream", [False, True])
def test_before_the_first_byte_the_answer_is_a_503_that_another_server_may_serve(
    rig: Rig, is_stream: bool
) -> None:
    rig.planner.plan_with = lose_device
    body = {"prompt": "hello", "stream": is_stream, "n": 3}
    first = call(app_of(rig), "POST", COMPLETIONS, body=body)
    assert (first.status_code, first.json()["error"]["code"]) == (503, "dead")
    assert first.headers["x-request-id"] == "run-1"
    second = call(app_of(rig), "POST", COMPLETIONS, body=body)
    assert (second.status_code, second.json()["error"]["code"]) == (503, "dead")
    assert "x-request-id" not in second.headers


def test_a_submission_while_a_stop_waits_for_a_step_does_not_touch_the_loop(rig: Rig) -> None:
    async def scenario() -> list[Any]:
        rig.runner.gate.clear()
        first = rig.service.submit(rig.ask(max_tokens=100))
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)
        stopping = asyncio.create_task(asyncio.to_thread(rig.service.stop, 0.0))
        await until(lambda: not rig.service.health().is_live)
        # The loop's thread is still inside a step: this one is its to end.
        second = rig.service.submit(rig.ask())
        assert rig.service.num_unfinished == 2
        rig.runner.gate.set()
        ends = [(await collect(stream))[-1] for stream in (first, second)]
        await stopping
        return ends

    ends = asyncio.run(scenario())
    assert [end.failure for end in ends] == ["the server was stopped"] * 2


def test_a_step_that_never_ends_is_left_behind(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.service._last_step_s = 0.0

    async def scenario() -> list[Any]:
        rig.runner.gate.clear()
        first = rig.service.submit(rig.ask(max_tokens=100))
        await asyncio.to_thread(rig.runner.is_inside.wait, 30)
        # The gate stays closed: this returns although the step has not ended, and so do readers.
        await asyncio.to_thread(rig.service.stop, 0.0)
        assert not rig.runner.gate.is_set()
        late = rig.service.submit(rig.ask())
        return [(await collect(stream))[-1] for stream in (first, late)]

    ends = asyncio.run(scenario())
    failure = "the engine hangs: a step did not end within 0 s"
    assert [(end.reason, end.failure) for end in ends] == [(FinishReason.ERROR, failure)] * 2
    assert rig.service.is_hung
    assert rig.service.failure == failure
    assert failure in rig.service.health().reason
    assert f"{failure} after the server was told to stop" in caplog.text
    # A step that ends after all finds nobody to tell, and tells nothing twice.
    rig.runner.gate.set()
    rig.service.stop(10.0)
    events = [record for record in rig.records if isinstance(record, EventRecord)]
    assert [event.numbers for event in events] == [{"message": failure}]
    assert rig.pool.num_used == 0


def test_a_stop_that_was_asked_for_is_no_failure(rig: Rig) -> None:
    rig.service.stop(10.0)
    assert rig.service.failure is None
    assert not rig.service.is_hung
    assert rig.records == []


@pytest.mark.device
def test_metrics_and_telemetry_tell_of_everybody_that_the_end_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path)
    settings = Settings(
        model=str(tmp_path), served_model_name="tiny", device="cpu", is_warmup_enabled=False,
        db=f"sqlite:///{tmp_path / 't.db'}", kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    runtime = build_runtime(settings, lambda done, total, what: None)
    forward = runtime.engine.runner.execute

    def execute(plan: StepPlan, requests: Any) -> Any:
        if plan.num_decode_tokens:
            raise DeviceLostError("the context is gone")
        return forward(plan, requests)

    monkeypatch.setattr(runtime.engine.runner, "execute", execute)
    app = create_app(runtime.service, metrics=runtime.metrics)
    answer = call(app, "POST", COMPLETIONS, body={"prompt": "hello", "ignore_eos": True})
    assert answer.status_code == 503
    runtime.close()
    value = runtime.metrics.registry.get_sample_value
    labels = {"slo_class": "default", "finish_reason": "error"}
    assert value("paceline_requests_finished_total", labels) == 1
    labels = {"model_name": "tiny", "engine": "0"}
    assert value("vllm:num_requests_running", labels) == 0
    assert value("vllm:kv_cache_usage_perc", labels) == 0
    assert value("vllm:request_success_total", labels | {"finished_reason": "error"}) == 1
    reader = TelemetryReader.open(settings.db)
    (run,) = reader.runs()
    assert run["end_reason"] == "engine_stopped"
    (event,) = reader.events(kind=EventKind.ENGINE_STOPPED).rows
    assert event["numbers"] == {"message": "DeviceLostError: the context is gone"}
    reader.close()
