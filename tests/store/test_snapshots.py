"""Cost models at rest: one per run and key, the newest found by its key, refused data dropped."""

from __future__ import annotations

import math
from typing import Any

from sqlalchemy import func, select

from engine.clock import VirtualClock
from store import schema, tables
from store.batch import insert_records
from store.database import Database
from store.queries import TelemetryReader
from store.records import EventKind, key_hash
from store.writer import TelemetryWriter
from tests.store.samples import SNAPSHOT_KEY as KEY
from tests.store.samples import is_balanced, make_run, make_snapshot, make_step


def write(url: str, *records: Any, run_id: str = "run-a") -> TelemetryWriter:
    writer = TelemetryWriter(Database.open_writer(url), make_run(run_id), VirtualClock())
    for record in records:
        assert writer.offer(record)
    assert writer.close()
    return writer


def test_a_later_snapshot_of_a_run_replaces_the_one_before(url: str) -> None:
    writer = write(url, make_snapshot(1), make_step(1), make_snapshot(2))
    assert is_balanced(writer.stats())
    assert writer.stats().kinds["model_snapshot"].committed == 2
    reader = TelemetryReader.open(url)
    found = reader.model_snapshot(KEY)
    assert found is not None
    assert found["version"] == 2
    # To the last bit: a model that came back rounded would not be the one that was stored.
    assert found["document"] == {"format": 2, "state": {"numbers": [2.1, 1e-300]}}
    assert (found["key"], found["mape"], found["num_observed"]) == (KEY, 0.02, 20)
    (listed,) = reader.model_snapshots()
    assert "document" not in listed
    reader.close()


def test_the_newest_of_all_runs_answers_for_exactly_its_key(url: str) -> None:
    write(url, make_snapshot(5), make_snapshot(9, key={**KEY, "block_size": 32}))
    write(url, make_snapshot(3, run_id="run-b"), run_id="run-b")
    reader = TelemetryReader.open(url)
    newest = reader.model_snapshot(dict(reversed(KEY.items())))
    assert newest is not None
    assert (newest["run_id"], newest["version"]) == ("run-a", 5)
    assert reader.model_snapshot({**KEY, "model": "other"}) is None
    assert [row["version"] for row in reader.model_snapshots()] == [9, 5, 3]
    last, own, none = (reader.newest_model(run) for run in (None, "run-b", "run-c"))
    assert last is not None
    assert own is not None
    assert (last["version"], own["version"], none) == (9, 3, None)
    assert len(reader.model_snapshots(limit=1)) == 1
    reader.close()


def test_a_snapshot_that_is_no_json_number_is_dropped_and_costs_nobody_else(url: str) -> None:
    broken = make_snapshot(4, document={"state": [math.nan]})
    writer = write(url, make_snapshot(1), make_step(1), broken, make_step(2))
    counts = writer.stats()
    assert counts.num_dropped_by_reason == {"invalid": 1}
    assert counts.kinds["step"].committed == 2
    reader = TelemetryReader.open(url)
    found = reader.model_snapshot(KEY)
    assert found is not None
    assert found["version"] == 1
    lost = [row for row in reader.events().rows if row["kind"] == EventKind.TELEMETRY_LOSS]
    assert len(lost) <= 1
    reader.close()


def test_a_batch_that_is_tried_again_leaves_one_row(url: str) -> None:
    database = Database.open_writer(url)
    for _ in range(2):
        with database.begin() as connection:
            insert_records(connection, [(make_snapshot(1), 0)], is_repeat=True)
    with database.begin() as connection:
        rows = connection.scalar(select(func.count()).select_from(tables.model_snapshot))
    database.close()
    assert rows == 1


def test_equal_keys_have_equal_hashes_whatever_their_order() -> None:
    assert key_hash({"a": 1, "b": "x"}) == key_hash({"b": "x", "a": 1})
    assert key_hash({"a": 1}) != key_hash({"a": "1"})


def test_steps_know_their_chunks_and_logits_and_older_rows_do_not(url: str) -> None:
    write(url, make_step(1, num_chunks=3, num_prompt_logits=2))
    schema.downgrade(url, "0002")
    schema.migrate(url)
    write(url, make_step(2, run_id="run-b", num_chunks=1, num_prompt_logits=0), run_id="run-b")
    reader = TelemetryReader.open(url)
    rows = {row["step_no"]: (row["num_chunks"], row["num_prompt_logits"]) for row in
            reader.steps().rows}  # fmt: skip
    assert rows == {1: (None, None), 2: (1, 0)}
    reader.close()
