"""`/telemetry/…`: what happened, over HTTP.

Owns routes, query parameters and the choice of JSON or CSV. Must not speak SQL or be awaited: the
routes are synchronous, so the framework runs them in its thread pool and a slow query never holds
up a stream of tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query
from pydantic import BeforeValidator, StringConstraints
from starlette.responses import JSONResponse, Response

from controller.api.errors import ApiError, invalid
from controller.runtime.learnt import learnt_costs
from store.errors import CursorError, StoreError
from store.queries import Page, RequestFilter, Span, TelemetryReader
from store.text import parse_instant, to_csv

MAX_LIMIT = 1000
DEFAULT_LIMIT = 100

_Answer = TypeVar("_Answer")


class Format(enum.StrEnum):
    """How a listing is written."""

    JSON = "json"
    CSV = "csv"


def _instant(value: Any) -> Any:
    return parse_instant(value) if isinstance(value, str) else value


# PostgreSQL text cannot hold NUL; no name of ours has one.
_Word = Annotated[str, StringConstraints(max_length=128, pattern=r"^[^\x00]*$")]
_Instant = Annotated[int | None, BeforeValidator(_instant)]
_Since = Annotated[_Instant, Query(description="From: epoch milliseconds or ISO 8601.")]
_Until = Annotated[_Instant, Query(description="Up to, not including; as `since`.")]
_Run = Annotated[_Word | None, Query(description="Only this server run.")]
_Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Most rows in the answer.")]
_Cursor = Annotated[str | None, Query(max_length=1024, description="`next_cursor` of a page.")]
_Format = Annotated[Format, Query(alias="format", description="`json` or `csv`.")]


def telemetry_router(reader: TelemetryReader) -> APIRouter:
    """Return the routes; rows are named like the columns, newest first, seconds and epoch ms.

    A listing answers `{"data": [...], "next_cursor": ... | null}`; CSV carries the cursor in the
    header `x-next-cursor`. Errors are OpenAI error JSON: 400 for parameters, 404 for an unknown
    request, 503 while the database cannot be read.
    """
    router = APIRouter(prefix="/telemetry", tags=["telemetry"])

    @router.get("/steps")
    def steps(
        since: _Since = None,
        until: _Until = None,
        run_id: _Run = None,
        limit: _Limit = DEFAULT_LIMIT,
        cursor: _Cursor = None,
        form: _Format = Format.JSON,
    ) -> Response:
        """List forward passes: work, time, prediction, decision."""
        page = _ask(
            lambda: reader.steps(span=Span(since, until), run_id=run_id, limit=limit, cursor=cursor)
        )
        return _listing(page, form)

    @router.get("/requests")
    def requests(
        since: _Since = None,
        until: _Until = None,
        slo_class: Annotated[_Word | None, Query(alias="class")] = None,
        attained: Annotated[bool | None, Query(description="Kept or missed promises.")] = None,
        decision: Annotated[_Word | None, Query(description="`admit` or `reject`.")] = None,
        reason: Annotated[_Word | None, Query(description="Reason of the decision.")] = None,
        finish_reason: Annotated[_Word | None, Query(description="How it ended.")] = None,
        run_id: _Run = None,
        limit: _Limit = DEFAULT_LIMIT,
        cursor: _Cursor = None,
        form: _Format = Format.JSON,
    ) -> Response:
        """List requests that have ended, by arrival."""
        where = RequestFilter(slo_class, attained, decision, reason, finish_reason)
        page = _ask(
            lambda: reader.requests(
                span=Span(since, until), where=where, run_id=run_id, limit=limit, cursor=cursor
            )
        )
        return _listing(page, form)

    @router.get("/requests/{request_id}")
    def request(
        request_id: Annotated[_Word, Path(description="The server's request id.")],
        run_id: _Run = None,
        form: _Format = Format.JSON,
    ) -> Response:
        """Return one request's life: its row, its share of every step, its events."""
        life = _ask(lambda: reader.request(request_id, run_id=run_id))
        if life is None:
            raise ApiError(404, "not_found", f"no request {request_id!r}", param="request_id")
        if form is Format.CSV:
            return _csv(life["steps"], f"request-{request_id}")
        return JSONResponse(life)

    @router.get("/events")
    def events(
        since: _Since = None,
        until: _Until = None,
        kind: Annotated[_Word | None, Query(description="`refusal`, `preemption`, …")] = None,
        run_id: _Run = None,
        limit: _Limit = DEFAULT_LIMIT,
        cursor: _Cursor = None,
        form: _Format = Format.JSON,
    ) -> Response:
        """List refusals, preemptions, alarms and telemetry losses."""
        page = _ask(
            lambda: reader.events(
                span=Span(since, until), kind=kind, run_id=run_id, limit=limit, cursor=cursor
            )
        )
        return _listing(page, form)

    @router.get("/summary")
    def summary(since: _Since = None, until: _Until = None, run_id: _Run = None) -> Response:
        """Sum up attainment, goodput, latencies, prediction, admissions and losses; and what the
        cost model that was stored last says of the machine.
        """

        def answer() -> dict[str, Any]:
            summed = reader.summary(span=Span(since, until), run_id=run_id)
            return {**summed, "cost_model": learnt_costs(reader, run_id)}

        return JSONResponse(_ask(answer))

    return router


def _ask(question: Callable[[], _Answer]) -> _Answer:
    """Return the reader's answer; what the store refuses becomes an error of this door."""
    try:
        return question()
    except CursorError as error:
        raise invalid("cursor", str(error)) from error
    except StoreError as error:
        raise ApiError(503, "telemetry_unavailable", str(error)) from error


def _listing(page: Page, form: Format) -> Response:
    if form is Format.JSON:
        return JSONResponse({"data": list(page.rows), "next_cursor": page.next_cursor})
    response = _csv(list(page.rows), "telemetry")
    if page.next_cursor is not None:
        response.headers["x-next-cursor"] = page.next_cursor
    return response


def _csv(rows: list[dict[str, Any]], name: str) -> Response:
    safe = "".join(char for char in name if char.isascii() and (char.isalnum() or char in "-_"))
    headers = {"content-disposition": f'attachment; filename="{safe}.csv"'}
    return Response(to_csv(rows), media_type="text/csv; charset=utf-8", headers=headers)
