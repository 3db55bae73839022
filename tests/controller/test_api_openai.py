"""The official client, as its users have it, against the application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from controller.api.app import create_app
from controller.policy.slo import Slo
from tests.controller.service_double import (
    ScriptedService,
    fails_after,
    refuses,
    says,
    slo_classes,
)


def with_client(
    service: ScriptedService, work: Callable[[AsyncOpenAI], Awaitable[None]], key: str = "secret"
) -> None:
    async def run() -> None:
        app = create_app(service, slo_classes=slo_classes(), api_key="secret")
        transport = httpx2.ASGITransport(app=app)
        async with (
            httpx2.AsyncClient(transport=transport) as http_client,
            AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=http_client) as client,
        ):
            await asyncio.wait_for(work(client), 20)

    asyncio.run(run())


def test_completions_with_targets_in_the_extra_body() -> None:
    service = ScriptedService(says("hello"))

    async def work(client: AsyncOpenAI) -> None:
        answer = await client.completions.create(
            model="tiny/model",
            prompt="hi",
            logprobs=1,
            stop=["END"],
            extra_body={"slo": {"ttft_ms": 500, "tpot_ms": 50}},
        )
        assert answer.choices[0].text == "hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].logprobs is not None
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6
        assert answer.model_extra is not None
        assert answer.model_extra["slo"]["ttft_met"] is True

    with_client(service, work)
    assert service.request.slo == Slo(ttft_s=0.5, tpot_s=0.05)


def test_chat_whole_and_streamed() -> None:
    service = ScriptedService(says("hello"))

    async def work(client: AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(
            model="tiny/model",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=20,
            logprobs=True,
            top_logprobs=2,
            service_tier="priority",
        )
        assert answer.choices[0].message.content == "hello"
        assert answer.choices[0].logprobs is not None
        stream = await client.chat.completions.create(
            model="tiny/model",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        text, roles, reasons, usages = "", [], [], []
        async for chunk in stream:
            usages.append(chunk.usage)
            for choice in chunk.choices:
                roles.append(choice.delta.role)
                text += choice.delta.content or ""
                reasons.append(choice.finish_reason)
        assert text == "hello"
        assert roles[0] == "assistant"
        assert set(roles[1:]) == {None}
        assert [reason for reason in reasons if reason] == ["stop"]
        assert [usage.completion_tokens for usage in usages if usage] == [6]

    with_client(service, work)
    assert service.streams[0].request.slo_class == "priority"


def test_the_streaming_helper_and_a_streamed_completion() -> None:
    async def work(client: AsyncOpenAI) -> None:
        async with client.chat.completions.stream(
            model="tiny/model", messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "hello"
        pieces = await client.completions.create(model="tiny/model", prompt=[104, 105], stream=True)
        assert "".join([chunk.choices[0].text async for chunk in pieces]) == "hello"

    with_client(ScriptedService(says("hello")), work)


def test_models_and_errors_have_their_types() -> None:
    async def work(client: AsyncOpenAI) -> None:
        models = [model.id async for model in await client.models.list()]
        assert models == ["tiny/model"]
        assert (await client.models.retrieve("tiny/model")).id == "tiny/model"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny/model", prompt="")
        assert bad.value.param == "prompt"
        with pytest.raises(openai.BadRequestError) as slo:
            await client.completions.create(
                model="tiny/model", prompt="x", extra_headers={"x-slo-ttft-ms": "nan"}
            )
        assert (slo.value.code, slo.value.param) == ("invalid_slo", "x-slo-ttft-ms")

    with_client(ScriptedService(), work)


def test_a_wrong_key_is_an_authentication_error() -> None:
    async def work(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(model="tiny/model", prompt="x")

    with_client(ScriptedService(), work, key="wrong")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_target_that_can_never_be_met_is_refused_once_without_a_retry_storm(
    is_stream: bool,
) -> None:
    service = ScriptedService(refuses("ttft_unreachable", predicted_ttft_s=2.0))

    async def work(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="tiny/model", prompt="x", stream=is_stream)
        assert refused.value.code == "ttft_unreachable"
        assert refused.value.response.headers["x-should-retry"] == "false"

    with_client(service, work)
    assert len(service.streams) == 1


def test_a_short_overload_is_tried_again_when_the_server_says_so() -> None:
    service = ScriptedService(refuses("overloaded", retry_after_s=0.001), says("hello"))

    async def work(client: AsyncOpenAI) -> None:
        answer = await client.completions.create(model="tiny/model", prompt="x")
        assert answer.choices[0].text == "hello"

    with_client(service, work)
    assert len(service.streams) == 2


def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    async def work(client: AsyncOpenAI) -> None:
        stream = await client.completions.create(model="tiny/model", prompt="x", stream=True)
        assert [(await anext(stream)).choices[0].text for _ in range(2)] == ["a", "a"]
        with pytest.raises(openai.APIError, match="the step failed"):
            await anext(stream)

    with_client(ScriptedService(fails_after(2)), work)
