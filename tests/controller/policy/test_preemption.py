"""Nobody gives way a fourth time, whatever the policy, and everybody comes to an end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policy.kv import BlockLedger
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig
from controller.policy.policies import make_planner
from controller.policy.preemption import MAX_PREEMPTIONS, hold_back, make_room
from controller.policy.slo import OnInfeasible, Slo
from engine.config import EngineConfig
from engine.ports import EngineView, Planner, RequestView
from engine.request import FinishReason, Request, RequestPhase
from engine.step import StepPlan
from tests.controller.policy.checking import CheckedPlanner
from tests.controller.policy.doubles import (
    GPU_FLOOR_S,
    GPU_WEIGHTS,
    LinearCostModel,
    Simulation,
    decode,
    running,
    slo_class,
    view_of,
    waiting,
)

MODEL = LinearCostModel(GPU_WEIGHTS, GPU_FLOOR_S)
BLOCK = 4
POLICIES = ("slo", "edf-shed-16", "fcfs-16", "edf-64", "whole", "slack-greedy", "smallest-feasible")

# Arrival, prompt, max_tokens, targets, weight, and whose beginning the prompt shares.
Crowd = list[tuple[float, int, int, Slo | None, float, int | None]]
crowds = st.lists(
    st.tuples(
        st.floats(0.0, 0.5),
        st.integers(1, 12),
        st.sampled_from([0, 1, 20, 40, 60, 60, 90]),
        st.sampled_from([None, Slo(ttft_s=0.5), Slo(tpot_s=0.05), Slo(tpot_s=1.0)]),
        st.sampled_from([0.5, 4.0]),
        st.sampled_from([None, 1, 2]),
    ),
    min_size=6,
    max_size=16,
)


class Watched:
    """Checks every plan, and that those who gave way most come back in the order of arrival."""

    def __init__(self, planner: Planner) -> None:
        self._planner = CheckedPlanner(planner)
        self.num_held_back = 0

    def plan(self, view: EngineView) -> StepPlan:
        plan = self._planner.plan(view)
        started = {work.request_id for work in plan.work}
        able = {request.request_id for request in hold_back(view).preempted}
        held_back = [r for r in view.preempted if r.request_id not in able]
        self.num_held_back += len(held_back)
        first = min((r.arrival_no for r in held_back), default=0)
        for request in view.preempted:
            if request.request_id in started and request.num_preemptions == MAX_PREEMPTIONS:
                assert not held_back or request.arrival_no < first
        return plan


def requests_of(crowd: Crowd) -> list[Request]:
    requests = []
    for i, (at, num_prompt, max_tokens, slo, weight, beginning) in enumerate(crowd):
        # Nobody is refused: everybody has to be served.
        of = slo_class(f"w{weight}", weight, OnInfeasible.QUEUE)
        request = waiting(f"r{i}", num_prompt, at=at, slo=slo, of=of, max_tokens=max_tokens)
        if beginning is not None:
            request.prompt_token_ids = (-beginning,) * num_prompt
        requests.append(request)
    return requests


def simulation(name: str, num_blocks: int, num_host_blocks: int = 0) -> tuple[Simulation, Watched]:
    """A pool that is too small, and a planner that expects far too short answers."""
    config = PolicyConfig(max_wait_s=0.2, max_age_factor=1e6, min_max_age_s=1e6)
    swap_block_s = 1e-4 if num_host_blocks else None
    lengths = OutputLengths(default=1)
    watched = Watched(make_planner(name, MODEL, lengths, config, swap_block_s=swap_block_s))
    engine = EngineConfig(
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_host_blocks=num_host_blocks,
    )
    return Simulation(watched, MODEL, engine), watched


def check_ends(sim: Simulation) -> None:
    """Everybody got all tokens that the pool can hold, and gave way three times at most."""
    for request in sim.requests.values():
        assert request.finish_reason is FinishReason.LENGTH
        most = sim.config.num_pool_tokens - request.num_prompt_tokens
        assert request.num_output_tokens == min(request.max_tokens, most)
        assert request.num_preemptions <= MAX_PREEMPTIONS
    assert sim.pool.num_used == 0


@pytest.mark.parametrize("name", POLICIES)
@settings(derandomize=True, deadline=None, max_examples=10)
@given(crowd=crowds, num_blocks=st.integers(8, 24), num_host_blocks=st.sampled_from([0, 6, 40]))
def test_nobody_gives_way_a_fourth_time(
    name: str, crowd: Crowd, num_blocks: int, num_host_blocks: int
) -> None:
    sim, _ = simulation(name, num_blocks, num_host_blocks)
    sim.run(requests_of(crowd), max_steps=5000)
    check_ends(sim)


@pytest.mark.parametrize(
    ("name", "num_host_blocks"), [*((name, 0) for name in POLICIES), ("slo", 40)]
)
def test_a_crowd_that_needs_many_times_the_pool(name: str, num_host_blocks: int) -> None:
    sim, watched = simulation(name, 20, num_host_blocks)
    sim.run(requests_of([(0.01 * i, 4, 60, None, 1.0, None) for i in range(12)]))
    check_ends(sim)
    assert max(r.num_preemptions for r in sim.requests.values()) == MAX_PREEMPTIONS
    assert watched.num_held_back > 0


@pytest.mark.parametrize("name", ["slo", "fcfs-16", "slack-greedy"])
def test_newcomers_pass_nobody_for_ever(name: str) -> None:
    sim, watched = simulation(name, 20)
    early = [(0.01 * i, 4, 60, None, 1.0, None) for i in range(8)]
    # More than can be served: the queue grows until they stop coming.
    stream = [(0.03 * i, 4, 16, None, 1.0, None) for i in range(100)]
    sim.run(requests_of([*early, *stream]))
    check_ends(sim)
    assert watched.num_held_back > 0
    ends = [at for i in range(8) if (at := sim.requests[f"r{i}"].finished_at) is not None]
    assert max(ends) < 0.75 * sim.clock.now()


def gave_way(
    request_id: str, num_preemptions: int, no: int, *, num_prompt: int = 16, max_tokens: int = 16
) -> Request:
    """A preempted request of two blocks at its longest."""
    request = waiting(request_id, num_prompt, max_tokens=max_tokens)
    request.phase = RequestPhase.PREEMPTED
    request.num_preemptions, request.arrival_no = num_preemptions, no
    return request


def able(view: EngineView) -> list[str]:
    return [request.request_id for request in hold_back(view).preempted]


def test_who_is_not_spared_is_never_held_back() -> None:
    crowd = [gave_way("a", 2, 1), gave_way("b", 1, 2)]
    view = view_of(preempted=crowd, num_blocks=1)
    assert hold_back(view) is view


def test_spared_ones_come_back_by_arrival_as_far_as_the_pool_holds_them_at_their_longest() -> None:
    crowd = [gave_way("c", 3, 3), gave_way("a", 3, 1), gave_way("x", 2, 9), gave_way("b", 3, 2)]
    whole = view_of(preempted=crowd, num_blocks=6)
    assert hold_back(whole) is whole
    # In the order of the view: by arrival those come back that fit, and who may give way yet.
    assert able(view_of(preempted=crowd, num_blocks=5)) == ["a", "x", "b"]
    stream = decode("d", num_prompt=16, max_tokens=16)
    assert able(view_of(running=[stream], preempted=crowd, num_blocks=5)) == ["a", "x", "b"]
    stream.num_preemptions = 3
    assert able(view_of(running=[stream], preempted=crowd, num_blocks=5)) == ["a", "x"]
    assert able(view_of(running=[stream], preempted=crowd, num_blocks=3)) == ["x"]


def test_nobody_passes_an_earlier_one_that_needs_more() -> None:
    crowd = [gave_way("small", 3, 2), gave_way("large", 3, 1, max_tokens=64)]
    stream = decode("d", num_prompt=16, max_tokens=16)
    stream.num_preemptions = 3
    assert able(view_of(running=[stream], preempted=crowd, num_blocks=6)) == []


def test_the_longest_ends_at_the_context_and_at_the_pool() -> None:
    crowd = [gave_way("a", 3, 1, max_tokens=9999), gave_way("b", 3, 2, max_tokens=0)]
    # The context holds 64 tokens; a prompt alone still has one sampled from it.
    assert able(view_of(preempted=crowd, num_blocks=6, max_model_len=64)) == ["a", "b"]
    assert able(view_of(preempted=crowd, num_blocks=5, max_model_len=64)) == ["a"]
    assert able(view_of(preempted=crowd, num_blocks=5)) == ["a"]


def latest_first(request: RequestView) -> tuple[float, ...]:
    return (-request.arrived_at,)


def full(request_id: str, at: float, num_preemptions: int = 0) -> Request:
    """A decode whose next token needs a block."""
    request = decode(request_id, num_prompt=32, num_output=1, at=at)
    request.num_preemptions = num_preemptions
    return request


def test_a_victim_that_shared_all_its_blocks_is_enough_for_spared_ones() -> None:
    a = decode("a", num_prompt=36, num_output=1, at=0.0)
    b = decode("b", num_prompt=36, num_output=1, at=1.0)
    a.num_preemptions = b.num_preemptions = 3
    c = full("c", 2.0)
    c.block_table = a.block_table[:2]
    ledger = BlockLedger.of(view_of(running=[a, b, c], num_free=0))
    assert make_room([a, b, c], [], ledger, latest_first) == [c]
    assert ledger.num_free == 0


def test_a_state_that_cannot_be_is_planned_all_the_same() -> None:
    a, b, c = full("a", 0.0, 3), full("b", 1.0, 3), full("c", 2.0)
    c.block_table = a.block_table[:2]
    ledger = BlockLedger.of(view_of(running=[a, b, c], num_free=0))
    assert make_room([a, b, c], [], ledger, latest_first) == [c, b]
    empty = running(waiting("p", 100, at=5.0), 0, 0)
    empty.num_preemptions = 3
    assert make_room([a, b], [empty], BlockLedger(0, 16), latest_first) == [empty, b]
