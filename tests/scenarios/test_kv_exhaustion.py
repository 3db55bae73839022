"""A pool that is too small, on virtual time: preempt, recompute, and everybody finishes."""

from __future__ import annotations

from controller.policy.baselines import StaticPlanner
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from engine.config import EngineConfig
from engine.ports import Planner
from engine.request import FinishReason
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import LinearCostModel, Simulation, waiting

MODEL = LinearCostModel()


def run(planner: Planner, num_blocks: int = 24) -> Simulation:
    """Eight requests that together want twice the pool."""
    sim = Simulation(CheckedPlanner(planner), MODEL, EngineConfig(num_blocks=num_blocks))
    sim.run(
        [
            waiting(f"r{i}", 32, at=0.1 * i, slo=Slo(tpot_s=1.0) if i % 2 else None, max_tokens=64)
            for i in range(8)
        ]
    )
    return sim


def test_preempted_requests_finish_with_all_their_tokens() -> None:
    # An expectation far below the truth lets too many in.
    sim = run(SloPlanner(PolicyConfig(), MODEL, OutputLengths(default=1)))
    assert sum(r.num_preemptions for r in sim.requests.values()) > 0
    assert {r.finish_reason for r in sim.requests.values()} == {FinishReason.LENGTH}
    assert all(r.num_output_tokens == 64 for r in sim.requests.values())
    assert max(r.num_preemptions for r in sim.requests.values()) <= 3
    assert sim.pool.num_used == 0


def test_an_honest_expectation_needs_no_preemption() -> None:
    sim = run(SloPlanner(PolicyConfig(), MODEL, OutputLengths(default=64)))
    assert sum(r.num_preemptions for r in sim.requests.values()) == 0
    assert all(r.num_output_tokens == 64 for r in sim.requests.values())


def test_the_baseline_survives_the_same() -> None:
    sim = run(StaticPlanner(128))
    assert sum(r.num_preemptions for r in sim.requests.values()) > 0
    assert all(r.num_output_tokens == 64 for r in sim.requests.values())


def test_an_answer_beyond_the_pool_ends_with_length() -> None:
    sim = Simulation(
        CheckedPlanner(SloPlanner(PolicyConfig(), MODEL, OutputLengths())),
        MODEL,
        EngineConfig(num_blocks=4),
    )
    sim.run([waiting("long", 40, max_tokens=500), waiting("too long", 64, max_tokens=5)])
    assert sim.requests["long"].finish_reason is FinishReason.LENGTH
    assert sim.requests["long"].num_known_tokens == 64
    refused = sim.requests["too long"]
    assert refused.finish_reason is FinishReason.REJECTED
    assert refused.admission is not None
    assert refused.admission.reason == "kv_never_fits"
