"""Tasks: two parts that share no request, and a fingerprint of everything that matters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from controller.policy.slo import Slo
from controller.simulation.recorded_noise import RecordedNoise
from controller.simulation.run import engine_for
from controller.simulation.source import WorkloadSource
from controller.tuning import task as tuning_task
from controller.tuning.space import DEFAULTS
from controller.tuning.task import TuningTask, cut_in_time, task_of_source
from controller.workload.arrivals import Workload
from controller.workload.traces import write_trace
from costmodel.features import Regime
from tests.controller.tuning.tuning_tasks import BULK, CHAT, QUIET, crowd, task

GENERATED = WorkloadSource(
    generator="poisson:rate=5,duration=10,prompt=9,output=3,classes=chat:1/bulk:1"
)


def of(source: WorkloadSource, **changes: object) -> TuningTask:
    return task_of_source(source, QUIET, engine_for(QUIET), (CHAT, BULK), **changes)  # type: ignore[arg-type]


def test_generated_parts_have_seeds_and_requests_of_their_own() -> None:
    made = of(GENERATED, seed=3, num_seeds=2, num_held_out_seeds=3)
    assert [scene.seed for scene in made.tuning] == [3, 4]
    assert [scene.seed for scene in made.held_out] == [5, 6, 7]
    workloads = [scene.workload.arrivals for scene in (*made.tuning, *made.held_out)]
    assert len(set(workloads)) == 5
    told: list[tuple[str, int, int]] = []
    of(GENERATED, num_seeds=1, num_held_out_seeds=2, progress=lambda *what: told.append(what))
    assert told == [("making the traffic", done, 3) for done in range(3)]
    faster = of(GENERATED, load=2.0)
    assert faster.tuning[0].workload.rate > 1.3 * made.tuning[0].workload.rate
    assert "2 times its rate" in faster.name


def test_a_trace_is_cut_in_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    whole = crowd(100, 0.5)
    write_trace(whole, path)
    made = of(WorkloadSource(trace=str(path)), num_seeds=1, num_held_out_seeds=2)
    first, rest = made.tuning[0].workload, made.held_out[0].workload
    assert first.num_requests + rest.num_requests == 100
    assert first.num_requests == 60
    # A file that has moved is still the same traffic.
    assert made.name == "trace.csv"
    part = of(
        WorkloadSource(trace=str(path), start_s=2.0, duration_s=30.0, max_requests=50), load=1.5
    )
    assert part.name == "trace.csv from 2 s for 30 s (50 requests) at 1.5 times its rate"
    assert made.held_out[1].workload == rest
    assert made.held_out[1].seed != made.held_out[0].seed
    assert rest.arrivals[0].at_s < 0.5


def test_a_part_without_requests_and_a_cut_that_is_none_are_refused() -> None:
    with pytest.raises(ValueError, match="arrives at once"):
        cut_in_time(crowd(3, 0.0), 0.4)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="held_out_share"):
            cut_in_time(crowd(3), share)
    with pytest.raises(ValueError, match="held-out part has no request"):
        task(held_out=(Workload("none", ()),))
    with pytest.raises(ValueError, match="held_out needs at least one seed"):
        of(GENERATED, num_held_out_seeds=0)


def _record(factor: float) -> RecordedNoise:
    noise = RecordedNoise.of([(Regime.DECODE_ONLY, factor, 1.0)] * 200)
    assert noise is not None
    return noise


def test_fingerprints_name_the_part_that_differs() -> None:
    made = task(crowd(5))
    assert made.fingerprint() == task(crowd(5)).fingerprint()

    def differs(other: TuningTask) -> list[str]:
        theirs = other.fingerprint()
        return [name for name, value in made.fingerprint().items() if theirs[name] != value]

    assert differs(task(crowd(6))) == ["tuning part", "held-out part"]
    assert differs(replace(made, hardware=replace(QUIET, noise=0.5))) == ["hardware noise"]
    # Thousands of numbers are told in a line.
    noisy = [replace(QUIET, recorded=_record(factor)) for factor in (1.1, 1.2)]
    made, theirs = (replace(made, hardware=each) for each in noisy)
    assert differs(theirs) == ["hardware recorded"]
    assert re.fullmatch(r'"200 steps \(\w{16}\)"', made.fingerprint()["hardware recorded"])
    made = task(crowd(5))
    assert differs(replace(made, classes=(CHAT, replace(BULK, weight=3.0)))) == [
        "class bulk weight"
    ]
    assert differs(replace(made, classes=(CHAT, replace(BULK, slo=Slo(9.0))))) == [
        "class bulk slo ttft_s"
    ]
    assert differs(replace(made, classes=(BULK, CHAT))) == ["classes"]
    assert differs(replace(made, max_tokens=64)) == ["max_tokens"]
    assert differs(replace(made, engine=engine_for(QUIET, num_blocks=99))) == [
        "engine num_blocks",
        "engine max_model_len",
    ]
    # The seats are a knob.
    assert differs(replace(made, engine=engine_for(QUIET, max_num_seqs=7))) == []


def test_shipped_seats_stay_within_the_tokens_of_a_step_and_others_do_not() -> None:
    made = replace(task(crowd(5)), engine=engine_for(QUIET, max_num_batched_tokens=96))
    assert made.engine.max_num_seqs == 96
    assert made.config(DEFAULTS, 0).engine == made.engine
    assert made.num_seats(replace(DEFAULTS, max_num_seqs=90)) == 90
    with pytest.raises(ValueError, match=r"max_num_seqs \(200\) must not exceed"):
        made.config(replace(DEFAULTS, max_num_seqs=200), 0)
    assert task(crowd(5)).num_seats(DEFAULTS) == DEFAULTS.max_num_seqs


def test_a_version_that_ships_other_settings_cannot_go_on_with_a_study(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = task(crowd(5))
    before = made.fingerprint()
    other = replace(DEFAULTS, planner=replace(DEFAULTS.planner, pace=0.71))
    monkeypatch.setattr(tuning_task, "DEFAULTS", other)
    after = made.fingerprint()
    assert [name for name in after if after[name] != before[name]] == ["shipped pace"]
    assert after["shipped pace"] == "0.71"
