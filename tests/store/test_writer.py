"""The writer, pumped by hand: order, whole steps, honest counts, runs that died."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from engine.clock import VirtualClock
from store.database import Database
from store.errors import StoreError
from store.queries import TelemetryReader
from store.records import StepWorkRecord
from store.writer import TelemetryWriter, WriterConfig
from tests.store.probes import count_rows, read_events
from tests.store.samples import (
    RUN_AT,
    is_balanced,
    life_of_a_request,
    make_event,
    make_request,
    make_run,
    make_step,
)


def test_everything_offered_is_written_and_counted(url: str, writer: TelemetryWriter) -> None:
    for record in life_of_a_request():
        assert writer.offer(record)
    assert writer.stats().num_rows_queued == 11
    assert writer.close()
    counts = count_rows(url)
    written = {"run": 1, "step": 4, "step_work": 5, "request": 1, "event": 1}
    assert counts == {"model_snapshot": 0, "profile": 0, "tune_trial": 0, **written}
    stats = writer.stats()
    assert is_balanced(stats)
    assert stats.num_rows_queued == 0
    assert {kind: value.committed for kind, value in stats.kinds.items()} == {
        kind: counts[kind] for kind in stats.kinds
    }


def test_values_come_back_as_they_went_in(url: str, writer: TelemetryWriter) -> None:
    step, request = make_step(1), make_request()
    writer.offer(step)
    writer.offer(request)
    writer.offer(make_event())
    writer.close()
    reader = TelemetryReader.open(url)
    (row,) = reader.steps().rows
    assert {name: getattr(step, name) for name in row} == row
    (row,) = reader.requests().rows
    assert {name: getattr(request, name) for name in row} == row
    (row,) = reader.events().rows
    assert (row["kind"], row["numbers"], row["step_no"]) == ("preemption", {"blocks": 3}, 2)
    reader.close()


def test_a_batch_is_bounded_and_in_order(url: str, writer: TelemetryWriter) -> None:
    for number in range(10):
        writer.offer(make_step(number))
    assert writer.pump()
    # 8 rows a batch, 2 rows a step.
    assert count_rows(url)["step"] == 4
    assert count_rows(url)["step_work"] == 4
    assert writer.stats().kinds["step"].queued == 6


def test_a_step_larger_than_a_batch_is_still_one_transaction(
    url: str, writer: TelemetryWriter
) -> None:
    work = tuple(StepWorkRecord(f"req-{index}", "decode", 1, 8) for index in range(30))
    writer.offer(make_step(1, work=work))
    assert writer.pump()
    assert (count_rows(url)["step"], count_rows(url)["step_work"]) == (1, 30)


@pytest.mark.parametrize("reason", ["closed", "engine_stopped"])
def test_run_row_has_its_secrets_masked_and_gets_an_end(
    url: str, writer: TelemetryWriter, clock: VirtualClock, reason: str
) -> None:
    writer.pump()
    clock.advance(7)
    writer.close(reason=reason)
    reader = TelemetryReader.open(url)
    (run,) = reader.runs()
    reader.close()
    assert run["settings"] == {"max_tokens": 8, "api_key": "***"}
    assert (run["ended_at"], run["end_reason"]) == (RUN_AT + 7000, reason)


def test_a_full_queue_drops_the_newest_and_tells_of_it(url: str, writer: TelemetryWriter) -> None:
    # 64 rows fit, two a step.
    accepted = [writer.offer(make_step(number)) for number in range(40)]
    assert accepted == [True] * 32 + [False] * 8
    stats = writer.stats()
    assert is_balanced(stats)
    assert stats.kinds["step"].dropped == 8
    assert stats.num_dropped_by_reason == {"queue_full": 16}
    assert writer.close()
    (event,) = read_events(url)
    assert (event["kind"], event["reason"]) == ("telemetry_loss", "queue_full")
    assert event["numbers"] == {
        "num_step_rows": 8,
        "num_step_work_rows": 8,
        "num_request_rows": 0,
        "num_event_rows": 0,
        "num_model_snapshot_rows": 0,
        "first_step_no": 32,
        "last_step_no": 39,
        "prefill_tokens": 0,
        "decode_tokens": 8,
        "first_at": RUN_AT + 3200,
        "last_at": RUN_AT + 3900,
    }
    assert count_rows(url)["step"] == 32
    assert is_balanced(writer.stats())


def test_one_bad_row_does_not_cost_its_neighbours(url: str, writer: TelemetryWriter) -> None:
    writer.offer(make_step(1))
    writer.offer(make_step(2, duration_s=math.nan))
    writer.offer(make_step(1))
    writer.offer(make_step(3))
    assert writer.pump()
    assert count_rows(url)["step"] == 2
    stats = writer.stats()
    assert is_balanced(stats)
    assert (stats.kinds["step"].committed, stats.num_dropped_by_reason) == (2, {"invalid": 4})
    assert writer.close()
    (event,) = read_events(url)
    assert (event["reason"], event["numbers"]["num_step_rows"]) == ("invalid", 2)


def test_odd_values_are_cleaned(url: str, writer: TelemetryWriter) -> None:
    writer.offer(make_step(1, slack_s=math.inf, failure="nul \x00 and \ud800", policy="p" * 99))
    writer.offer(make_event(numbers={"share": math.nan, "url": "postgresql://u:secret@h/d"}))
    assert writer.close()
    reader = TelemetryReader.open(url)
    (step,) = reader.steps().rows
    (event,) = reader.events().rows
    reader.close()
    assert (step["slack_s"], step["failure"]) == (None, "nul \ufffd and ?")
    assert step["policy"] == "p" * 64
    assert event["numbers"] == {"share": None, "url": "postgresql://u:***@h/d"}


def test_runs_that_died_are_marked_once(url: str, clock: VirtualClock) -> None:
    dead = TelemetryWriter(Database.open_writer(url), make_run("dead"), clock)
    dead.offer(make_step(1, run_id="dead"))
    dead.offer(make_step(2, run_id="dead", work=(StepWorkRecord("req-2", "decode", 1, 9),)))
    dead.offer(make_request("req-1", run_id="dead"))
    dead.pump()
    dead._database.close()

    for name in ("second", "third"):
        later = RUN_AT + 60_000
        writer = TelemetryWriter(Database.open_writer(url), make_run(name, later), clock)
        writer.pump()
        assert writer.close()
        assert is_balanced(writer.stats())

    reader = TelemetryReader.open(url)
    ends = {run["run_id"]: (run["ended_at"], run["end_reason"]) for run in reader.runs()}
    (event,) = reader.events(kind="run_lost").rows
    reader.close()
    assert ends["dead"] == (RUN_AT + 200, "lost")
    assert ends["second"][1] == ends["third"][1] == "closed"
    assert (event["run_id"], event["reason"]) == ("second", "lost")
    assert event["numbers"] == {
        "lost_run_id": "dead",
        "last_at": RUN_AT + 200,
        "num_open_requests": 1,
    }


def test_events_of_a_run_that_found_a_dead_one_keep_their_own_numbers(
    url: str, clock: VirtualClock
) -> None:
    dead = TelemetryWriter(Database.open_writer(url), make_run("dead"), clock)
    dead.pump()
    dead._database.close()
    writer = TelemetryWriter(Database.open_writer(url), make_run(), clock)
    writer.offer(make_event())
    assert writer.close()
    assert [(event["event_no"], event["kind"]) for event in read_events(url)] == [
        (0, "run_lost"),
        (1, "preemption"),
    ]


def test_counts_balance_while_threads_offer_and_rows_are_written(
    url: str, writer: TelemetryWriter
) -> None:
    def offer(thread_no: int) -> None:
        for number in range(100):
            writer.offer(make_step(thread_no * 100 + number))

    threads = [threading.Thread(target=offer, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert writer.pump()
        assert is_balanced(writer.stats())
    assert writer.close()
    stats = writer.stats()
    assert is_balanced(stats)
    assert (stats.kinds["step"].offered, stats.num_rows_queued) == (400, 0)
    assert count_rows(url)["step"] == stats.kinds["step"].committed


def test_offers_after_the_close_are_counted(writer: TelemetryWriter) -> None:
    writer.close()
    assert not writer.offer(make_step(1))
    assert is_balanced(writer.stats())
    assert writer.stats().num_dropped_by_reason == {"closed": 2}


def test_the_thread_writes_while_the_loop_offers(url: str, clock: VirtualClock) -> None:
    writer = TelemetryWriter(Database.open_writer(url), make_run(), clock)
    writer.start()
    with pytest.raises(RuntimeError, match="started already"):
        writer.start()
    for number in range(2000):
        assert writer.offer(make_step(number))
    assert writer.close(timeout_s=60)
    assert count_rows(url)["step"] == 2000
    assert is_balanced(writer.stats())
    assert "telemetry-writer" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("name", ["max_queue_rows", "max_batch_rows", "flush_interval_s"])
def test_settings_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        WriterConfig(**{name: 0})


def test_opening_needs_a_migrated_database(tmp_path: Path, clock: VirtualClock) -> None:
    with pytest.raises(StoreError, match="paceline db upgrade"):
        TelemetryWriter.open(f"sqlite:///{tmp_path}/none.db", make_run(), clock)
    assert list(tmp_path.iterdir()) == []
