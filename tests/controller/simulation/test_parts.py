"""One simulation in parts: everybody is counted once, whoever does it."""

from __future__ import annotations

import math

import pytest

from controller.simulation.hardware import A100_8B, HardwareProfile
from controller.simulation.parts import RUN_IN_S, simulate_in_parts, stretches
from controller.simulation.run import SimulationConfig, simulate
from controller.workload.arrivals import Arrival, Workload
from tests.controller.simulation.test_run import CONFIG, crowd


def long_crowd(num: int = 400, every_s: float = 1.0) -> Workload:
    return crowd(num, every_s)


def test_every_arrival_counts_in_one_part_and_time_is_cut_where_they_meet() -> None:
    cut = stretches(long_crowd(), 3)
    assert [(each.first, each.last) for each in cut] == [(0, 133), (133, 266), (266, 400)]
    assert [(each.from_s, each.until_s) for each in cut] == [
        (-math.inf, 133.0),
        (133.0, 266.0),
        (266.0, math.inf),
    ]
    # Each begins with the arrivals that bring its machine into its state.
    assert [each.begin for each in cut] == [0, 133 - int(RUN_IN_S), 266 - int(RUN_IN_S)]


def test_no_part_is_empty() -> None:
    assert len(stretches(crowd(2), 5)) == 2
    assert len(stretches(Workload("nobody", ()), 5)) == 1
    nobody = simulate_in_parts(Workload("nobody", ()), "slo", A100_8B, CONFIG, 5)
    assert nobody.requests == ()


def test_one_part_is_the_simulation_itself() -> None:
    whole = simulate(crowd(), "slo", A100_8B, CONFIG)
    assert simulate_in_parts(crowd(), "slo", A100_8B, CONFIG, 1).event_hash == whole.event_hash


def test_the_parts_are_the_whole_where_nothing_but_the_noise_tells_them_apart() -> None:
    """Without noise, with the machine's own formula, and quiet between arrivals."""
    calm = HardwareProfile("calm", A100_8B.planes, noise=0.0)
    config = SimulationConfig(classes=CONFIG.classes, learner="oracle")
    workload = long_crowd(every_s=2.0)
    whole = simulate(workload, "fcfs-512", calm, config)
    parts = simulate_in_parts(workload, "fcfs-512", calm, config, 3)
    assert [each.index for each in parts.requests] == list(range(400))
    for mine, theirs in zip(parts.requests, whole.requests, strict=True):
        assert mine.arrived_at == theirs.arrived_at
        assert mine.ttft_s == pytest.approx(theirs.ttft_s, abs=1e-9)
        assert mine.ended_at == pytest.approx(theirs.ended_at, abs=1e-9)
    assert parts.steps.num_steps == whole.steps.num_steps
    assert parts.steps.num_prefill_tokens == whole.steps.num_prefill_tokens
    assert parts.steps.num_decode_tokens == whole.steps.num_decode_tokens
    assert parts.steps.busy_s == pytest.approx(whole.steps.busy_s)
    assert parts.steps.bindings == whole.steps.bindings
    assert parts.steps.bound_s == pytest.approx(whole.steps.bound_s)
    assert parts.offered_rate == whole.offered_rate
    assert parts.event_hash != whole.event_hash


def test_each_part_has_noise_of_its_own() -> None:
    # Everybody alone, and all alike: what the second part takes differs by the noise only.
    loud = HardwareProfile("loud", A100_8B.planes, noise=0.3)
    config = SimulationConfig(classes=CONFIG.classes, learner="oracle")
    same = Workload("same", tuple(Arrival(30.0 * i, 64, 4, "chat") for i in range(40)))
    cut = stretches(same, 2)
    parts = simulate_in_parts(same, "fcfs-512", loud, config, 2)
    ttfts = [each.ttft_s or math.nan for each in parts.requests]
    first, second = ttfts[: cut[0].last], ttfts[cut[1].first :]
    lead = cut[1].first - cut[1].begin
    # With the same draws the second part would be the first one again, from its own beginning on.
    alike = zip(first[lead:], second, strict=False)
    assert max(abs(mine / theirs - 1.0) for mine, theirs in alike) > 0.1


def test_who_does_the_parts_does_not_matter() -> None:
    workload = long_crowd(300)
    calls: list[tuple[int, int]] = []
    alone = simulate_in_parts(
        workload, "slo", A100_8B, CONFIG, 2, lambda done, total: calls.append((done, total))
    )
    assert calls == [(150, 300), (300, 300)]
    calls.clear()
    at_once = simulate_in_parts(
        workload, "slo", A100_8B, CONFIG, 2,
        lambda done, total: calls.append((done, total)), workers=2,
    )  # fmt: skip
    assert at_once.event_hash == alone.event_hash
    assert at_once.requests == alone.requests
    assert calls[-1] == (300, 300)
    assert calls == sorted(calls)
    # What a part does before its own arrivals is not told.
    assert len({each.index for each in alone.requests}) == 300
    assert alone.steps.planner_us_mean > 0.0


def test_what_waits_at_the_end_of_a_part_is_served_beside_what_comes_next() -> None:
    """A queue that one part leaves behind is there for its own requests, and for the next one's."""
    burst = [Arrival(100.0 + i * 0.001, 4000, 20, "batch") for i in range(200)]
    workload = Workload("burst", tuple(burst))
    whole = simulate(workload, "fcfs-512", A100_8B, CONFIG)
    parts = simulate_in_parts(workload, "fcfs-512", A100_8B, CONFIG, 2)
    for one in (whole, parts):
        last = one.requests[-1]
        assert last.ttft_s is not None
        assert last.ttft_s > 60.0
    for mine, theirs in zip(parts.requests, whole.requests, strict=True):
        assert mine.ttft_s == pytest.approx(theirs.ttft_s, rel=0.05)


def test_what_goes_wrong_in_a_part_is_told() -> None:
    unknown = Workload("w", tuple(Arrival(float(i), 10, 2, "gold") for i in range(20)))
    for workers in (1, 2):
        with pytest.raises(ValueError, match="class 'gold'"):
            simulate_in_parts(unknown, "slo", A100_8B, CONFIG, 2, workers=workers)
