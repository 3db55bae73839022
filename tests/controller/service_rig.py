"""A started service on a virtual clock, with a runner that tests can hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from controller.policy.baselines import StaticPlanner
from controller.policy.lengths import OutputLengths
from controller.policy.slo import Slo, SloClass
from controller.runtime.feedback import PromiseKeeper, Teacher, TelemetryFeed
from controller.runtime.generation import (
    GenerationRequest,
    ServedModel,
)
from controller.runtime.service import PromiseTerms, Service
from controller.runtime.streams import StreamHub
from controller.runtime.tally import Tally
from costmodel.features import StepFeatures
from costmodel.hygiene import RejectReason
from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import EngineView
from engine.request import Request
from engine.step import SampledToken, StepOutput, StepPlan

CONFIG = EngineConfig(block_size=4, num_blocks=64, max_model_len=128, max_num_seqs=8)
STEP_S = 0.25


class GatedRunner:
    """Steps take 0.25 virtual seconds; `hold` lets a test stop the loop inside a step."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.gate = threading.Event()
        self.gate.set()
        self.is_inside = threading.Event()
        self.error: BaseException | None = None
        self.forgotten: list[str] = []
        self.released = threading.Event()
        self.holds: Callable[[Mapping[str, Request]], bool] = lambda requests: False

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        self.is_inside.set()
        assert self.gate.wait(30)
        assert not self.holds(requests) or self.released.wait(30)
        if self.error is not None:
            raise self.error
        self.clock.advance(STEP_S)
        return StepOutput(
            [
                SampledToken(work.request_id, 40 + requests[work.request_id].num_output_tokens)
                for work in plan.work
                if work.num_context_tokens == requests[work.request_id].num_known_tokens
            ]
        )

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        raise NotImplementedError

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        raise NotImplementedError

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


class Spy:
    """A cost model that only remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[StepFeatures, float]] = []
        self.rejected: list[RejectReason] = []
        self.num_drift_alarms = 0
        self.alarms_at: set[int] = set()

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        self.seen.append((features, latency_s))
        self.num_drift_alarms += len(self.seen) in self.alarms_at
        return True

    def reject(self, reason: RejectReason) -> None:
        self.rejected.append(reason)


@dataclass
class Rig:
    """A started service and everything around it."""

    service: Service
    runner: GatedRunner
    clock: VirtualClock
    pool: BlockPool
    planner: Any
    tally: Tally
    lengths: OutputLengths
    model: Spy
    records: list[Any] = field(default_factory=list)

    def ask(self, num_prompt: int = 6, max_tokens: int = 3, **kwargs: Any) -> GenerationRequest:
        return GenerationRequest(
            prompt_token_ids=tuple(range(num_prompt)),
            max_tokens=max_tokens,
            arrived_at=self.clock.now(),
            **kwargs,
        )


class SwitchPlanner:
    """The static baseline until a test replaces `plan_with`."""

    def __init__(self) -> None:
        self.plan_with: Callable[[EngineView], StepPlan] = StaticPlanner(4).plan

    def plan(self, view: EngineView) -> StepPlan:
        return self.plan_with(view)


@contextmanager
def running_service(settle_in: Callable[[], None] = lambda: None) -> Iterator[Rig]:
    """Yield a started service; it is stopped afterwards, whatever the test left held."""
    clock = VirtualClock(50.0)
    runner, planner, hub, tally = GatedRunner(clock), SwitchPlanner(), StreamHub(), Tally()
    records: list[Any] = []

    def offer(record: Any) -> bool:
        records.append(record)
        return True

    model, lengths = Spy(), OutputLengths(default=99)
    feed = TelemetryFeed(offer, clock, "run", model)
    pool = BlockPool(CONFIG.num_blocks, CONFIG.block_size)
    listeners = (PromiseKeeper(), hub, Teacher(model, lengths), feed, tally)
    loop = EngineLoop(planner, runner, pool, CONFIG, clock, listeners)
    service = Service(
        loop,
        hub,
        clock,
        ServedModel("m", "m", 0, 128, 256, (), False),
        None,  # type: ignore[arg-type]  # nothing here is text
        PromiseTerms(
            {
                "default": SloClass("default"),
                "chat": SloClass("chat", Slo(ttft_s=10.0, tpot_s=0.3)),
            },
            "default",
        ),
        run_id="run",
        on_abort=feed.record_endings,
        on_failure=feed.tell_failure,
        settle_in=settle_in,
    )
    service.start()
    yield Rig(service, runner, clock, pool, planner, tally, lengths, model, records)
    runner.gate.set()
    runner.released.set()
    service.stop(10.0)


async def collect(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def until(condition: Callable[[], bool]) -> None:
    """Let other threads go on until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - it is another thread that changes it
        await asyncio.sleep(0)
