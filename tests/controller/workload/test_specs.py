"""Generators in one line of text: the same workloads as the functions make, and named mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.workload.arrivals import Workload
from controller.workload.generators import Phase, gamma, poisson, square_wave
from controller.workload.lengths import FixedLengths, LognormalLengths, TraceLengths
from controller.workload.specs import SpecError, generate
from controller.workload.traces import TraceError, read_trace, write_trace
from controller.workload.transforms import assign_classes, assign_classes_by_length

AZURE_LIKE = LognormalLengths(1020, 4142, 129, 601)


def same(workload: Workload, other: Workload) -> bool:
    return workload.num_requests > 0 and workload.arrivals == other.arrivals


def test_defaults() -> None:
    workload = generate("poisson:rate=2", seed=1)
    assert workload.name == "poisson:rate=2"
    assert same(workload, poisson(2.0, 600.0, AZURE_LIKE, seed=1))


def test_every_key_of_a_steady_generator() -> None:
    line = " gamma : rate=5 , burstiness=4,duration=60,prompt=100/900,output=7,classes=a:1/b:3"
    lengths = LognormalLengths(100, 900, 7, 7)
    expected = assign_classes(
        gamma(5.0, 60.0, lengths, 2, burstiness=4.0), {"a": 1.0, "b": 3.0}, seed=2
    )
    workload = generate(line, seed=2)
    assert same(workload, expected)
    assert {a.num_output_tokens for a in workload.arrivals} == {7}


def test_correlated_classes() -> None:
    workload = generate("poisson:rate=5,classes=a:60/b:40,correlation=0.5", seed=3)
    base = poisson(5.0, 600.0, AZURE_LIKE, seed=3)
    expected = assign_classes_by_length(base, {"a": 60, "b": 40}, seed=3, correlation=0.5)
    assert same(workload, expected)


def test_one_number_is_a_fixed_length() -> None:
    workload = generate("poisson:rate=5,duration=20,prompt=512,output=1", seed=4)
    assert same(workload, poisson(5.0, 20.0, FixedLengths(512, 1), seed=4))


def test_phases() -> None:
    line = "square:duration=200;period=40,rate=3,classes=chat:1;period=10,rate=9,prompt=5,output=6"
    phases = [Phase(40.0, 3.0, AZURE_LIKE, {"chat": 1.0}), Phase(10.0, 9.0, FixedLengths(5, 6))]
    assert same(generate(line, seed=5), square_wave(phases, 200.0, seed=5))
    assert same(
        generate("square:;period=600,rate=1", seed=5),
        square_wave([Phase(600.0, 1.0, AZURE_LIKE)], 600.0, seed=5),
    )


def test_lengths_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    write_trace(poisson(1.0, 30.0, AZURE_LIKE, seed=6), path)
    lengths = TraceLengths(read_trace(path))
    assert same(
        generate(f"poisson:rate=9,duration=60,lengths={path}", seed=6),
        poisson(9.0, 60.0, lengths, seed=6),
    )
    with pytest.raises(TraceError, match="nowhere"):
        generate("poisson:rate=9,lengths=nowhere.csv", seed=6)
    with pytest.raises(TraceError, match="nowhere"):
        generate("square:;period=1,rate=9,lengths=nowhere.csv", seed=6)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "must begin with one of poisson, gamma, square"),
        ("uniform:rate=1", "must begin with one of poisson, gamma, square"),
        ("poisson", "rate is missing"),
        ("poisson:", "rate is missing"),
        ("poisson:rate", "must be key=value with commas between, got 'rate'"),
        ("poisson:rate=", "must be key=value"),
        ("poisson:rate=1,", "must be key=value"),
        ("poisson:rate=x", "rate must be a number, got 'x'"),
        ("poisson:rate=nan", "rate must be a positive number"),
        ("poisson:rate=1,rate=2", "rate is given twice"),
        ("poisson:rate=1,rats=2", "rats is unknown here; known are classes, correlation"),
        ("poisson:rate=1,burstiness=2", "burstiness is unknown here"),
        ("poisson:rate=1,duration=-1", "duration must be a positive number"),
        ("poisson:rate=1,prompt=0", "prompt_p50"),
        ("poisson:rate=1,prompt=9/3", "prompt_p99 must not be below"),
        ("poisson:rate=1,output=9/", "output must be a number, got ''"),
        ("poisson:rate=1,prompt=9000000", "prompt_p50 must not exceed"),
        ("poisson:rate=1,prompt=9,lengths=a.csv", "excludes prompt and output"),
        ("poisson:rate=1,classes=chat", "classes must be name:share"),
        ("poisson:rate=1,classes=:1", "classes must be name:share"),
        ("poisson:rate=1,classes=chat:x", "share of chat in classes must be a number"),
        ("poisson:rate=1,classes=chat:1/chat:2", "classes names chat twice"),
        ("poisson:rate=1,classes=chat:0", "share above 0"),
        ("poisson:rate=1,correlation=1", "correlation needs classes"),
        ("poisson:rate=1,classes=a:1,correlation=2", "correlation must be in"),
        ("poisson:rate=1;period=2,rate=1", "poisson has no phases"),
        ("gamma:rate=1", "burstiness is missing"),
        ("gamma:rate=1,burstiness=-1", "burstiness"),
        ("square:duration=60", "square needs phases"),
        ("square:duration=60;", "phase 1: period is missing"),
        ("square:;period=1,rate=1;period=0,rate=1", "phase 2: period must be a positive"),
        ("square:;period=1,rate=1,duration=5", "phase 1: duration is unknown here"),
    ],
)
def test_a_wrong_line_is_quoted_and_its_key_named(line: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        generate(line, seed=0)
    assert repr(line) in str(caught.value)
    assert problem in str(caught.value)


def test_a_wrong_seed_is_named() -> None:
    with pytest.raises(ValueError, match="seed"):
        generate("poisson:rate=1", seed=-1)


def test_the_lines_of_the_page_are_understood(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "simulation.md"
    block = page.read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    trace = tmp_path / "trace.csv"
    write_trace(poisson(1.0, 30.0, AZURE_LIKE, seed=0), trace)
    lines = block.replace("AzureLLMInferenceTrace_code.csv", str(trace)).split()
    assert len(lines) == 4
    assert all(generate(line, seed=0).num_requests > 1000 for line in lines)
