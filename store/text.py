"""Rows and instants as text: CSV that no spreadsheet takes for formulas, times as people type them.

Owns the two text formats of telemetry. Must not know a table or a door.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

MAX_EPOCH_MS = 253_402_300_799_999
"""The last millisecond of the year 9999."""

# A spreadsheet takes such a cell for a formula; tab and carriage return hide one.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
_AGO_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_AGO = re.compile(r"(\d{1,9})([smhd])")


def to_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Return rows as CSV with a header (RFC 4180); `columns` default to those of the first row.

    None is an empty cell, a nested value is JSON. Text that begins with `= + - @` gets a leading
    apostrophe; numbers do not.
    """
    listed = list(rows)
    names = list(columns) if columns is not None else list(listed[0]) if listed else []
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(names)
    for row in listed:
        writer.writerow([_cell(row.get(name)) for name in names])
    return out.getvalue()


def parse_instant(text: str, *, now_ms: int | None = None) -> int:
    """Return epoch milliseconds of `text`: milliseconds, ISO 8601, or an age.

    Ages (`15m`, `2h`, `1d`) need `now_ms`. A time without an offset is UTC. ValueError with a clear
    line for anything else, and beyond the year 9999.
    """
    text = text.strip()
    ago = _AGO.fullmatch(text)
    if ago and now_ms is not None:
        return max(0, now_ms - int(ago[1]) * _AGO_UNITS_MS[ago[2]])
    try:
        if text.isascii() and text.isdigit():
            instant = int(text[:32])
        else:
            # A plus sign that was not escaped in a URL arrives as a space.
            moment = datetime.fromisoformat(
                re.sub(r" (\d\d:?\d\d)$", r"+\1", text) if "T" in text else text
            )
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            instant = int(moment.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        relative = "" if now_ms is None else ", or an age such as 15m, 2h, 1d"
        raise ValueError(
            f"expected epoch milliseconds or an ISO 8601 time{relative}, got {text[:64]!r}"
        ) from error
    if not 0 <= instant <= MAX_EPOCH_MS:
        raise ValueError(f"time out of range: {text[:64]!r}")
    return instant


def format_instant(epoch_ms: int) -> str:
    """Return an instant as ISO 8601 UTC with milliseconds."""
    moment = datetime.fromtimestamp(epoch_ms // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{epoch_ms % 1000:03d}Z"


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping | list | tuple):
        value = json.dumps(value, ensure_ascii=False, sort_keys=True)
    text = str(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
