"""Workloads of a few words: what loads and seeds change, and which word was wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from controller.simulation.source import SourceError, WorkloadSource, parse_mix
from controller.workload.arrivals import Arrival, Workload
from controller.workload.specs import SpecError
from controller.workload.traces import TraceError, write_trace

STEADY = "poisson:rate=4,duration=50"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    arrivals = tuple(Arrival(float(i), 100 + i, 10) for i in range(60))
    write_trace(Workload("w", arrivals), path)
    return str(path)


def test_a_mix_is_read_with_each_name_once() -> None:
    assert parse_mix("chat=0.5,code=0.3") == (("chat", 0.5), ("code", 0.3))
    with pytest.raises(SourceError, match=r"'chat=1'.*each name once"):
        parse_mix("chat=1,chat=1")
    with pytest.raises(SourceError, match="expected NAME=SHARE"):
        parse_mix("=1")
    with pytest.raises(SourceError, match="share of 'chat' must be a number, got 'much'"):
        parse_mix("chat=much")


def test_load_compresses_a_trace_and_adds_requests_to_a_generator(trace: str) -> None:
    recorded = WorkloadSource(trace=trace)
    plain, double = recorded.workload(), recorded.workload(2.0)
    assert double.num_requests == plain.num_requests == 60
    assert double.rate == pytest.approx(2 * plain.rate)
    made = WorkloadSource(generator=STEADY)
    plain, double = made.workload(), made.workload(2.0)
    assert double.num_requests > 1.5 * plain.num_requests
    assert double.duration_s <= 50.0


def test_a_seed_draws_arrivals_of_a_generator_and_classes_of_a_trace(trace: str) -> None:
    made = WorkloadSource(generator=STEADY)
    assert made.workload(1.0, 1) == made.workload(1.0, 1)
    assert made.workload(1.0, 1) != made.workload(1.0, 2)
    mixed = WorkloadSource(trace=trace, mix=(("chat", 1.0), ("code", 1.0)))
    first, second = mixed.workload(1.0, 1), mixed.workload(1.0, 2)
    assert [a.at_s for a in first.arrivals] == [a.at_s for a in second.arrivals]
    assert first.class_counts.keys() == {"chat", "code"}
    assert first != second


def test_classes_may_follow_the_length_of_the_prompt(trace: str) -> None:
    source = WorkloadSource(trace=trace, mix=(("chat", 1.0), ("code", 1.0)), is_by_length=True)
    classes = [a.slo_class for a in source.workload().arrivals]
    assert classes == ["chat"] * 30 + ["code"] * 30


def test_a_span_a_number_and_a_context_cut_a_trace(trace: str) -> None:
    source = WorkloadSource(
        trace=trace, start_s=10.0, duration_s=20.0, max_requests=15, max_model_len=118
    )
    arrivals = source.workload().arrivals
    assert [a.at_s for a in arrivals] == [float(i) for i in range(15)]
    assert max(a.num_prompt_tokens + a.num_output_tokens for a in arrivals) == 118


def test_traffic_that_changes_does_so_at_the_same_pace_under_any_load() -> None:
    source = WorkloadSource(
        generator="square:duration=40;period=10,rate=20,prompt=64,output=8,classes=chat:1"
        ";period=10, rate = 5,prompt=512,output=8,classes=code:1"
    )
    plain, double = source.workload(), source.workload(2.0)
    for workload in (plain, double):
        for arrival in workload.arrivals:
            is_first = int(arrival.at_s // 10) % 2 == 0
            assert arrival.slo_class == ("chat" if is_first else "code")
        assert 30 < workload.duration_s < 40
    assert double.num_requests > 1.7 * plain.num_requests


def test_lengths_may_come_from_a_trace(trace: str) -> None:
    source = WorkloadSource(generator=f"poisson:rate=4,duration=30,lengths={trace}")
    assert source.files == [trace]
    assert {a.num_output_tokens for a in source.workload().arrivals} == {10}
    assert WorkloadSource(generator=STEADY).files == []
    assert WorkloadSource(trace=trace).files == [trace]


@pytest.mark.parametrize("is_trace", [True, False])
def test_a_source_survives_pickling_and_is_json(trace: str, is_trace: bool) -> None:
    source = WorkloadSource(trace=trace) if is_trace else WorkloadSource(generator=STEADY)
    assert pickle.loads(pickle.dumps(source)).workload(1.5, 3) == source.workload(1.5, 3)
    assert json.loads(json.dumps(source.to_json()))["trace"] == source.trace


@pytest.mark.parametrize("words", [{}, {"trace": "x", "generator": STEADY}])
def test_a_source_is_one_thing(words: dict[str, str]) -> None:
    with pytest.raises(SourceError, match=r"give a trace or a generator: (nothing|both) was given"):
        WorkloadSource(**words)  # type: ignore[arg-type]


def test_what_cannot_be_made_is_refused_when_it_is_asked_for(trace: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="load must be a positive number"):
        WorkloadSource(generator=STEADY).workload(0.0)
    with pytest.raises(SourceError, match="holds no request"):
        WorkloadSource(trace=trace, start_s=1000.0).workload()
    with pytest.raises(SpecError, match="rate must be a number, got 'fast'"):
        WorkloadSource(generator="poisson:rate=fast").workload(2.0)
    broken = tmp_path / "broken.csv"
    broken.write_text("at_s,num_prompt_tokens,num_output_tokens\n0,10,0\n", encoding="utf-8")
    with pytest.raises(TraceError, match="line 2"):
        WorkloadSource(trace=str(broken)).workload()
    with pytest.raises(ValueError, match="nowhere"):
        WorkloadSource(trace=str(tmp_path / "nowhere.csv")).workload()
