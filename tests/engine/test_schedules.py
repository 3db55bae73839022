"""Preemption, sharing and cancellation change nobody's tokens, whenever they happen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.ports import DeviceLostError, EngineView
from engine.request import FinishReason, Request, RequestPhase
from engine.step import AdmissionAction, Preemption, PreemptionMethod, StepPlan, StepWork
from tests.engine.shadow import (
    Scripted,
    ShadowEngine,
    continuation,
    make_engine,
    make_request,
    plan_everyone,
)

SWAP, DROP = PreemptionMethod.SWAP, PreemptionMethod.RECOMPUTE


def without(plan: StepPlan, *names: str) -> StepPlan:
    return replace(plan, work=tuple(w for w in plan.work if w.request_id not in names))


def preempting(schedule: dict[int, PreemptionMethod]) -> Callable[[EngineView, StepPlan], StepPlan]:
    """Preempt `victim` at these steps, if it runs then."""

    def change(view: EngineView, plan: StepPlan) -> StepPlan:
        method = schedule.get(view.step_no)
        if method is None or "victim" not in {r.request_id for r in view.running}:
            return plan
        return replace(without(plan, "victim"), preemptions=(Preemption("victim", method),))

    return change


def submit_three(engine: ShadowEngine) -> list[Request]:
    """A victim between two neighbours, one of whom begins like it."""
    requests = [
        make_request("before", range(9), 7),
        make_request("victim", range(17), 6),
        make_request("after", range(3, 14), 7),
    ]
    for request in requests:
        engine.loop.submit(request)
    return requests


def check(requests: list[Request]) -> None:
    for request in requests:
        expected = continuation(request.prompt_token_ids, request.max_tokens)
        assert request.output_token_ids == expected, request.request_id
        assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_prefix_cache_enabled", [False, True])
@pytest.mark.parametrize("methods", list(itertools.product([SWAP, DROP], repeat=2)))
@pytest.mark.parametrize("chunk", [3, 6, 64])
def test_preempted_at_any_two_steps(
    chunk: int, methods: tuple[PreemptionMethod, ...], is_prefix_cache_enabled: bool
) -> None:
    num_preempted = 0
    for steps in itertools.combinations(range(2, 14), 2):
        planner = Scripted(chunk, preempting(dict(zip(steps, methods, strict=True))))
        engine = make_engine(
            planner, num_host_blocks=12, is_prefix_cache_enabled=is_prefix_cache_enabled
        )
        requests = submit_three(engine)
        engine.run()
        check(requests)
        engine.assert_idle()
        num_preempted += requests[1].num_preemptions
        swapped = sum(report.num_swapped_blocks for report in engine.reports)
        if requests[1].num_preemptions == 2:
            assert (swapped > 0) == (SWAP in methods)
    assert num_preempted > (60 if chunk < 64 else 30)


def test_a_swap_without_room_on_the_host_is_a_drop() -> None:
    engine = make_engine(Scripted(64, preempting({3: SWAP})), num_host_blocks=2)
    requests = submit_three(engine)
    engine.run()
    check(requests)
    assert requests[1].num_preemptions == 1
    assert all(report.num_swapped_blocks == 0 for report in engine.reports)
    done = [p.method for report in engine.reports for p in report.plan.preemptions]
    assert done == [DROP]


@pytest.mark.parametrize("is_prefix_cache_enabled", [False, True])
@pytest.mark.parametrize("copy", ["swap_out", "swap_in"])
def test_a_swap_that_fails_computes_again(
    copy: str, is_prefix_cache_enabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for step_no in range(2, 9):
        engine = make_engine(
            Scripted(6, preempting({step_no: SWAP})),
            num_host_blocks=12,
            is_prefix_cache_enabled=is_prefix_cache_enabled,
        )
        requests = submit_three(engine)
        caplog.clear()
        break_copies(engine, copy, RuntimeError("no memory"))
        engine.run()
        check(requests)
        assert "victim is computed again" in caplog.text
        assert "no memory" in caplog.text
        # What could not come back was preempted once more, and the reports say what was done.
        done = [p.method for report in engine.reports for p in report.plan.preemptions]
        assert done == ([SWAP, DROP] if copy == "swap_in" else [DROP])
        assert requests[1].num_preemptions == len(done)
        # The step that paid for the copy says so, and no other.
        assert [report.num_failed_swaps for report in engine.reports] == [
            sum(p.method is DROP for p in report.plan.preemptions) for report in engine.reports
        ]
        engine.assert_idle()
        assert engine.loop._memory._prefix.is_idle


@pytest.mark.parametrize("copy", ["swap_out", "swap_in"])
def test_a_device_that_is_lost_in_a_copy_is_fatal_and_keeps_the_books(copy: str) -> None:
    engine = make_engine(Scripted(64, preempting({3: SWAP})), num_host_blocks=12)
    requests = submit_three(engine)
    break_copies(engine, copy, DeviceLostError("gone"))
    with pytest.raises(DeviceLostError, match="gone"):
        engine.run()
    assert len(engine.loop.abort("gone")) == 3
    assert all(request.finish_reason is FinishReason.ERROR for request in requests)
    assert engine.pool.num_used == 0
    assert engine.loop._memory.num_host_blocks_used == 0
    assert engine.loop._memory._prefix.is_idle


def break_copies(engine: ShadowEngine, name: str, error: Exception) -> None:
    def broken(blocks: object, host_blocks: object) -> None:
        raise error

    setattr(engine.runner, name, broken)


def test_a_swapped_request_keeps_its_place_while_others_use_its_blocks() -> None:
    """The device's blocks are overwritten by a newcomer before the victim comes back to others."""

    newcomer = make_request("newcomer", range(100, 130), 5)

    def change(view: EngineView, plan: StepPlan) -> StepPlan:
        if view.step_no == 4:
            return StepPlan(preemptions=(Preemption("victim", SWAP),))
        return plan if newcomer.is_finished or view.step_no < 4 else without(plan, "victim")

    engine = make_engine(Scripted(64, change), num_blocks=10, num_host_blocks=8)
    victim = make_request("victim", range(20), 8)
    engine.loop.submit(victim)
    for _ in range(4):
        engine.step()
    assert (victim.phase, victim.num_computed_tokens) == (RequestPhase.PREEMPTED, 22)
    assert len(victim.host_block_table) == 6
    assert engine.reports[-1].num_host_blocks_used == 6
    engine.loop.submit(newcomer)
    engine.run()
    check([victim, newcomer])
    assert sum(report.num_swapped_blocks for report in engine.reports) == 12
    engine.assert_idle()


def test_identical_prompts_at_once_compute_the_prompt_once() -> None:
    """The later ones wait a step and then find what the first one computed."""

    def change(view: EngineView, plan: StepPlan) -> StepPlan:
        if view.step_no > 1:
            return plan
        later = [f"r{i}" for i in range(1, 5)]
        kept = tuple(a for a in plan.admissions if a.request_id not in later)
        return replace(without(plan, *later), admissions=kept)

    engine = make_engine(Scripted(64, change))
    requests = [make_request(f"r{i}", range(18), 5) for i in range(5)]
    for request in requests:
        engine.loop.submit(request)
    engine.run()
    check(requests)
    # 18 tokens are four full blocks and two tokens more.
    assert [request.num_cached_tokens for request in requests] == [0, 16, 16, 16, 16]
    prefill = sum(report.plan.num_prefill_tokens for report in engine.reports)
    assert prefill == 18 + 4 * 2
    # Four shared blocks; beyond them two of one's own, and the first is gone before the last turn.
    assert max(report.num_blocks_used for report in engine.reports) == 4 + 4 * 2


def test_the_next_turn_of_a_conversation_begins_with_the_answer() -> None:
    engine = make_engine()
    first = make_request("first", range(10), 10)
    engine.loop.submit(first)
    engine.run()
    history = [*first.prompt_token_ids, *first.output_token_ids, 1, 2, 3]
    second = make_request("second", history, 5)
    engine.loop.submit(second)
    engine.run()
    check([first, second])
    # The newest token of the answer was never computed: 19 tokens, four full blocks.
    assert second.num_cached_tokens == 16


@pytest.mark.parametrize("is_prefix_cache_enabled", [False, True])
def test_a_prompt_that_is_only_scored_ends_without_a_token(is_prefix_cache_enabled: bool) -> None:
    engine = make_engine(is_prefix_cache_enabled=is_prefix_cache_enabled)
    first = make_request("first", range(13), 0, num_prompt_logprobs=0)
    again = make_request("again", range(13), 2, num_prompt_logprobs=0)
    for request in (first, again):
        engine.loop.submit(request)
        engine.run()
    assert (first.output_token_ids, first.finish_reason) == ([], FinishReason.LENGTH)
    assert first.first_token_at is None
    assert again.output_token_ids == continuation(range(13), 2)
    for request in (first, again):
        assert request.num_cached_tokens == 0
        scored = [
            token.token_id
            for report in engine.reports
            for scores in report.prompt_scores
            if scores.request_id == request.request_id
            for token in scores.tokens
        ]
        assert scored == list(range(1, 13))
    engine.assert_idle()


@pytest.mark.parametrize("method", [SWAP, DROP])
@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_scores_come_once_and_in_order_whenever_preempted(
    chunk: int, method: PreemptionMethod
) -> None:
    for step_no in range(2, 20):
        engine = make_engine(Scripted(chunk, preempting({step_no: method})), num_host_blocks=8)
        victim = make_request("victim", range(13), 3, num_prompt_logprobs=2)
        engine.loop.submit(victim)
        engine.run()
        check([victim])
        runs = [scores for report in engine.reports for scores in report.prompt_scores]
        positions = [s.start + i for s in runs for i in range(len(s.tokens))]
        assert positions == list(range(1, 13))
        assert [t.token_id for s in runs for t in s.tokens] == positions


@st.composite
def lives(draw: st.DrawFn) -> list[Request]:
    """Requests from a small alphabet, so that beginnings collide."""
    requests = []
    for i in range(draw(st.integers(1, 7))):
        stem = draw(st.sampled_from([(0,) * 30, (1, 0) * 15, tuple(range(30))]))
        length = draw(st.integers(1, 24))
        tail = draw(st.lists(st.integers(0, 1), max_size=4))
        request = make_request(
            f"r{i}",
            [*stem[:length], *tail],
            draw(st.integers(0, 9)),
            num_prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        )
        request.cache_salt = draw(st.sampled_from([None, None, "a"]))
        requests.append(request)
    return requests


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests=lives(), data=st.data())
def test_any_schedule_over_a_small_pool(requests: list[Request], data: st.DataObject) -> None:
    """Random chunks, order, preemptions, swaps and cancellations; only what fits is planned."""
    num_blocks, block_size = 18, 4
    cancelled: set[str] = set()

    def change(view: EngineView, plan: StepPlan) -> StepPlan:
        free = view.num_free_blocks
        holders = {block: view.num_holders(block) for block in range(num_blocks)}
        preemptions = []
        for request in view.running:
            choice = data.draw(st.sampled_from(["go", "go", "go", "swap", "drop"]))
            if choice == "go":
                continue
            preemptions.append(Preemption(request.request_id, SWAP if choice == "swap" else DROP))
            for block in request.block_table:
                holders[block] -= 1
                free += holders[block] == 0
        gone = {preemption.request_id for preemption in preemptions}
        everybody = {
            r.request_id: r for g in (view.waiting, view.running, view.preempted) for r in g
        }
        work = []
        order: list[StepWork] = data.draw(st.permutations(plan.work))
        for item in order:
            if item.request_id in gone or data.draw(st.integers(0, 4)) == 0:
                continue
            request = everybody[item.request_id]
            num_tokens = data.draw(st.integers(1, item.num_tokens))
            table = request.block_table
            context = item.num_computed_tokens + num_tokens
            needed = max(0, -(-context // block_size) - len(table))
            if request.phase is not RequestPhase.RUNNING:
                needed += sum(holders[block] == 0 for block in table)
            if needed > free:
                continue
            free -= needed
            if request.phase is not RequestPhase.RUNNING:
                for block in table:
                    holders[block] += 1
            work.append(item._replace(num_tokens=num_tokens))
        started = {item.request_id for item in work}
        return StepPlan(
            work=tuple(work),
            admissions=tuple(a for a in plan.admissions if a.request_id in started),
            preemptions=tuple(preemptions),
        )

    engine = make_engine(Scripted(9, change), num_blocks=num_blocks, num_host_blocks=9)
    pending = list(requests)
    for _ in range(60):
        is_arriving: bool = data.draw(st.booleans())
        if pending and is_arriving:
            engine.loop.submit(pending.pop(0))
        if data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(requests))
            if victim not in pending and not victim.is_finished:
                engine.loop.finish(victim.request_id, FinishReason.CANCELLED)
                cancelled.add(victim.request_id)
        engine.step()
        held = {b for r in requests if r.phase is RequestPhase.RUNNING for b in r.block_table}
        assert engine.pool.num_used == len(held)
    # Now one after the other, so that whatever is left comes to its end.
    engine.loop._planner = _OneByOne()
    for request in pending:
        engine.loop.submit(request)
    engine.run()
    for request in requests:
        expected = continuation(request.prompt_token_ids, request.max_tokens)
        if request.finish_reason is FinishReason.CANCELLED:
            assert request.request_id in cancelled
            expected = expected[: request.num_output_tokens]
        assert request.output_token_ids == expected
    scored = [s for report in engine.reports for s in report.prompt_scores]
    for request in requests:
        positions = [
            s.start + i
            for s in scored
            if s.request_id == request.request_id
            for i in range(len(s.tokens))
        ]
        assert positions == list(range(1, len(positions) + 1))
        if request.finish_reason is FinishReason.LENGTH and (
            request.sampling.num_prompt_logprobs is not None
        ):
            assert len(positions) == request.num_prompt_tokens - 1
    engine.assert_idle()
    assert sorted(engine.runner.forgotten) == sorted(r.request_id for r in requests)


class _OneByOne:
    """Everybody else gives way to the first."""

    def plan(self, view: EngineView) -> StepPlan:
        everybody = [r.request_id for g in (view.running, view.preempted, view.waiting) for r in g]
        plan = plan_everyone(view, 9, everybody[1:])
        others = (r.request_id for r in view.running)
        preemptions = tuple(Preemption(i, DROP) for i in others if i != everybody[0])
        assert all(a.action is AdmissionAction.ADMIT for a in plan.admissions)
        return replace(plan, preemptions=preemptions)
