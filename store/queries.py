"""`TelemetryReader`: the questions that doors ask, answered as plain JSON-ready rows.

Owns listing, paging and one request's timeline (the summary is in `store.summary`). Must not write;
each answer is one short read transaction.

Rows are dicts named like the columns (`_at` epoch milliseconds UTC, `_s` seconds). Listings come
newest first, in pages with an opaque cursor that stays valid while rows are added.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, RowMapping, Select, select, tuple_

from store import tables
from store.database import Database
from store.errors import CursorError
from store.records import key_hash
from store.schema import require_current
from store.summary import Summary, summarise

JsonRow = dict[str, Any]
MAX_PAGE_ROWS = 10_000
_RUN, _STEP, _WORK = tables.run.c, tables.step.c, tables.step_work.c
_REQUEST, _EVENT = tables.request.c, tables.event.c
_SNAPSHOT = tables.model_snapshot.c


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time in epoch milliseconds, `since` included, `until` not; None = open."""

    since: int | None = None
    until: int | None = None


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Which requests to list; None = any. `attained` False means promised and missed."""

    slo_class: str | None = None
    attained: bool | None = None
    decision: str | None = None
    reason: str | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing; `next_cursor` is None on the last."""

    rows: tuple[JsonRow, ...]
    next_cursor: str | None


class TelemetryReader:
    """Answers from one database; safe to share between threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str) -> TelemetryReader:
        """Open `url` read-only; StoreError with a clear line if there is nothing to read."""
        database = Database.open_reader(url)
        try:
            require_current(database)
        except BaseException:
            database.close()
            raise
        return cls(database)

    @property
    def database(self) -> Database:
        """The open database, for other readers of it; it is closed with this one."""
        return self._database

    def close(self) -> None:
        """Close every connection."""
        self._database.close()

    def steps(
        self,
        *,
        span: Span | None = None,
        run_id: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List steps, newest first."""
        query = _in_span(select(tables.step), _STEP.at, span)
        if run_id is not None:
            query = query.where(_STEP.run_id == run_id)
        return self._page(query, (_STEP.at, _STEP.run_id, _STEP.step_no), limit, cursor)

    def requests(
        self,
        *,
        span: Span | None = None,
        where: RequestFilter | None = None,
        run_id: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List requests that have ended, by arrival, newest first; `span` is over arrivals."""
        query = _in_span(select(tables.request), _REQUEST.arrived_at, span)
        query = query.where(*_conditions(where or RequestFilter()))
        if run_id is not None:
            query = query.where(_REQUEST.run_id == run_id)
        keys = (_REQUEST.arrived_at, _REQUEST.run_id, _REQUEST.request_id)
        return self._page(query, keys, limit, cursor)

    def events(
        self,
        *,
        span: Span | None = None,
        kind: str | None = None,
        run_id: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> Page:
        """List events, newest first."""
        query = _in_span(select(tables.event), _EVENT.at, span)
        if kind is not None:
            query = query.where(_EVENT.kind == kind)
        if run_id is not None:
            query = query.where(_EVENT.run_id == run_id)
        return self._page(query, (_EVENT.at, _EVENT.run_id, _EVENT.event_no), limit, cursor)

    def runs(self, *, limit: int = 100) -> tuple[JsonRow, ...]:
        """List server lives, newest first."""
        query = select(tables.run).order_by(_RUN.started_at.desc(), _RUN.run_id.desc())
        with self._database.read() as connection:
            return _rows(connection, query.limit(limit))

    def run(self, run_id: str) -> JsonRow | None:
        """Return one server life; None if there is none with that id."""
        with self._database.read() as connection:
            rows = _rows(connection, select(tables.run).where(_RUN.run_id == run_id))
        return rows[0] if rows else None

    def request(self, request_id: str, *, run_id: str | None = None) -> JsonRow | None:
        """Return one request's life: `request`, `steps`, `events`; None if nothing is known.

        `request` is None while the request runs (its row is written at its end). Each of `steps`,
        in order, joins the request's share with its step and adds, in seconds: `since_arrival_s`
        (the step's start; None without a request row), `token_since_arrival_s` and `gap_s` (to the
        token before) where a token was sampled. If several runs know the id, the newest one answers
        unless `run_id` says otherwise.
        """
        with self._database.read() as connection:
            run_id = run_id or _newest_run(connection, request_id)
            if run_id is None:
                return None
            found = _rows(
                connection,
                select(tables.request).where(
                    _REQUEST.run_id == run_id, _REQUEST.request_id == request_id
                ),
            )
            steps = _rows(
                connection,
                select(
                    *(column for column in tables.step.c if column.name != "run_id"),
                    _WORK.kind,
                    _WORK.num_tokens,
                    _WORK.num_computed_tokens,
                    _WORK.token_index,
                    _WORK.token_offset_s,
                )
                .join_from(
                    tables.step_work,
                    tables.step,
                    (_STEP.run_id == _WORK.run_id) & (_STEP.step_no == _WORK.step_no),
                )
                .where(_WORK.request_id == request_id, _WORK.run_id == run_id)
                .order_by(_WORK.step_no),
            )
            events = _rows(
                connection,
                select(tables.event)
                .where(_EVENT.request_id == request_id, _EVENT.run_id == run_id)
                .order_by(_EVENT.at, _EVENT.event_no),
            )
        if not (found or steps or events):
            return None
        row = found[0] if found else None
        _add_offsets(steps, None if row is None else row["arrived_clock_s"])
        return {
            "run_id": run_id,
            "request_id": request_id,
            "request": row,
            "steps": list(steps),
            "events": list(events),
        }

    def model_snapshot(self, key: Mapping[str, str | int]) -> JsonRow | None:
        """Return the newest cost model that any run stored under exactly that key, or None."""
        query = (
            select(tables.model_snapshot)
            .where(_SNAPSHOT.key_hash == key_hash(key))
            .order_by(_SNAPSHOT.at.desc(), _SNAPSHOT.run_id.desc())
            .limit(1)
        )
        with self._database.read() as connection:
            found = _rows(connection, query)
        return found[0] if found else None

    def newest_model(self, run_id: str | None = None) -> JsonRow | None:
        """Return the cost model that was stored last, by that run if one is given, or None."""
        query = select(tables.model_snapshot)
        if run_id is not None:
            query = query.where(_SNAPSHOT.run_id == run_id)
        query = query.order_by(_SNAPSHOT.at.desc(), _SNAPSHOT.run_id.desc()).limit(1)
        with self._database.read() as connection:
            found = _rows(connection, query)
        return found[0] if found else None

    def model_snapshots(self, *, limit: int = 100) -> tuple[JsonRow, ...]:
        """List stored cost models, newest first, without their documents."""
        columns = (column for column in tables.model_snapshot.c if column.name != "document")
        query = select(*columns).order_by(_SNAPSHOT.at.desc(), _SNAPSHOT.run_id.desc())
        with self._database.read() as connection:
            return _rows(connection, query.limit(limit))

    def summary(self, *, span: Span | None = None, run_id: str | None = None) -> Summary:
        """Return attainment, goodput, latencies, prediction quality, admissions and losses."""
        span = span or Span()
        with self._database.read() as connection:
            return summarise(connection, span.since, span.until, run_id)

    def _page(
        self,
        query: Select[Any],
        keys: tuple[Column[Any], Column[Any], Column[Any]],
        limit: int,
        cursor: str | None,
    ) -> Page:
        if not 1 <= limit <= MAX_PAGE_ROWS:
            raise ValueError(f"limit must be in 1..{MAX_PAGE_ROWS}, got {limit}")
        if cursor is not None:
            query = query.where(tuple_(*keys) < tuple_(*_decode(cursor, keys)))
        query = query.order_by(*(key.desc() for key in keys)).limit(limit + 1)
        with self._database.read() as connection:
            rows = _rows(connection, query)
        if len(rows) <= limit:
            return Page(rows, None)
        last = rows[limit - 1]
        return Page(rows[:limit], _encode([last[key.name] for key in keys], keys))


def _rows(connection: Connection, query: Select[Any]) -> tuple[JsonRow, ...]:
    found: Sequence[RowMapping] = connection.execute(query).mappings().all()
    return tuple(dict(row) for row in found)


def _in_span(query: Select[Any], at: Column[Any], span: Span | None) -> Select[Any]:
    if span is not None and span.since is not None:
        query = query.where(at >= span.since)
    if span is not None and span.until is not None:
        query = query.where(at < span.until)
    return query


def _conditions(where: RequestFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    for name in ("slo_class", "decision", "reason", "finish_reason"):
        value = getattr(where, name)
        if value is not None:
            conditions.append(_REQUEST[name] == value)
    if where.attained is not None:
        conditions.append(_REQUEST.attained.is_(where.attained))
    return conditions


def _newest_run(connection: Connection, request_id: str) -> str | None:
    for table in (tables.step_work, tables.request, tables.event):
        query = (
            select(table.c.run_id)
            .join(tables.run, table.c.run_id == _RUN.run_id, isouter=True)
            .where(table.c.request_id == request_id)
            .order_by(_RUN.started_at.desc())
            .limit(1)
        )
        run_id: str | None = connection.scalar(query)
        if run_id is not None:
            return run_id
    return None


def _add_offsets(steps: Sequence[JsonRow], arrived_clock_s: float | None) -> None:
    last_token_clock_s: float | None = None
    for row in steps:
        clock_s = row.pop("clock_s")
        row["since_arrival_s"] = None if arrived_clock_s is None else clock_s - arrived_clock_s
        row["token_since_arrival_s"] = None
        row["gap_s"] = None
        offset_s = row.pop("token_offset_s")
        if offset_s is None:
            continue
        token_clock_s = clock_s + offset_s
        if arrived_clock_s is not None:
            row["token_since_arrival_s"] = token_clock_s - arrived_clock_s
        if last_token_clock_s is not None:
            row["gap_s"] = token_clock_s - last_token_clock_s
        last_token_clock_s = token_clock_s


def _encode(values: list[Any], keys: Sequence[Column[Any]]) -> str:
    text = json.dumps([keys[0].table.name, *values])
    return base64.urlsafe_b64encode(text.encode("utf-8")).decode("ascii").rstrip("=")


def _decode(cursor: str, keys: Sequence[Column[Any]]) -> list[Any]:
    """Return the key values of a cursor of this listing; CursorError otherwise."""
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        values = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError) as error:
        raise CursorError("the cursor is not one that this server made") from error
    if (
        not isinstance(values, list)
        or len(values) != 1 + len(keys)
        or values[0] != keys[0].table.name
        or any(
            type(value) is not key.type.python_type
            or (isinstance(value, int) and abs(value) >= 2**63)
            or (isinstance(value, str) and "\x00" in value)
            for value, key in zip(values[1:], keys, strict=True)
        )
    ):
        raise CursorError("the cursor belongs to another listing")
    return values[1:]
