"""A fresh migrated database per test: SQLite always, PostgreSQL where one is offered."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from engine.clock import VirtualClock
from store import schema
from store.database import Database
from store.writer import TelemetryWriter, WriterConfig
from tests.store.samples import make_run


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database without tables."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'telemetry.db'}"
        return
    server = os.environ.get("PACELINE_TEST_POSTGRES_URL")
    if not server:
        pytest.skip("PACELINE_TEST_POSTGRES_URL is not set")
    name = f"paceline_{uuid.uuid4().hex}"
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        admin.dispose()


@pytest.fixture
def url(empty_url: str) -> str:
    """URL of a migrated database."""
    schema.migrate(empty_url)
    return empty_url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """URL of a migrated SQLite database."""
    path = f"sqlite:///{tmp_path / 'telemetry.db'}"
    schema.migrate(path)
    return path


@pytest.fixture
def clock() -> VirtualClock:
    """A clock that stands still."""
    return VirtualClock()


@pytest.fixture
def writer(url: str, clock: VirtualClock) -> Iterator[TelemetryWriter]:
    """A writer without a thread, to be pumped; small enough to fill."""
    config = WriterConfig(max_queue_rows=64, max_batch_rows=8)
    database = Database.open_writer(url, busy_timeout_s=0)
    made = TelemetryWriter(database, make_run(), clock, config)
    yield made
    made.close()
