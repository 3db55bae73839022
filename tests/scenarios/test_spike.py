"""The spike on virtual time: seven short requests decode while one long prompt arrives."""

from __future__ import annotations

import pytest

from controller.policy.baselines import StaticPlanner
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from engine.ports import Planner
from tests.controller.policy.doubles import LinearCostModel, Simulation, waiting

MODEL = LinearCostModel()
NORMAL_S = 0.14
# Three normal steps; a 121-token chunk beside seven decodes takes a little more.
TARGET_S = 3 * NORMAL_S


def spike(planner: Planner, tpot_s: float | None = None) -> tuple[float, float, Simulation]:
    """Largest gap of the short ones over the whole run, TTFT of the long one, and the run."""
    slo = None if tpot_s is None else Slo(tpot_s=tpot_s)
    sim = Simulation(planner, MODEL)
    shorts = [waiting(f"short{i}", 32, slo=slo, max_tokens=64) for i in range(7)]
    sim.run([*shorts, waiting("long", 1024, at=2.0, slo=slo, max_tokens=16)])
    gap = max(sim.largest_gap(request.request_id) for request in shorts)
    return gap, sim.token_times("long")[0] - 2.0, sim


def slo_planner() -> SloPlanner:
    return SloPlanner(PolicyConfig(), MODEL, OutputLengths())


def test_the_whole_prompt_freezes_everybody() -> None:
    gap, _, _ = spike(StaticPlanner(None))
    assert gap > 15 * NORMAL_S


def test_a_fixed_budget_trades_the_gap_for_the_wait() -> None:
    gap_256, ttft_256, _ = spike(StaticPlanner(256))
    gap_128, ttft_128, _ = spike(StaticPlanner(128))
    assert gap_128 < gap_256
    assert ttft_128 > ttft_256


def test_the_planner_holds_the_gap_under_the_target() -> None:
    gap, ttft_s, sim = spike(slo_planner(), TARGET_S)
    assert gap <= TARGET_S
    # A gap that a fixed budget of 128 does not keep; its TTFT is bought with late tokens.
    static_gap, static_ttft_s, _ = spike(StaticPlanner(128), TARGET_S)
    assert static_gap > TARGET_S
    assert ttft_s <= 1.05 * static_ttft_s
    bindings = {r.plan.decision.binding_constraint for r in sim.reports if r.plan.decision}
    assert "decode_slack" in bindings


def test_where_the_target_allows_it_the_long_prompt_is_no_later_than_with_a_fixed_budget() -> None:
    static_gap, static_ttft_s, _ = spike(StaticPlanner(128))
    gap, ttft_s, _ = spike(slo_planner(), 1.1 * static_gap)
    assert gap <= 1.1 * static_gap
    assert ttft_s <= static_ttft_s


@pytest.mark.parametrize("target_s", [0.2, 0.3, 0.6, 1.0])
def test_the_gap_follows_the_target(target_s: float) -> None:
    gap, _, sim = spike(slo_planner(), target_s)
    assert gap <= target_s
    assert all(request.is_finished for request in sim.requests.values())


def test_without_targets_no_stream_freezes() -> None:
    gap, ttft_s, _ = spike(slo_planner())
    assert gap <= PolicyConfig().gap_limit_s
    assert ttft_s < spike(StaticPlanner(128))[1]
