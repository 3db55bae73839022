"""Connections: one engine per process and purpose, with its pragmas, timeouts and locks.

Owns opening and closing. Must not know a table.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError

from store.errors import (
    DamagedDataError,
    DatabaseUnavailableError,
    DatabaseUrlError,
    MissingDatabaseError,
)
from store.lockfile import WriterLock
from store.urls import is_sqlite, mask_url, parse_url, shown_url, sqlite_path

SQLITE_BUSY_TIMEOUT_S = 5.0
POSTGRESQL_CONNECT_TIMEOUT_S = 5
READER_STATEMENT_TIMEOUT_MS = 30_000

# Releases of the SQLite library in which a checkpoint that resets the WAL can race with a commit
# (fixed in 3.51.3 and in the two maintenance branches below).
_WAL_RESET_FIRST = (3, 7, 0)
_WAL_RESET_FIXED = (3, 51, 3)
_WAL_RESET_BRANCHES = ((3, 44, 6), (3, 50, 7))


def sqlite_warning(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> str | None:
    """Return a warning if this SQLite library has the WAL-reset fault, None if it is safe."""
    has_branch_fix = any(
        version[:2] == fixed[:2] and version >= fixed for fixed in _WAL_RESET_BRANCHES
    )
    if version < _WAL_RESET_FIRST or version >= _WAL_RESET_FIXED or has_branch_fix:
        return None
    shown = ".".join(str(part) for part in version)
    return (
        f"SQLite library {shown} lacks the WAL-reset fix: a checkpoint can, rarely, corrupt the"
        " telemetry database. Use 3.51.3 or later (or 3.50.7, 3.44.6), or PostgreSQL."
    )


class Database:
    """An SQLAlchemy engine with its purpose: the one writer, or any number of readers.

    SQLite writer: WAL, synchronous NORMAL, incremental vacuum, BEGIN IMMEDIATE and the lock file.
    SQLite reader: `mode=ro`, so that no statement can change the file. PostgreSQL: psycopg 3;
    readers run in read-only transactions.
    """

    def __init__(self, url: URL, engine: Engine, lock: WriterLock | None) -> None:
        self.url = url
        self.engine = engine
        self._lock = lock

    @classmethod
    def open_writer(
        cls,
        url: str,
        *,
        may_create: bool = False,
        busy_timeout_s: float = SQLITE_BUSY_TIMEOUT_S,
    ) -> Database:
        """Open for writing; a missing SQLite file is created only if `may_create`.

        Raises DatabaseUrlError, DatabaseBusyError (another process writes the SQLite file),
        DatabaseUnavailableError.
        """
        parsed = parse_url(url)
        if not is_sqlite(parsed):
            return cls(parsed, _postgresql_engine(parsed, is_reader=False), None)
        path = sqlite_path(parsed)
        if not path.parent.is_dir():
            raise DatabaseUnavailableError(
                f"no directory {path.parent} for the database {path.name}"
            )
        if not may_create:
            _require_file(path)
        lock = WriterLock(path)
        lock.acquire()
        mode = "rwc" if may_create else "rw"
        return cls(parsed, _sqlite_engine(parsed, path, mode, busy_timeout_s), lock)

    @classmethod
    def open_reader(cls, url: str) -> Database:
        """Open read-only.

        Raises DatabaseUrlError, or DatabaseUnavailableError if an SQLite file does not exist.
        """
        parsed = parse_url(url)
        if not is_sqlite(parsed):
            return cls(parsed, _postgresql_engine(parsed, is_reader=True), None)
        path = sqlite_path(parsed)
        _require_file(path)
        return cls(parsed, _sqlite_engine(parsed, path, "ro", SQLITE_BUSY_TIMEOUT_S), None)

    @property
    def is_sqlite(self) -> bool:
        """Whether this is an SQLite file."""
        return is_sqlite(self.url)

    @property
    def shown(self) -> str:
        """The URL with its password masked."""
        return shown_url(self.url)

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """Yield a connection in one transaction: commits at the end, rolls back on an exception."""
        with self.engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a connection in one short snapshot; SQL errors become DatabaseUnavailableError, a
        cell that is no JSON DamagedDataError.
        """
        try:
            with self.engine.begin() as connection:
                yield connection
        except (SQLAlchemyError, UnicodeError) as error:
            raise DatabaseUnavailableError(f"cannot read {self.shown}: {brief(error)}") from error
        except (json.JSONDecodeError, RecursionError) as error:
            # Parsed by the driver's side as rows are fetched, so inside this block.
            raise DamagedDataError(
                f"{self.shown} is damaged: a cell holds no JSON ({brief(error)})"
            ) from error

    def close(self) -> None:
        """Close every connection and give the lock back."""
        self.engine.dispose()
        if self._lock is not None:
            self._lock.release()


def brief(error: BaseException) -> str:
    """Return the first line of the driver's own message: no SQL, no parameters, no password."""
    cause = getattr(error, "orig", None) or error
    lines = str(cause).strip().splitlines()
    return mask_url(lines[0]) if lines else type(cause).__name__


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise MissingDatabaseError(
            f"no database at {path}: start the server, or run `paceline db upgrade`"
        )


def _sqlite_engine(url: URL, path: Path, mode: str, busy_timeout_s: float) -> Engine:
    is_reader = mode == "ro"
    location = f"file:{quote(str(path))}?mode={mode}"

    def connect() -> sqlite3.Connection:
        # Connections of a pool move between threads; SQLAlchemy hands each to one thread at a time.
        return sqlite3.connect(location, uri=True, timeout=busy_timeout_s, check_same_thread=False)

    engine = create_engine(url, creator=connect)
    begin = "BEGIN" if is_reader else "BEGIN IMMEDIATE"

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        # The driver must not open transactions by itself: it would do so late, and DEFERRED.
        connection.isolation_level = None
        if is_reader:
            connection.execute("PRAGMA query_only = ON")
            return
        # auto_vacuum only takes effect before the first page is written, which journal_mode does.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        # A writer takes its lock at the start: an upgrade in mid-transaction fails at once instead
        # of waiting.
        connection.exec_driver_sql(begin)

    return engine


def _postgresql_engine(url: URL, *, is_reader: bool) -> Engine:
    arguments: dict[str, Any] = {
        "connect_timeout": POSTGRESQL_CONNECT_TIMEOUT_S,
        "application_name": "paceline reader" if is_reader else "paceline writer",
    }
    if is_reader:
        arguments["options"] = (
            "-c default_transaction_read_only=on"
            f" -c statement_timeout={READER_STATEMENT_TIMEOUT_MS}"
        )
    try:
        return create_engine(
            url, connect_args=arguments, pool_size=4, max_overflow=4, pool_pre_ping=True
        )
    except ModuleNotFoundError as error:
        raise DatabaseUrlError(
            f"{shown_url(url)} needs the PostgreSQL driver: pip install 'paceline[postgresql]'"
        ) from error
