"""Looks into a database from outside, and the lock that another process may hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import func, select

from store import tables
from store.database import Database
from store.queries import TelemetryReader
from store.urls import parse_url, sqlite_path


def count_rows(url: str) -> dict[str, int]:
    """Rows by table."""
    database = Database.open_reader(url)
    try:
        with database.read() as connection:
            return {
                name: connection.scalar(select(func.count()).select_from(table)) or 0
                for name, table in tables.metadata.tables.items()
            }
    finally:
        database.close()


def read_events(url: str) -> list[dict[str, Any]]:
    """Every event, oldest first."""
    reader = TelemetryReader.open(url)
    try:
        return list(reader.events().rows)[::-1]
    finally:
        reader.close()


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Another process's write transaction that does not end (SQLite)."""
    connection = sqlite3.connect(sqlite_path(parse_url(url)), isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()
