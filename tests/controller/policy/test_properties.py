"""What holds of every plan, whatever the state of the engine and of the cost model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policy.baselines import StaticPlanner
from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.policies import make_planner
from controller.policy.slo import Slo, SloClass
from engine.config import EngineConfig
from engine.ports import EngineView
from engine.step import StepPlan
from tests.controller.policy.checking import CheckedPlanner, check_plan
from tests.controller.policy.doubles import (
    GarbageCostModel,
    LinearCostModel,
    Simulation,
    view_of,
    waiting,
)
from tests.controller.policy.states import (
    PROPERTY,
    classes,
    configs,
    demands,
    garbage_models,
    models,
    output_lengths,
    slos,
    views,
)

swap_times_s = st.sampled_from([None, 0.0, 1e-3])
maybe_demands = st.one_of(st.none(), demands())


def _check_told(plan: StepPlan) -> None:
    """Assert that every number that somebody is told is one, and none is for the past."""
    assert plan.decision is not None
    for number in (plan.decision.predicted_mean_s, plan.decision.predicted_upper_s):
        assert number is None or 0.0 <= number < math.inf
    assert plan.decision.slack_s is None or math.isfinite(plan.decision.slack_s)
    for admission in plan.admissions:
        for number in (admission.predicted_ttft_s, admission.retry_after_s):
            assert number is None or 0.0 <= number < math.inf


@PROPERTY
@given(
    view=views(),
    config=configs,
    model=models,
    swap_block_s=swap_times_s,
    demand=maybe_demands,
    lengths=output_lengths(),
)
def test_every_plan_of_the_slo_planner_is_sound(
    view: EngineView,
    config: PolicyConfig,
    model: LinearCostModel,
    swap_block_s: float | None,
    demand: Demand | None,
    lengths: OutputLengths,
) -> None:
    planner = SloPlanner(config, model, lengths, swap_block_s=swap_block_s, demand=demand)
    _check_told(CheckedPlanner(planner, config.token_budget, demand, lengths).plan(view))


@PROPERTY
@given(
    view=views(),
    config=configs,
    model=garbage_models,
    swap_block_s=swap_times_s,
    demand=maybe_demands,
    lengths=output_lengths(),
)
def test_no_answer_of_a_cost_model_spoils_a_plan_or_what_is_told(
    view: EngineView,
    config: PolicyConfig,
    model: GarbageCostModel,
    swap_block_s: float | None,
    demand: Demand | None,
    lengths: OutputLengths,
) -> None:
    planner = SloPlanner(config, model, lengths, swap_block_s=swap_block_s, demand=demand)
    _check_told(CheckedPlanner(planner, config.token_budget, demand, lengths).plan(view))


BASELINES = (
    "whole",
    "fcfs-1",
    "fcfs-100",
    "edf-16",
    "edf-shed-16",
    "slack-greedy",
    "smallest-feasible",
)


@pytest.mark.parametrize("name", BASELINES)
@settings(PROPERTY, max_examples=25)
@given(view=views(), model=models, demand=maybe_demands, lengths=output_lengths())
def test_every_plan_of_a_baseline_is_sound(
    name: str,
    view: EngineView,
    model: LinearCostModel,
    demand: Demand | None,
    lengths: OutputLengths,
) -> None:
    token_budget = int(name.rpartition("-")[2]) if name[-1].isdigit() else None
    planner = make_planner(name, model, lengths, demand=demand)
    _check_told(CheckedPlanner(planner, token_budget, demand, lengths).plan(view))


arrivals = st.lists(
    st.tuples(
        st.floats(0.0, 10.0),
        st.integers(1, 120),
        st.integers(1, 40),
        st.one_of(st.none(), slos),
        classes,
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize(
    "name",
    ["slo", "fcfs-32", "edf-32", "edf-shed-32", "whole", "slack-greedy", "smallest-feasible"],
)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(arrivals=arrivals, num_blocks=st.integers(3, 30), noise=st.floats(0.5, 2.0), config=configs)
def test_everybody_ends_in_a_small_pool(
    name: str,
    arrivals: list[tuple[float, int, int, Slo | None, SloClass]],
    num_blocks: int,
    noise: float,
    config: PolicyConfig,
) -> None:
    model = LinearCostModel()
    planner = make_planner(name, model, OutputLengths(default=16), config)
    engine = EngineConfig(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=64)
    sim = Simulation(CheckedPlanner(planner), model, engine, noise=(1.0, noise))
    requests = [
        waiting(f"r{i}", num_prompt, at=at, slo=slo, of=of, max_tokens=max_tokens)
        for i, (at, num_prompt, max_tokens, slo, of) in enumerate(arrivals)
    ]
    sim.run(requests, max_steps=20_000)
    assert all(request.is_finished for request in requests)
    assert sim.pool.num_used == 0


def test_check_plan_notices_a_plan_without_blocks() -> None:
    view = view_of(waiting=[waiting("a", 32)], num_blocks=4)
    plan = StaticPlanner(64).plan(view)
    check_plan(view, plan)
    with pytest.raises(AssertionError):
        check_plan(replace(view, num_free_blocks=1), plan)


class Meddler:
    """A planner that changes something of what it was given."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self._meddle = meddle

    def plan(self, view: EngineView) -> StepPlan:
        self._meddle()
        return StaticPlanner(64).plan(view)


def test_a_planner_that_changes_what_it_is_given_is_noticed() -> None:
    request, demand, lengths = waiting("a", 32), Demand(), OutputLengths()
    demand.observe("chat", "a", 1, 0.0, 32, Slo(ttft_s=1.0), 1.0)
    view = view_of(waiting=[request])
    harmless: list[Callable[[], object]] = [lambda: demand.expected(1.0)]
    meddles: list[Callable[[], object]] = [
        lambda: request.host_block_table.append(1),
        lambda: setattr(request, "num_preemptions", request.num_preemptions + 1),
        lambda: demand.refuse("a"),
        lambda: demand.returns.book(0.0, 1.0, 32),
        lambda: lengths.observe("chat", 8),
    ]
    for meddle in harmless:
        CheckedPlanner(Meddler(meddle), None, demand, lengths).plan(view)
    for meddle in meddles:
        with pytest.raises(AssertionError):
            CheckedPlanner(Meddler(meddle), None, demand, lengths).plan(view)
