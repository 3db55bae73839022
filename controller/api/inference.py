"""`/v1/completions` and `/v1/chat/completions`: one path for both, whole or streamed.

Owns the order of an answer: nothing is sent before the first token or the refusal, so that a
refusal has its own status in both modes. Must not know how a token is chosen.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from controller.api.choices import Choice, Delta
from controller.api.context import ApiContext
from controller.api.errors import CLIENT_CLOSED_STATUS, ApiError, error_body
from controller.api.formats import ChatFormat, CompletionFormat, Envelope, Format
from controller.api.generation import Generation, submitted
from controller.api.guards import StrictJsonRoute
from controller.api.headers import tenant_names
from controller.api.logprobs import TokenSpeller
from controller.api.prompts import Prepared, prepare_chat, prepare_completion
from controller.api.responses import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    ErrorAnswer,
)
from controller.api.schemas import ChatBody, CompletionBody, GenerationBody
from controller.api.streaming import (
    DONE,
    ClientGoneError,
    EventStream,
    sse_event,
    until_disconnect,
)

logger = logging.getLogger("paceline.api")

AnswerT = TypeVar("AnswerT")
Deltas = AsyncGenerator[tuple[Choice, Delta], None]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": what}
    for status, what in (
        (400, "A field or header is wrong; `param` names it."),
        (404, "No such model."),
        (413, "The body is too large."),
        (415, "The body is not declared as JSON."),
        (429, "Shed; see `retry-after` and `x-llm-d-request-dropped-reason`."),
        (500, "This request failed."),
        (503, "Loading, draining or dead."),
    )
}


def inference_router(context: ApiContext) -> APIRouter:
    """Return the two generation routes."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["inference"])
    speller = TokenSpeller(context.service.tokenizer)

    @router.post(
        "/v1/completions",
        response_model=None,
        responses={200: _either(CompletionAnswer, CompletionAnswer), **_ERRORS},
    )
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete one or several prompts, each its own choice."""
        context.require_ready()
        arrived_at = _arrived_at(request, context)
        prepared = await prepare_completion(body, request.headers, arrived_at, context)
        form = CompletionFormat(speller, body.logprobs, body.prompt_logprobs)
        return await _answer(request, body, prepared, form, context)

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: _either(ChatAnswer, ChatChunk), **_ERRORS},
    )
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        context.require_ready()
        arrived_at = _arrived_at(request, context)
        prepared = await prepare_chat(body, request.headers, arrived_at, context)
        num_logprobs = prepared.prompts[0].request.sampling.num_logprobs
        form = ChatFormat(speller, num_logprobs, body.prompt_logprobs)
        return await _answer(request, body, prepared, form, context)

    return router


def _either(whole: type, chunk: type) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{chunk.__name__}"}
    return {
        "model": whole,
        "description": "The answer, or with `stream` server-sent events of chunks.",
        "content": {"text/event-stream": {"schema": schema}},
    }


def _arrived_at(request: Request, context: ApiContext) -> float:
    stamped = request.scope.get("state", {}).get("arrived_at")
    return context.service.now() if stamped is None else float(stamped)


async def _answer(
    request: Request,
    body: GenerationBody,
    prepared: Prepared,
    form: Format,
    context: ApiContext,
) -> Response:
    async with AsyncExitStack() as stack:
        generation = await stack.enter_async_context(submitted(prepared, body, context))
        deltas = await stack.enter_async_context(aclosing(generation.deltas()))
        envelope = Envelope(
            f"{form.id_prefix}{generation.request_id}", context.created_at(), prepared.model
        )

        def on_disconnect() -> None:
            logger.info(
                "%s: the client went away (%d)", generation.request_id, CLIENT_CLOSED_STATUS
            )
            if context.metrics is not None:
                context.metrics.on_disconnect()

        try:
            if not body.stream:
                answer = await until_disconnect(
                    request.receive, _whole(generation, deltas, form, envelope, context)
                )
                headers = _headers(request, generation, body)
                headers["server-timing"] = generation.server_timing()
                return JSONResponse(answer, headers=headers)
            first = await until_disconnect(request.receive, anext(deltas))
        except ClientGoneError:
            on_disconnect()
            return Response(status_code=CLIENT_CLOSED_STATUS)
        chunks = _chunks(first, generation, deltas, form, envelope, body, context)
        headers = _headers(request, generation, body)
        return EventStream(chunks, stack.pop_all(), headers, on_disconnect)


def _headers(request: Request, generation: Generation, body: GenerationBody) -> dict[str, str]:
    headers = generation.headers()
    ignored = sorted((*body.ignored_hints, *tenant_names(request.headers, body.user)))
    if ignored:
        headers["x-paceline-ignored-parameters"] = ", ".join(ignored)
    return headers


async def _whole(
    generation: Generation,
    deltas: Deltas,
    form: Format,
    envelope: Envelope,
    context: ApiContext,
) -> Mapping[str, Any]:
    parts: list[list[Delta]] = [[] for _ in range(generation.num_choices)]
    async for choice, delta in deltas:
        parts[choice.index].append(delta)
    if generation.has_prompt_scores:
        return await _off_loop(context, form.whole, envelope, generation, parts)
    return form.whole(envelope, generation, parts)


async def _off_loop(context: ApiContext, function: Callable[..., AnswerT], *args: Any) -> AnswerT:
    """Write what holds a whole prompt's scores on a thread: every stream would wait for it."""
    return await anyio.to_thread.run_sync(function, *args, limiter=context.tokenizer_limiter)


async def _chunks(
    first: tuple[Choice, Delta],
    generation: Generation,
    deltas: Deltas,
    form: Format,
    envelope: Envelope,
    body: GenerationBody,
    context: ApiContext,
) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    has_usage = options is not None and bool(options.include_usage)
    has_running_usage = has_usage and options is not None and bool(options.continuous_usage_stats)

    def encoded(chunk: dict[str, Any]) -> bytes:
        if has_running_usage:
            chunk["usage"] = generation.usage()
        elif has_usage:
            chunk["usage"] = None
        return sse_event(chunk)

    def all_of(choice: Choice, delta: Delta) -> bytes:
        opening = None
        if choice.index not in opened:
            opened.add(choice.index)
            opening = form.opening(envelope, choice)
        head = b"" if opening is None else encoded(opening)
        return head + encoded(form.chunk(envelope, choice, delta))

    async def sent(choice: Choice, delta: Delta) -> bytes:
        # More than one token at once: the prompt, repeated with its scores.
        if len(delta.tokens) > 1:
            return await _off_loop(context, all_of, choice, delta)
        return all_of(choice, delta)

    opened: set[int] = set()
    try:
        yield await sent(*first)
        async for choice, delta in deltas:
            yield await sent(choice, delta)
        if has_usage:
            yield sse_event(form.usage_chunk(envelope, generation))
        yield DONE
    except ApiError as error:
        # The status is sent already: what is left is to say so and stop.
        yield sse_event(error.body())
    except Exception:
        logger.exception("%s failed while it was streamed", generation.request_id)
        message = "the server failed to continue this answer"
        yield sse_event(error_body(500, "internal_error", message))
