"""`paceline simulate --replay`: a stored run's arrivals, promises and machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from controller.cli.main import app
from store.records import Record
from tests.controller.simulation.stored_runs import (
    arrived,
    database,
    learnt,
    pool,
    refused,
    write,
)
from tests.store.samples import make_step


def stored(tmp_path: Path, *records: Record) -> str:
    url = database(tmp_path)
    write(url, *records)
    return url


def lives() -> list[Record]:
    """Three chats with two promises, a batch that was refused, and the model that was learnt."""
    return [
        pool(1800),
        arrived(1, 60.0, num_output_tokens=5),
        arrived(2, 61.5, num_output_tokens=9, ttft_target_s=2.0),
        arrived(3, 62.0, num_output_tokens=7, num_prompt_tokens=40),
        refused(4, 63.0, slo_class="batch", ttft_target_s=None, tpot_target_s=None),
        learnt(),
    ]


def simulate(url: str, *arguments: str) -> tuple[int, str]:
    words = ["simulate", "--replay", "last", "--db", url, "--workers", "1", *arguments]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def about(out: Path) -> dict[str, Any]:
    text = (out / "report.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)["about"]
    return found


def test_a_stored_run_is_simulated_under_another_policy(tmp_path: Path) -> None:
    url, out = stored(tmp_path, *lives()), tmp_path / "out"
    code, text = simulate(url, "--policy", "fcfs-256", "--out", str(out))
    assert code == 0, text
    found = about(out)
    assert (found["workload"], found["num_requests"]) == ("run run-a of the demo model", 4)
    assert found["hardware"]["name"] == "demo-cpu (2 threads)"
    assert {each["name"] for each in found["classes"]} == {"chat", "chat#2", "batch"}
    assert found["engine"] == {
        "block_size": 16, "num_blocks": 1800, "max_model_len": 900, "max_num_seqs": 24,
        "max_num_batched_tokens": 4096, "max_waiting_requests": 99, "num_host_blocks": 0,
        "is_prefix_cache_enabled": False,
    }  # fmt: skip
    assert found["client_max_tokens"] == 8
    assert "chat#2" in text
    assert "chat#2" in (out / "report.html").read_text(encoding="utf-8")


def test_options_stand_over_what_the_run_says(tmp_path: Path) -> None:
    url, out = stored(tmp_path, *lives()), tmp_path / "out"
    code, text = simulate(
        url, "--policy", "slo", "--max-num-seqs", "2", "--hardware", "a100-8b", "--out", str(out),
        "--enable-prefix-caching", "--client-max-tokens", "0", "--max-requests", "3",
    )  # fmt: skip
    assert code == 0, text
    assert "on a100-8b" in text
    found = about(out)
    engine = found["engine"]
    assert (engine["max_num_seqs"], engine["is_prefix_cache_enabled"]) == (2, True)
    assert (engine["max_model_len"], engine["num_blocks"]) == (900, 1800)
    assert (found["client_max_tokens"], found["num_requests"]) == (None, 3)


def test_a_stored_run_has_its_own_noise_unless_another_is_asked_for(tmp_path: Path) -> None:
    steps = [make_step(i, num_blocks_total=1800, duration_s=0.1) for i in range(2, 130)]
    url, out = stored(tmp_path, *lives(), *steps), tmp_path / "out"
    code, text = simulate(url, "--policy", "slo", "--out", str(out))
    assert code == 0, text
    assert len(about(out)["hardware"]["recorded"]["factors"]) >= 128
    assert "steps of it had, in stretches" in (out / "report.html").read_text(encoding="utf-8")
    code, text = simulate(
        url, "--policy", "slo", "--out", str(tmp_path / "other"), "--noise", "0.1"
    )
    assert code == 0, text
    machine = about(tmp_path / "other")["hardware"]
    assert "recorded" not in machine
    assert machine["noise"] == 0.1


def test_what_a_run_does_not_tell_must_be_said(tmp_path: Path) -> None:
    url = stored(tmp_path, *lives()[:-1])
    code, text = simulate(url)
    assert code == 2
    assert "run run-a has stored no cost model: name a machine with --hardware" in text
    code, text = simulate(url, "--trace", "x.csv")
    assert code == 2
    assert "--trace or --replay" in text
    code, text = simulate(f"sqlite:///{tmp_path}/nowhere.db")
    assert code == 2
    assert text.startswith("paceline: error: ")
    code, text = simulate(url, "--replay", "other")
    assert (code, text) == (
        2, "paceline: error: no run 'other' is stored; the newest are: run-a\n"
    )  # fmt: skip
