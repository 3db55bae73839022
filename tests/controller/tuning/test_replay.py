"""A stored run as a task: what was written down is replayed, what was not is assumed and said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from controller.config import Settings
from controller.policy.slo import OnInfeasible
from controller.tuning.objective import run_scene
from controller.tuning.replay import ReplayError, read_run, task_of_run
from controller.tuning.space import DEFAULTS
from costmodel.prior import flat_prior
from costmodel.refitted import RefittedLeastSquares
from costmodel.snapshot import SnapshotKey, dump_model
from engine.clock import VirtualClock
from store import schema
from store.queries import TelemetryReader
from store.writer import TelemetryWriter
from tests.controller.tuning.tuning_tasks import QUIET
from tests.store.samples import make_request, make_run, make_snapshot, make_step

KEY = SnapshotKey("demo", "cpu (2 threads)", "float32", "reference", 16, "0.1.0")
# As a server writes them.
SETTINGS = Settings(
    slo_class=("chat:ttft_ms=1000,tpot_ms=200,weight=3,on_infeasible=degrade",),
    max_num_batched_tokens=4096,
    max_model_len=900,
).to_json()


def requests() -> list[Any]:
    """Twenty chats, every fifth refused; two bring a target of their own, one has no class's."""
    found = []
    for i in range(20):
        changes: dict[str, Any] = {"arrived_clock_s": 50.0 + i / 2, "num_output_tokens": 3 + i % 2}
        if i % 5 == 4:
            changes |= {"finish_reason": "rejected", "num_output_tokens": 0, "attained": False}
        if i in (3, 8):
            changes |= {"ttft_target_s": 0.25}
        if i == 6:
            changes |= {"slo_class": "default", "ttft_target_s": None, "tpot_target_s": None}
        found.append(make_request(f"r{i:02d}", **changes))
    return found


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/p.db"
    schema.migrate(url)
    return url


def write(url: str, *records: Any, **run: Any) -> None:
    started = make_run(device="cpu (2 threads)", settings=SETTINGS, **run)
    writer = TelemetryWriter.open(url, started, VirtualClock())
    for record in records:
        assert writer.offer(record)
    assert writer.close()


@contextmanager
def reading(url: str) -> Iterator[TelemetryReader]:
    with closing(TelemetryReader.open(url)) as reader:
        yield reader


def snapshot(run_id: str = "run-a") -> Any:
    document = dump_model(flat_prior(RefittedLeastSquares), KEY)
    return make_snapshot(1, run_id=run_id, key=asdict(KEY), document=document)


def test_a_run_becomes_its_arrivals_its_promises_and_its_machine(url: str) -> None:
    # Written at their end, so in any order.
    write(url, *reversed(requests()), make_step(1, num_blocks_total=77), snapshot())
    with reading(url) as reader:
        rows = read_run(reader, "latest")
    replayed = task_of_run(rows, "mine", num_seeds=2, num_held_out_seeds=1)
    task = replayed.task
    assert replayed.run_id == "run-a"
    assert replayed.tuned_for.profile == "mine"
    assert replayed.tuned_for.refusal("demo", "cpu (2 threads)", "float32", "reference") is None
    assert replayed.tuned_for.refusal("demo", "cuda (X)") is not None
    assert replayed.tuned_for.source == SETTINGS["model"]
    first, rest = task.tuning[0].workload.arrivals, task.held_out[0].workload.arrivals
    assert len(first) + len(rest) == 20
    assert [a.at_s for a in first[:3]] == [0.0, 0.5, 1.0]
    assert task.tuning[1].workload == task.tuning[0].workload
    assert {scene.seed for scene in (*task.tuning, *task.held_out)} == {0, 1, 2}
    assert all(a.num_output_tokens in (3, 4) for a in (*first, *rest))
    assert (first[0].num_prompt_tokens, task.max_tokens) == (96, 8)
    by_name = {each.name: each for each in task.classes}
    assert set(by_name) == {"chat", "chat#2", "default"}
    assert (by_name["chat"].weight, by_name["chat#2"].weight) == (3.0, 3.0)
    assert by_name["chat"].on_infeasible is OnInfeasible.DEGRADE
    assert (by_name["chat"].slo.ttft_s, by_name["chat#2"].slo.ttft_s) == (1.0, 0.25)
    assert by_name["default"].slo.is_best_effort
    engine = task.engine
    assert (engine.num_blocks, engine.block_size, engine.max_model_len) == (77, 16, 900)
    assert engine.max_num_batched_tokens == 4096
    assert "learnt by" in task.hardware.source
    assert run_scene(task, DEFAULTS, task.held_out[0]).num_offered


def test_the_same_rows_make_the_same_task(url: str) -> None:
    write(url, *requests(), snapshot())
    with reading(url) as reader:
        prints = [task_of_run(read_run(reader, "run-a"), "x").task.fingerprint() for _ in "ab"]
        fewer = task_of_run(read_run(reader, "run-a", 10), "x").task
    assert prints[0] == prints[1]
    assert sum(each.workload.num_requests for each in (fewer.tuning[0], fewer.held_out[0])) == 10


def test_a_later_run_under_the_same_key_does_not_lend_its_machine(url: str) -> None:
    write(url, *requests(), snapshot())
    later = {**snapshot("run-b").document, "of": "run-b"}
    newer = make_snapshot(1, run_id="run-b", at=2**42, key=asdict(KEY), document=later)
    write(url, newer, run_id="run-b", started_at=2000)
    with reading(url) as reader:
        rows = read_run(reader, "run-a")
    assert rows.document == snapshot().document
    assert rows.key == asdict(KEY)


def test_the_latest_run_is_the_newest_that_has_requests(url: str) -> None:
    write(url, *requests(), started_at=1000)
    write(url, *(make_request(f"r{i}", run_id="run-b") for i in range(3)),
          run_id="run-b", started_at=2000)  # fmt: skip
    write(url, run_id="run-c", started_at=3000)
    with reading(url) as reader:
        assert read_run(reader, "latest").run["run_id"] == "run-b"
        assert len(read_run(reader, "run-a").requests) == 20


def test_what_is_missing_is_said(url: str) -> None:
    with reading(url) as reader, pytest.raises(ReplayError, match="no run with requests"):
        read_run(reader, "latest")
    refused = [
        make_request(f"r{i}", arrived_clock_s=float(i), finish_reason="rejected") for i in range(3)
    ]
    write(url, *refused)
    with reading(url) as reader:
        with pytest.raises(ReplayError, match="no requests of a run 'run-x'"):
            read_run(reader, "run-x")
        rows = read_run(reader, "run-a")
    with pytest.raises(ReplayError, match="stored no cost model: name a machine"):
        task_of_run(rows, "x")
    with pytest.raises(ReplayError, match="no request of run run-a has ended by itself"):
        task_of_run(rows, "x", hardware=QUIET)
