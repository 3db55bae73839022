"""Doubles for policy tests: a linear cost model, requests in any state, a loop on virtual time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from controller.policy.demand import Demand
from controller.policy.facts import ClassNames, FactReader, RunningTable
from controller.policy.ordering import PrefillQueue
from controller.policy.promise import Promise
from controller.policy.settings import PolicyConfig
from controller.policy.slo import OnInfeasible, Slo, SloClass
from controller.runtime.arrival_feed import ArrivalFeed
from costmodel.base import LatencyEstimate, MarginalCosts, ModelQuality
from costmodel.features import NUM_FEATURES, FloatArray, StepFeatures
from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import EngineView, Planner, RequestView
from engine.request import Request, RequestPhase
from engine.simulated import SimulatedRunner
from engine.step import StepPlan, StepReport

# Of the order of a 270M model on two cores: a decode of 7 takes 0.14 s, beside a chunk of 121
# tokens 0.43 s (tokens, decodes, decode context, chunk·past, chunk²).
CPU_WEIGHTS = (0.0023, 0.0068, 0.0, 1e-7, 1e-7)
CPU_FLOOR_S = 0.09
# Of the order of an 8B model on a data-centre chip.
GPU_WEIGHTS = (85e-6, 20e-6, 66e-9, 1e-9, 1e-9)
GPU_FLOOR_S = 0.012


class LinearCostModel:
    """seconds = floor + weights · features; the upper bound is `margin` above. Never learns."""

    def __init__(
        self,
        weights: Sequence[float] = CPU_WEIGHTS,
        floor_s: float = CPU_FLOOR_S,
        margin: float = 0.05,
    ) -> None:
        # A basis may have grown: what is not weighed costs nothing.
        self._weights = np.zeros(NUM_FEATURES)
        self._weights[: len(weights)] = weights
        self._floor_s = floor_s
        self._margin = margin

    def predict(self, features: FloatArray) -> LatencyEstimate:
        mean_s = self._floor_s + features @ self._weights
        return LatencyEstimate(mean_s, mean_s * (1.0 + self._margin))

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        return False

    def marginals(self) -> MarginalCosts:
        prefill_s, decode_s, context_s = self._weights[:3].tolist()
        return MarginalCosts(prefill_s, decode_s, context_s, self._floor_s, 1)

    def quality(self) -> ModelQuality:
        return ModelQuality(7, 0, 0.0, 1.0, (), {})

    def latency_of(self, plan: StepPlan) -> float:
        features = StepFeatures.of(plan.work).to_array()
        return float(self.predict(features[None, :]).mean_s[0])


class JumpingModel(LinearCostModel):
    """30 ms; 40 ms more (`jump_s`) with prompts, up to 512 tokens of them; then 100 µs more per
    token.
    """

    def __init__(self, jump_s: float = 0.04) -> None:
        super().__init__()
        self._jump_s = jump_s

    def predict(self, features: FloatArray) -> LatencyEstimate:
        prefill = features[:, 0]
        mean_s = 0.03 + self._jump_s * (prefill > 0.0) + 1e-4 * np.maximum(prefill - 512.0, 0.0)
        return LatencyEstimate(mean_s, mean_s)


class BrokenCostModel(LinearCostModel):
    """Answers the same number for every candidate, whatever it is."""

    def __init__(self, answer_s: float) -> None:
        super().__init__()
        self._answer_s = answer_s

    def predict(self, features: FloatArray) -> LatencyEstimate:
        answer = np.full(len(features), self._answer_s)
        return LatencyEstimate(answer, answer)


class GarbageCostModel(LinearCostModel):
    """Answers something else for every candidate, and marginal costs that mean as little."""

    def __init__(self, answers_s: Sequence[float], costs_s: Sequence[float], knee: int) -> None:
        super().__init__()
        self._answers_s = np.array(answers_s)
        self._costs_s = tuple(costs_s)
        self._knee = knee

    def predict(self, features: FloatArray) -> LatencyEstimate:
        # By what is asked, not by when: the same view is to give the same plan.
        asked = features.sum(axis=1).astype(np.int64)
        num = self._answers_s.size
        return LatencyEstimate(self._answers_s[asked % num], self._answers_s[(7 * asked + 3) % num])

    def marginals(self) -> MarginalCosts:
        prefill_s, decode_s, context_s, floor_s, chunk_s, logit_s = self._costs_s
        return MarginalCosts(prefill_s, decode_s, context_s, floor_s, self._knee, chunk_s, logit_s)


# Blocks of their own for everybody: tables that name the same block share it.
_BLOCKS = itertools.count()
_TOKENS = itertools.count()


def slo_class(
    name: str = "chat",
    weight: float = 1.0,
    on_infeasible: OnInfeasible = OnInfeasible.REJECT,
) -> SloClass:
    return SloClass(name, weight=weight, on_infeasible=on_infeasible)


def waiting(
    request_id: str,
    num_prompt: int = 32,
    *,
    at: float = 0.0,
    slo: Slo | None = None,
    of: SloClass | None = None,
    max_tokens: int = 64,
    priority: int = 0,
) -> Request:
    """A request that nobody has looked at; without `slo` it carries no promise."""
    promise = None
    if slo is not None:
        promise = Promise(slo=slo, slo_class=of or slo_class(), arrived_at=at, priority=priority)
    # Nobody begins like anybody else: nothing is shared unless a test wants it.
    return Request(request_id, (next(_TOKENS),) * num_prompt, max_tokens, at, promise=promise)


def running(
    request: Request, num_computed: int, num_output: int, *, last_at: float = 0.0, block: int = 16
) -> Request:
    """Put a request on the engine: `num_computed` tokens in the cache, `num_output` generated."""
    request.admitted_at = request.first_scheduled_at = request.arrived_at
    request.phase = RequestPhase.RUNNING
    request.num_computed_tokens = num_computed
    request.output_token_ids = [1] * num_output
    request.block_table = list(itertools.islice(_BLOCKS, -(-num_computed // block)))
    if num_output:
        request.first_token_at = request.last_token_at = last_at
        if isinstance(request.promise, Promise):
            request.promise.record_token(last_at)
    return request


def decode(
    request_id: str,
    *,
    slo: Slo | None = None,
    num_prompt: int = 32,
    num_output: int = 1,
    last_at: float = 0.0,
    at: float = 0.0,
    of: SloClass | None = None,
    max_tokens: int = 64,
) -> Request:
    """A request in decode."""
    request = waiting(request_id, num_prompt, slo=slo, at=at, of=of, max_tokens=max_tokens)
    return running(request, num_prompt + num_output - 1, num_output, last_at=last_at)


def view_of(
    *,
    waiting: Sequence[RequestView] = (),
    running: Sequence[RequestView] = (),
    preempted: Sequence[RequestView] = (),
    now: float = 0.0,
    step_no: int = 1,
    num_blocks: int = 1024,
    num_free: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 8192,
    max_waiting: int = 1024,
    max_model_len: int = 4096,
    is_draining: bool = False,
    num_free_host: int = 0,
) -> EngineView:
    holders = Counter(block for request in running for block in request.block_table)
    return EngineView(
        now=now,
        step_no=step_no,
        waiting=waiting,
        running=running,
        preempted=preempted,
        num_free_blocks=num_blocks - len(holders) if num_free is None else num_free,
        num_total_blocks=num_blocks,
        block_size=16,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_waiting_requests=max_waiting,
        is_draining=is_draining,
        num_free_host_blocks=num_free_host,
        num_holders=lambda block: holders[block],
    )


NAMES = ClassNames()


def facts_of(requests: Sequence[RequestView]) -> FloatArray:
    return FactReader(NAMES).read(list(requests))


def table_of(requests: Sequence[RequestView]) -> RunningTable:
    """The running requests as a planner sees them, decodes first."""
    ordered = sorted(requests, key=lambda request: not request.is_decoding)
    num_decodes = sum(request.is_decoding for request in ordered)
    return RunningTable(ordered, num_decodes, facts_of(ordered))


def queue_of(
    requests: Sequence[RequestView], config: PolicyConfig, num_expected: int = 10
) -> PrefillQueue:
    """The ordered queue at a gap limit of 1 s and decode steps of 0.1 s."""
    expected = np.full(len(requests), float(num_expected))
    return PrefillQueue.of(requests, facts_of(requests), config, 1.0, expected, 0.1)


@dataclass
class Simulation:
    """The production loop on virtual time; promises are kept up to date as the runtime would."""

    planner: Planner
    model: LinearCostModel
    config: EngineConfig = field(default_factory=EngineConfig)
    noise: Sequence[float] = (1.0,)
    reports: list[StepReport] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    demand: Demand = field(default_factory=Demand)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.pool = BlockPool(self.config.num_blocks, self.config.block_size)
        runner = SimulatedRunner(self.clock, self._latency_of)
        self._feed = ArrivalFeed(self.demand)
        self.loop = EngineLoop(self.planner, runner, self.pool, self.config, self.clock)

    def _latency_of(self, plan: StepPlan) -> float:
        return self.model.latency_of(plan) * self.noise[len(self.reports) % len(self.noise)]

    def run(self, arrivals: Sequence[Request], max_steps: int = 100_000) -> None:
        """Feed requests at their `arrived_at` and step until all have ended."""
        self.requests |= {request.request_id: request for request in arrivals}
        queue = sorted(arrivals, key=lambda request: request.arrived_at)
        for _ in range(max_steps):
            while queue and queue[0].arrived_at <= self.clock.now():
                self.loop.submit(queue.pop(0))
            report = self.loop.step()
            if report is not None:
                self.hear(report)
            elif queue:
                self.clock.advance(queue[0].arrived_at - self.clock.now())
            elif not self.loop.has_work:
                return
            else:
                raise AssertionError("the planner found nothing to do for unfinished requests")
        raise AssertionError(f"not done after {max_steps} steps")

    def hear(self, report: StepReport) -> None:
        """Tell promises and demand what a step did."""
        self.reports.append(report)
        for token in report.tokens:
            promise = self.requests[token.request_id].promise
            if isinstance(promise, Promise):
                promise.record_token(token.at)
        known = {a.request_id: self.requests[a.request_id] for a in report.plan.admissions}
        if all(isinstance(each.promise, Promise) for each in known.values()):
            self._feed.on_step(report, known)
        for admission in report.plan.admissions:
            promise = self.requests[admission.request_id].promise
            if admission.is_degraded and isinstance(promise, Promise):
                promise.is_degraded = True

    def token_times(self, request_id: str) -> list[float]:
        return [
            token.at for r in self.reports for token in r.tokens if token.request_id == request_id
        ]

    def largest_gap(self, request_id: str) -> float:
        times = self.token_times(request_id)
        return max(b - a for a, b in itertools.pairwise(times))
