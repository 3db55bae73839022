"""Records to rows: plain values that both databases accept.

Owns cleaning (numbers that are not finite, NUL characters, lengths) and the masking of secrets in
settings. Must not open a connection. Runs on the writer's thread only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, String, Table

from store import tables
from store.records import (
    EventRecord,
    ModelSnapshotRecord,
    RequestRecord,
    RunRecord,
    StepRecord,
    StepWorkRecord,
    key_hash,
)
from store.urls import mask_url

Row = dict[str, Any]
_SECRET = re.compile(r"password|passwd|secret|api_?key|credential", re.IGNORECASE)
# Where a record's name differs from its column's: `kind` of a record is its table.
_FIELD_OF_COLUMN = {"step_work": {"kind": "work_kind"}, "event": {"kind": "event_kind"}}


def _integer(value: Any) -> int:
    return int(value)


def _real(value: Any) -> float | None:
    number = float(value)
    # NaN is not comparable, and neither value is JSON: unknown is the honest reading of both.
    return number if math.isfinite(number) else None


def _text(limit: int | None) -> Callable[[Any], str]:
    def clean(value: Any) -> str:
        text = str(value)[:limit]
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")
        return text.replace("\x00", "\ufffd")

    return clean


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            _clean_key(key): "***" if item and _SECRET.search(str(key)) else _json(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_json(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return _real(value)
    return mask_url(_clean_key(value))


_clean_key = _text(None)


def _cleaner(column: Column[Any]) -> Callable[[Any], Any]:
    kind = column.type
    if isinstance(kind, Boolean):
        return bool
    if isinstance(kind, BigInteger):
        return _integer
    if isinstance(kind, Double):
        return _real
    if isinstance(kind, JSON):
        return _json
    if isinstance(kind, String):
        return _text(kind.length)
    raise TypeError(f"no cleaner for {column}")


def _readers(table: Table, *skipped: str) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    renamed = _FIELD_OF_COLUMN.get(table.name, {})
    return tuple(
        (column.name, renamed.get(column.name, column.name), _cleaner(column))
        for column in table.columns
        if column.name not in skipped
    )


_RUN = _readers(tables.run, "ended_at", "end_reason")
_STEP = _readers(tables.step)
_STEP_WORK = _readers(tables.step_work, "run_id", "step_no")
_REQUEST = _readers(tables.request)
_EVENT = _readers(tables.event, "event_no")
_SNAPSHOT = _readers(tables.model_snapshot, "key_hash", "document")


def _row(record: Any, readers: tuple[tuple[str, str, Callable[[Any], Any]], ...]) -> Row:
    row: Row = {}
    for column, name, clean in readers:
        value = getattr(record, name)
        row[column] = None if value is None else clean(value)
    return row


def run_row(record: RunRecord) -> Row:
    """Return the row of a run that has just begun."""
    return _row(record, _RUN)


def step_row(record: StepRecord) -> Row:
    """Return the step's own row."""
    return _row(record, _STEP)


def step_work_rows(record: StepRecord) -> list[Row]:
    """Return one row per share of the step."""
    return [_work_row(record, work) for work in record.work]


def _work_row(record: StepRecord, work: StepWorkRecord) -> Row:
    row = _row(work, _STEP_WORK)
    row["run_id"] = record.run_id
    row["step_no"] = record.step_no
    return row


def request_row(record: RequestRecord) -> Row:
    """Return the row of a request that has ended."""
    return _row(record, _REQUEST)


def snapshot_row(record: ModelSnapshotRecord) -> Row:
    """Return the row of a cost model; ValueError if its document holds what is no JSON number."""
    # Not cleaned: a model whose numbers were changed would not be the one that was stored.
    json.dumps(record.document, allow_nan=False)
    row = _row(record, _SNAPSHOT)
    return {**row, "key_hash": key_hash(record.key), "document": dict(record.document)}


def event_row(record: EventRecord, event_no: int) -> Row:
    """Return the row of an event; `event_no` makes it unique within its run."""
    return {**_row(record, _EVENT), "event_no": event_no}
