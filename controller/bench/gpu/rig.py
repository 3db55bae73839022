"""The production loop over a runner on trial, in this process: submit, step, and see when tokens
came.

Owns the wiring of one loop and its recorder. Must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from controller.bench.series import RequestSeries, TokenRead
from controller.policy.promise import Promise
from controller.policy.slo import OnInfeasible, Slo, SloClass
from controller.runtime.feedback import PromiseKeeper
from engine.blocks import BlockPool
from engine.clock import Clock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import Planner, StepListener
from engine.request import Request
from engine.step import StepReport

if TYPE_CHECKING:
    from engine.device.trial import TrialRunner

# Whoever cannot be served in time is served late: a benchmark wants every token.
_CLASS = SloClass("default", on_infeasible=OnInfeasible.QUEUE)


class Recorder:
    """Keeps the instants of all tokens and what every step cost."""

    def __init__(self) -> None:
        self.token_times: dict[str, list[float]] = {}
        self.planner_s: list[float] = []
        self.num_decodes: list[int] = []
        self.failures: list[str] = []

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Note tokens, planning time and failures."""
        for token in report.tokens:
            self.token_times.setdefault(token.request_id, []).append(token.at)
        if report.plan.work:
            self.planner_s.append(report.planner_s)
            self.num_decodes.append(report.plan.num_decode_tokens)
        if report.failure is not None:
            self.failures.append(report.failure)


class Rig:
    """One loop, one pool, one recorder; ended requests stay readable in `requests`."""

    def __init__(
        self,
        made: TrialRunner,
        planner: Planner,
        clock: Clock,
        *,
        max_context: int,
        max_batched_tokens: int,
        max_batch: int,
        listeners: Sequence[StepListener] = (),
    ) -> None:
        self.clock = clock
        self.recorder = Recorder()
        self.requests: dict[str, Request] = {}
        self.config = EngineConfig(
            block_size=made.block_size,
            num_blocks=made.num_blocks,
            max_model_len=max_context,
            max_num_seqs=max_batch,
            max_num_batched_tokens=max_batched_tokens,
            # Prompts are random: a hit would only hide work.
            is_prefix_cache_enabled=False,
        )
        self._loop = EngineLoop(
            planner,
            made.runner,
            BlockPool(made.num_blocks, made.block_size),
            self.config,
            clock,
            (PromiseKeeper(), self.recorder, *listeners),
        )

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self._loop.num_unfinished

    def submit(
        self, name: str, prompt: tuple[int, ...], max_tokens: int, slo: Slo | None = None
    ) -> Request:
        """Hand in a request that arrives now."""
        now = self.clock.now()
        promise = Promise(slo or Slo(), _CLASS, now)
        request = Request(name, prompt, max_tokens, now, promise=promise)
        self.requests[name] = request
        self._loop.submit(request)
        return request

    def step(self) -> bool:
        """Run one pass; False when there is nothing left to do.

        RuntimeError with the first failure of a step: a benchmark of failing steps means nothing.
        """
        report = self._loop.step()
        if self.recorder.failures:
            raise RuntimeError(self.recorder.failures[0])
        return report is not None

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Step until idle, or until `is_over`."""
        while not is_over() and self.step():
            pass

    def drain(self) -> None:
        """End every request, so that the runner can serve another loop."""
        for request in self._loop.abort("the measurement is over"):
            self.requests[request.request_id] = request

    def num_tokens(self, name: str) -> int:
        """Output tokens of a request so far."""
        return len(self.recorder.token_times.get(name, ()))

    def series(self, name: str) -> RequestSeries:
        """Return a request's token times as the benchmarks' arithmetic wants them."""
        request = self.requests[name]
        times = self.recorder.token_times.get(name, ())
        return RequestSeries(
            name,
            request.arrived_at,
            tuple(TokenRead(at, 1) for at in times),
            finish_reason=request.finish_reason,
            decision=None if request.admission is None else request.admission.reason,
        )
