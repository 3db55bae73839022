"""The SQL of the writer: one batch, one transaction.

Owns the inserts, the start and end of a run, and which errors mean "try again". Must not queue,
retry or count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    SQLAlchemyError,
    StatementError,
)

from store import tables
from store.records import (
    EventKind,
    EventRecord,
    ModelSnapshotRecord,
    Record,
    RequestRecord,
    RunRecord,
    StepRecord,
)
from store.rows import (
    Row,
    event_row,
    request_row,
    run_row,
    snapshot_row,
    step_row,
    step_work_rows,
)

# How far back a dead run's steps are searched for requests that never ended.
_OPEN_REQUEST_STEPS = 1000


def is_retryable(error: Exception) -> bool:
    """Whether the database, not the data, is at fault: locked, gone, full, not migrated yet."""
    if isinstance(error, IntegrityError | DataError):
        return False
    if isinstance(error, StatementError) and not isinstance(error, DBAPIError):
        return False
    return isinstance(error, SQLAlchemyError | OSError)


def insert_records(
    connection: Connection, numbered: Sequence[tuple[Record, int]], *, is_repeat: bool
) -> None:
    """Insert records; the number beside an event is its `event_no` (ignored for the rest).

    `is_repeat` says that an earlier try ended without a clear answer, so some of the rows may stand
    already.
    """
    rows: dict[str, list[Row]] = {"step": [], "step_work": [], "request": [], "event": []}
    for record, number in numbered:
        if isinstance(record, ModelSnapshotRecord):
            _replace_snapshot(connection, snapshot_row(record))
        elif isinstance(record, StepRecord):
            rows["step"].append(step_row(record))
            rows["step_work"].extend(step_work_rows(record))
        elif isinstance(record, RequestRecord):
            rows["request"].append(request_row(record))
        else:
            rows["event"].append(event_row(record, number))
    for name, values in rows.items():
        if values:
            connection.execute(
                _insert(connection, tables.metadata.tables[name], is_repeat=is_repeat), values
            )


def begin_run(connection: Connection, run: RunRecord) -> tuple[list[EventRecord], int]:
    """Insert the run, end earlier runs that never said goodbye, and return one event for each.

    On SQLite every run without an end is dead, because one process writes the file. On PostgreSQL
    only those of the same replica are: the others may be alive. Also returns the number of the
    run's next event. Calling it again for the same run changes nothing: a commit whose answer got
    lost may stand.
    """
    already = connection.execute(
        select(tables.run.c.run_id).where(tables.run.c.run_id == run.run_id)
    ).first()
    if already is not None:
        last_no = connection.scalar(
            select(func.max(tables.event.c.event_no)).where(tables.event.c.run_id == run.run_id)
        )
        return [], 0 if last_no is None else last_no + 1
    lost: ColumnElement[bool] = tables.run.c.ended_at.is_(None)
    if connection.dialect.name != "sqlite":
        lost &= tables.run.c.replica_id == run.replica_id
    dead = connection.execute(
        select(tables.run.c.run_id, tables.run.c.started_at).where(lost)
    ).all()
    events = []
    for run_id, started_at in dead:
        last_at, num_open = _last_signs(connection, run_id, started_at)
        connection.execute(
            update(tables.run)
            .where(tables.run.c.run_id == run_id)
            .values(ended_at=last_at, end_reason="lost")
        )
        numbers = {"lost_run_id": run_id, "last_at": last_at, "num_open_requests": num_open}
        events.append(
            EventRecord(run.run_id, run.started_at, EventKind.RUN_LOST, "lost", numbers=numbers)
        )
    connection.execute(insert(tables.run), [run_row(run)])
    if events:
        numbered = [(event, number) for number, event in enumerate(events)]
        insert_records(connection, numbered, is_repeat=False)
    return events, len(events)


def end_run(connection: Connection, run_id: str, ended_at: int, reason: str) -> None:
    """Write the end of a run; an end that stands already is kept."""
    connection.execute(
        update(tables.run)
        .where(tables.run.c.run_id == run_id, tables.run.c.ended_at.is_(None))
        .values(ended_at=ended_at, end_reason=reason)
    )


def _replace_snapshot(connection: Connection, row: Row) -> None:
    """Write a run's cost model over the one that it wrote before."""
    table = tables.model_snapshot
    connection.execute(
        delete(table).where(table.c.run_id == row["run_id"], table.c.key_hash == row["key_hash"])
    )
    connection.execute(insert(table), [row])


def _insert(connection: Connection, table: Table, *, is_repeat: bool) -> Any:
    if not is_repeat:
        return insert(table)
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table).on_conflict_do_nothing()
    return postgresql.insert(table).on_conflict_do_nothing()


def _last_signs(connection: Connection, run_id: str, started_at: int) -> tuple[int, int]:
    """Return the last instant that the run wrote of, and how many requests it left open."""
    step, work, request = tables.step, tables.step_work, tables.request
    last_step_no = connection.scalar(
        select(func.max(step.c.step_no)).where(step.c.run_id == run_id)
    )
    if last_step_no is None:
        return started_at, 0
    last_at = connection.scalar(
        select(step.c.at).where(step.c.run_id == run_id, step.c.step_no == last_step_no)
    )
    ended = select(request.c.request_id).where(
        request.c.run_id == run_id, request.c.request_id == work.c.request_id
    )
    num_open = connection.scalar(
        select(func.count(work.c.request_id.distinct())).where(
            work.c.run_id == run_id,
            work.c.step_no > last_step_no - _OPEN_REQUEST_STEPS,
            ~ended.exists(),
        )
    )
    return max(started_at, last_at or started_at), num_open or 0
