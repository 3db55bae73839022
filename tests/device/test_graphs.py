"""Graphs of decode steps: sizes, padding, buffers, fallback.

The double of a graph runs the recorded work again on what the buffers hold, as a replay does;
tokens must be those of a run without graphs.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.device import loading
from engine.device.graphs import (
    DecodeGraphs,
    GraphLimits,
    GraphRequest,
    batch_sizes,
)
from engine.device.inputs import StepInputs, build_inputs
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind
from tests.device.graph_double import EagerRecorder

pytestmark = pytest.mark.device

CPU = torch.device("cpu")
BLOCK_SIZE = 4


@pytest.mark.parametrize(
    ("max_batch", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (0, ()),
    ],
)
def test_sizes(max_batch: int, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(max_batch) == sizes


def test_sizes_end_where_graphs_gain_nothing() -> None:
    assert batch_sizes(4096)[-1] == 256
    assert len(batch_sizes(4096)) == 35


def decode_inputs(contexts: Sequence[int], first_block: int = 0) -> StepInputs:
    """Decodes with contexts of the given lengths, token ids 10, 11, …"""
    requests, work = {}, []
    for index, context in enumerate(contexts):
        request = Request(f"r{index}", (5,) * (context - 1), 9, 0.0)
        request.output_token_ids.append(10 + index)
        count = -(-context // BLOCK_SIZE)
        # One block more than the context needs: a reservation.
        request.block_table = list(range(first_block, first_block + count + 1))
        first_block += count + 1
        request.num_computed_tokens = context - 1
        requests[request.request_id] = request
        work.append(StepWork(request.request_id, WorkKind.DECODE, 1, context - 1))
    return build_inputs(StepPlan(work=tuple(work)), requests, BLOCK_SIZE, CPU)


class Spy:
    """A forward that keeps what it saw and whose logits are a function of ids and contexts."""

    def __init__(self) -> None:
        self.seen: list[StepInputs] = []

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        self.seen.append(inputs)
        lengths = inputs.cu_seqlens_k.diff()
        return torch.stack([inputs.input_ids[0], lengths], dim=1).double()


LIMITS = GraphLimits(max_batch=8, max_context=40, block_size=BLOCK_SIZE, scratch_block=77)


def make(forward: Callable[[StepInputs], torch.Tensor], **limits: Any) -> DecodeGraphs:
    graphs = DecodeGraphs(forward, LIMITS, CPU, limits.pop("record", EagerRecorder()))
    assert graphs.capture() is None
    return graphs


def test_a_step_is_padded_with_rows_that_touch_nobodys_blocks() -> None:
    spy = Spy()
    graphs = make(spy)
    inputs = decode_inputs([9, 4, 17])
    logits = graphs.run(inputs)
    assert logits is not None
    assert logits.tolist() == [[10, 9], [11, 4], [12, 17]]
    padded = spy.seen[-1]
    assert padded.input_ids.tolist() == [[10, 11, 12, 0]]
    assert padded.position_ids.tolist() == [[8, 3, 16, 0]]
    assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    assert padded.cu_seqlens_k.tolist() == [0, 9, 13, 30, 31]
    assert padded.slot_mapping.tolist() == [*inputs.slot_mapping.tolist(), 77 * BLOCK_SIZE]
    width = inputs.block_table.shape[1]
    assert padded.block_table[:3, :width].tolist() == inputs.block_table.tolist()
    assert padded.block_table[3].tolist()[0] == 77
    assert padded.sample_rows.tolist() == [0, 1, 2, 3]
    # Clean rows are not cleaned again, and no step leaves anything behind for a smaller one.
    graphs.run(decode_inputs([6] * 4))
    graphs.run(inputs)
    again = spy.seen[-1]
    assert again.slot_mapping.tolist() == [*inputs.slot_mapping.tolist(), 77 * BLOCK_SIZE]
    assert again.cu_seqlens_k.tolist() == [0, 9, 13, 30, 31]
    # What a recorded kernel keeps as a number must hold for every step to come.
    assert (padded.max_seqlen_q, padded.max_seqlen_k) == (1, 40)
    assert graphs.num_replayed == 3


def test_every_step_overwrites_what_the_last_one_left() -> None:
    spy = Spy()
    graphs = make(spy)
    rng = np.random.default_rng(3)
    for _ in range(40):
        contexts = rng.integers(1, 40, rng.integers(1, 9)).tolist()
        logits = graphs.run(decode_inputs(contexts))
        assert logits is not None
        assert logits.tolist() == [[10 + i, c] for i, c in enumerate(contexts)]
        padded = spy.seen[-1]
        lengths = padded.cu_seqlens_k.diff().tolist()
        extra = len(lengths) - len(contexts)
        assert lengths == contexts + [1] * extra
        assert padded.slot_mapping[len(contexts) :].tolist() == [77 * BLOCK_SIZE] * extra
        assert padded.block_table[len(contexts) :, 0].tolist() == [77] * extra
        assert int(padded.block_table.min()) >= 0


def test_the_buffers_never_move() -> None:
    # A graph holds addresses, not tensors.
    spy = Spy()
    graphs = make(spy)
    places = set()
    for contexts in ([3] * 4, [9, 1, 30], [2] * 4):
        graphs.run(decode_inputs(contexts))
        padded = spy.seen[-1]
        tensors = [getattr(padded, name) for name in StepInputs.__slots__]
        places.add(tuple(t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)))
    assert len(places) == 1


@pytest.mark.parametrize(
    ("contexts", "size"), [([5], 1), ([5] * 3, 4), ([5] * 8, 8), ([5] * 9, None), ([5, 41], None)]
)
def test_a_step_beyond_the_graphs_runs_without(contexts: list[int], size: int | None) -> None:
    graphs = make(Spy())
    inputs = decode_inputs(contexts)
    assert graphs.size_for(inputs) == size
    assert (graphs.run(inputs) is None) == (size is None)


def test_a_chunk_runs_without() -> None:
    request = Request("r0", (5,) * 9, 4, 0.0)
    request.block_table = [0, 1, 2]
    plan = StepPlan(work=(StepWork("r0", WorkKind.PREFILL, 9, 0),))
    assert make(Spy()).run(build_inputs(plan, {"r0": request}, BLOCK_SIZE, CPU)) is None


def test_what_is_derived_once_per_step_is_derived_in_every_replay() -> None:
    def forward(inputs: StepInputs) -> torch.Tensor:
        if "lengths" not in inputs.scratch:
            inputs.scratch["lengths"] = inputs.cu_seqlens_k.diff()
        lengths: torch.Tensor = inputs.scratch["lengths"]
        return lengths[:, None].double()

    graphs = make(forward)
    for contexts in ([7], [30], [11]):
        logits = graphs.run(decode_inputs(contexts))
        assert logits is not None
        assert logits.tolist() == [[contexts[0]]]


def fail(caplog: Any, forward: Any, record: Any) -> str:
    graphs = DecodeGraphs(forward, LIMITS, CPU, record)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        reason = graphs.capture()
    assert reason is not None
    assert graphs.sizes == ()
    assert graphs.run(decode_inputs([5])) is None
    assert [record.message for record in caplog.records] == [f"CUDA graphs are off: {reason}"]
    return reason


def test_a_failed_capture_turns_graphs_off_with_one_line(caplog: Any) -> None:
    def record(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA error")

    assert "not permitted" in fail(caplog, Spy(), record)


def test_a_graph_that_repeats_old_results_is_not_used(caplog: Any) -> None:
    # What was decided on the host while recording stays as it was: a replay gives the old answer.
    def record(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None

    assert "off by" in fail(caplog, Spy(), record)


def test_logits_that_are_not_finite_are_no_proof(caplog: Any) -> None:
    def forward(inputs: StepInputs) -> torch.Tensor:
        return torch.full((inputs.num_tokens, 3), torch.nan)

    assert "off by nan" in fail(caplog, forward, EagerRecorder())


@pytest.mark.parametrize(
    ("device", "max_batch", "expected"),
    [("cuda", 8, GraphRequest(8, 100)), ("cuda", 0, None), ("cpu", 8, None)],
)
def test_graphs_are_asked_for_on_cuda_only(
    device: str, max_batch: int, expected: GraphRequest | None
) -> None:
    model: Any = types.SimpleNamespace(device=torch.device(device))
    options = loading.DeviceOptions(max_graph_batch=max_batch)
    assert loading._graphs(options, model, 100) == expected
