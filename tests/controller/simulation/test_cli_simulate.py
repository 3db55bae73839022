"""`paceline simulate`: what it prints and writes, and what it refuses with which words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from controller.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
STEADY = ["--generate", "poisson:rate=6,duration=4,prompt=200,output=8", "--workers", "1"]


def paceline(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_one_run_prints_its_tables() -> None:
    code, text = paceline(*STEADY, "--policy", "slo")
    assert code == 0
    assert "duration=4" in text
    assert "on a100-8b, 1 seed, learned costs" in text
    assert " 100% " in text
    assert "Goodput" in text


def test_a_sweep_writes_what_it_prints_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    out = tmp_path / "out" / "deep"
    arguments = [
        *STEADY, "--policy", "slo", "--policy", "fcfs-512", "--load", "0.5,1", "--seeds", "2",
        "--slo-class", "chat:ttft_ms=1000,tpot_ms=50", "--slo-class", "batch:on_infeasible=queue",
        "--mix", "chat=3,batch=1", "--out", str(out),
    ]  # fmt: skip
    code, text = paceline(*arguments)
    assert code == 0, text
    assert "Attainment by class" in text
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [policy["policy"] for policy in report["policies"]] == ["slo", "fcfs-512"]
    assert report["policies"][0]["points"][0]["num_seeds"] == 2
    assert set(report["policies"][0]["points"][0]["classes"]) == {"batch", "chat"}
    assert report["about"]["classes"][0]["slo"]["ttft_s"] == 1.0
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    results = (out / "results.jsonl").read_text(encoding="utf-8")
    assert len(results.splitlines()) == 8
    code, again = paceline(*arguments)
    assert code == 0
    # The first time there is progress to tell of.
    assert text.endswith(again)
    assert (out / "results.jsonl").read_text(encoding="utf-8") == results


def test_the_best_static_budget_is_searched_and_named(tmp_path: Path) -> None:
    code, text = paceline(*STEADY, "--best-static", "edf", "--out", str(tmp_path))
    assert code == 0, text
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    (search,) = report["about"]["best_static"]
    assert search["family"] == "edf"
    assert f"best static budget of edf at 90%: {search['policy']}" in text
    assert len(search["scores"]) >= 6
    assert report["shown"] == ["slo", search["policy"]]
    assert len(report["policies"]) == 1 + len(search["scores"])


def test_a_trace_at_given_rates_on_hardware_from_a_file(tmp_path: Path) -> None:
    from controller.simulation.hardware import CPU_DEMO

    trace, hardware = tmp_path / "trace.csv", tmp_path / "machine.json"
    rows = "".join(f"{i},50,4\n" for i in range(1, 21))
    trace.write_text(f"at_s,num_prompt_tokens,num_output_tokens\n{rows}", encoding="utf-8")
    hardware.write_text(json.dumps(CPU_DEMO.to_json()), encoding="utf-8")
    code, text = paceline(
        "--trace", str(trace), "--hardware", str(hardware), "--rate", "0.5,2", "--workers", "1",
        "--policy", "whole", "--slo-class", "default:ttft_ms=5000", "--noise", "0",
        "--slowdown", "5:10:1.5",
        "--max-num-seqs", "4", "--no-enable-prefix-caching", "--learner", "oracle",
        "--client-max-tokens", "0", "--planner", "pace=0.9", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert code == 0, text
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    points = report["policies"][0]["points"]
    assert [round(point["rate"], 6) for point in points] == [0.5, 2.0]
    about = report["about"]
    assert about["hardware"]["name"] == "cpu-demo"
    assert about["hardware"]["noise"] == 0
    assert about["hardware"]["slowdowns"] == [{"start_s": 5.0, "end_s": 10.0, "factor": 1.5}]
    assert about["engine"]["max_num_seqs"] == 4
    assert about["engine"]["is_prefix_cache_enabled"] is False
    assert about["planner"]["pace"] == 0.9
    assert (about["learner"], about["client_max_tokens"]) == ("oracle", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a trace or a generator"),
        (["--trace", "no-such.csv"], "no-such.csv"),
        (["--generate", "poisson:rate=x,duration=1"], "rate must be a number, got 'x'"),
        ([*STEADY, "--hardware", "abacus"], "no hardware 'abacus': choose from a100-8b"),
        ([*STEADY, "--policy", "magic"], "got 'magic'"),
        ([*STEADY, "--best-static", "slo"], "--best-static must be one of fcfs, edf, edf-shed"),
        ([*STEADY, "--level", "1.5"], "--level must be in (0, 1]"),
        ([*STEADY, "--slo-class", "chat:ttft_ms=soon"], "ttft_ms of SLO class 'chat'"),
        ([*STEADY, "--mix-by-length"], "mix must say which classes"),
        ([*STEADY, "--out", "/dev/null/x"], "/dev/null/x: Not a directory"),
        ([*STEADY, "--mix", "chat=1"], "names class 'chat', which has no targets; known: default"),
        ([*STEADY, "--default-slo-class", "gold"], "no class 'gold'"),
        ([*STEADY, "--planner", "speed=1"], "--planner 'speed=1': expected one of bank"),
        ([*STEADY, "--planner", "pace=2"], "pace must be in (0, 1]"),
        ([*STEADY, "--learner", "psychic"], "learner must be one of learned, refitted, prior"),
        ([*STEADY, "--load", "fast"], "--load must be numbers"),
        ([*STEADY, "--load", "0"], "--load must be positive"),
        ([*STEADY, "--load", "1", "--rate", "2"], "give --load or --rate"),
        ([*STEADY, "--slowdown", "5:10"], "--slowdown must be START:END:FACTOR, got '5:10'"),
        ([*STEADY, "--slowdown", "5:1:2"], "end_s of a slowdown must be after start_s"),
        ([*STEADY, "--seeds", "many"], "--seeds must be a number"),
        ([*STEADY, "--seeds", "0"], "--seeds must be at least 1"),
        ([*STEADY, "--seeds", "0,7,0"], "--seeds names 0 twice, got '0,7,0'"),
        ([*STEADY, "--max-num-seqs", "9999"], "max_num_seqs (9999) must not exceed"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: list[str], message: str) -> None:
    code, text = paceline(*arguments)
    assert code == 2
    assert message in text
    assert text.startswith("paceline: error: ")
    assert len(text.strip().splitlines()) == 1


def test_a_broken_trace_is_named_with_line_and_column(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,num_prompt_tokens,num_output_tokens\n0,5,5\n1,-3,5\n", encoding="utf-8")
    code, text = paceline("--trace", str(trace))
    assert code == 2
    assert "trace.csv" in text
    assert "line 3" in text
    assert "num_prompt_tokens" in text


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("hello\n", encoding="utf-8")
    code, text = paceline(*STEADY, "--out", str(tmp_path))
    assert code == 2
    assert "results.jsonl: line 1 is no result" in text


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from controller.cli.main import main\n"
        "sys.argv = ['paceline', 'simulate', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('HEAVY', [m for m in ('torch', 'transformers', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stderr
