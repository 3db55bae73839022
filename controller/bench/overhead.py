"""What the loop and a planner cost by themselves, against the number of waiting requests.

Owns the made-up crowd and the aggregation. Runs the production loop and planners over a runner that
computes nothing, so that no time but their own is left. Must not take a time: the loop's own
reports, on the clock that is handed in, are all it reads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controller.policy.baselines import StaticPlanner
from controller.policy.lengths import OutputLengths
from controller.policy.planner import SloPlanner
from controller.policy.promise import Promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Slo, SloClass
from costmodel.prior import flat_prior
from engine.blocks import BlockPool
from engine.clock import Clock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import Planner
from engine.request import Request
from engine.step import SampledToken, StepOutput, StepPlan, StepReport

WAITING_COUNTS = (0, 10, 100, 1000)
NUM_RUNNING = 8
PROMPT_TOKENS = 128

_WARMUP_STEPS = 5
_NUM_STEPS = 60
_TARGET_TTFT_S = 3600.0
"""Far enough away that nobody is turned away while the crowd is measured."""


class InstantRunner:
    """A runner that samples one fixed token in no time to speak of."""

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        """Sample where a request's known tokens are complete."""
        return StepOutput(
            [
                SampledToken(work.request_id, 0)
                for work in plan.work
                if work.num_context_tokens == requests[work.request_id].num_known_tokens
            ]
        )

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Nothing is held, so nothing moves."""

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Nothing is held, so nothing moves."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""


PLANNERS: dict[str, Callable[[], Planner]] = {
    "static": lambda: StaticPlanner(256),
    "slo": lambda: SloPlanner(PolicyConfig(), flat_prior(), OutputLengths(), lambda: 1),
}
"""The planners to measure, each made anew for a crowd."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Medians over the steps of one crowd, in seconds.

    `planner_s` is the plan alone, `loop_s` the rest of the step without its execution.
    `num_waiting` requests wait behind `num_running` that decode; they carry targets if
    `has_targets`.
    """

    planner: str
    num_running: int
    num_waiting: int
    has_targets: bool
    num_steps: int
    planner_s: float
    loop_s: float


class _Keeper:
    """Keeps the reports of executed steps."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Take one."""
        self.reports.append(report)


def measure_overhead(
    planner: str, num_waiting: int, clock: Clock, *, has_targets: bool = True
) -> Overhead:
    """Return what one step costs beside its execution while `num_waiting` requests wait.

    `planner` is a key of `PLANNERS`. The seats are taken by `NUM_RUNNING` decodes throughout, so
    that every step sees the same crowd.
    """
    num_seats = NUM_RUNNING
    num_steps = _WARMUP_STEPS + _NUM_STEPS
    # Everybody would fit into memory: seats are what the crowd waits for.
    config = EngineConfig(
        num_blocks=(num_seats + num_waiting + 1) * (PROMPT_TOKENS + 4 * num_steps) // 16,
        max_num_seqs=num_seats,
        max_num_batched_tokens=2048,
        max_waiting_requests=num_waiting + num_seats + 1,
    )
    keeper = _Keeper()
    loop = EngineLoop(
        PLANNERS[planner](),
        InstantRunner(),
        BlockPool(config.num_blocks, config.block_size),
        config,
        clock,
        (keeper,),
    )
    for index in range(num_seats):
        loop.submit(_request(f"running-{index}", clock.now(), has_targets))
    while not keeper.reports or not _are_all_decoding(keeper.reports[-1], num_seats):
        if loop.step() is None:
            raise RuntimeError(f"the {planner} planner does not start {num_seats} requests")
    for index in range(num_waiting):
        loop.submit(_request(f"waiting-{index}", clock.now(), has_targets))
    for _ in range(_WARMUP_STEPS):
        loop.step()
    keeper.reports.clear()
    for _ in range(_NUM_STEPS):
        loop.step()
    steady = [
        report
        for report in keeper.reports
        if report.num_waiting == num_waiting and _are_all_decoding(report, num_seats)
    ]
    if not steady:
        raise RuntimeError(f"the {planner} planner did not keep {num_waiting} requests waiting")
    return Overhead(
        planner=planner,
        num_running=num_seats,
        num_waiting=num_waiting,
        has_targets=has_targets,
        num_steps=len(steady),
        planner_s=statistics.median(r.planner_s for r in steady),
        loop_s=statistics.median(r.duration_s - r.planner_s - r.execute_s for r in steady),
    )


def _are_all_decoding(report: StepReport, num_running: int) -> bool:
    return report.plan.num_decode_tokens == num_running and not report.plan.num_prefill_tokens


def _request(request_id: str, now: float, has_targets: bool) -> Request:
    slo = Slo(ttft_s=_TARGET_TTFT_S, tpot_s=1.0) if has_targets else Slo()
    return Request(
        request_id,
        tuple(range(PROMPT_TOKENS)),
        4 * (_WARMUP_STEPS + _NUM_STEPS),
        now,
        promise=Promise(slo, SloClass("default"), now),
    )
