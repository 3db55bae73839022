"""The loop: commit only what was executed, one door out, steps that tile time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.errors import IllegalMoveError, PlanError
from engine.loop import EngineLoop
from engine.ports import EngineView
from engine.request import (
    FinishReason,
    Request,
    RequestPhase,
    SamplingParams,
)
from engine.simulated import SimulatedRunner
from engine.step import (
    Admission,
    AdmissionAction,
    Preemption,
    StepOutput,
    StepPlan,
    StepReport,
    StepWork,
    WorkKind,
)

CONFIG = EngineConfig(
    block_size=4, num_blocks=16, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32
)


def work_for(request: Request, num_tokens: int) -> StepWork:
    kind = WorkKind.DECODE if request.is_decoding else WorkKind.PREFILL
    return StepWork(request.request_id, kind, num_tokens, request.num_computed_tokens)


@dataclass
class Everyone:
    """Plans a chunk of at most `chunk` for everybody; `change` may spoil the plan."""

    chunk: int = 6
    change: Callable[[EngineView, StepPlan], StepPlan] = field(default=lambda view, plan: plan)

    def plan(self, view: EngineView) -> StepPlan:
        requests = [*view.running, *view.preempted, *view.waiting]
        admissions = tuple(
            Admission(request.request_id, AdmissionAction.ADMIT, "admitted")
            for request in view.waiting
        )
        work = tuple(
            work_for(request, min(self.chunk, request.num_remaining_tokens))  # type: ignore[arg-type]
            for request in requests
        )
        return self.change(view, StepPlan(work=work, admissions=admissions))


@dataclass
class Harness:
    """A loop on a virtual clock: planning takes 1 s, a step 10 s, each listener 2 s."""

    planner: Everyone
    loop: EngineLoop
    pool: BlockPool
    clock: VirtualClock
    forgotten: list[str]
    reports: list[StepReport]
    failures: list[str]


@pytest.fixture
def harness() -> Harness:
    clock = VirtualClock(100.0)
    planner = Everyone()
    forgotten: list[str] = []
    reports: list[StepReport] = []
    failures: list[str] = []

    class Runner(SimulatedRunner):
        def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
            if failures:
                raise RuntimeError(failures.pop())
            return super().execute(plan, requests)

        def forget(self, request_id: str) -> None:
            forgotten.append(request_id)

    class Slow:
        def plan(self, view: EngineView) -> StepPlan:
            clock.advance(1.0)
            return planner.plan(view)

    class Listener:
        def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
            reports.append(report)
            clock.advance(2.0)

    pool = BlockPool(CONFIG.num_blocks, CONFIG.block_size)
    loop = EngineLoop(
        Slow(), Runner(clock, lambda plan: 10.0, token_id=7), pool, CONFIG, clock, (Listener(),)
    )
    return Harness(planner, loop, pool, clock, forgotten, reports, failures)


def make(name: str, num_prompt: int = 10, max_tokens: int = 3, **sampling: object) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(name, tuple(range(num_prompt)), max_tokens, 100.0, params)


def run(harness: Harness) -> None:
    while harness.loop.step() is not None:
        pass


def test_a_request_from_arrival_to_end(harness: Harness) -> None:
    request = make("a")
    harness.loop.submit(request)
    run(harness)
    # Ten prompt tokens in chunks of six, then two decodes: the last chunk samples the first token.
    assert [r.plan.num_prefill_tokens for r in harness.reports] == [6, 4, 0, 0]
    assert [len(r.tokens) for r in harness.reports] == [0, 1, 1, 1]
    assert [t.index for r in harness.reports for t in r.tokens] == [0, 1, 2]
    assert request.output_token_ids == [7, 7, 7]
    assert request.finish_reason is FinishReason.LENGTH
    assert [r.finished for r in harness.reports] == [(), (), (), ("a",)]
    assert harness.forgotten == ["a"]
    assert harness.pool.num_used == 0


def test_steps_tile_time_and_include_who_watches(harness: Harness) -> None:
    harness.loop.submit(make("a"))
    run(harness)
    starts = [r.started_at for r in harness.reports]
    # 1 s planning and 10 s execution; from the second step on, the listener's 2 s before it too.
    assert [r.duration_s for r in harness.reports] == [11.0, 13.0, 13.0, 13.0]
    ends = [r.started_at + r.duration_s for r in harness.reports]
    assert starts[1:] == ends[:-1]
    assert all((r.planner_s, r.execute_s) == (1.0, 10.0) for r in harness.reports)
    # A token's instant is when it was computed: after execution, before anybody was told.
    assert [t.at for r in harness.reports for t in r.tokens] == [124.0, 137.0, 150.0]


def test_waiting_for_work_belongs_to_no_step(harness: Harness) -> None:
    harness.loop.submit(make("a", 4, 1))
    run(harness)
    harness.clock.advance(1000.0)
    harness.loop.submit(make("b", 4, 1))
    run(harness)
    assert [r.duration_s for r in harness.reports] == [11.0, 11.0]


def test_an_idle_loop_reports_nothing(harness: Harness) -> None:
    assert harness.loop.step() is None
    assert not harness.loop.has_work
    assert harness.reports == []


def test_a_stop_token_ends_but_not_before_min_tokens(harness: Harness) -> None:
    early = make("early", max_tokens=9, stop_token_ids=(7,))
    late = make("late", max_tokens=9, stop_token_ids=(7,), min_tokens=3)
    harness.loop.submit(early)
    harness.loop.submit(late)
    run(harness)
    assert (early.num_output_tokens, early.finish_reason) == (1, FinishReason.STOP)
    assert (late.num_output_tokens, late.finish_reason) == (4, FinishReason.STOP)


@pytest.mark.parametrize("num_blocks", [16, 5])
def test_output_beyond_context_or_pool_ends_with_length(num_blocks: int) -> None:
    clock = VirtualClock()
    config = replace(CONFIG, max_model_len=40, num_blocks=num_blocks)
    pool = BlockPool(num_blocks, CONFIG.block_size)
    loop = EngineLoop(Everyone(), SimulatedRunner(clock, lambda plan: 1.0), pool, config, clock)
    request = make("a", 10, max_tokens=1000)
    loop.submit(request)
    while loop.step() is not None:
        pass
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_known_tokens == min(40, num_blocks * CONFIG.block_size)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_cancelling_frees_everything_at_the_next_step(harness: Harness, num_steps: int) -> None:
    request, other = make("a", max_tokens=20), make("b", max_tokens=4)
    harness.loop.submit(request)
    harness.loop.submit(other)
    for _ in range(num_steps):
        harness.loop.step()
    harness.loop.finish("a", FinishReason.CANCELLED)
    harness.loop.finish("a", FinishReason.CANCELLED)
    harness.loop.finish("nobody", FinishReason.CANCELLED)
    report = harness.loop.step()
    assert report is not None
    assert report.finished.count("a") == 1
    assert request.block_table == []
    assert harness.pool.num_used == len(other.block_table)
    run(harness)
    assert sum(r.finished.count("a") for r in harness.reports) == 1
    assert other.finish_reason is FinishReason.LENGTH
    assert harness.pool.num_used == 0


def test_a_failed_step_commits_nothing_and_others_go_on(harness: Harness) -> None:
    doomed = make("doomed", max_tokens=5)
    harness.loop.submit(doomed)
    harness.loop.step()
    later = make("later")
    harness.planner.change = lambda view, plan: replace(
        plan, work=tuple(w for w in plan.work if w.request_id == "doomed")
    )
    harness.loop.submit(later)
    harness.failures.append("device lost its mind")
    report = harness.loop.step()
    assert report is not None
    assert report.failure == "RuntimeError: device lost its mind"
    assert not report.is_executed
    assert report.tokens == ()
    assert (doomed.finish_reason, doomed.failure) == (FinishReason.ERROR, report.failure)
    assert doomed.num_computed_tokens == 6
    assert harness.pool.num_used == 0
    harness.planner.change = lambda view, plan: plan
    run(harness)
    assert later.finish_reason is FinishReason.LENGTH


def test_a_row_without_a_token_ends_alone(harness: Harness) -> None:
    class Poisoned(SimulatedRunner):
        def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
            return StepOutput(
                [
                    replace(token, failure="not finite") if token.request_id == "bad" else token
                    for token in super().execute(plan, requests).tokens
                ]
            )

    loop = EngineLoop(
        Everyone(),
        Poisoned(harness.clock, lambda plan: 1.0),
        harness.pool,
        CONFIG,
        harness.clock,
    )
    bad, good = make("bad"), make("good")
    loop.submit(bad)
    loop.submit(good)
    while loop.step() is not None:
        pass
    assert (bad.finish_reason, bad.failure) == (FinishReason.ERROR, "not finite")
    assert bad.output_token_ids == []
    assert good.finish_reason is FinishReason.LENGTH
    assert harness.pool.num_used == 0


def test_a_rejected_request_never_holds_a_block(harness: Harness) -> None:
    def reject(view: EngineView, plan: StepPlan) -> StepPlan:
        verdicts = tuple(
            replace(a, action=AdmissionAction.REJECT, reason="overloaded") for a in plan.admissions
        )
        return StepPlan(admissions=verdicts)

    harness.planner.change = reject
    request = make("a")
    harness.loop.submit(request)
    report = harness.loop.step()
    assert report is not None
    assert report.finished == ("a",)
    assert not report.is_executed
    assert request.finish_reason is FinishReason.REJECTED
    assert request.admission is not None
    assert request.admission.reason == "overloaded"
    assert harness.loop.step() is None


def test_preemption_drops_blocks_and_recomputes(harness: Harness) -> None:
    request = make("a", max_tokens=4)
    harness.loop.submit(request)
    for _ in range(3):
        harness.loop.step()
    assert request.num_output_tokens == 2
    harness.planner.change = lambda view, plan: StepPlan(preemptions=(Preemption("a"),))
    report = harness.loop.step()
    assert report is not None
    assert request.phase is RequestPhase.PREEMPTED
    assert (report.num_preempted, harness.pool.num_used) == (1, 0)
    # Two full blocks are still known to the prefix cache, though nobody holds them.
    assert (request.num_computed_tokens, report.num_blocks_cached) == (8, 2)
    harness.planner.change = lambda view, plan: plan
    run(harness)
    assert request.output_token_ids == [7] * 4
    assert request.num_preemptions == 1
    assert sum(len(r.tokens) for r in harness.reports) == 4


SPOILED: dict[str, Callable[[EngineView, StepPlan], StepPlan]] = {
    "unknown": lambda v, p: replace(p, work=(*p.work, StepWork("x", WorkKind.DECODE, 1, 0))),
    "twice": lambda v, p: replace(p, work=(*p.work, *p.work)),
    "too many": lambda v, p: replace(p, work=(p.work[0]._replace(num_tokens=99),)),
    "none": lambda v, p: replace(p, work=(p.work[0]._replace(num_tokens=0),)),
    "stale": lambda v, p: replace(p, work=(p.work[0]._replace(num_computed_tokens=3),)),
    "not admitted": lambda v, p: replace(p, admissions=()),
    "unknown preemption": lambda v, p: replace(p, preemptions=(Preemption("x"),)),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_a_plan_that_contradicts_the_state_is_a_bug(
    harness: Harness, spoil: Callable[[EngineView, StepPlan], StepPlan]
) -> None:
    harness.planner.change = spoil
    harness.loop.submit(make("a", num_prompt=4))
    with pytest.raises(PlanError):
        harness.loop.step()


def test_too_many_running_requests_are_a_bug(harness: Harness) -> None:
    harness.planner.chunk = 1
    for index in range(CONFIG.max_num_seqs + 1):
        harness.loop.submit(make(f"r{index}"))
    with pytest.raises(PlanError, match="more than 8 running"):
        harness.loop.step()


def test_abort_ends_everybody_once(harness: Harness) -> None:
    running, arriving = make("a", max_tokens=9), make("b")
    harness.loop.submit(running)
    harness.loop.step()
    harness.loop.submit(arriving)
    ended = harness.loop.abort("the device is gone")
    assert {request.request_id for request in ended} == {"a", "b"}
    assert all(request.finish_reason is FinishReason.ERROR for request in ended)
    assert harness.loop.abort("again") == ()
    assert harness.pool.num_used == 0
    assert harness.loop.num_unfinished == 0


def test_planner_sees_arrivals_in_order_and_draining(harness: Harness) -> None:
    seen: list[tuple[list[str], bool]] = []

    def watch(view: EngineView, plan: StepPlan) -> StepPlan:
        seen.append(([request.request_id for request in view.waiting], view.is_draining))
        return plan

    harness.planner.change = watch
    for name in ("b", "a", "c"):
        harness.loop.submit(make(name))
    harness.loop.step()
    harness.loop.drain()
    harness.loop.submit(make("d"))
    harness.loop.step()
    assert seen == [(["b", "a", "c"], False), (["d"], True)]


def test_moves_outside_the_table_raise() -> None:
    request = make("a")
    with pytest.raises(IllegalMoveError, match="waiting -> preempted"):
        request.move(RequestPhase.PREEMPTED)
    request.move(RequestPhase.FINISHED)
    with pytest.raises(IllegalMoveError):
        request.move(RequestPhase.RUNNING)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 4, [0, 1, 2, 3]), (2, 6, [2, 3, 90, 91]), (4, 7, [90, 91, 92]), (5, 6, [91])],
)
def test_known_tokens_span_prompt_and_output(start: int, stop: int, expected: list[int]) -> None:
    request = make("a", num_prompt=4)
    request.output_token_ids.extend([90, 91, 92])
    assert request.known_token_ids(start, stop) == expected


@pytest.mark.parametrize("field_name", ["block_size", "num_blocks", "max_num_seqs"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_config_names_the_wrong_field(field_name: str, value: object) -> None:
    with pytest.raises(ValueError, match=field_name):
        replace(CONFIG, **{field_name: value})  # type: ignore[arg-type]


def test_every_running_decode_must_fit_into_a_step() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        replace(CONFIG, max_num_seqs=64)


def test_a_virtual_clock_only_moves_forward() -> None:
    clock = VirtualClock(5.0, epoch_ms=1_000_000)
    clock.advance(2.5)
    assert (clock.now(), clock.epoch_ms()) == (7.5, 1_002_500)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="duration_s"):
            clock.advance(wrong)
