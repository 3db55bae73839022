"""Databases that are locked, gone, incomplete or stuck: nothing blocks, everything is counted."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, text

from engine.clock import VirtualClock
from store.database import Database
from store.urls import parse_url, sqlite_path
from store.writer import TelemetryWriter, WriterConfig
from tests.store.probes import count_rows, locked, read_events
from tests.store.samples import (
    is_balanced,
    life_of_a_request,
    make_run,
    make_snapshot,
    make_step,
)


@pytest.fixture
def sqlite_writer(sqlite_url: str, clock: VirtualClock) -> Iterator[TelemetryWriter]:
    """A writer on SQLite without a thread; a locked database refuses at once."""
    config = WriterConfig(max_queue_rows=20, max_batch_rows=8, min_retry_s=0.5, max_retry_s=2)
    made = TelemetryWriter(
        Database.open_writer(sqlite_url, busy_timeout_s=0), make_run(), clock, config
    )
    yield made
    made.close()


def test_locked_database_costs_nothing_until_the_queue_is_full(
    sqlite_url: str, sqlite_writer: TelemetryWriter
) -> None:
    writer = sqlite_writer
    assert writer.pump()
    with locked(sqlite_url):
        for number in range(6):
            assert writer.offer(make_step(number))
        delays = []
        for _ in range(5):
            assert not writer.pump()
            delays.append(writer.delay_s)
        assert delays == [0.5, 1.0, 2.0, 2.0, 2.0]
        stats = writer.stats()
        assert stats.last_error == "database is locked"
        assert (stats.num_failed_tries, stats.num_rows_queued) == (5, 12)
        # The batch in flight still takes its room: 4 of 20 rows are left... for 4 steps of 2 rows.
        assert [writer.offer(make_step(number)) for number in range(6, 12)] == [
            *[True] * 4,
            *[False] * 2,
        ]
        assert is_balanced(writer.stats())
    assert writer.pump()
    assert writer.stats().last_error is None
    assert writer.delay_s == WriterConfig().flush_interval_s
    assert writer.close()
    assert count_rows(sqlite_url)["step"] == 10
    (event,) = read_events(sqlite_url)
    assert (event["numbers"]["first_step_no"], event["numbers"]["last_step_no"]) == (10, 11)
    assert is_balanced(writer.stats())


def test_database_that_never_comes_back_is_counted_at_the_close(
    sqlite_url: str, sqlite_writer: TelemetryWriter
) -> None:
    writer = sqlite_writer
    with locked(sqlite_url):
        for number in range(3):
            writer.offer(make_step(number))
        assert not writer.close()
        stats = writer.stats()
        assert is_balanced(stats)
        assert (stats.num_rows_queued, stats.num_dropped_by_reason) == (0, {"closed": 6})
    assert count_rows(sqlite_url)["step"] == 0
    assert not writer.close()


def test_missing_tables_are_an_outage_not_a_crash(sqlite_url: str, clock: VirtualClock) -> None:
    path = sqlite_path(parse_url(sqlite_url))
    writer = TelemetryWriter(Database.open_writer(sqlite_url, busy_timeout_s=0), make_run(), clock)
    aside = sqlite3.connect(path)
    aside.execute("ALTER TABLE step RENAME TO elsewhere")
    writer.offer(make_step(1))
    assert not writer.pump()
    assert "no such table" in (writer.stats().last_error or "")
    aside.execute("ALTER TABLE elsewhere RENAME TO step")
    aside.close()
    assert writer.pump()
    assert writer.close()
    assert count_rows(sqlite_url)["step"] == 1


def test_a_full_disk_is_an_outage(sqlite_url: str, sqlite_writer: TelemetryWriter) -> None:
    writer = sqlite_writer
    room = {"pages": 1}

    def limit(connection: Any, _record: Any) -> None:
        connection.execute(f"PRAGMA max_page_count = {room['pages']}")

    assert writer.pump()
    engine = writer._database.engine
    engine.dispose()
    event.listen(engine, "connect", limit)
    step = make_step(1, failure="x" * 1_000_000)
    assert writer.offer(step)
    assert not writer.pump()
    assert "full" in (writer.stats().last_error or "")
    assert is_balanced(writer.stats())
    room["pages"] = 1_000_000
    assert writer.pump()
    assert writer.close()
    assert count_rows(sqlite_url)["step"] == 1


def test_connections_that_the_server_ended_are_replaced(url: str, writer: TelemetryWriter) -> None:
    if not url.startswith("postgresql"):
        pytest.skip("SQLite has no server")
    writer.offer(make_step(1))
    assert writer.pump()
    other = Database.open_writer(url)
    with other.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
    other.close()
    writer.offer(make_step(2))
    while writer.stats().num_rows_queued:
        writer.pump()
    assert writer.close()
    assert count_rows(url)["step"] == 2
    assert is_balanced(writer.stats())


def test_a_commit_whose_answer_got_lost_is_not_written_twice(
    url: str, writer: TelemetryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = writer._database
    begin = database.begin
    broken = {"next": True}

    @contextmanager
    def begin_and_lose_the_answer() -> Iterator[Any]:
        with begin() as connection:
            yield connection
        if broken.pop("next", False):
            raise OSError("connection reset")

    assert writer.pump()
    monkeypatch.setattr(database, "begin", begin_and_lose_the_answer)
    for record in [*life_of_a_request()[-3:], make_snapshot(1)]:
        writer.offer(record)
    assert not writer.pump()
    assert writer.pump()
    assert writer.close()
    assert writer.stats().num_dropped_by_reason == {}
    once = dict.fromkeys(("run", "step", "step_work", "request", "event", "model_snapshot"), 1)
    assert {name: number for name, number in count_rows(url).items() if number} == once


def test_the_thread_gives_up_a_dead_database_when_it_is_closed(
    sqlite_url: str, clock: VirtualClock
) -> None:
    writer = TelemetryWriter(Database.open_writer(sqlite_url, busy_timeout_s=0), make_run(), clock)
    with locked(sqlite_url):
        writer.start()
        for number in range(50):
            assert writer.offer(make_step(number))
        assert not writer.close(timeout_s=60)
        stats = writer.stats()
    assert is_balanced(stats)
    assert (stats.kinds["step"].dropped, stats.num_rows_queued) == (50, 0)


def test_offers_go_on_while_the_thread_is_stuck_in_the_driver(
    url: str, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database.open_writer(url)
    begin = database.begin
    is_stuck, is_free = threading.Event(), threading.Event()

    @contextmanager
    def begin_when_free() -> Iterator[Any]:
        is_stuck.set()
        assert is_free.wait(timeout=60)
        with begin() as connection:
            yield connection

    monkeypatch.setattr(database, "begin", begin_when_free)
    writer = TelemetryWriter(database, make_run(), clock, WriterConfig(max_queue_rows=100))
    writer.start()
    assert is_stuck.wait(timeout=60)
    assert [writer.offer(make_step(number)) for number in range(60)].count(True) == 50
    assert is_balanced(writer.stats())
    # The thread is left alone with its connection; a later close finds its work done.
    assert not writer.close(timeout_s=0)
    is_free.set()
    assert writer.close(timeout_s=60)
    assert count_rows(url)["step"] == 50
    (event,) = read_events(url)
    assert event["numbers"]["num_step_rows"] == 10
    assert is_balanced(writer.stats())
