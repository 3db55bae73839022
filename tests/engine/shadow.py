"""A runner that keeps keys and values as what they stand for: a token at a position.

The next token is a digest of everything read through the block table, so one wrong block, position
or copy changes every later token. Pure Python: whole schedules can be tried exhaustively.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.blocks import BlockPool
from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import EngineView
from engine.request import Request, SamplingParams
from engine.step import (
    Admission,
    AdmissionAction,
    PromptScores,
    PromptToken,
    SampledToken,
    StepOutput,
    StepPlan,
    StepReport,
    StepWork,
    WorkKind,
)

VOCAB_SIZE = 50
Cell = tuple[int, int]
GARBAGE: Cell = (-1, -1)


def next_token(cells: Sequence[Cell]) -> int:
    """The token that follows what stands in the cache."""
    digest = hashlib.blake2b(repr(list(cells)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB_SIZE


def continuation(prompt: Sequence[int], num_new: int) -> list[int]:
    """What an undisturbed run answers."""
    known = list(prompt)
    for _ in range(num_new):
        known.append(next_token([(token, at) for at, token in enumerate(known)]))
    return known[len(prompt) :]


@dataclass
class ShadowRunner:
    """`is_failing` makes a forward raise; `is_spoilt` makes one request's row unusable."""

    block_size: int
    is_failing: Callable[[StepPlan], bool] = lambda plan: False
    is_spoilt: Callable[[str], bool] = lambda request_id: False
    cells: dict[int, Cell] = field(default_factory=dict)
    host_cells: dict[int, Cell] = field(default_factory=dict)
    num_forwards: int = 0
    forgotten: list[str] = field(default_factory=list)

    def execute(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepOutput:
        self.num_forwards += 1
        self._check_writes(plan, requests)
        for work in plan.work:
            request = requests[work.request_id]
            known = request.known_token_ids(0, request.num_known_tokens)
            for at in range(work.num_computed_tokens, work.num_context_tokens):
                self.cells[self._slot(request, at)] = (known[at], at)
        if self.is_failing(plan):
            # A failed forward may have written anything where its requests write.
            for work in plan.work:
                for at in range(work.num_computed_tokens, work.num_context_tokens):
                    self.cells[self._slot(requests[work.request_id], at)] = GARBAGE
            raise RuntimeError("poisoned")
        return StepOutput(
            [
                self._sample(requests[work.request_id])
                for work in plan.work
                if work.num_context_tokens == requests[work.request_id].num_known_tokens
            ],
            [
                self._score(work, requests[work.request_id])
                for work in plan.work
                if requests[work.request_id].sampling.num_prompt_logprobs is not None
            ],
        )

    def swap_out(self, blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        self._copy(self.cells, blocks, self.host_cells, host_blocks)

    def swap_in(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self._copy(self.host_cells, host_blocks, self.cells, blocks)

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def _slot(self, request: Request, at: int) -> int:
        return request.block_table[at // self.block_size] * self.block_size + at % self.block_size

    def _sample(self, request: Request) -> SampledToken:
        cells = [
            self.cells.get(self._slot(request, at), GARBAGE)
            for at in range(request.num_known_tokens)
        ]
        failure = "not finite" if self.is_spoilt(request.request_id) else None
        return SampledToken(request.request_id, next_token(cells), failure=failure)

    def _score(self, work: StepWork, request: Request) -> PromptScores:
        stop = min(work.num_context_tokens + 1, request.num_prompt_tokens)
        tokens = tuple(
            PromptToken(request.prompt_token_ids[at], -float(at), 1)
            for at in range(work.num_computed_tokens + 1, stop)
        )
        return PromptScores(request.request_id, work.num_computed_tokens + 1, tokens)

    def _check_writes(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """A block that somebody else reads is never written."""
        tables = {work.request_id: requests[work.request_id].block_table for work in plan.work}
        for work in plan.work:
            first = work.num_computed_tokens // self.block_size
            written = set(tables[work.request_id][first:])
            for other, table in tables.items():
                assert other == work.request_id or not written & set(table), (work, other)

    def _copy(
        self,
        source: dict[int, Cell],
        blocks: Sequence[int],
        target: dict[int, Cell],
        target_blocks: Sequence[int],
    ) -> None:
        assert len(blocks) == len(target_blocks)
        for block, target_block in zip(blocks, target_blocks, strict=True):
            for offset in range(self.block_size):
                cell = source.get(block * self.block_size + offset, GARBAGE)
                target[target_block * self.block_size + offset] = cell


def plan_everyone(view: EngineView, chunk: int, skip: Collection[str] = ()) -> StepPlan:
    """Everybody goes on or starts, in chunks; `skip` names those left out."""
    requests = (*view.running, *view.preempted, *view.waiting)
    work = tuple(
        StepWork(
            request.request_id,
            WorkKind.DECODE if request.is_decoding else WorkKind.PREFILL,
            min(chunk, request.num_remaining_tokens),
            request.num_computed_tokens,
        )
        for request in requests
        if request.request_id not in skip
    )
    admissions = tuple(
        Admission(request.request_id, AdmissionAction.ADMIT, "admitted")
        for request in view.waiting
        if request.request_id not in skip
    )
    return StepPlan(work=work, admissions=admissions)


@dataclass
class Scripted:
    """Plans everybody; `change(view, plan)` has the last word."""

    chunk: int = 6
    change: Callable[[EngineView, StepPlan], StepPlan] = lambda view, plan: plan

    def plan(self, view: EngineView) -> StepPlan:
        return self.change(view, plan_everyone(view, self.chunk))


@dataclass
class ShadowEngine:
    """A production loop over a shadow runner."""

    loop: EngineLoop
    pool: BlockPool
    runner: ShadowRunner
    reports: list[StepReport]

    def run(self, max_steps: int = 1000) -> None:
        for _ in itertools.repeat(None, max_steps):
            if self.step() is None and not self.loop.has_work:
                return
        raise AssertionError("the loop does not come to rest")

    def step(self) -> StepReport | None:
        report = self.loop.step()
        if report is not None:
            self.reports.append(report)
        return report

    def assert_idle(self) -> None:
        """Nobody holds a block, on the device or on the host."""
        assert not self.loop.has_work
        assert self.pool.num_used == 0
        assert self.pool.num_free == self.pool.num_total
        assert self.reports[-1].num_host_blocks_used == 0


def make_engine(
    planner: object = None,
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    num_host_blocks: int = 0,
    is_prefix_cache_enabled: bool = True,
) -> ShadowEngine:
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=block_size * num_blocks,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        num_host_blocks=num_host_blocks,
        is_prefix_cache_enabled=is_prefix_cache_enabled,
    )
    pool = BlockPool(num_blocks, block_size)
    runner = ShadowRunner(block_size)
    loop = EngineLoop(planner or Scripted(), runner, pool, config, VirtualClock())  # type: ignore[arg-type]
    return ShadowEngine(loop, pool, runner, [])


def make_request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 5, **sampling: object
) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(request_id, tuple(prompt), max_tokens, 0.0, params)
