"""`EngineLoop.step()`: take arrivals, plan, execute, commit, report.

Owns every change of a request and of the block pool. Must not know an SLO, wait for an observer, or
touch a tensor. `submit` and `finish` may be called from any thread; everything else runs on the
loop's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from engine.blocks import BlockPool
from engine.clock import Clock
from engine.config import EngineConfig
from engine.errors import PlanError
from engine.isolation import Execution, execute
from engine.memory import KvMemory
from engine.ports import EngineView, ModelRunner, Planner, StepListener
from engine.request import FinishReason, Request, RequestPhase
from engine.step import (
    AdmissionAction,
    EmittedToken,
    Preemption,
    PromptScores,
    SampledToken,
    StepPlan,
    StepReport,
)

logger = logging.getLogger("paceline")

# Every step makes one per stream: without the call into Python of a named tuple's constructor.
_emitted: Callable[[tuple[object, ...]], EmittedToken] = partial(tuple.__new__, EmittedToken)


class EngineLoop:
    """Drives one runner by one planner.

    Call `step()` repeatedly; it returns None when there is nothing to do.
    """

    def __init__(
        self,
        planner: Planner,
        runner: ModelRunner,
        pool: BlockPool,
        config: EngineConfig,
        clock: Clock,
        listeners: Sequence[StepListener] = (),
    ) -> None:
        self._planner = planner
        self._runner = runner
        self._memory = KvMemory(pool, config, runner)
        self._pool = pool
        self._config = config
        self._clock = clock
        self._listeners = tuple(listeners)
        self._arrivals: deque[Request] = deque()
        self._endings: deque[tuple[str, FinishReason]] = deque()
        self._requests: dict[str, Request] = {}
        # One ordered dict per phase: membership and removal cost O(1) however long the queue is.
        self._by_phase: dict[RequestPhase, dict[str, Request]] = {
            phase: {} for phase in RequestPhase if phase is not RequestPhase.FINISHED
        }
        self._ended: dict[str, Request] = {}
        self._step_no = self._num_arrived = 0
        self._previous_end_at: float | None = None
        self._is_draining = False

    @property
    def step_no(self) -> int:
        """Number of the last reported step, 0 before the first."""
        return self._step_no

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended, arrivals included."""
        return len(self._requests) + len(self._arrivals)

    @property
    def has_work(self) -> bool:
        """Whether a call of `step()` may find something to do."""
        return bool(self._requests or self._arrivals or self._endings)

    def submit(self, request: Request) -> None:
        """Hand in a new request (any thread); it is taken at the start of the next step."""
        self._arrivals.append(request)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Ask for a request's end (any thread); unknown and ended ids are ignored."""
        self._endings.append((request_id, reason))

    def drain(self) -> None:
        """Tell the planner to refuse new requests from now on."""
        self._is_draining = True

    def step(self) -> StepReport | None:
        """Run one pass. Returns None when nothing changed.

        PlanError and planner errors are fatal for the caller.
        """
        if not self.has_work:
            self._previous_end_at = None
            return None
        # A busy loop's steps tile time without a hole: what observers cost belongs to the gap that
        # streams see.
        now = self._clock.now()
        started_at = now if self._previous_end_at is None else self._previous_end_at
        # Counted first: who is to end was handed in before, so it is among the arrivals by now.
        num_endings = len(self._endings)
        self._take_arrivals()
        self._apply_endings(num_endings, now)
        plan = self._planner.plan(self._view(now)) if self._requests else StepPlan()
        planned_at = self._clock.now()
        plan = self._apply_preemptions(plan)
        self._apply_admissions(plan, planned_at)
        plan, batch = self._prepare(plan, planned_at)
        execution = execute(self._runner, plan, batch, self._step_no)
        executed_at = self._clock.now()
        outcome = self._commit(execution, executed_at)
        return self._report(
            plan, batch, execution, outcome, started_at, planned_at - now, executed_at - planned_at
        )

    def abort(self, failure: str) -> tuple[Request, ...]:
        """End every request with ERROR after a fatal error, arrivals included, and return them."""
        self._take_arrivals()
        now = self._clock.now()
        for request in list(self._requests.values()):
            self._finish(request, FinishReason.ERROR, now, failure)
        ended, self._ended = self._ended, {}
        return tuple(ended.values())

    def _take_arrivals(self) -> None:
        while self._arrivals:
            request = self._arrivals.popleft()
            self._num_arrived = request.arrival_no = self._num_arrived + 1
            self._requests[request.request_id] = request
            self._by_phase[RequestPhase.WAITING][request.request_id] = request
            self._memory.watch(request)

    def _apply_endings(self, num_endings: int, now: float) -> None:
        for _ in range(num_endings):
            request_id, reason = self._endings.popleft()
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, reason, now)

    def _view(self, now: float) -> EngineView:
        return EngineView(
            now=now,
            step_no=self._step_no + 1,
            waiting=self._by_phase[RequestPhase.WAITING].values(),
            running=self._by_phase[RequestPhase.RUNNING].values(),
            preempted=self._by_phase[RequestPhase.PREEMPTED].values(),
            num_free_blocks=self._pool.num_free,
            num_total_blocks=self._pool.num_total,
            block_size=self._pool.block_size,
            max_model_len=self._config.max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_waiting_requests=self._config.max_waiting_requests,
            is_draining=self._is_draining,
            num_free_host_blocks=self._memory.num_free_host_blocks,
            num_holders=self._pool.num_references,
        )

    def _apply_preemptions(self, plan: StepPlan) -> StepPlan:
        """Let the victims give way; the plan that comes back says what became of their KV."""
        done = []
        for preemption in plan.preemptions:
            request, method = self._known(preemption.request_id), preemption.method
            if request.phase is RequestPhase.RUNNING:
                method = self._memory.preempt(request, method)
            self._move(request, RequestPhase.PREEMPTED)
            request.num_preemptions += 1
            done.append(Preemption(request.request_id, method))
        return replace(plan, preemptions=tuple(done)) if done else plan

    def _apply_admissions(self, plan: StepPlan, now: float) -> None:
        for admission in plan.admissions:
            request = self._known(admission.request_id)
            request.admission = admission
            if admission.action is AdmissionAction.REJECT:
                self._finish(request, FinishReason.REJECTED, now)
            elif admission.action is AdmissionAction.ADMIT and request.admitted_at is None:
                request.admitted_at = now

    def _prepare(self, plan: StepPlan, now: float) -> tuple[StepPlan, dict[str, Request]]:
        """Start who starts, give everybody blocks; return what can be executed and whose it is."""
        requests, running = self._requests, RequestPhase.RUNNING
        batch: dict[str, Request] = {}
        starting: list[Request] = []
        num_planned = 0
        for work in plan.work:
            request_id, _, num_tokens, num_computed = work
            request = requests.get(request_id) or self._known(request_id)
            if (
                num_computed != request.num_computed_tokens
                or not 0 < num_tokens <= request.num_remaining_tokens
            ):
                raise PlanError(
                    f"{work} contradicts {request.num_computed_tokens} computed of"
                    f" {request.num_known_tokens} tokens"
                )
            batch[request_id] = request
            num_planned += num_tokens
            if request.phase is not running:
                starting.append(request)
        if num_planned > self._config.max_num_batched_tokens:
            raise PlanError(
                f"{num_planned} tokens planned, at most {self._config.max_num_batched_tokens}"
            )
        if len(batch) != len(plan.work):
            raise PlanError("a request appears twice in a plan")
        for request in starting:
            self._start(request, now)
        # What starters share is theirs before anybody's new blocks push it out of the cache.
        lost = [request for request in starting if not self._memory.bring_back(request)]
        plan = self._without(plan, lost) if lost else plan
        # Most steps of a decode stay within its last block: asked here, not of the memory.
        block_size = self._pool.block_size
        for request_id, _, num_tokens, num_computed in plan.work:
            request = batch[request_id]
            if len(request.block_table) * block_size < num_computed + num_tokens:
                self._memory.grow(request, num_computed + num_tokens)
        if len(self._by_phase[running]) > self._config.max_num_seqs:
            raise PlanError(f"more than {self._config.max_num_seqs} running requests planned")
        return plan, batch

    def _without(self, plan: StepPlan, lost: Sequence[Request]) -> StepPlan:
        """Put those whose KV is lost back to the preempted, and return the plan without them."""
        for request in lost:
            self._move(request, RequestPhase.PREEMPTED)
            request.num_preemptions += 1
        again = [Preemption(request.request_id) for request in lost]
        names = {preemption.request_id for preemption in again}
        work = tuple(work for work in plan.work if work.request_id not in names)
        return replace(plan, work=work, preemptions=(*plan.preemptions, *again))

    def _start(self, request: Request, now: float) -> None:
        if request.admitted_at is None:
            raise PlanError(f"{request.request_id} was given work without an admission")
        if request.first_scheduled_at is None:
            request.first_scheduled_at = now
            request.num_cached_tokens = request.num_computed_tokens
        self._memory.start(request)
        self._move(request, RequestPhase.RUNNING)

    def _commit(
        self, execution: Execution, at: float
    ) -> tuple[tuple[EmittedToken, ...], tuple[PromptScores, ...]]:
        """Keep what was computed, end who failed; whoever was not reached is as before."""
        for request_id, failure in execution.failures.items():
            self._finish(self._requests[request_id], FinishReason.ERROR, at, failure)
        scores = tuple(
            fresh
            for item in execution.prompt_scores
            if (fresh := self._requests[item.request_id].take_scores(item)) is not None
        )
        requests, block_size = self._requests, self._pool.block_size
        for request_id, _, num_tokens, num_before in execution.done:
            request = requests[request_id]
            num_computed = request.num_computed_tokens = num_before + num_tokens
            # Only a block that has become full gets a name.
            if num_computed // block_size > num_before // block_size:
                self._memory.commit(request)
        return self._emit(execution.tokens, at), scores

    def _emit(self, results: Sequence[SampledToken], at: float) -> tuple[EmittedToken, ...]:
        """Give each request its token and end who is done; one loop, for it runs per token."""
        requests = self._requests
        # The next step would need the KV of every known token; what the pool or the context cannot
        # hold ends here.
        limit = min(self._config.max_model_len, self._memory.most_tokens)
        emitted = []
        for result in results:
            request_id, token_id = result.request_id, result.token_id
            request = requests[request_id]
            if result.failure is not None:
                self._finish(request, FinishReason.ERROR, at, result.failure)
                self._memory.forget_prefixes()
                continue
            max_tokens, sampling = request.max_tokens, request.sampling
            if max_tokens == 0:
                # Only its prompt was wanted, and that is computed now.
                self._finish(request, FinishReason.LENGTH, at)
                continue
            output = request.output_token_ids
            index = len(output)
            output.append(token_id)
            if request.first_token_at is None:
                request.first_token_at = at
            request.last_token_at = at
            num_output = index + 1
            if token_id in sampling.stop_token_ids and num_output > sampling.min_tokens:
                self._finish(request, FinishReason.STOP, at)
            elif num_output >= max_tokens or len(request.prompt_token_ids) + num_output >= limit:
                self._finish(request, FinishReason.LENGTH, at)
            token = (request_id, token_id, index, at, result.logprob, result.top_logprobs)
            emitted.append(_emitted(token))
        return tuple(emitted)

    def _finish(
        self, request: Request, reason: FinishReason, at: float, failure: str | None = None
    ) -> None:
        """End a request: the one door, whatever its phase and whoever asked."""
        del self._by_phase[request.phase][request.request_id]
        del self._requests[request.request_id]
        if request.phase is RequestPhase.RUNNING:
            self._memory.release_running(request)
        else:
            self._memory.release_waiting(request)
        request.move(RequestPhase.FINISHED)
        request.finish_reason = reason
        request.finished_at = at
        request.failure = failure
        self._runner.forget(request.request_id)
        self._ended[request.request_id] = request

    def _report(
        self,
        plan: StepPlan,
        batch: Mapping[str, Request],
        execution: Execution,
        outcome: tuple[tuple[EmittedToken, ...], tuple[PromptScores, ...]],
        started_at: float,
        planner_s: float,
        execute_s: float,
    ) -> StepReport | None:
        ended = self._ended
        if not (plan.work or plan.admissions or plan.preemptions or ended):
            self._previous_end_at = None
            return None
        self._step_no += 1
        end_at = self._clock.now()
        # After a pass without a forward the caller may wait; that wait belongs to no step.
        self._previous_end_at = end_at if plan.work and self._requests else None
        report = StepReport(
            step_no=self._step_no,
            started_at=started_at,
            duration_s=end_at - started_at,
            planner_s=planner_s,
            execute_s=execute_s,
            plan=plan,
            is_executed=bool(plan.work) and execution.num_retries == 0 and bool(execution.done),
            num_running=len(self._by_phase[RequestPhase.RUNNING]),
            num_waiting=len(self._by_phase[RequestPhase.WAITING]),
            num_preempted=len(self._by_phase[RequestPhase.PREEMPTED]),
            num_blocks_used=self._pool.num_used,
            num_blocks_total=self._pool.num_total,
            tokens=outcome[0],
            prompt_scores=outcome[1],
            finished=tuple(ended),
            failure=None if execution.done else execution.first_failure,
            num_retries=execution.num_retries,
            num_swapped_blocks=self._memory.take_num_swapped(),
            num_failed_swaps=self._memory.take_num_failed_swaps(),
            num_blocks_cached=self._pool.num_cached,
            num_host_blocks_used=self._memory.num_host_blocks_used,
            num_host_blocks_total=self._memory.num_host_blocks_total,
        )
        self._ended = {}
        named = self._named(plan, batch, ended)
        for listener in self._listeners:
            try:
                listener.on_step(report, named)
            except Exception:
                # Whoever only watches must not end anybody's request.
                logger.exception("a listener failed in step %d", report.step_no)
        return report

    def _named(
        self, plan: StepPlan, batch: Mapping[str, Request], ended: Mapping[str, Request]
    ) -> dict[str, Request]:
        named = {**batch, **ended}
        others = [item.request_id for item in plan.admissions]
        others += [item.request_id for item in plan.preemptions]
        requests = self._requests
        named.update({each: requests[each] for each in others if each not in named})
        return named

    def _known(self, request_id: str) -> Request:
        try:
            return self._requests[request_id]
        except KeyError:
            raise PlanError(f"the plan names an unknown request {request_id!r}") from None

    def _move(self, request: Request, phase: RequestPhase) -> None:
        del self._by_phase[request.phase][request.request_id]
        request.move(phase)
        self._by_phase[phase][request.request_id] = request
