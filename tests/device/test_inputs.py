"""Inputs built step after step equal inputs built from nothing, and cost what the step is worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.device.inputs import InputBuilder, StepInputs, build_inputs
from engine.request import Request, SamplingParams
from engine.step import StepPlan, StepWork, WorkKind

pytestmark = pytest.mark.device

CPU = torch.device("cpu")
BLOCK_SIZE = 4
TENSORS = (
    "input_ids",
    "position_ids",
    "slot_mapping",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "block_table",
    "sample_rows",
    "logit_rows",
    "score_token_ids",
)
ARRAYS = ("query_lengths", "context_lengths", "host_block_table")
OTHERS = ("request_ids", "sample_ids", "score_spans", "max_seqlen_q", "max_seqlen_k")


def check_equal(left: StepInputs, right: StepInputs) -> None:
    for name in TENSORS:
        one, other = getattr(left, name), getattr(right, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name
    for name in ARRAYS:
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    for name in OTHERS:
        assert getattr(left, name) == getattr(right, name), name


def work_of(request: Request, num_tokens: int) -> StepWork:
    kind = WorkKind.DECODE if request.is_decoding else WorkKind.PREFILL
    return StepWork(request.request_id, kind, num_tokens, request.num_computed_tokens)


class Life:
    """Requests that come, compute, lose their blocks, and go, as a loop would let them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.requests: dict[str, Request] = {}
        self.builder = InputBuilder(BLOCK_SIZE, CPU)
        self.free = list(range(2000))
        self.num_made = 0

    def arrive(self) -> None:
        # Names return: a new request may bear an old one's.
        name = f"r{self.num_made % 7}"
        if name in self.requests:
            return
        self.num_made += 1
        length = int(self.random.integers(1, 60))
        prompt = tuple(int(i) for i in self.random.integers(0, 99, length))
        scores = int(self.random.integers(0, 3)) if self.random.random() < 0.3 else None
        sampling = SamplingParams(num_prompt_logprobs=scores)
        self.requests[name] = Request(name, prompt, 99, 0.0, sampling)

    def give_up(self, request: Request) -> None:
        self.random.shuffle(request.block_table)
        self.free = [*request.block_table, *self.free]
        request.block_table.clear()
        request.num_computed_tokens = 0

    def change(self) -> None:
        for name, request in list(self.requests.items()):
            luck = self.random.random()
            if luck < 0.05:
                self.give_up(request)
                request.num_preemptions += 1
            elif luck < 0.1:
                self.give_up(request)
                del self.requests[name]
                # Forgetting is the loop's habit, but a request object is told apart without it.
                if luck < 0.08:
                    self.builder.forget(name)

    def step(self) -> StepInputs | None:
        batch = [r for r in self.requests.values() if self.random.random() < 0.7]
        self.random.shuffle(batch)
        work = []
        for request in batch:
            left = request.num_remaining_tokens
            item = work_of(request, int(self.random.integers(1, left + 1)))
            while len(request.block_table) * BLOCK_SIZE < item.num_context_tokens:
                request.block_table.append(self.free.pop(0))
            work.append(item)
        if not work:
            return None
        plan = StepPlan(work=tuple(work))
        inputs = self.builder.build(plan, self.requests)
        check_equal(inputs, build_inputs(plan, self.requests, BLOCK_SIZE, CPU))
        for item in work:
            request = self.requests[item.request_id]
            request.num_computed_tokens += item.num_tokens
        for span in inputs.score_spans:
            self.requests[span.request_id].num_scored_tokens += span.num_tokens
        for name in inputs.sample_ids:
            self.requests[name].output_token_ids.append(int(self.random.integers(0, 99)))
        return inputs


@pytest.mark.parametrize("seed", range(5))
def test_what_is_cached_changes_nothing(seed: int) -> None:
    life = Life(seed)
    num_steps = longest = 0
    for _ in range(150):
        if life.random.random() < 0.4:
            life.arrive()
        life.change()
        inputs = life.step()
        if inputs is not None:
            num_steps += 1
            longest = max(longest, inputs.max_seqlen_k)
    assert num_steps > 100
    assert longest > 64
    assert life.num_made > 15


def two_decodes() -> tuple[StepPlan, dict[str, Request]]:
    requests = {}
    for index, name in enumerate("ab"):
        request = Request(name, tuple(range(10)), 9, 0.0, num_computed_tokens=10)
        request.output_token_ids = [50 + index]
        request.block_table = list(range(4 * index, 4 * index + 3))
        requests[name] = request
    return StepPlan(work=tuple(work_of(r, 1) for r in requests.values())), requests


def test_the_inputs_of_a_step_are_its_own() -> None:
    builder = InputBuilder(BLOCK_SIZE, CPU)
    plan, requests = two_decodes()
    first = builder.build(plan, requests)
    copies = {name: getattr(first, name).clone() for name in TENSORS}
    table = first.host_block_table.copy()
    requests["a"].block_table[0] = 99
    requests["b"].output_token_ids[0] = 77
    builder.build(plan, requests)
    assert all(torch.equal(getattr(first, name), copies[name]) for name in TENSORS)
    assert np.array_equal(first.host_block_table, table)


@pytest.mark.parametrize(
    "table",
    [[90, 91, 92], [0, 1, 92], [90, 1, 2], [0, 1, 2, 93], [95, 96, 97, 98, 99]],
)
def test_a_table_that_changed_is_read_anew(table: list[int]) -> None:
    builder = InputBuilder(BLOCK_SIZE, CPU)
    plan, requests = two_decodes()
    builder.build(plan, requests)
    requests["a"].block_table[:] = table
    check_equal(builder.build(plan, requests), build_inputs(plan, requests, BLOCK_SIZE, CPU))


def test_a_preempted_request_may_get_its_ends_back_but_not_its_middle() -> None:
    builder = InputBuilder(BLOCK_SIZE, CPU)
    plan, requests = two_decodes()
    builder.build(plan, requests)
    requests["a"].num_preemptions += 1
    requests["a"].block_table[:] = [0, 77, 2]
    check_equal(builder.build(plan, requests), build_inputs(plan, requests, BLOCK_SIZE, CPU))


def test_work_without_blocks_is_refused() -> None:
    plan, requests = two_decodes()
    requests["b"].block_table.pop()
    with pytest.raises(ValueError, match="b: 2 blocks cannot hold"):
        build_inputs(plan, requests, BLOCK_SIZE, CPU)


def test_a_step_reads_what_is_new_however_long_the_context() -> None:
    num_read = 0

    class Watched(list[int]):
        def __getitem__(self, item: Any) -> Any:
            nonlocal num_read
            found = super().__getitem__(item)
            num_read += len(found) if isinstance(item, slice) else 1
            return found

        def __iter__(self) -> Any:
            pytest.fail("a whole list was walked")

    def reads_of_steps(context: int) -> int:
        nonlocal num_read
        request = Request("a", tuple(range(context)), 99, 0.0, num_computed_tokens=context)
        request.output_token_ids = Watched([1])
        request.block_table = Watched(range(context // BLOCK_SIZE + 1))
        builder = InputBuilder(BLOCK_SIZE, CPU)
        builder.build(StepPlan(work=(work_of(request, 1),)), {"a": request})
        num_read = 0
        for step in range(20):
            request.num_computed_tokens += 1
            request.output_token_ids.append(step)
            if len(request.block_table) * BLOCK_SIZE <= request.num_computed_tokens:
                request.block_table.append(5000 + step)
            builder.build(StepPlan(work=(work_of(request, 1),)), {"a": request})
        return num_read

    assert reads_of_steps(4000) == reads_of_steps(40)
    assert num_read < 20 * 5


def test_nothing_is_kept_of_the_forgotten() -> None:
    builder = InputBuilder(BLOCK_SIZE, CPU)
    for index in range(100):
        request = Request(f"r{index}", (1, 2, 3), 9, 0.0, block_table=[index])
        builder.build(StepPlan(work=(work_of(request, 3),)), {request.request_id: request})
        builder.forget(request.request_id)
        builder.forget("never seen")
    assert not builder._store._contexts
    assert builder._store._tables.shape[0] == 16
