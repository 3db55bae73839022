"""Clients that go away: whatever they left behind is cancelled at once, whenever they leave."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import ASGIApp

from controller.api.app import create_app
from controller.runtime.metrics import Metrics
from engine.request import FinishReason
from tests.controller.service_double import (
    ScriptedService,
    Wire,
    call,
    hangs_after,
    run_async,
    says,
)

PATH = "/v1/completions"


def start(app: ASGIApp, wire: Wire) -> asyncio.Future[None]:
    return asyncio.ensure_future(app(wire.scope, wire.receive, wire.send))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_leaving_while_waiting_cancels_every_prompt(is_stream: bool, num_prompts: int) -> None:
    async def run() -> None:
        service = ScriptedService(hangs_after(0))
        app = create_app(service)
        wire = Wire(PATH, {"prompt": ["x"] * num_prompts, "stream": is_stream})
        exchange = start(app, wire)
        while len(service.streams) < num_prompts:
            service.submitted.clear()
            await service.submitted.wait()
        assert wire.sent == []
        wire.hung_up.set()
        await exchange
        assert [s.ended_with for s in service.streams] == [[FinishReason.CANCELLED]] * num_prompts
        assert wire.status == 499

    run_async(run())


def test_leaving_a_stream_cancels_between_two_tokens() -> None:
    async def run() -> None:
        service = ScriptedService(hangs_after(2))
        wire = Wire(PATH, {"prompt": "x", "stream": True})
        exchange = start(create_app(service), wire)
        while wire.text.count("data: ") < 2:
            wire.has_sent.clear()
            await wire.has_sent.wait()
        assert service.streams[0].ended_with == []
        wire.hung_up.set()
        await exchange
        assert service.streams[0].ended_with == [FinishReason.CANCELLED]
        assert "[DONE]" not in wire.text

    run_async(run())


def test_a_connection_that_breaks_while_it_is_written_to_is_a_client_gone() -> None:
    async def run() -> None:
        service = ScriptedService(says("a" * 100, ends_with_eos=False))
        wire = Wire(PATH, {"prompt": "x", "stream": True, "max_tokens": 100})
        num_sent = 0

        async def breaking(message: object) -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent > 4:
                raise OSError("connection reset")

        await create_app(service)(wire.scope, wire.receive, breaking)
        assert service.streams[0].ended_with == [FinishReason.CANCELLED]

    run_async(run())


def test_a_server_that_is_stopped_in_the_middle_cancels_too() -> None:
    async def run() -> None:
        service = ScriptedService(hangs_after(1))
        wire = Wire(PATH, {"prompt": "x", "stream": False})
        exchange = start(create_app(service), wire)
        await service.submitted.wait()
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange
        assert service.streams[0].ended_with == [FinishReason.CANCELLED]

    run_async(run())


def test_a_whole_answer_is_not_cancelled_by_a_late_goodbye() -> None:
    async def run() -> None:
        service = ScriptedService(says("hi"))
        wire = Wire(PATH, {"prompt": "x"})
        await create_app(service)(wire.scope, wire.receive, wire.send)
        wire.hung_up.set()
        assert service.streams[0].ended_with == []
        assert wire.status == 200

    run_async(run())


def test_leaving_is_counted_and_the_load_goes_down() -> None:
    metrics = Metrics("tiny", block_size=16, num_blocks=1)
    service = ScriptedService(hangs_after(0))
    app = create_app(service, metrics=metrics)

    async def run() -> None:
        wire = Wire(PATH, {"prompt": "x"})
        exchange = start(app, wire)
        await service.submitted.wait()
        wire.hung_up.set()
        await exchange

    run_async(run())
    assert "paceline_client_disconnects_total 1.0" in call(app, "GET", "/metrics").text
    assert call(app, "GET", "/load").json() == {"server_load": 0}
