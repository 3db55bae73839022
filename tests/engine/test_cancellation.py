"""`finish(request, reason)` is the one door, whatever state the request is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from engine.ports import EngineView
from engine.request import FinishReason, Request, RequestPhase
from engine.step import Preemption, PreemptionMethod, StepOutput, StepPlan, StepReport
from tests.engine.shadow import (
    Scripted,
    ShadowEngine,
    ShadowRunner,
    continuation,
    make_engine,
    make_request,
)

PROMPT = range(21)
NUM_NEW = 5


def state_of(victim: Request) -> str:
    """The states that the issue of a cancelled request can meet, by name."""
    if victim.is_finished:
        return "finished"
    if victim.phase is RequestPhase.WAITING:
        return "waiting with blocks" if victim.block_table else "waiting"
    if victim.phase is RequestPhase.PREEMPTED:
        return "swapped" if victim.host_block_table else "preempted"
    if victim.num_output_tokens == 0:
        return "last chunk" if victim.num_remaining_tokens <= 6 else "mid-chunk"
    return "first token" if victim.num_output_tokens == 1 else "decoding"


class Cancelling:
    """Cancels the victim once, while its n-th step executes or right after it was committed."""

    def __init__(self, engine: ShadowEngine, step_no: int, moment: str) -> None:
        self.engine, self.step_no, self.moment = engine, step_no, moment
        self.is_done = False
        self.ended: list[str] = []
        execute = ShadowRunner.execute

        def executing(plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
            output = execute(engine.runner, plan, requests)
            self.at("execute", engine.loop.step_no + 1)
            return output

        engine.runner.execute = executing  # type: ignore[method-assign]
        engine.loop._listeners = (self,)

    def at(self, moment: str, step_no: int) -> None:
        if (moment, step_no) == (self.moment, self.step_no):
            self.is_done = True
            self.engine.loop.finish("victim", FinishReason.CANCELLED)

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        self.ended += report.finished
        self.at("listener", report.step_no)


def hold_back(view: EngineView, plan: StepPlan) -> StepPlan:
    """The victim starts at step 4; a twin computes its beginning meanwhile. It is preempted at 6
    and at 9, by both methods, and waits a step each time.
    """
    victim = [r for r in (*view.waiting, *view.running, *view.preempted) if r.max_tokens == NUM_NEW]
    if not victim:
        return plan
    work = tuple(w for w in plan.work if w.request_id != "victim")
    kept = tuple(a for a in plan.admissions if a.request_id != "victim")
    if view.step_no < 4 or view.step_no in (7, 10):
        return replace(plan, work=work, admissions=kept)
    if view.step_no in (6, 9) and victim[0].phase is RequestPhase.RUNNING:
        is_first = view.step_no == 6
        method = PreemptionMethod.RECOMPUTE if is_first else PreemptionMethod.SWAP
        return replace(plan, work=work, preemptions=(Preemption("victim", method),))
    return plan


def neighbours() -> list[Request]:
    """A twin by prompt and a stranger, both longer than the victim."""
    return [make_request("twin", PROMPT, 22), make_request("stranger", range(50, 59), 24)]


@pytest.mark.parametrize("moment", ["execute", "listener"])
@pytest.mark.parametrize("is_sharing", [True, False])
def test_cancelled_in_every_state(is_sharing: bool, moment: str) -> None:
    states = set()
    for step_no in range(1, 20):
        engine = make_engine(
            Scripted(6, hold_back), num_host_blocks=10, is_prefix_cache_enabled=is_sharing
        )
        cancelling = Cancelling(engine, step_no, moment)
        others = neighbours()
        victim = make_request("victim", PROMPT, NUM_NEW)
        for request in (*others, victim):
            engine.loop.submit(request)
        before = ""
        while not cancelling.is_done:
            before = state_of(victim)
            engine.step()
        state = state_of(victim)
        # Told while a step executes, it is still what it was before that step.
        states.add(before if moment == "execute" else state)
        if moment == "execute" and before != state == "finished":
            states.add("finishing")
        engine.step()
        engine.step()
        # Two steps later nothing of it is left, on the device or on the host.
        assert victim.is_finished
        assert (victim.block_table, victim.host_block_table) == ([], [])
        held = {b for r in others if r.phase is RequestPhase.RUNNING for b in r.block_table}
        assert engine.pool.num_used == len(held)
        assert engine.reports[-1].num_host_blocks_used == 0
        # Who had ended, in that very step or before, has ended by itself.
        is_late = state == "finished"
        assert victim.finish_reason is (FinishReason.LENGTH if is_late else FinishReason.CANCELLED)
        engine.run()
        # Exactly one ending each, and nobody else noticed.
        assert sorted(cancelling.ended) == ["stranger", "twin", "victim"]
        assert sorted(engine.runner.forgotten) == ["stranger", "twin", "victim"]
        for request in others:
            assert request.output_token_ids == continuation(
                request.prompt_token_ids, request.max_tokens
            )
        expected = continuation(PROMPT, NUM_NEW)
        assert victim.output_token_ids == expected[: victim.num_output_tokens]
        engine.assert_idle()
    wanted = {"first token", "decoding", "preempted", "swapped", "finished"}
    wanted |= {"finishing"} if moment == "execute" else set()
    wanted |= {"waiting with blocks"} if is_sharing else {"waiting", "mid-chunk", "last chunk"}
    assert wanted <= states


@pytest.mark.parametrize("when", ["before it is taken", "twice", "after its end", "unknown"])
def test_a_door_that_may_be_knocked_at_any_time(when: str) -> None:
    engine = make_engine()
    victim = make_request("victim", PROMPT, NUM_NEW)
    cancelling = Cancelling(engine, -1, "")
    engine.loop.submit(victim)

    def knock(name: str = "victim") -> None:
        engine.loop.finish(name, FinishReason.CANCELLED)

    if when == "twice":
        engine.step()
        knock()
    if when == "after its end":
        engine.run()
    knock("nobody" if when == "unknown" else "victim")
    engine.run()
    assert cancelling.ended == ["victim"]
    is_cancelled = when in ("before it is taken", "twice")
    assert (victim.finish_reason is FinishReason.CANCELLED) == is_cancelled
    engine.assert_idle()


def test_a_stop_string_ends_a_request_like_any_other_ending() -> None:
    engine = make_engine()
    victim = make_request("victim", PROMPT, NUM_NEW)
    engine.loop.submit(victim)
    for _ in range(5):
        engine.step()
    assert victim.num_output_tokens > 0
    engine.loop.finish("victim", FinishReason.STOP)
    engine.run()
    assert victim.finish_reason is FinishReason.STOP
    engine.assert_idle()


def test_who_is_cancelled_while_the_loop_looks_at_arrivals_is_not_missed() -> None:
    """Another thread may hand a request in and take it back between two lines of the loop."""
    engine = make_engine()
    victim = make_request("victim", PROMPT, 30)
    engine.loop.submit(make_request("other", PROMPT, NUM_NEW))
    take_arrivals = engine.loop._take_arrivals

    def interrupted() -> None:
        take_arrivals()
        if not engine.reports:
            engine.loop.submit(victim)
            engine.loop.finish("victim", FinishReason.CANCELLED)

    engine.loop._take_arrivals = interrupted  # type: ignore[method-assign]
    for _ in range(2):
        engine.step()
    assert victim.finish_reason is FinishReason.CANCELLED
    engine.run()
    engine.assert_idle()
