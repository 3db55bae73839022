"""`paceline telemetry` and `paceline db`: tables, JSON, CSV; one clear line for nothing."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from controller.cli import db, telemetry
from controller.cli.telemetry_view import cost_model_table
from costmodel.prior import flat_prior
from costmodel.refitted import RefittedLeastSquares
from costmodel.snapshot import SnapshotKey, dump_model
from costmodel.synthetic import TWO_CORES, synthetic_steps
from engine.clock import VirtualClock
from store import schema
from store.writer import TelemetryWriter
from tests.store.samples import (
    life_of_a_request,
    make_event,
    make_request,
    make_run,
    make_snapshot,
    make_step,
)

app = typer.Typer()
app.add_typer(telemetry.app, name="telemetry")
app.add_typer(db.app, name="db")
runner = CliRunner()

LONG_ID = "8f7a6c1e2d3b4a5f8f7a6c1e2d3b4a5f"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with one request's life, a missed promise and a refusal."""
    monkeypatch.delenv("PACELINE_DB", raising=False)
    url = f"sqlite:///{tmp_path}/telemetry.db"
    schema.migrate(url)
    writer = TelemetryWriter.open(url, make_run(), VirtualClock())
    for record in life_of_a_request():
        writer.offer(record)
    writer.offer(
        make_request(
            LONG_ID, slo_class="code", attained=False, ttft_s=2.3, num_cached_tokens=64,
            num_preemptions=1,
        )
    )  # fmt: skip
    swap = {"method": "swap", "num_preemptions": 1}
    writer.offer(make_event(request_id=LONG_ID, step_no=None, numbers=swap))
    writer.offer(
        make_request(
            "req-3",
            decision="reject",
            reason="=overloaded",
            finish_reason="rejected",
            attained=False,
            ttft_s=None,
            tpot_s=None,
            queue_s=None,
        )
    )
    writer.offer(make_event("refusal", reason="overloaded", request_id="req-3", step_no=None))
    assert writer.close()
    return url


def ask(*arguments: str, code: int = 0) -> str:
    """Run a command, check its exit code and return its standard output."""
    result = runner.invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def complaint(*arguments: str, code: int) -> str:
    """Run a command that fails and return its one line."""
    result = runner.invoke(app, [*arguments])
    assert result.exit_code == code, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("paceline: error: ")
    return lines[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("steps",),
        ("requests",),
        ("request", "req-1"),
        ("request", LONG_ID),
        ("request", "req-0"),
        ("summary",),
        ("events",),
    ],
)
def test_tables_fit_120_columns_and_hide_nothing(url: str, arguments: tuple[str, ...]) -> None:
    output = ask("telemetry", *arguments, "--db", url)
    assert max(len(line) for line in output.splitlines()) <= 120
    assert "…" not in output


def test_steps_are_the_newest_in_time_order(url: str) -> None:
    lines = ask("telemetry", "steps", "--last", "2", "--db", url).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "3", "4"]
    assert "decode_slack" in lines[1]


def test_what_was_cached_and_how_a_request_gave_way_is_shown(url: str) -> None:
    assert "96 (64)" in ask("telemetry", "requests", "--db", url)
    life = ask("telemetry", "request", LONG_ID, "--db", url)
    assert "prompt 96 tokens (64 cached)" in life
    assert "preemption: kv_blocks (swap)" in life
    assert '"method": "swap"' in ask("telemetry", "events", "--db", url)


def test_a_step_that_moved_blocks_or_tried_again_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/telemetry.db"
    schema.migrate(url)
    writer = TelemetryWriter.open(url, make_run(), VirtualClock())
    writer.offer(make_step(1, num_swapped_blocks=12, num_retries=0))
    writer.offer(make_step(2, num_swapped_blocks=0, num_retries=3))
    writer.offer(make_step(3))
    assert writer.close()
    _, moved, retried, plain = ask("telemetry", "steps", "--db", url).splitlines()
    assert moved.split()[-1] == "↔12"
    assert retried.split()[-1] == "↻3"
    assert plain.split()[-2:] == ["11", "%"]


def test_the_database_comes_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DB", url)
    assert "req-1" in ask("telemetry", "requests")


def test_a_requests_life_is_drawn(url: str) -> None:
    output = ask("telemetry", "request", "req-1", "--db", url)
    for part in (
        "class chat",
        "decision: admit (feasible), predicted TTFT 300.0 ms; end: stop",
        "queue for 100.0 ms",
        "chunk 64 (0→64)",
        "chunk 32 (64→96) token 1",
        "preemption: kv_blocks",
        "decode token 2",
        "decode token 3",
        "0..128",
        "░ queue 100.0 ms   ▒ prefill 190.0 ms   █ decode 200.0 ms",
    ):
        assert part in output
    order = [output.index(part) for part in ("chunk 64", "preemption:", "chunk 32", "token 3")]
    assert order == sorted(order)


def test_a_running_request_says_so(url: str) -> None:
    assert "still running" in ask("telemetry", "request", "req-0", "--db", url)


def test_requests_can_be_filtered(url: str) -> None:
    def ids(*options: str) -> list[str]:
        rows = json.loads(ask("telemetry", "requests", "--json", "--db", url, *options))
        return [row["request_id"] for row in rows]

    assert ids("--class", "code") == ids("--missed", "--decision", "admit") == [LONG_ID]
    assert ids("--attained") == ["req-1"]
    assert ids("--finish", "rejected") == ["req-3"]
    assert ids("--until", "2023-11-14T22:13:20.001Z", "--since", "1700000000000") == [
        LONG_ID,
        "req-1",
        "req-3",
    ]


def test_json_is_strict_and_in_seconds(url: str) -> None:
    life = json.loads(ask("telemetry", "request", "req-1", "--json", "--db", url))
    assert life["request"]["ttft_s"] == 0.29
    assert len(life["steps"]) == 4
    summary = json.loads(ask("telemetry", "summary", "--json", "--db", url))
    assert summary["requests"]["num_offered"] == 3


def test_the_summary_shows_what_was_learnt_of_the_machine(url: str) -> None:
    assert json.loads(ask("telemetry", "summary", "--json", "--db", url))["cost_model"] is None
    assert "Cost model" not in ask("telemetry", "summary", "--db", url)
    model = flat_prior(RefittedLeastSquares)
    for step in islice(synthetic_steps(TWO_CORES), 200):
        model.observe(step.features, step.measured_s)
    key = SnapshotKey("model", "cpu", "float32", "reference", 16, "0.1.0")

    def store(version: int, document: object) -> None:
        writer = TelemetryWriter.open(url, make_run("run-b"), VirtualClock())
        writer.offer(make_snapshot(version, run_id="run-b", key=asdict(key), document=document))
        assert writer.close()

    store(20, dump_model(model, key))
    costs = json.loads(ask("telemetry", "summary", "--json", "--db", url))["cost_model"]
    assert costs["prefill_token_s"] == model.marginals().prefill_token_s
    table = ask("telemetry", "summary", "--db", url)
    assert "Cost model, stored after 200 steps" in table
    assert f"{costs['mixing_ratio']:.2f} (mixing wins)" in table
    store(30, {"format": 1})
    assert "format: must be 2, got 1" in ask("telemetry", "summary", "--db", url)


@pytest.mark.parametrize(
    ("ratio", "words"), [(1.2, "1.20 (two steps would be quicker)"), (None, "throughput is flat")]
)
def test_mixing_that_loses_or_was_never_seen(ratio: float | None, words: str) -> None:
    costs = {
        **asdict(flat_prior().marginals()), "num_observed": 5, "problem": None,
        "mixing_ratio": ratio,
    }  # fmt: skip
    console = Console(width=100, file=io.StringIO())
    console.print(cost_model_table(costs))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert words in text
    assert ("mixed steps" in text) is (ratio is not None)


def test_csv_quotes_what_looks_like_a_formula(url: str) -> None:
    output = ask("telemetry", "requests", "--csv", "--decision", "reject", "--db", url)
    (row,) = csv.DictReader(io.StringIO(output))
    assert row["reason"] == "'=overloaded"
    assert row["attained"] == "false"
    assert row["ttft_s"] == ""


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("request", "nope"), 1, "no request 'nope'"),
        (("events", "--kind", "drift_alarm"), 1, "no events found"),
        (("steps", "--since", "yesterday"), 2, "--since: expected epoch milliseconds"),
        (("summary", "--run", "nope"), 1, "no requests and no steps"),
    ],
)
def test_nothing_found_is_one_line(
    url: str, arguments: tuple[str, ...], code: int, part: str
) -> None:
    assert part in complaint("telemetry", *arguments, "--db", url, code=code)


@pytest.mark.parametrize("command", ["steps", "requests", "summary", "events"])
def test_unusable_databases_are_one_line(tmp_path: Path, command: str) -> None:
    missing = f"sqlite:///{tmp_path}/none.db"
    assert "paceline db upgrade" in complaint("telemetry", command, "--db", missing, code=2)
    (tmp_path / "empty.db").touch()
    empty = f"sqlite:///{tmp_path}/empty.db"
    assert "run `paceline db upgrade" in complaint("telemetry", command, "--db", empty, code=2)
    malformed = "postgresql://me:topsecret@host"
    assert "topsecret" not in complaint("telemetry", command, "--db", malformed, code=2)


def test_db_upgrade_current_and_check(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    complaint("db", "current", "--db", url, code=2)
    head = schema.head_revision()
    assert f"at revision {head}" in ask("db", "upgrade", "--db", url)
    assert "up to date" in ask("db", "current", "--db", url)
    assert "up to date" in ask("db", "check", "--db", url)
    schema.downgrade(url, "base")
    assert f"at revision none (this version needs {head})" in ask("db", "current", "--db", url)
    result = runner.invoke(app, ["db", "check", "--db", url])
    assert result.exit_code == 1
    assert "run `paceline db upgrade" in result.stderr


def test_importing_the_commands_does_not_import_torch() -> None:
    code = (
        "import sys, controller.cli.telemetry, controller.cli.db;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
