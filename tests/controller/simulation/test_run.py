"""`simulate`: the production loop to the end of a workload, with everything accounted for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from controller.config import Settings
from controller.policy.baselines import StaticPlanner
from controller.policy.policies import POLICY_NAMES
from controller.policy.settings import PolicyConfig
from controller.policy.slo import OnInfeasible, Slo, SloClass
from controller.simulation.hardware import A100_8B, CPU_DEMO, HardwareProfile
from controller.simulation.records import SimulationResult
from controller.simulation.run import (
    LEARNERS,
    LearnerKind,
    PlannerParts,
    SimulationConfig,
    SimulationError,
    engine_for,
    simulate,
)
from controller.workload.arrivals import Arrival, Workload
from engine.config import EngineConfig
from engine.ports import EngineView, Planner
from engine.step import StepPlan

ROOT = Path(__file__).resolve().parents[3]
CHAT = SloClass("chat", Slo(1.0, 0.05))
BATCH = SloClass("batch", on_infeasible=OnInfeasible.QUEUE)
CONFIG = SimulationConfig(classes=(CHAT, BATCH))


def crowd(num: int = 40, every_s: float = 0.1, **shape: int) -> Workload:
    """Requests at even intervals, three of four of them chats."""
    return Workload(
        "crowd",
        tuple(
            Arrival(
                i * every_s,
                shape.get("prompt", 200 + 97 * (i * 7 % 13)),
                shape.get("output", 3 + 5 * (i * 5 % 11)),
                "batch" if i % 4 == 3 else "chat",
            )
            for i in range(num)
        ),
    )


def served(result: SimulationResult) -> list[int]:
    return [request.index for request in result.requests if request.is_served]


@pytest.mark.parametrize("name", [n.replace("-N", "-384") for n in POLICY_NAMES])
def test_every_policy_serves_a_light_load_to_its_end(name: str) -> None:
    workload = crowd()
    result = simulate(workload, name, A100_8B, CONFIG)
    assert served(result) == list(range(40))
    for request, arrival in zip(result.requests, workload.arrivals, strict=True):
        assert request.arrived_at == arrival.at_s
        assert request.num_prompt_tokens == arrival.num_prompt_tokens
        assert request.num_output_tokens == arrival.num_output_tokens
        assert request.slo_class == arrival.slo_class
        assert request.finish_reason == "stop"
        assert request.num_cached_tokens == 0
        assert request.ttft_s is not None
        assert request.first_token_at == pytest.approx(request.arrived_at + request.ttft_s)
        assert request.is_kept
    steps = result.steps
    assert steps.num_prefill_tokens == sum(a.num_prompt_tokens for a in workload.arrivals)
    assert steps.num_decode_tokens == sum(a.num_output_tokens - 1 for a in workload.arrivals)
    assert sum(steps.bindings.values()) == steps.num_steps
    assert steps.bound_s.keys() == steps.bindings.keys()
    assert sum(steps.bound_s.values()) == pytest.approx(steps.busy_s)
    assert (result.policy, result.hardware, result.workload) == (name, "a100-8b", "crowd")
    assert result.offered_rate == workload.rate


def test_the_planner_is_charged_nothing_and_timed_once_per_pass() -> None:
    result = simulate(crowd(4), "slo", A100_8B, CONFIG)
    assert 0 < result.steps.planner_us_p50 <= result.steps.planner_us_p99
    assert result.wall_s > 0


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_keeps_light_promises(learner: LearnerKind) -> None:
    config = SimulationConfig(classes=(CHAT, BATCH), learner=learner)
    result = simulate(crowd(), "slo", A100_8B, config)
    assert all(request.is_kept for request in result.requests)
    assert (result.steps.mape > 0) == (learner in ("learned", "refitted"))


def test_the_learner_follows_the_machine() -> None:
    result = simulate(crowd(200, 0.02), "fcfs-512", A100_8B, CONFIG)
    assert result.steps.num_steps > 300
    assert result.steps.mape < 0.06
    assert 0.8 <= result.steps.coverage <= 0.97


def test_the_learner_aims_for_the_coverage_that_the_planner_asks() -> None:
    config = SimulationConfig(classes=(CHAT, BATCH), planner=PolicyConfig(margin_quantile=0.6))
    result = simulate(crowd(200, 0.02), "fcfs-512", A100_8B, config)
    assert 0.5 <= result.steps.coverage <= 0.7


def test_refits_are_run_at_the_same_steps_every_time() -> None:
    config = SimulationConfig(classes=(CHAT, BATCH), learner="refitted")
    first, again = (simulate(crowd(300, 0.08), "whole", A100_8B, config) for _ in range(2))
    assert first.steps.num_refits > 0
    assert first.event_hash == again.event_hash
    assert simulate(crowd(), "slo", A100_8B, CONFIG).steps.num_refits == 0


def test_overload_is_refused_with_reasons_and_counted_as_missed() -> None:
    result = simulate(crowd(60, 0.001, prompt=4000), "slo", A100_8B, CONFIG)
    refused = [r for r in result.requests if r.finish_reason == "rejected"]
    assert refused
    assert {r.decision for r in refused} == {"reject"}
    assert all(r.reason and not r.is_kept and r.ttft_s is None for r in refused)
    assert len(result.requests) == 60


def test_equal_beginnings_are_computed_once_and_only_with_a_prefix_cache() -> None:
    arrivals = tuple(Arrival(float(i), 512 + 64, 4, None, (7, 100 + i), 512) for i in range(3))
    workload = Workload("shared", arrivals)
    result = simulate(workload, "slo", A100_8B)
    assert [request.num_cached_tokens for request in result.requests] == [0, 512, 512]
    off = engine_for(A100_8B, is_prefix_cache_enabled=False)
    result = simulate(workload, "slo", A100_8B, SimulationConfig(engine=off))
    assert [request.num_cached_tokens for request in result.requests] == [0, 0, 0]
    assert result.steps.num_prefill_tokens == 3 * 576


def test_a_machine_has_a_servers_seats_within_the_tokens_of_a_step() -> None:
    served = Settings.model_fields["max_num_seqs"].default
    assert engine_for(A100_8B).max_num_seqs == EngineConfig().max_num_seqs == served == 128
    assert engine_for(A100_8B, max_num_batched_tokens=96).max_num_seqs == 96
    assert engine_for(A100_8B, max_num_seqs=300).max_num_seqs == 300
    with pytest.raises(ValueError, match=r"max_num_seqs \(97\) must not exceed"):
        engine_for(A100_8B, max_num_batched_tokens=96, max_num_seqs=97)
    with pytest.raises(ValueError, match="max_num_batched_tokens must be a positive integer"):
        engine_for(A100_8B, max_num_batched_tokens=0)


def test_preempted_requests_move_to_host_memory_and_come_back() -> None:
    engine = engine_for(CPU_DEMO, num_blocks=40, num_host_blocks=64, max_num_seqs=8)
    config = SimulationConfig(engine=engine, classes=(CHAT, BATCH), learner="oracle")
    # Short answers first, so that nobody expects the long ones.
    short = [Arrival(0.0, 16, 2, "batch") for _ in range(20)]
    long = [Arrival(30.0 + 0.01 * i, 100, 120, "batch") for i in range(6)]
    result = simulate(Workload("tight", (*short, *long)), "slo", CPU_DEMO, config)
    assert served(result) == list(range(26))
    assert result.steps.num_preemptions > 0
    assert result.steps.num_swapped_blocks > 0
    assert result.steps.max_blocks_used <= 40


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    first, again = (simulate(crowd(), "slo", A100_8B, CONFIG) for _ in range(2))
    assert first.event_hash == again.event_hash
    assert first.requests == again.requests
    other = SimulationConfig(classes=(CHAT, BATCH), seed=1)
    assert simulate(crowd(), "slo", A100_8B, other).event_hash != first.event_hash
    assert simulate(crowd(), "edf-256", A100_8B, CONFIG).event_hash != first.event_hash


def test_the_hash_does_not_depend_on_the_process() -> None:
    code = (
        "from tests.controller.simulation.test_run import *\n"
        "print(simulate(crowd(), 'slo', A100_8B, CONFIG).event_hash)"
    )
    hashes = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        hashes.add(done.stdout.strip())
    assert hashes == {simulate(crowd(), "slo", A100_8B, CONFIG).event_hash}


def test_noise_and_slowdowns_reach_the_clock() -> None:
    calm = HardwareProfile("calm", A100_8B.planes, noise=0.0)
    slow = HardwareProfile.from_json(
        calm.to_json() | {"slowdowns": [{"start_s": 0, "end_s": 1e6, "factor": 2.0}]}
    )
    config = SimulationConfig(learner="oracle")
    workload = Workload("one", (Arrival(0.0, 100, 10),))
    calm_s, slow_s = (
        simulate(workload, "fcfs-512", machine, config).requests[0].e2e_s
        for machine in (calm, slow)
    )
    assert calm_s is not None
    assert slow_s == pytest.approx(2 * calm_s)


def test_progress_counts_requests_that_ended() -> None:
    calls: list[tuple[int, int]] = []
    simulate(crowd(), "fcfs-64", A100_8B, CONFIG, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (40, 40)
    assert len(calls) > 1
    assert calls == sorted(calls)


class IdlePlanner:
    """Never finds anything to do."""

    def plan(self, view: EngineView) -> StepPlan:
        return StepPlan()


def test_a_policy_that_never_works_is_reported_not_waited_for() -> None:
    with pytest.raises(SimulationError, match="no work for 2 requests"):
        simulate(crowd(2), lambda _parts: IdlePlanner(), A100_8B, CONFIG)


def test_a_planner_may_be_made_of_its_parts() -> None:
    seen: list[PlannerParts] = []

    def factory(parts: PlannerParts) -> Planner:
        seen.append(parts)
        return StaticPlanner(128)

    result = simulate(crowd(3), factory, A100_8B, CONFIG, policy_name="mine")
    assert result.policy == "mine"
    assert seen[0].config == CONFIG.planner


def test_an_empty_workload_ends_at_once() -> None:
    result = simulate(Workload("nobody", ()), "slo", A100_8B, CONFIG)
    assert result.requests == ()
    assert result.steps.num_steps == 0


def test_unknown_names_are_refused_before_anything_runs() -> None:
    with pytest.raises(
        ValueError, match="class 'gold', which has no targets; known: batch, chat, default"
    ):
        simulate(Workload("w", (Arrival(0.0, 1, 1, "gold"),)), "slo", A100_8B, CONFIG)
    with pytest.raises(ValueError, match="nonsense"):
        simulate(crowd(1), "nonsense", A100_8B, CONFIG)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"learner": "psychic"}, "learner"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"default_class": "gold"}, "default_class"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SimulationConfig(**changes)  # type: ignore[arg-type]
