"""What holds of every plan, whatever the state of the engine and of the cost model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policy.baselines import StaticPlanner
from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.policies import make_planner
from controller.policy.slo import OnInfeasible, Slo, SloClass
from engine.config import EngineConfig
from engine.ports import EngineView
from engine.request import Request, RequestPhase
from tests.controller.policy.checking import CheckedPlanner, check_plan
from tests.controller.policy.doubles import (
    BrokenCostModel,
    JumpingModel,
    LinearCostModel,
    Simulation,
    decode,
    running,
    view_of,
    waiting,
)

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)

targets = st.one_of(st.none(), st.floats(0.01, 20.0))
slos = st.builds(Slo, ttft_s=targets, tpot_s=targets, e2e_s=targets)
classes = st.builds(
    SloClass,
    name=st.sampled_from(["chat", "code", "batch"]),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    on_infeasible=st.sampled_from(list(OnInfeasible)),
)
models = st.sampled_from(
    [
        LinearCostModel(),
        LinearCostModel(margin=0.5),
        LinearCostModel((1e-9,) * 5, 1e-9),
        JumpingModel(),
        BrokenCostModel(math.nan),
        BrokenCostModel(math.inf),
        BrokenCostModel(-1.0),
        BrokenCostModel(0.0),
        BrokenCostModel(1e300),
    ]
)
configs = st.builds(
    PolicyConfig,
    bank=st.sampled_from([0.0, 0.5, 1.0]),
    token_budget=st.sampled_from([None, 8, 64]),
    drain_steps=st.sampled_from([1.0, 8.0, math.inf]),
    patience=st.sampled_from([0.1, 1.0]),
    patience_s=st.sampled_from([0.05, 10.0]),
    patience_backlog=st.sampled_from([0.1, 0.5, math.inf]),
    stream_knee_share=st.sampled_from([0.05, 1.0]),
    upper_pace=st.sampled_from([1.0, 1.5]),
    gap_limit_s=st.sampled_from([0.08, 1.0]),
    max_overtaken=st.sampled_from([None, 1, 64]),
    exploration=st.sampled_from([0.0, 0.5]),
    split_threshold=st.sampled_from([0, 64]),
    turn_period=st.integers(1, 4),
    max_waiting_tokens=st.sampled_from([None, 100]),
    max_judged=st.sampled_from([1, 512]),
    length_neutrality=st.sampled_from([0.0, 1.0]),
    kv_reserve=st.sampled_from([0.0, 0.1]),
    order_blend=st.sampled_from([0.0, 8.0]),
    max_running=st.sampled_from([None, 1, 4]),
)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Arrivals of any rate and size, some refused."""
    demand = Demand()
    for no in range(1, 1 + draw(st.integers(0, 12))):
        slo, of = draw(slos), draw(classes)
        if slo.is_best_effort:
            continue
        at = draw(st.floats(0.0, 100.0))
        demand.observe(of.name, f"d{no}", no, at, draw(st.integers(1, 9000)), slo, of.weight)
        if draw(st.booleans()):
            demand.refuse(f"d{no}")
    return demand


@st.composite
def views(draw: st.DrawFn) -> EngineView:
    """Any state that the loop could be in: blocks held by the running ones, or lent."""
    now = draw(st.floats(0.0, 100.0))
    groups: dict[RequestPhase, list[Request]] = {phase: [] for phase in RequestPhase}
    for i in range(draw(st.integers(0, 8))):
        at = now - draw(st.floats(0.0, 60.0))
        num_prompt = draw(st.integers(1, 200))
        request = waiting(
            f"r{i}",
            num_prompt,
            at=at,
            slo=draw(st.one_of(st.none(), slos)),
            of=draw(classes),
            priority=draw(st.integers(-1, 1)),
        )
        kind = draw(st.sampled_from(["new", "told", "prefill", "decode", "preempted"]))
        num_output = draw(st.integers(1, 40))
        if kind == "decode":
            running(request, num_prompt + num_output - 1, num_output, last_at=at)
        elif kind == "prefill":
            running(request, draw(st.integers(0, num_prompt - 1)), 0)
        elif kind == "preempted":
            running(request, 0, draw(st.sampled_from([0, num_output])), last_at=at)
            request.phase = RequestPhase.PREEMPTED
            request.num_preemptions = draw(st.integers(1, 4))
        _share(draw, request, [*itertools.chain(*groups.values())])
        groups[request.phase].append(request)
    held = len({b for r in groups[RequestPhase.RUNNING] for b in r.block_table})
    num_running = len(groups[RequestPhase.RUNNING])
    waiting_tables = (r.block_table for r in itertools.chain(*groups.values()))
    cached = len(set(itertools.chain(*waiting_tables))) - held
    num_free = cached + draw(st.integers(0, 40))
    return view_of(
        now=now,
        step_no=draw(st.integers(1, 20)),
        waiting=groups[RequestPhase.WAITING],
        running=groups[RequestPhase.RUNNING],
        preempted=groups[RequestPhase.PREEMPTED],
        num_blocks=max(1, held + num_free, 16),
        num_free=num_free,
        max_num_seqs=max(num_running, draw(st.integers(1, 8))),
        max_num_batched_tokens=draw(st.sampled_from([8, 64, 512])),
        max_waiting=draw(st.sampled_from([1, 100])),
        is_draining=draw(st.booleans()),
        num_free_host=draw(st.integers(0, 12)),
    )


def _share(draw: st.DrawFn, request: Request, others: Sequence[Request]) -> None:
    """Let a request begin with the blocks of another one, or hope for cached ones."""
    most = (request.num_known_tokens - 1) // 16
    table = draw(st.sampled_from([*(other.block_table for other in others), [-1, -2, -3, -4]]))
    num_shared = draw(st.integers(0, min(most, len(table))))
    if request.phase is RequestPhase.RUNNING:
        num_shared = min(num_shared, request.num_computed_tokens // 16)
        if table[:1] != [-1]:
            request.block_table[:num_shared] = table[:num_shared]
    elif draw(st.booleans()):
        request.block_table = table[:num_shared]
        request.num_computed_tokens = 16 * num_shared
    elif request.phase is RequestPhase.PREEMPTED and request.num_output_tokens:
        # Moved to the host: all but the newest token's keys and values stand there.
        request.num_computed_tokens = request.num_known_tokens - 1
        request.host_block_table = list(range(-(-request.num_computed_tokens // 16)))


@PROPERTY
@given(
    view=views(),
    config=configs,
    model=models,
    swap_block_s=st.sampled_from([None, 0.0, 1e-3]),
    demand=st.one_of(st.none(), demands()),
)
def test_every_plan_of_the_slo_planner_is_sound(
    view: EngineView,
    config: PolicyConfig,
    model: LinearCostModel,
    swap_block_s: float | None,
    demand: Demand | None,
) -> None:
    slo_planner = SloPlanner(
        config, model, OutputLengths(), swap_block_s=swap_block_s, demand=demand
    )
    plan = CheckedPlanner(slo_planner, config.token_budget).plan(view)
    assert plan.decision is not None
    for number in (plan.decision.predicted_mean_s, plan.decision.predicted_upper_s):
        assert number is None or math.isfinite(number)
    for admission in plan.admissions:
        for number in (admission.predicted_ttft_s, admission.retry_after_s):
            assert number is None or math.isfinite(number)


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
@given(view=views(), model=models)
def test_every_plan_of_a_baseline_is_sound(
    name: str, view: EngineView, model: LinearCostModel
) -> None:
    token_budget = int(name.rpartition("-")[2]) if name[-1].isdigit() else None
    CheckedPlanner(make_planner(name, model, OutputLengths()), token_budget).plan(view)


@PROPERTY
@given(view=views(), tpot_s=st.floats(0.05, 2.0), more=st.floats(0.0, 2.0))
def test_more_slack_never_gives_a_smaller_upper_bound(
    view: EngineView, tpot_s: float, more: float
) -> None:
    def upper_bound(target_s: float) -> int:
        stream = decode("stream", slo=Slo(tpot_s=target_s), last_at=view.now)
        crowd = replace(
            view, running=[stream], preempted=[], num_free_blocks=1000, num_total_blocks=1002
        )
        planner = SloPlanner(PolicyConfig(), LinearCostModel(), OutputLengths())
        decision = planner.plan(crowd).decision
        assert decision is not None
        return decision.upper_bound_tokens

    assert upper_bound(tpot_s) <= upper_bound(tpot_s + more)


@PROPERTY
@given(view=views())
def test_the_chosen_step_keeps_the_tightest_stream_on_pace(view: EngineView) -> None:
    config = PolicyConfig()
    model = LinearCostModel(margin=0.2)
    decision = SloPlanner(config, model, OutputLengths()).plan(view).decision
    assert decision is not None
    num_prefill = decision.token_budget - sum(r.is_decoding for r in view.running)
    if decision.binding_constraint == "min_quota" or num_prefill <= 0:
        return
    assert num_prefill <= decision.upper_bound_tokens
    if decision.slack_s is not None:
        assert decision.predicted_mean_s is not None
        assert decision.predicted_upper_s is not None
        assert decision.predicted_mean_s <= decision.slack_s + 1e-9
        assert decision.predicted_upper_s * config.upper_share <= decision.slack_s + 1e-9


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
