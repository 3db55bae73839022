"""Whoever is due gets its turn on a full pool too: what others give back is not given away."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import OnInfeasible, Slo
from engine.config import EngineConfig
from engine.request import Request
from tests.controller.policy.doubles import (
    GPU_FLOOR_S,
    GPU_WEIGHTS,
    LinearCostModel,
    Simulation,
    slo_class,
    waiting,
)

MODEL = LinearCostModel(GPU_WEIGHTS, GPU_FLOOR_S)
MAX_WAIT_S = 1.0
# Of 256 blocks of 16 tokens.
BIG = st.integers(2000, 3600)


def _serve(
    seed: int, rate: float, big: Request, turn_period: int, seconds: float = 12.0
) -> list[Request]:
    """Serve a stream of chats that fills the pool by itself, and `big` among them."""
    rng = np.random.default_rng(seed)
    chat = slo_class("chat")
    arrivals = np.cumsum(rng.exponential(1.0 / rate, int(rate * seconds)))
    chats = [
        waiting(
            f"chat-{i}",
            int(rng.integers(60, 200)),
            at=float(at),
            slo=Slo(ttft_s=5.0),
            of=chat,
            max_tokens=int(rng.integers(100, 300)),
        )
        for i, at in enumerate(arrivals)
    ]
    demand = Demand()
    config = PolicyConfig(max_wait_s=MAX_WAIT_S, turn_period=turn_period)
    planner = SloPlanner(config, MODEL, OutputLengths(default=50), demand=demand)
    engine = EngineConfig(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=512)
    Simulation(planner, MODEL, engine, demand=demand).run([*chats, big], max_steps=100_000)
    return chats


def _passed(chats: list[Request], big: Request) -> int:
    """Chats that came after it and began before it, once it was due."""
    due_at = big.arrived_at + MAX_WAIT_S
    assert big.first_scheduled_at is not None
    return sum(
        each.first_scheduled_at is not None
        and big.arrived_at < each.arrived_at
        and due_at < each.first_scheduled_at < big.first_scheduled_at
        for each in chats
    )


@settings(derandomize=True, deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 99),
    rate=st.sampled_from([10.0, 15.0, 25.0]),
    num_prompt=BIG,
    turn_period=st.sampled_from([2, 8]),
    is_relegated=st.booleans(),
)
def test_a_stream_of_small_ones_does_not_take_the_blocks_of_who_is_due(
    seed: int, rate: float, num_prompt: int, turn_period: int, is_relegated: bool
) -> None:
    # One that never had a promise, or one whose promise cannot be kept and who queues for it.
    slo = Slo(ttft_s=0.05) if is_relegated else Slo()
    of = slo_class("bulk", on_infeasible=OnInfeasible.DEGRADE)
    big = waiting("big", num_prompt, at=1.0, slo=slo, of=of, max_tokens=8)
    chats = _serve(seed, rate, big, turn_period)
    assert big.first_token_at is not None
    # Those who fit beside it may begin; a pool's worth of chats must not.
    assert _passed(chats, big) <= 8
    # It begins when those who run have ended, long before the stream of chats does.
    assert big.first_scheduled_at is not None
    assert big.first_scheduled_at < 8.0


def test_while_it_waits_the_others_do_not_idle() -> None:
    big = waiting("big", 3000, at=1.0, slo=Slo(), of=slo_class("bulk"), max_tokens=8)
    chats = _serve(0, 15.0, big, 8)
    begun = sorted(e.first_scheduled_at for e in chats if e.first_scheduled_at is not None)
    # Those who run go on, and after it chats begin again at once.
    assert max(b - a for a, b in pairwise(begun)) < 6.0
    assert len(begun) > len(chats) / 4
