"""Room for streams that are expected: who makes it, for whom, and when nobody need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from controller.policy.capacity import Intake
from controller.policy.demand import Demand, Expected
from controller.policy.facts import ClassNames, FactReader, RunningTable
from controller.policy.kv import BlockLedger
from controller.policy.lengths import OutputLengths
from controller.policy.ordering import PrefillQueue
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from controller.policy.streams import StreamRoom
from costmodel.base import LatencyEstimate
from costmodel.features import FloatArray
from engine.ports import RequestView
from engine.request import Request, RequestPhase
from engine.step import StepPlan
from tests.controller.policy.doubles import (
    LinearCostModel,
    decode,
    running,
    slo_class,
    view_of,
    waiting,
)

# 50 ms, 1 ms a stream, 1 µs a token of context.
MODEL = LinearCostModel((1e-4, 1e-3, 1e-6, 0.0, 0.0), 0.05, margin=0.0)
CONFIG = PolicyConfig(pace=1.0, upper_pace=1.0, exploration=0.0)
CHAT = slo_class("chat")
BATCH = slo_class("batch")
LOOSE = Slo(ttft_s=60.0, tpot_s=1.0)


def expected(
    rate: float = 0.1, num_prompt: float = 1000.0, tpot_s: float = 0.1, weight: float = 1.0
) -> Expected:
    """Chats, of a first token within 2 s."""
    numbers = (rate, num_prompt, 2.0, tpot_s, weight, 1.0)
    return Expected(("chat",), *(np.array([number]) for number in numbers))


def intake_of(
    who: Expected | None,
    newcomers: Sequence[RequestView],
    running: Sequence[RequestView] = (),
    model: LinearCostModel = MODEL,
    num_output: int = 100,
    num_blocks: int = 100_000,
) -> tuple[Intake, PrefillQueue, StreamRoom]:
    """Return the intake beside those who run, the queue of the newcomers, and the room."""
    names = ClassNames()
    facts = FactReader(names).read(list(newcomers))
    streams = list(running)
    table = RunningTable(streams, len(streams), FactReader(names).read(streams))
    room = StreamRoom.of(table, newcomers, 64, CONFIG, model)
    if who is not None:
        room.make_room(who, table, facts, names, lambda _: num_output, CONFIG, model)
    view = view_of(running=streams, waiting=newcomers, num_blocks=num_blocks, max_model_len=131_072)
    lengths = OutputLengths()
    for name in ("chat", "batch", ""):
        lengths.observe(name, num_output)
    ledger = BlockLedger.of(view)
    intake = Intake(view, ledger, table, names, 256, 0.0, lengths, room, CONFIG.pace)
    queue = PrefillQueue.of(
        newcomers, facts, CONFIG, CONFIG.gap_limit_s, np.full(len(newcomers), 10.0), 0.05
    )
    return intake, queue, room


def batch(name: str, num_prompt: int, **changes: Any) -> Request:
    return waiting(name, num_prompt, slo=LOOSE, of=BATCH, **{"max_tokens": 1000, **changes})


def chat(name: str, num_prompt: int = 100) -> Request:
    return waiting(name, num_prompt, slo=Slo(ttft_s=2.0, tpot_s=0.1), of=CHAT)


def joins(who: Expected | None, newcomer: Request, **changes: Any) -> bool:
    """Whether it may join beside one stream that is no chat; foresight and plan must agree."""
    streams = [decode("s", slo=LOOSE, of=BATCH, num_prompt=100)]
    intake, queue, room = intake_of(who, [newcomer], streams, **changes)
    (joiner,) = intake._joiners(queue).at(np.arange(1))
    may_join = room.can_all_join([joiner])
    assert bool(intake.yielding(queue)[0]) == (not may_join)
    assert intake.admit(newcomer) == may_join
    assert intake.is_outpaced == (not may_join)
    return may_join


def test_a_long_context_waits_where_it_would_lock_many_short_ones_out() -> None:
    # 60,000 tokens make every step 0.11 s; a chat needs one of 0.1.
    assert joins(None, batch("b", 60_000))
    assert not joins(expected(), batch("b", 60_000))
    assert joins(expected(), batch("b", 30_000)), "it leaves the pace alone"


def test_who_costs_no_more_than_those_who_are_expected_makes_no_room() -> None:
    tight = expected(num_prompt=20_000.0, tpot_s=0.0525)
    assert joins(tight, batch("b", 60_000)), "three times as much"
    assert not joins(expected(num_prompt=10_000.0, tpot_s=0.0525), batch("b", 60_000))


def test_weights_count_as_many_times() -> None:
    assert joins(expected(num_prompt=60_000.0), batch("b", 60_000))
    assert not joins(expected(num_prompt=60_000.0, weight=4.0), batch("b", 60_000))


def test_the_same_pace_makes_no_room() -> None:
    streams = [decode("s", slo=LOOSE, of=BATCH, num_prompt=100)]
    # A chat of 40,000 tokens costs forty times the usual one, and keeps its own pace all the same.
    intake, queue, _ = intake_of(expected(), [chat("c", 40_000), batch("b", 10)], streams)
    assert not intake.yielding(queue).any()
    assert intake.admit(queue.at(0))


def test_best_effort_makes_room_for_every_promise() -> None:
    assert not joins(expected(num_prompt=60_000.0, tpot_s=0.105), waiting("free", 60_000))


def test_streams_that_are_expected_and_do_not_run_yet_are_counted() -> None:
    newcomer = batch("b", 40_000)
    # 0.05 + 0.002 + 0.04 s: 8 ms are left. Ten chats a second of 100 tokens at 0.1 s each are 100.
    assert joins(expected(rate=0.1), newcomer)
    assert not joins(expected(rate=10.0), newcomer)
    # Once they run they are in the step itself.
    chats = [decode(f"c{i}", slo=Slo(tpot_s=0.2), of=CHAT, num_prompt=10) for i in range(100)]
    intake, _, room = intake_of(expected(rate=5.0, num_prompt=10.0, tpot_s=0.2), [newcomer], chats)
    assert room.rents is not None
    assert room.rents.guards[0].num_missing == 0.0
    assert intake.admit(newcomer), "0.19 s, and nobody is missing"


def test_those_who_join_are_not_missing_any_more() -> None:
    chats, newcomer = [chat(f"c{i}") for i in range(8)], batch("b", 39_000)
    streams = [decode("s", slo=LOOSE, of=BATCH, num_prompt=100)]
    # Eight are expected, nine milliseconds, and 8.9 are left beside the newcomer.
    intake, _, _ = intake_of(expected(rate=0.8, num_prompt=100.0), [*chats, newcomer], streams)
    assert not intake.admit(newcomer)
    assert all(map(intake.admit, chats))
    assert intake.admit(newcomer)


def test_who_is_kept_out_stands_in_nobodys_way() -> None:
    """Nor is its context in the step of those who do join, nor its place used up."""
    crowd = [waiting(f"free{i}", 60_000, at=-29.5) for i in range(100)]
    newcomer = chat("c")
    streams = [decode("s", slo=LOOSE, of=BATCH, num_prompt=45_000)]
    intake, queue, _ = intake_of(expected(rate=1.0), [*crowd, newcomer], streams)
    assert intake.yielding(queue).sum() == 100
    delays_s = intake.start_delays_s(queue, np.arange(101), 0.1, intake.yielding(queue))
    assert delays_s is not None
    place = int(queue.index.tolist().index(100))
    assert delays_s[place] == 0.0
    assert (np.delete(delays_s, place) > 0.0).all()
    planner = SloPlanner(CONFIG, MODEL, OutputLengths(default=16), demand=demand())
    view = view_of(
        now=60.0,
        running=[decode("s", slo=LOOSE, of=BATCH, num_prompt=45_000, last_at=60.0)],
        waiting=[
            *[waiting(f"free{i}", 60_000, at=30.5) for i in range(100)],
            waiting("c", 100, at=60.0, slo=Slo(ttft_s=2.0, tpot_s=0.1), of=CHAT),
        ],
        num_blocks=100_000,
        max_model_len=131_072,
    )
    assert "c" in [work.request_id for work in planner.plan(view).work]


def test_a_stream_that_was_preempted_comes_back_and_holds_nobody_up() -> None:
    stream = running(batch("b", 60_000), 0, 5)
    stream.phase = RequestPhase.PREEMPTED
    streams = [decode("s", slo=LOOSE, of=BATCH, num_prompt=100)]
    intake, queue, _ = intake_of(expected(), [stream], streams)
    assert not intake.yielding(queue).any()
    assert intake._joiners(queue).at(np.arange(1))[0].rent == 0.0
    assert intake.admit(stream)


def test_an_end_to_end_target_says_nothing_of_a_pace() -> None:
    by_end = waiting("e", 60_000, slo=Slo(e2e_s=90.0), of=BATCH)
    assert joins(expected(), by_end)


def test_a_short_answer_costs_little() -> None:
    assert joins(expected(), batch("b", 60_000, max_tokens=4))


def test_a_class_that_hardly_comes_any_more_keeps_nobody_out() -> None:
    assert joins(expected(rate=0.04), batch("b", 60_000))
    assert not joins(expected(rate=0.06), batch("b", 60_000))


def test_where_an_empty_step_keeps_no_such_pace_nobody_waits_for_it() -> None:
    assert joins(expected(tpot_s=0.05), batch("b", 60_000))
    streams = [decode("s", slo=LOOSE, of=BATCH, num_prompt=100)]
    assert intake_of(expected(tpot_s=0.05), [batch("b", 60_000)], streams)[2].rents is None


def test_without_looser_newcomers_nothing_is_asked() -> None:
    streams = [decode("s", slo=LOOSE, of=BATCH, num_prompt=100)]
    assert intake_of(expected(), [chat("c")], streams)[2].rents is None
    assert intake_of(expected(tpot_s=math.inf), [batch("b", 100)], streams)[2].rents is None


def test_alone_in_an_empty_engine_nothing_is_asked() -> None:
    intake, queue, room = intake_of(expected(), [batch("b", 60_000)])
    assert room.rents is None
    assert not intake.yielding(queue).any()
    # The first of two has nobody to make room for either: nobody is faster alone.
    intake, queue, room = intake_of(expected(), [batch("a", 60_000), batch("b", 60_000)])
    assert room.rents is not None
    assert not intake.yielding(queue).any()


class Jumping(LinearCostModel):
    """30 ms more with any prompt token."""

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s = super().predict(features).mean_s + 0.03 * (features[:, 0] > 0.0)
        return LatencyEstimate(mean_s, mean_s)


def test_on_a_machine_that_jumps_prompts_must_fit_beside_it_too() -> None:
    model = Jumping((1e-4, 1e-3, 1e-6, 0.0, 0.0), 0.05, margin=0.0)
    assert joins(expected(), batch("b", 30_000))
    assert not joins(expected(), batch("b", 30_000), model=model)
    assert joins(expected(), batch("b", 15_000), model=model)


def demand(num: int = 60) -> Demand:
    found = Demand()
    for no in range(1, num + 1):
        found.observe("chat", f"c{no}", no, no * 1.0, 500, Slo(ttft_s=2.0, tpot_s=0.1), 1.0)
    return found


@pytest.mark.parametrize("newcomer", [batch("b", 60_000), waiting("b", 60_000)])
def test_the_planner_keeps_it_waiting_and_says_so(newcomer: Request) -> None:
    newcomer.arrived_at = 59.0
    view = view_of(
        now=60.0,
        running=[decode("s", slo=Slo(tpot_s=0.9), of=BATCH, last_at=60.0)],
        waiting=[newcomer],
        num_blocks=10_000,
        max_model_len=131_072,
    )
    alone = SloPlanner(CONFIG, MODEL, OutputLengths(default=16))
    crowded = SloPlanner(CONFIG, MODEL, OutputLengths(default=16), demand=demand())
    assert alone.plan(view).num_prefill_tokens > 0
    step = crowded.plan(view)
    assert step.num_prefill_tokens == 0
    assert step.decision is not None
    assert step.decision.binding_constraint == "decode_slack"
    assert crowded.plan(view) == step


def test_best_effort_that_is_old_gets_its_turn_all_the_same() -> None:
    old = waiting("b", 60_000)
    planner = SloPlanner(CONFIG, MODEL, OutputLengths(default=16), demand=demand())
    tokens = [
        planner.plan(
            view_of(
                now=60.0,
                step_no=step_no,
                running=[decode("s", slo=Slo(tpot_s=0.9), of=BATCH, last_at=60.0)],
                waiting=[old],
                num_blocks=10_000,
                max_model_len=131_072,
            )
        ).num_prefill_tokens
        for step_no in range(1, CONFIG.turn_period + 1)
    ]
    assert max(tokens) > 0


def test_hours_later_nobody_waits_for_who_came_once() -> None:
    planner = SloPlanner(CONFIG, MODEL, OutputLengths(default=16), demand=demand(1000))
    stream = decode("s", slo=Slo(tpot_s=0.9), of=BATCH)
    tokens = []
    for minutes in (0.0, 30.0):
        now = 1001.0 + 60.0 * minutes
        stream.last_token_at = now
        view = view_of(
            now=now,
            running=[stream],
            waiting=[batch("b", 60_000, at=now)],
            num_blocks=10_000,
            max_model_len=131_072,
        )
        tokens.append(planner.plan(view).num_prefill_tokens)
    assert tokens[0] == 0
    assert tokens[1] > 0


def test_who_is_kept_out_is_no_work_that_others_must_hurry_for() -> None:
    def plan(*crowd: Request) -> StepPlan:
        planner = SloPlanner(CONFIG, MODEL, OutputLengths(default=16), demand=demand())
        streams = [decode(f"s{i}", slo=Slo(tpot_s=0.9), of=BATCH, last_at=60.0) for i in range(2)]
        return planner.plan(
            view_of(
                now=60.0,
                running=streams,
                waiting=crowd,
                num_blocks=10_000,
                max_model_len=131_072,
            )
        )

    new = waiting("c", 3000, at=60.0, slo=Slo(ttft_s=2.0, tpot_s=0.1), of=CHAT)
    alone = plan(new).decision
    assert alone is not None
    for other in (batch("b", 60_000, at=59.0), waiting("free", 60_000, at=59.0)):
        beside = plan(other, new).decision
        assert beside is not None
        assert beside.token_budget == alone.token_budget
        assert beside.lower_bound_tokens == alone.lower_bound_tokens


def test_who_has_been_overtaken_as_often_as_is_allowed_makes_room_for_nobody() -> None:
    elder, later = batch("b", 60_000, at=59.0), batch("later", 100, at=59.5)
    elder.arrival_no = 1

    def started(later_no: int) -> set[str]:
        planner = SloPlanner(CONFIG, MODEL, OutputLengths(default=16), demand=demand())
        later.arrival_no = later_no
        view = view_of(
            now=60.0,
            running=[decode("s", slo=Slo(tpot_s=0.9), of=BATCH, last_at=60.0)],
            waiting=[elder, later],
            num_blocks=10_000,
            max_model_len=131_072,
        )
        return {work.request_id for work in planner.plan(view).work} - {"s"}

    assert started(61) == {"later"}
    assert "b" in started(71)


def test_who_finds_no_blocks_takes_no_room() -> None:
    long, new = batch("b", 47_000), chat("c")
    streams = [decode("s", slo=Slo(tpot_s=0.1), of=CHAT, num_prompt=100)]
    intake, _, _ = intake_of(None, [long, new], streams, num_blocks=2000)
    assert not intake.admit(long)
    assert intake.is_short
    assert intake.admit(new)


def test_who_ends_will_be_missing_again() -> None:
    chats = [decode(f"c{i}", slo=Slo(tpot_s=0.2), of=CHAT, num_prompt=10) for i in range(8)]
    intake, queue, room = intake_of(
        expected(rate=0.8, num_prompt=10.0, tpot_s=0.1), [batch("b", 41_000)], chats
    )
    (joiner,) = intake._joiners(queue).at(np.arange(1))
    assert room.yields(joiner), "0.1001 s"
    for each in chats[1:]:
        room.leave(each.num_known_tokens, 1)
    # 0.0931 s, but seven that are missing now take 7 ms.
    assert room.yields(joiner)
    assert not room.yields(joiner._replace(num_tokens=40_000.0))


def test_behind_many_who_join_at_once_the_others_wait() -> None:
    crowd = [chat(f"c{i}", 10) for i in range(34)]
    whales = [batch(f"b{i}", 60_000) for i in range(12)]
    streams = [decode("s", slo=LOOSE, of=BATCH, num_prompt=100)]
    who = expected(rate=1.0, num_prompt=10.0)
    intake, queue, room = intake_of(who, [*crowd, *whales], streams)
    delays_s = intake.start_delays_s(queue, np.arange(46), 0.1, intake.yielding(queue))
    assert delays_s is not None
    is_whale = intake.yielding(queue)
    assert is_whale.sum() == 12
    joiners = intake._joiners(queue).at(np.arange(46))
    assert is_whale.tolist() == [room.yields(joiner) for joiner in joiners]
    assert (delays_s[is_whale] > 0.0).all()


def test_scoring_streams_nothing_and_costs_nobody_a_pace() -> None:
    assert joins(expected(), waiting("score", 60_000, max_tokens=0))
