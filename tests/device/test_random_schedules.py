"""Random schedules over a real runner: tokens, log-probabilities and prompt scores of solo runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest

from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.device.attention.reference import ReferenceAttention
from engine.device.runner import TorchRunner
from engine.loop import EngineLoop
from engine.ports import EngineView, Planner
from engine.request import FinishReason, Request, RequestPhase, SamplingParams
from engine.step import (
    EmittedToken,
    Preemption,
    PreemptionMethod,
    PromptToken,
    StepOutput,
    StepPlan,
    StepReport,
)
from tests.device.families import VOCAB_SIZE
from tests.engine.shadow import Scripted, plan_everyone

pytestmark = pytest.mark.device

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS = 4, 18, 9
# Summation order differs with the chunks; float64 leaves this much and no more.
CLOSE = 1e-8


def draw_requests(rng: Random) -> list[Request]:
    """Requests that begin alike, and ask for whatever a sampler offers."""
    stem = [rng.randrange(2, VOCAB_SIZE) for _ in range(30)]
    requests = []
    for i in range(rng.randint(3, 6)):
        tail = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(0, 3))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 0.8, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            seed=rng.choice([None, 5]),
            num_logprobs=rng.choice([None, 0, 3]),
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 5)),
            min_tokens=rng.choice([0, 4]),
            num_prompt_logprobs=rng.choice([None, None, 0, 2]),
        )
        prompt = (*stem[: rng.randint(1, 30)], *tail)
        requests.append(Request(f"r{i}", prompt, rng.choice([0, 3, 9]), 0.0, sampling))
    return requests


def fresh(request: Request) -> Request:
    return Request(
        request.request_id, request.prompt_token_ids, request.max_tokens, 0.0, request.sampling
    )


class Failing(TorchRunner):
    """Fails by and by, once everything is written."""

    rng: Random | None = None
    num_failures = 0

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        output = super().execute(plan, requests)
        if self.rng is not None and len(plan.work) > 1 and self.rng.random() < 0.2:
            self.num_failures += 1
            raise RuntimeError("too large")
        return output


class Engine:
    """A loop over a real runner that keeps what each request was told."""

    def __init__(self, tiny: Any, planner: Planner, is_shared: bool) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.runner = Failing(
            tiny.served, ReferenceAttention(), NUM_BLOCKS, BLOCK_SIZE, 0, NUM_HOST_BLOCKS
        )
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_host_blocks=NUM_HOST_BLOCKS,
            is_prefix_cache_enabled=is_shared,
        )
        self.loop = EngineLoop(planner, self.runner, self.pool, config, VirtualClock(), (self,))
        self.tokens: dict[str, list[EmittedToken]] = {}
        self.scores: dict[str, list[PromptToken]] = {}
        self.num_swapped = 0

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        self.num_swapped += report.num_swapped_blocks
        for token in report.tokens:
            self.tokens.setdefault(token.request_id, []).append(token)
        for scores in report.prompt_scores:
            told = self.scores.setdefault(scores.request_id, [])
            assert scores.start == len(told) + 1
            told.extend(scores.tokens)

    def run(self) -> None:
        while self.loop.has_work:
            self.spoil()
            self.loop.step()

    def spoil(self) -> None:
        """What a poisoned request may leave behind: no block that nobody knows holds a number."""
        cache = self.runner._cache
        for block in range(NUM_BLOCKS):
            if self.pool.num_references(block) == 0 and self.pool.name_of(block) is None:
                for pages in (*cache.keys, *cache.values):
                    pages[block] = float("nan")


class AtRandom:
    """Chunks, order, pauses, preemptions and swaps by chance; only what fits is planned."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def plan(self, view: EngineView) -> StepPlan:
        rng, free = self.rng, view.num_free_blocks
        holders = {block: view.num_holders(block) for block in range(NUM_BLOCKS)}
        preemptions = []
        for request in view.running:
            if rng.random() < 0.2:
                method = rng.choice(list(PreemptionMethod))
                preemptions.append(Preemption(request.request_id, method))
                for block in request.block_table:
                    holders[block] -= 1
                    free += holders[block] == 0
        gone = {preemption.request_id for preemption in preemptions}
        requests = {
            r.request_id: r for g in (view.waiting, view.running, view.preempted) for r in g
        }
        everyone = plan_everyone(view, 10, gone)
        work = []
        for item in rng.sample(everyone.work, len(everyone.work)):
            request, num_tokens = requests[item.request_id], rng.randint(1, item.num_tokens)
            is_starting = request.phase is not RequestPhase.RUNNING
            table = request.block_table
            needed = max(0, -(-(item.num_computed_tokens + num_tokens) // BLOCK_SIZE) - len(table))
            needed += sum(holders[block] == 0 for block in table) if is_starting else 0
            if rng.random() < 0.2 or needed > free:
                continue
            free -= needed
            for block in table if is_starting else ():
                holders[block] += 1
            work.append(item._replace(num_tokens=num_tokens))
        started = {item.request_id for item in work}
        return StepPlan(
            work=tuple(work),
            admissions=tuple(a for a in everyone.admissions if a.request_id in started),
            preemptions=tuple(preemptions),
        )


def check_tokens(told: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compare ids exactly and log-probabilities up to rounding."""
    for one, other in zip(told, expected, strict=True):
        assert one.token_id == other.token_id
        assert (one.logprob is None) == (other.logprob is None)
        assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)
        assert [t.token_id for t in one.top_logprobs] == [t.token_id for t in other.top_logprobs]
        assert [t.logprob for t in one.top_logprobs] == pytest.approx(
            [t.logprob for t in other.top_logprobs], abs=CLOSE
        )


def test_any_schedule_tells_what_solo_runs_tell(tiny: Any) -> None:
    num_preempted = num_cached = num_swapped = num_failures = num_cancelled = 0
    for seed in range(8):
        rng = Random(seed)
        requests = draw_requests(rng)
        planner = AtRandom(rng)
        engine = Engine(tiny, planner, is_shared=True)
        engine.runner.rng = rng
        for request in requests:
            engine.loop.submit(request)
            engine.loop.step()
            if rng.random() < 0.1:
                engine.loop.finish(rng.choice(requests).request_id, FinishReason.CANCELLED)
        engine.run()
        for request in requests:
            solo, alone = Engine(tiny, Scripted(1000), is_shared=False), fresh(request)
            solo.loop.submit(alone)
            solo.run()
            told, expected = (e.tokens.get(request.request_id, []) for e in (engine, solo))
            scores, all_scores = (e.scores.get(request.request_id, []) for e in (engine, solo))
            if request.finish_reason is FinishReason.CANCELLED:
                num_cancelled += 1
                expected, all_scores = expected[: len(told)], all_scores[: len(scores)]
            else:
                assert request.finish_reason is alone.finish_reason
            check_tokens(told, expected)
            check_tokens(scores, all_scores)
            assert [token.rank for token in scores] == [token.rank for token in all_scores]
            num_preempted += request.num_preemptions
            num_cached += request.num_cached_tokens > 0
        assert engine.pool.num_used == engine.loop._memory.num_host_blocks_used == 0
        assert not engine.runner._sampler._cache
        assert not engine.runner._inputs._store._contexts
        num_swapped += engine.num_swapped
        num_failures += engine.runner.num_failures
    # Or nothing was tried.
    assert min(num_preempted, num_swapped) > 20
    assert min(num_failures, num_cached, num_cancelled) > 2
