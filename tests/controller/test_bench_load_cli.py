"""What `paceline bench load` prints, writes and exits with, given what was measured."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from controller.bench.load_contestants import StartedServers
from controller.bench.load_history import ReplayError, ServerHistory
from controller.bench.load_measures import Fate, Outcome, numbers_of
from controller.bench.load_rounds import Calibration, LoadResult, LoadSession
from controller.bench.load_run import LoadError
from controller.bench.validity import Violation, ViolationKind
from controller.cli import bench_load
from controller.cli.bench import app

OUTCOME = Outcome(
    0, "chat", 0.0, 50, 20, 20, Fate.SERVED, "", None, False, 0.001, 0.4, 0.2, 0.3, True
)  # fmt: skip
BROKEN = Violation(ViolationKind.FAILED_REQUEST, "load-3 failed")
CALIBRATION = Calibration(0.1, 2.0)


def measured(plan: Any, *found: Violation) -> LoadSession:
    """Return what a measurement of `plan` would be: a knee of 2/s, one request per run."""
    terms = plan.terms(CALIBRATION)
    results = [
        LoadResult(
            round_no, key, key, rate, 0.1, 0, 1, (OUTCOME,),
            None if found else numbers_of([OUTCOME], terms.duration_s), found,
        )
        for round_no in range(terms.num_rounds)
        for key in plan.keys
        for rate in terms.rates
    ]  # fmt: skip
    return LoadSession(terms, CALIBRATION, tuple(results), is_complete=True)


def invoke(
    monkeypatch: pytest.MonkeyPatch, words: list[str], *found: Violation
) -> tuple[int, str, list[Any]]:
    """Run the command with the measurement replaced; return exit code, output and the plans."""
    plans: list[Any] = []

    async def measure(servers: Any, plan: Any, clock: Any, on_turn: Any) -> LoadSession:
        await asyncio.sleep(0)
        plans.append(plan)
        for round_no in range(plan.num_rounds):
            for key in plan.keys:
                servers.database(round_no, key).touch()
        session = measured(plan, *found)
        on_turn(session)
        return session

    monkeypatch.setattr(bench_load, "_measure", measure)
    result = CliRunner().invoke(app, ["load", *words], env={"COLUMNS": "200"})
    return result.exit_code, result.output, plans


def test_loads_are_multiples_of_the_knee(monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, (plan,) = invoke(monkeypatch, ["--load", "0.5,1.5", "--policy", "slo"])
    assert code == 0
    assert plan.terms(CALIBRATION).rates == (1.0, 3.0)
    assert plan.terms(CALIBRATION).num_rounds == 2
    assert "Mixed load on demo: normal step 100 ms, knee 2.00/s" in output
    assert "slo: goodput at 90% at least 3.00/s" in output


def test_rates_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rates", "0.5,1.5", "--rounds", "1", "--seed", "7", "--arrivals", "gamma:3"]
    code, _, (plan,) = invoke(monkeypatch, words)
    assert code == 0
    terms = plan.terms(Calibration(0.1))
    assert (terms.rates, terms.num_rounds, terms.seed) == ((0.5, 1.5), 1, 7)
    assert (terms.traffic.kind, terms.traffic.shape) == ("gamma", 3.0)
    assert plan.keys == ["slo", "static-64", "static-128", "static-256"]


def test_everything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    code, _, _ = invoke(monkeypatch, ["--rates", "1", "--policy", "slo", "--out", str(out)])
    assert code == 0
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["policies"] == ["slo"]
    assert document["load"] is None
    assert document["is_complete"] is True
    assert document["results"][0]["outcomes"][0]["slo_class"] == "chat"


def test_an_invalid_measurement_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--load", "1", "--policy", "slo", "--rounds", "1"]
    code, output, _ = invoke(monkeypatch, words, BROKEN)
    assert code == 1
    assert "INVALID slo at 2.00/s, round 1: load-3 failed" in output


def test_what_cannot_be_simulated_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: object, result: LoadResult) -> ServerHistory:
        raise ReplayError("the telemetry is gone")

    monkeypatch.setattr(StartedServers, "history_of", lost)
    words = ["--load", "1", "--policy", "slo", "--rounds", "1", "--simulate"]
    code, output, _ = invoke(monkeypatch, words)
    assert code == 0
    assert "Simulated against real, the same arrivals" in output
    assert "not simulated: slo at 2.00/s, round 1: the telemetry is gone" in output


def test_databases_are_kept_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[Path] = []

    def read(self: StartedServers, result: LoadResult) -> ServerHistory:
        folders.append(self.folder)
        assert self.database(result.round_no, result.key).exists()
        raise ReplayError("enough")

    monkeypatch.setattr(StartedServers, "history_of", read)
    words = ["--rates", "1", "--policy", "slo", "--policy", "whole", "--rounds", "2", "--simulate"]
    kept = tmp_path / "some" / "runs"
    code, output, _ = invoke(monkeypatch, [*words, "--keep", str(kept)])
    assert code == 0
    assert {path.name for path in kept.iterdir()} == {
        "round-0-slo.db", "round-0-whole.db", "round-1-slo.db", "round-1-whole.db",
    }  # fmt: skip
    assert f"4 databases are kept in {kept}" in output
    # Not over those of another measurement.
    code, output, plans = invoke(monkeypatch, [*words, "--keep", str(kept)])
    assert (code, plans) == (2, [])
    # Without it nothing stays.
    code, output, _ = invoke(monkeypatch, words)
    assert code == 0
    assert "kept in" not in output
    assert not folders[-1].exists()


def test_a_load_that_cannot_be_made_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(*_: Any) -> LoadSession:
        raise LoadError("nobody arrives")

    monkeypatch.setattr(bench_load, "_measure", measure)
    result = CliRunner().invoke(app, ["load", "--rates", "1"])
    assert result.exit_code == 1
    assert "INVALID: nothing could be measured: nobody arrives" in result.output
