"""Swapping: what goes to host memory comes back, to other blocks, and nobody else's moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.device import kv_cache
from engine.device.attention.reference import ReferenceAttention
from engine.device.kv_cache import LayerGeometry, PagedKvCache, num_bytes_per_block
from engine.device.runner import TorchRunner
from engine.request import Request
from engine.step import StepPlan, StepWork, WorkKind

pytestmark = pytest.mark.device

CPU = torch.device("cpu")
LAYERS = (LayerGeometry(2, 4, 6), LayerGeometry(1, 8, 8), LayerGeometry(3, 2, 2))
NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 12, 9, 4


def make_cache() -> PagedKvCache:
    torch.manual_seed(3)
    cache = PagedKvCache(LAYERS, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU, NUM_HOST_BLOCKS)
    for pages in (*cache.keys, *cache.values):
        pages.normal_()
    return cache


def snapshot(cache: PagedKvCache) -> list[torch.Tensor]:
    return [pages.clone() for pages in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("packed_blocks", [1, 2, 100])
@pytest.mark.parametrize(
    ("blocks", "host_blocks", "targets"),
    [
        ([3], [0], [7]),
        ([5, 1, 8, 2], [3, 4, 5, 6], [2, 8, 1, 5]),
        ([0, 11, 6], [8, 0, 4], [9, 10, 11]),
        ([7, 6, 5, 4, 3], [5, 4, 8, 1, 0], [0, 1, 2, 3, 4]),
    ],
)
def test_blocks_return_to_other_blocks(
    blocks: list[int],
    host_blocks: list[int],
    targets: list[int],
    packed_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block_bytes = num_bytes_per_block(LAYERS, BLOCK_SIZE, torch.float32)
    monkeypatch.setattr(kv_cache, "_MAX_PACKED_BYTES", packed_blocks * block_bytes)
    cache = make_cache()
    before = snapshot(cache)
    cache.copy_out(blocks, host_blocks)
    for pages in (*cache.keys, *cache.values):
        pages[blocks] = -1.0
    clobbered = snapshot(cache)
    cache.copy_in(host_blocks, targets)
    others = sorted(set(range(NUM_BLOCKS)) - set(targets))
    for pages, old, spoilt in zip(snapshot(cache), before, clobbered, strict=True):
        assert torch.equal(pages[targets], old[blocks])
        assert torch.equal(pages[others], spoilt[others])


def test_neighbours_in_host_memory_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    original = kv_cache._runs

    def watching(host_blocks: Any) -> Any:
        found = list(original(host_blocks))
        runs.append(len(found))
        return found

    monkeypatch.setattr(kv_cache, "_runs", watching)
    cache = make_cache()
    cache.copy_out([9, 1, 6, 2], [5, 3, 6, 4])
    cache.copy_in([6, 5, 4, 3], [0, 3, 7, 8])
    cache.copy_out([4, 5, 6], [8, 2, 1])
    assert runs == [1, 1, 2]


def test_host_blocks_keep_apart() -> None:
    cache = make_cache()
    before = snapshot(cache)
    cache.copy_out([0, 1], [4, 2])
    cache.copy_out([2, 3], [3, 5])
    cache.copy_in([2, 3, 4, 5], [8, 9, 10, 11])
    for pages, old in zip(snapshot(cache), before, strict=True):
        assert torch.equal(pages[8:], old[[1, 2, 0, 3]])


@pytest.mark.parametrize(
    ("blocks", "host_blocks"),
    [([NUM_BLOCKS], [0]), ([0], [NUM_HOST_BLOCKS]), ([-1], [0]), ([1], [])],
)
def test_impossible_moves_are_refused_before_anything_moves(
    blocks: list[int], host_blocks: list[int]
) -> None:
    cache = make_cache()
    before = snapshot(cache)
    with pytest.raises(ValueError):
        cache.copy_out(blocks, host_blocks)
    with pytest.raises(ValueError):
        cache.copy_in(host_blocks, blocks)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(cache), before, strict=True))


def test_nothing_to_move() -> None:
    cache = PagedKvCache(LAYERS, NUM_BLOCKS, BLOCK_SIZE, torch.float32, CPU)
    cache.copy_out([], [])
    cache.copy_in([], [])
    assert cache.num_host_blocks == 0


def test_host_bytes_are_what_one_block_holds() -> None:
    values_per_token = 2 * 10 + 16 + 3 * 4
    assert num_bytes_per_block(LAYERS, BLOCK_SIZE, torch.float32) == values_per_token * 4 * 4
    cache = make_cache()
    held = sum(p[0].numel() * p.element_size() for p in (*cache.keys, *cache.values))
    assert num_bytes_per_block(LAYERS, BLOCK_SIZE, torch.float32) == held


def step(runner: TorchRunner, *shares: tuple[Request, int]) -> None:
    """Execute one step as the loop would, and commit what came of it."""
    requests = {request.request_id: request for request, _ in shares}
    work = []
    for request, num_tokens in shares:
        kind = WorkKind.DECODE if request.is_decoding else WorkKind.PREFILL
        work.append(StepWork(request.request_id, kind, num_tokens, request.num_computed_tokens))
    output = runner.execute(StepPlan(work=tuple(work)), requests)
    for item in work:
        requests[item.request_id].num_computed_tokens += item.num_tokens
    for token in output.tokens:
        assert token.failure is None
        requests[token.request_id].output_token_ids.append(token.token_id)


@pytest.mark.parametrize("swapped_after", range(8))
def test_a_swapped_request_continues_as_if_undisturbed(
    tiny: Any, make_request: Any, make_prompt: Any, swapped_after: int
) -> None:
    chunks = [7, 7, 3, 1, 1, 1, 1, 1]
    sampling = {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "num_logprobs": 3}

    def make_runner() -> TorchRunner:
        return TorchRunner(
            tiny.served, ReferenceAttention(), 24, BLOCK_SIZE, seed=0, num_host_blocks=8
        )

    def run(is_disturbed: bool) -> list[int]:
        runner = make_runner()
        request = make_request("victim", make_prompt(1, 17), 9, **sampling)
        request.block_table = [3, 9, 4, 17, 0, 12]
        for index, num_tokens in enumerate(chunks):
            step(runner, (request, num_tokens))
            if is_disturbed and index == swapped_after:
                used = -(-request.num_computed_tokens // BLOCK_SIZE)
                host = [6, 1, 2, 0, 7, 3][:used]
                runner.swap_out(request.block_table[:used], host)
                # Somebody else takes the very blocks that were given up.
                other = make_request("other", make_prompt(2, 24), 5)
                other.block_table = list(request.block_table)
                step(runner, (other, 24))
                request.num_preemptions += 1
                request.block_table = [20, 21, 18, 7, 6, 5]
                runner.swap_in(host, request.block_table[:used])
        tokens: list[int] = request.output_token_ids
        return tokens

    undisturbed = run(is_disturbed=False)
    assert len(undisturbed) == 6
    assert len(np.unique(undisturbed)) > 2
    assert run(is_disturbed=True) == undisturbed
