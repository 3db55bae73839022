"""`paceline simulate --replay`: a stored run's arrivals, promises and machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from controller.cli.main import app
from controller.cli.simulate_stored import StoredRunError, read_run
from controller.policy.slo import OnInfeasible, Slo
from costmodel.prior import fit_prior
from costmodel.snapshot import SnapshotKey, dump_model
from costmodel.synthetic import TWO_CORES, synthetic_steps
from engine.clock import VirtualClock
from store import schema
from store.queries import TelemetryReader
from store.records import Record
from store.writer import TelemetryWriter
from tests.store.samples import make_request, make_run, make_snapshot, make_step

KEY = SnapshotKey("demo", "cpu", "float32", "reference", 16, "0.1.0")
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 24,
    "slo_class": [{"name": "chat", "weight": 3.0, "on_infeasible": "queue"}],
}


def arrived(number: int, at: float, **changes: Any) -> Record:
    return make_request(f"req-{number}", arrived_clock_s=at, arrived_at=int(at * 1000), **changes)


def stored(tmp_path: Path, *records: Record, settings: dict[str, Any] | None = None) -> str:
    url = f"sqlite:///{tmp_path}/telemetry.db"
    schema.migrate(url)
    run = make_run(settings=SETTINGS if settings is None else settings)
    writer = TelemetryWriter.open(url, run, VirtualClock())
    writer.start()
    for record in records:
        assert writer.offer(record)
    writer.close()
    return url


def lives() -> list[Record]:
    """Three chats with two promises, a batch that was refused, and the model that was learnt."""
    learner = fit_prior([])
    for step, _ in zip(synthetic_steps(TWO_CORES, seed=1), range(400), strict=False):
        learner.observe(step.features, step.measured_s)
    return [
        make_step(1, num_blocks_total=1800),
        arrived(1, 60.0, num_output_tokens=5),
        arrived(2, 61.5, num_output_tokens=9, ttft_target_s=2.0),
        arrived(3, 62.0, num_output_tokens=7, num_prompt_tokens=40),
        arrived(
            4, 63.0, slo_class="batch", ttft_target_s=None, tpot_target_s=None,
            num_output_tokens=0, finish_reason="rejected", decision="reject",
        ),
        make_snapshot(1, key=asdict(KEY), document=dump_model(learner, KEY)),
    ]  # fmt: skip


def test_a_stored_run_is_read_with_its_promises_and_its_machine(tmp_path: Path) -> None:
    reader = TelemetryReader.open(stored(tmp_path, *lives()))
    run = read_run(reader, "run-a")
    assert [
        (a.at_s, a.num_prompt_tokens, a.num_output_tokens, a.slo_class)
        for a in run.workload.arrivals
    ] == [
        (0.0, 96, 5, "chat-1"),
        (1.5, 96, 9, "chat-2"),
        (2.0, 40, 7, "chat-1"),
        # Nobody knows how long the refused answer would have been: as long as is usual.
        (3.0, 96, 7, "batch"),
    ]  # fmt: skip
    assert [(c.name, c.slo, c.weight, c.on_infeasible) for c in run.classes] == [
        ("chat-1", Slo(1.0, 0.2), 3.0, OnInfeasible.QUEUE),
        ("chat-2", Slo(2.0, 0.2), 3.0, OnInfeasible.QUEUE),
        ("batch", Slo(), 1.0, OnInfeasible.REJECT),
    ]
    assert run.machine is not None
    assert run.machine.name == "demo-cpu"
    assert run.limits == {"max_num_seqs": 24, "block_size": 16, "num_blocks": 1800}
    assert read_run(reader, "last") == run
    reader.close()


def test_a_later_run_under_the_same_key_does_not_lend_its_machine(tmp_path: Path) -> None:
    url = stored(tmp_path, *lives())
    later = dump_model(fit_prior([]), KEY)
    writer = TelemetryWriter.open(url, make_run(run_id="run-b", started_at=9**9), VirtualClock())
    writer.start()
    for record in (
        arrived(1, 60.0, run_id="run-b"),
        make_snapshot(1, run_id="run-b", at=2**42, key=asdict(KEY), document=later),
    ):
        assert writer.offer(record)
    writer.close()
    reader = TelemetryReader.open(url)
    own, other = (read_run(reader, run).machine for run in ("run-a", "run-b"))
    reader.close()
    assert own is not None
    assert own != other


def test_an_unknown_or_empty_run_is_refused(tmp_path: Path) -> None:
    reader = TelemetryReader.open(stored(tmp_path))
    with pytest.raises(StoredRunError, match="no run 'other' is stored; the newest are: run-a"):
        read_run(reader, "other")
    with pytest.raises(StoredRunError, match="run-a has no request that ended"):
        read_run(reader, "last")
    reader.close()


def simulate(url: str, *arguments: str) -> tuple[int, str]:
    words = ["simulate", "--replay", "last", "--db", url, "--workers", "1", *arguments]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_stored_run_is_simulated_under_another_policy(tmp_path: Path) -> None:
    url, out = stored(tmp_path, *lives()), tmp_path / "out"
    code, text = simulate(url, "--policy", "fcfs-256", "--out", str(out))
    assert code == 0, text
    about = json.loads((out / "report.json").read_text(encoding="utf-8"))["about"]
    assert about["num_requests"] == 4
    assert about["hardware"]["name"] == "demo-cpu"
    assert (about["engine"]["max_num_seqs"], about["engine"]["num_blocks"]) == (24, 1800)
    assert {each["name"] for each in about["classes"]} == {"chat-1", "chat-2", "batch"}
    code, text = simulate(url, "--policy", "slo", "--max-num-seqs", "2", "--hardware", "a100-8b")
    assert code == 0, text
    assert "on a100-8b" in text


def test_what_a_run_does_not_tell_must_be_said(tmp_path: Path) -> None:
    url = stored(tmp_path, *lives()[:-1])
    code, text = simulate(url)
    assert code == 2
    assert "kept no cost model: name a machine with --hardware" in text
    code, text = simulate(url, "--trace", "x.csv")
    assert code == 2
    assert "--trace or --replay" in text
    code, text = simulate(f"sqlite:///{tmp_path}/nowhere.db")
    assert code == 2
    assert text.startswith("paceline: error: ")
