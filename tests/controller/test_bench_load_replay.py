"""From a server's own telemetry to the simulator, and how far they agree: all on virtual time."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from controller.bench import load_replay
from controller.bench.client import StreamClient
from controller.bench.load_history import (
    MIN_STEPS,
    RecordedStep,
    ReplayError,
    ServerHistory,
    fit_machine,
    machine_over_time,
    read_history,
)
from controller.bench.load_replay import Agreement, Replayed, StepTimes, replay
from controller.bench.load_report import render_agreement, render_replay_notes
from controller.bench.load_rounds import (
    Calibration,
    LoadContestant,
    LoadResult,
    LoadSession,
    LoadTerms,
    measure_loads,
)
from controller.bench.load_traffic import LoadTraffic
from controller.config import Settings
from controller.simulation.measures import Percentiles
from controller.simulation.run import SimulationError
from costmodel.features import Regime, StepFeatures
from tests.controller.bench_load_double import (
    DECODE_S,
    NUM_BLOCKS,
    PREFILL_TOKEN_S,
    STEP_S,
    OpenServer,
    Timeline,
    open_client,
    telemetry,
)

SETTINGS = {
    "slo": Settings(policy="slo"),
    "static-128": Settings(policy="static", max_num_batched_tokens=128),
    "edf-shed-128": Settings(policy="edf-shed-128"),
}
POLICIES = {"slo": "slo", "static-128": "fcfs-128", "edf-shed-128": "edf-shed-128"}
TERMS = LoadTerms(LoadTraffic(), (0.8, 1.4), num_rounds=1, duration_s=40.0, drain_s=40.0, seed=3)


def measured(folder: Path) -> LoadSession:
    """Measure both policies on servers that write their telemetry."""
    timeline = Timeline()

    def contestant(key: str) -> LoadContestant:
        @contextlib.asynccontextmanager
        async def opened(round_no: int) -> AsyncIterator[StreamClient]:
            path = folder / f"{round_no}-{key}.db"
            with telemetry(path, SETTINGS[key], timeline.clock) as offer:
                server = OpenServer(timeline, POLICIES[key], offer=offer)
                async with open_client(timeline, server) as client:
                    yield client

        return LoadContestant(key, key, opened)

    return timeline.run(
        measure_loads(
            [contestant(key) for key in SETTINGS],
            TERMS,
            Calibration(STEP_S + 4 * DECODE_S),
            timeline.clock,
            sleep=timeline.sleep,
        )
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def session(folder: Path) -> LoadSession:
    session = measured(folder)
    assert all(result.violations == () for result in session.results)
    return session


@pytest.fixture(scope="module")
def replayed(session: LoadSession, folder: Path) -> Replayed:
    return replay(session, lambda result: history(folder, result))


def history(folder: Path, result: LoadResult) -> ServerHistory:
    return read_history(f"sqlite:///{folder / f'{result.round_no}-{result.key}.db'}")


def test_the_history_of_a_server_is_read_back(session: LoadSession, folder: Path) -> None:
    slo, static = history(folder, session.results[0]), history(folder, session.results[2])
    assert (slo.policy, static.policy) == ("slo", "fcfs-128")
    assert slo.num_blocks == NUM_BLOCKS
    assert static.engine.max_num_batched_tokens == 128
    assert slo.engine.max_num_batched_tokens == 8192
    assert slo.engine.max_num_seqs == Settings().max_num_seqs
    assert [step.at_ms for step in slo.steps] == sorted(step.at_ms for step in slo.steps)
    names = {name for _, name, _ in slo.verdicts}
    assert names == {"chat", "long", "batch", "default"}


def test_any_policy_is_replayed_under_its_own_name(session: LoadSession, folder: Path) -> None:
    shedding = history(folder, session.results[4])
    assert shedding.policy == "edf-shed-128"
    # The budget is the planner's alone, there as here.
    assert shedding.engine.max_num_batched_tokens == 8192


def test_the_machine_is_found_in_the_steps(session: LoadSession, folder: Path) -> None:
    machine = fit_machine(history(folder, session.results[0]).steps)
    for features, seconds in (
        (StepFeatures(0, 6, 600), STEP_S + 6 * DECODE_S),
        (StepFeatures(96, 4, 600, 0, 96 * 96, 1), STEP_S + 4 * DECODE_S + 96 * PREFILL_TOKEN_S),
    ):
        assert machine.seconds(features) == pytest.approx(seconds, rel=0.05)
    assert machine.noise < 0.05


def test_simulated_and_real_attainment_agree(replayed: Replayed) -> None:
    assert replayed.problems == ()
    assert {(each.key, each.rate) for each in replayed.agreements} == {
        (key, rate) for key in SETTINGS for rate in TERMS.rates
    }
    assert {each.slo_class for each in replayed.agreements} == {"all", "chat", "long", "batch"}
    # Something is missed at all, or agreement would be easy.
    assert min(each.real for each in replayed.agreements) < 0.9
    assert [
        each for each in replayed.agreements if each.slo_class == "all" and not each.is_close
    ] == []
    for each in replayed.agreements:
        assert each.recorded == pytest.approx(each.real, abs=0.03)
    (one, *_) = replayed.machines.values()
    assert one["source"].startswith("fitted to ")


def test_step_times_of_both_are_kept(replayed: Replayed) -> None:
    mixed = [each for each in replayed.step_times if each.regime is Regime.MIXED]
    assert len(mixed) == len(SETTINGS) * len(TERMS.rates)
    for each in mixed:
        assert each.real_s is not None
        assert each.simulated_s is not None
        assert each.simulated_s.p50 == pytest.approx(each.real_s.p50, rel=0.25)


def test_a_machine_that_stalls_is_drawn_many_times(session: LoadSession, folder: Path) -> None:
    # Eight steps of a hundred times their length: when they come decides what is kept.
    own = history(folder, session.results[0])
    every = len(own.steps) // 8
    steps = tuple(
        replace(step, duration_s=step.duration_s * (100.0 if i % every == every // 2 else 1.0))
        for i, step in enumerate(own.steps)
    )
    one = replace(session, results=session.results[:1])
    found = replay(one, lambda result: replace(own, steps=steps))
    (overall,) = [each for each in found.agreements if each.slo_class == "all"]
    assert overall.simulated_low < overall.simulated < overall.simulated_high
    assert not overall.is_close
    assert overall.simulated < overall.real
    # What simulated steps took is told with what the noise made of them: stalls are not rare
    # enough to be missing, and the others are as short as they were.
    for each in found.step_times:
        if each.regime is not Regime.PREFILL_ONLY:
            assert each.real_s is not None
            assert each.simulated_s is not None
            assert each.simulated_s.p50 == pytest.approx(each.real_s.p50, rel=0.25)
            assert each.simulated_s.num == pytest.approx(each.real_s.num, rel=0.5)
    drawn = [each.simulated_s for each in found.step_times if each.simulated_s is not None]
    assert max(each.max / each.p50 for each in drawn) > 50.0
    # The same again: seeds decide.
    assert replay(one, lambda result: replace(own, steps=steps)) == found


def test_a_server_that_left_nothing_is_a_problem_not_a_crash(
    session: LoadSession, tmp_path: Path
) -> None:
    with pytest.raises(ReplayError, match="cannot be read"):
        read_history(f"sqlite:///{tmp_path / 'none.db'}")
    with telemetry(tmp_path / "idle.db", SETTINGS["slo"], Timeline().clock):
        pass
    with pytest.raises(ReplayError, match="holds no step"):
        read_history(f"sqlite:///{tmp_path / 'idle.db'}")

    def lost(result: LoadResult) -> ServerHistory:
        raise ReplayError("gone")

    nothing = replay(session, lost)
    assert nothing.agreements == ()
    assert len(nothing.problems) == len(session.results)
    assert render_replay_notes(nothing)[0] == "not simulated: slo at 0.80/s, round 1: gone"


def test_what_cannot_be_simulated_is_a_problem_too(
    session: LoadSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: object, **__: object) -> None:
        raise SimulationError("the policy finds no work for 3 requests that wait")

    monkeypatch.setattr(load_replay, "simulate", stuck)
    nothing = replay(session, lambda result: history(folder, result))
    assert nothing.agreements == ()
    assert len(nothing.problems) == len(session.results)
    assert "edf-shed-128 at 1.40/s, round 1: the policy finds no work" in nothing.problems[-1]
    # The machine was found all the same.
    assert list(nothing.machines) == [f"round 1, {key}" for key in SETTINGS]


def test_few_steps_are_too_few() -> None:
    step = RecordedStep(0, StepFeatures(0, 1, 10), 0.1)
    with pytest.raises(ReplayError, match=f"{MIN_STEPS - 1} recorded steps are too few"):
        fit_machine([step] * (MIN_STEPS - 1))


def test_noise_and_scale_are_those_of_the_steps() -> None:
    steps = [
        RecordedStep(i, StepFeatures(0, 1 + i % 8, 100), 0.1 * math.exp(0.2 * (-1) ** i))
        for i in range(400)
    ]
    machine = fit_machine(steps)
    predicted = sum(machine.seconds(step.features) for step in steps)
    assert predicted == pytest.approx(sum(step.duration_s for step in steps))
    assert machine.noise == pytest.approx(0.2, abs=0.03)


def test_a_machine_that_was_slowed_for_a_while_is_slow_then() -> None:
    features = StepFeatures(0, 4, 100)
    steps, at_s = [], 0.0
    while at_s < 16.0:
        seconds = 0.3 if 4.0 <= at_s < 8.0 else 0.1
        steps.append(RecordedStep(5_000 + round(1e3 * at_s), features, seconds))
        at_s += seconds
    machine = fit_machine(steps)
    assert machine.noise > 0.25
    timed = machine_over_time(machine, steps, started_ms=5_000)
    mean_s = machine.seconds(features)
    assert timed.factor_at(1.0) * mean_s == pytest.approx(0.1)
    assert timed.factor_at(5.0) * mean_s == pytest.approx(0.3, rel=0.05)
    assert timed.factor_at(10.9) * mean_s == pytest.approx(0.1)
    assert timed.factor_at(99.0) == 1.0
    assert timed.noise < 0.1


def test_a_window_with_few_steps_keeps_the_speed_of_the_machine() -> None:
    features = StepFeatures(0, 4, 100)
    steps = [RecordedStep(100 * i, features, 0.1) for i in range(200)]
    machine = fit_machine(steps)
    lone = [RecordedStep(1_000, features, 5.0), RecordedStep(-9_000, features, 5.0)]
    assert machine_over_time(machine, lone, started_ms=0).slowdowns == ()
    assert machine_over_time(machine, [], started_ms=0) == machine


AGREES = Agreement("slo", "SLO planner", 1.0, "all", 200, 0.90, 0.91, 0.94, 0.92, 0.94, 0.94)
MISSED = replace(AGREES, slo_class="chat", simulated=0.97, simulated_low=0.9, simulated_high=1.0)
TIMES = StepTimes(
    "slo", 1.0, Regime.MIXED,
    Percentiles(10, 0.2, 0.3, 0.4, 0.5), Percentiles(12, 0.1, 0.1, 0.1, 0.1),
)  # fmt: skip


def test_a_miss_is_shown_with_both_distributions() -> None:
    assert (AGREES.is_close, MISSED.is_close) == (True, False)
    assert pytest.approx(4.0) == AGREES.points
    far = replace(MISSED, slo_class="long", simulated_low=0.96)
    both = Replayed((AGREES, MISSED, far), (TIMES, replace(TIMES, rate=2.0)), {}, ())
    assert both.misses == (MISSED, far)
    assert render_replay_notes(both) == [
        "MISS slo at 1.00/s, mixed steps: real 10 of 200/300/400,"
        " simulated 12 of 100/100/100 (P50/P90/P99 ms)"
    ]
    columns = {each.header: list(each.cells) for each in render_agreement(both).columns}
    assert columns[""] == ["agrees", "MISS by 14 of 200, within the draws", "MISS by 14 of 200"]
    assert columns["simulated, %"] == ["94.0", "97.0 (90–100)", "97.0 (96–100)"]
    agreed = Replayed((AGREES,), (TIMES,), {}, ())
    assert render_replay_notes(agreed) == ["every class agrees within 5 points"]
