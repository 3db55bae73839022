"""Attention backends: the reference against plain arithmetic, flash-attn's by recording."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.device.attention.base import AttentionCall, UnsupportedByBackendError
from engine.device.attention.flash_attn import FlashAttention
from engine.device.attention.reference import ReferenceAttention, _partition
from engine.device.inputs import StepInputs, build_inputs
from engine.device.kv_cache import LayerGeometry, PagedKvCache, num_blocks_within
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind

pytestmark = pytest.mark.device

CPU = torch.device("cpu")
SHAPES = [(1, 13), (5, 0), (1, 1), (9, 4), (1, 30), (16, 16), (2, 7)]
"""(tokens computed, tokens before) of a mixed batch: decodes, first and later chunks."""


def mixed_batch(block_size: int) -> tuple[StepPlan, dict[str, Request]]:
    """Requests whose blocks are scattered over the pool in shuffled order."""
    generator = np.random.default_rng(5)
    free = list(generator.permutation(200))
    requests, work = {}, []
    for index, (num_tokens, past) in enumerate(SHAPES):
        known = past + num_tokens + (index % 2)
        prompt = tuple(int(i) for i in generator.integers(0, 50, known))
        request = Request(f"r{index}", prompt, 5, 0.0)
        num_blocks = math.ceil((past + num_tokens) / block_size)
        request.block_table = [int(free.pop()) for _ in range(num_blocks)]
        request.num_computed_tokens = past
        requests[request.request_id] = request
        kind = WorkKind.DECODE if num_tokens == 1 else WorkKind.PREFILL
        work.append(StepWork(request.request_id, kind, num_tokens, past))
    return StepPlan(work=tuple(work)), requests


def slots_of(request: Request, count: int, block_size: int) -> list[int]:
    return [
        request.block_table[p // block_size] * block_size + p % block_size for p in range(count)
    ]


@pytest.fixture(params=[1, 4, 16])
def batch(request: pytest.FixtureRequest) -> tuple[StepPlan, dict[str, Request], StepInputs, int]:
    plan, requests = mixed_batch(request.param)
    return plan, requests, build_inputs(plan, requests, request.param, CPU), request.param


def test_inputs_flatten_the_plan_in_order(batch: Any) -> None:
    plan, requests, inputs, block_size = batch
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    sampled: list[str] = []
    for item in plan.work:
        request = requests[item.request_id]
        start, stop = item.num_computed_tokens, item.num_context_tokens
        ids += request.known_token_ids(start, stop)
        positions += range(start, stop)
        slots += slots_of(request, stop, block_size)[start:]
        if stop == request.num_known_tokens:
            rows.append(len(ids) - 1)
            sampled.append(item.request_id)
    assert inputs.input_ids.tolist() == [ids]
    assert inputs.position_ids.tolist() == [positions]
    assert inputs.slot_mapping.tolist() == slots
    assert inputs.sample_rows.tolist() == rows
    assert list(inputs.sample_ids) == sampled
    queries = [item.num_tokens for item in plan.work]
    contexts = [item.num_context_tokens for item in plan.work]
    assert inputs.cu_seqlens_q.tolist() == [0, *np.cumsum(queries)]
    assert inputs.cu_seqlens_k.tolist() == [0, *np.cumsum(contexts)]
    assert (inputs.max_seqlen_q, inputs.max_seqlen_k) == (max(queries), max(contexts))
    assert inputs.cu_seqlens_q.dtype == inputs.block_table.dtype == torch.int32
    for row, item in enumerate(plan.work):
        table = requests[item.request_id].block_table
        assert inputs.block_table[row, : len(table)].tolist() == table


@pytest.mark.parametrize("tile_rows", [3, 256])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_reference_equals_plain_attention(
    batch: Any,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    softcap: float | None,
    tile_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.device.attention.reference.TILE_ROWS", tile_rows)
    plan, requests, inputs, block_size = batch
    torch.manual_seed(1)
    key_dim, value_dim = 8, 6
    layer = LayerGeometry(num_kv_heads, key_dim, value_dim)
    cache = PagedKvCache((layer,), 200, block_size, torch.float64, CPU)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    query = torch.randn(inputs.num_tokens, num_heads, key_dim, dtype=torch.float64)
    call = AttentionCall(0, scale=0.3, sliding_window=window, softcap=softcap)
    output = ReferenceAttention().attend(query, cache, inputs, call)

    row = 0
    for item in plan.work:
        slots = slots_of(requests[item.request_id], item.num_context_tokens, block_size)
        keys, values = cache.keys[0].flatten(0, 1)[slots], cache.values[0].flatten(0, 1)[slots]
        for position in range(item.num_computed_tokens, item.num_context_tokens):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                shared = head * num_kv_heads // num_heads
                scores = keys[first : position + 1, shared] @ query[row, head] * call.scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                expected = torch.softmax(scores, 0) @ values[first : position + 1, shared]
                torch.testing.assert_close(output[row, head], expected)
            row += 1


def test_writing_touches_only_the_slots_of_the_step(batch: Any) -> None:
    _, _, inputs, block_size = batch
    cache = PagedKvCache((LayerGeometry(2, 4, 3),), 200, block_size, torch.float32, CPU)
    key = torch.randn(inputs.num_tokens, 2, 4)
    value = torch.randn(inputs.num_tokens, 2, 3)
    cache.write(0, key, value, inputs.slot_mapping)
    keys, values = cache.keys[0].flatten(0, 1), cache.values[0].flatten(0, 1)
    assert torch.equal(keys[inputs.slot_mapping], key)
    assert torch.equal(values[inputs.slot_mapping], value)
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[inputs.slot_mapping] = False
    assert not keys[untouched].any()


def test_equal_decodes_share_one_call_and_padding_is_bounded() -> None:
    decodes = _partition(np.ones(32, np.int64), np.full(32, 100), 10**9)
    assert [len(group) for group in decodes] == [32]
    lengths = np.array([1] * 8 + [512, 500, 3], np.int64)
    contexts = np.array([10_000, 11_000, 40, 50, 60, 10_500, 45, 55, 512, 4000, 3], np.int64)
    groups = _partition(lengths, contexts, 10**9)
    assert sorted(index for group in groups for index in group) == list(range(11))
    for group in groups:
        padded = len(group) * int(lengths[group].max()) * int(contexts[group].max())
        needed = int((lengths[group] * contexts[group]).sum())
        assert padded <= 1.25 * needed + 4096
    assert len(groups) < 11


def test_a_call_gathers_what_the_processor_holds_but_never_one_request_alone() -> None:
    ones = np.ones(32, np.int64)
    assert [len(group) for group in _partition(ones, np.full(32, 1000), 4000)] == [4] * 8
    assert [len(group) for group in _partition(ones, np.full(32, 9000), 4000)] == [2] * 16
    # Members stand in packed order, whatever their contexts: a batch of decodes is one whole group.
    assert _partition(ones[:3], np.array([40, 10, 30]), 4000)[0].tolist() == [0, 1, 2]


def test_groups_are_built_once_per_step_and_window(batch: Any) -> None:
    _, _, inputs, block_size = batch
    cache = PagedKvCache((LayerGeometry(1, 4, 4),) * 4, 200, block_size, torch.float32, CPU)
    query = torch.randn(inputs.num_tokens, 2, 4)
    for layer_idx, window in enumerate([None, 6, None, 6]):
        ReferenceAttention().attend(query, cache, inputs, AttentionCall(layer_idx, 1.0, window))
    assert sorted((key[1] for key in inputs.scratch), key=str) == [6, None]


class RecordingKernel:
    """Stands in for `flash_attn_varlen_func` with the documented signature of version 2.8."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls.append(dict(locals()))
        return torch.zeros(q.shape[0], q.shape[1], v.shape[-1])


@pytest.mark.parametrize(
    ("window", "softcap", "expected_window"), [(None, None, (-1, -1)), (512, 30.0, (511, 0))]
)
def test_flash_attn_is_called_as_documented(
    window: int | None, softcap: float | None, expected_window: tuple[int, int]
) -> None:
    plan, requests = mixed_batch(256)
    inputs = build_inputs(plan, requests, 256, CPU)
    cache = PagedKvCache((LayerGeometry(2, 8, 8),), 200, 256, torch.float32, CPU)
    kernel = RecordingKernel()
    query = torch.randn(inputs.num_tokens, 4, 8)
    backend = FlashAttention(kernel)
    output = backend.attend(query, cache, inputs, AttentionCall(0, 0.25, window, softcap))
    assert output.shape == (inputs.num_tokens, 4, 8)
    (call,) = kernel.calls
    assert call["k"] is cache.keys[0]
    assert call["v"] is cache.values[0]
    assert call["k"].shape == (200, 256, 2, 8)
    assert call["cu_seqlens_q"] is inputs.cu_seqlens_q
    assert call["cu_seqlens_k"] is inputs.cu_seqlens_k
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (16, 32)
    assert call["block_table"] is inputs.block_table
    assert (call["causal"], call["softmax_scale"]) == (True, 0.25)
    assert call["window_size"] == expected_window
    assert call["softcap"] == (softcap or 0.0)


@pytest.mark.parametrize(
    ("block_size", "dtype", "device", "names"),
    [
        (256, torch.bfloat16, "cpu", "--attention-backend"),
        (16, torch.bfloat16, "cuda", "--block-size 16"),
        (256, torch.float32, "cuda", "--dtype bfloat16"),
    ],
)
def test_flash_attn_refuses_what_it_cannot_do(
    block_size: int, dtype: torch.dtype, device: str, names: str
) -> None:
    with pytest.raises(UnsupportedByBackendError, match=names):
        FlashAttention(RecordingKernel()).check(block_size, dtype, torch.device(device))


def test_flash_attn_accepts_paged_half_precision_on_cuda() -> None:
    FlashAttention(RecordingKernel()).check(512, torch.float16, torch.device("cuda"))


def test_pool_size_counts_every_layer() -> None:
    layers = (LayerGeometry(2, 8, 4), LayerGeometry(1, 8, 8))
    per_token = (2 * 12 + 16) * 4
    assert num_blocks_within(per_token * 16 * 7 + 5, layers, 16, torch.float32) == 7
