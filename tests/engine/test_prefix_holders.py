"""The prefix cache and requests that hold blocks, were preempted, or share none at all."""

from __future__ import annotations

import pytest

from engine.errors import BlockAccountingError
from tests.engine.prefix_rig import NUM_BLOCKS, Rig, matches

TEN = list(range(10))


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    rig = Rig()
    request = rig.arrive(TEN)
    rig.run(request)
    rig.decode(request, [20, 21, 22])
    blocks = list(request.block_table)
    rig.preempt(request)
    assert request.block_table == blocks[:3]
    assert (request.num_computed_tokens, request.num_remaining_tokens) == (12, 1)
    assert rig.start(request) == 12


def test_the_newest_token_of_a_preempted_request_is_computed_again() -> None:
    rig = Rig()
    request = rig.arrive(range(7))
    rig.run(request)
    rig.decode(request, [7])
    assert request.num_computed_tokens == 8
    rig.preempt(request)
    assert matches(request) == [1]


def test_a_swapped_request_is_no_watcher_and_names_what_comes_back() -> None:
    rig = Rig()
    request = rig.arrive(TEN)
    rig.run(request)
    request.output_token_ids.append(10)
    request.host_block_table = [0, 1, 2]
    rig.cache.release(request)
    with pytest.raises(BlockAccountingError, match="holds blocks"):
        rig.cache.watch(request)
    rig.pool.forget_names()
    assert rig.cache.start(request) == 0
    assert request.num_computed_tokens == 10
    request.block_table.extend(rig.pool.allocate(3))
    request.host_block_table.clear()
    rig.compute(request, 1)
    assert rig.arrive(TEN).block_table == request.block_table[:2]


def test_a_request_that_came_back_before_names_were_forgotten_names_none() -> None:
    rig = Rig()
    request = rig.arrive(TEN)
    rig.start(request)
    rig.compute(request, 2)
    rig.cache.release(request)
    assert rig.cache.start(request) == 0
    request.block_table.extend(rig.pool.allocate(1))
    rig.cache.commit(request)
    rig.cache.forget_names()
    rig.compute(request, 8)
    assert matches(rig.arrive(TEN)) == [0]


@pytest.mark.parametrize("is_swapped_first", [False, True])
def test_a_request_that_was_on_the_host_brings_its_doubts_back(is_swapped_first: bool) -> None:
    """Names were forgotten because blocks may be spoilt: a copy of them may be spoilt as well."""
    rig = Rig()
    request = rig.arrive(TEN)
    rig.run(request)
    request.output_token_ids.append(10)
    if not is_swapped_first:
        rig.cache.forget_names()
    request.host_block_table = [0, 1, 2]
    rig.cache.release(request)
    if is_swapped_first:
        rig.cache.forget_names()
    request.block_table.extend(rig.pool.allocate(3))
    request.host_block_table.clear()
    rig.cache.commit(request)
    rig.compute(request, 1)
    assert matches(rig.arrive(TEN)) == [0]
    # Dropped, it is computed anew and may be shared again.
    rig.preempt(request)
    rig.run(request)
    assert matches(rig.arrive(TEN)) == [2]


def test_nothing_is_kept_of_who_ends_on_the_host() -> None:
    rig = Rig()
    request = rig.arrive(TEN)
    rig.run(request)
    request.host_block_table = [0, 1, 2]
    rig.cache.release(request)
    assert not rig.cache.is_idle
    rig.cache.unwatch(request)
    assert rig.cache.is_idle


def test_mistakes_in_the_books_are_bugs() -> None:
    rig = Rig()
    rig.remember(TEN)
    waiting, running = rig.arrive(TEN), rig.arrive(TEN)
    rig.run(running)
    with pytest.raises(BlockAccountingError, match="watches"):
        rig.cache.release(waiting)
    with pytest.raises(BlockAccountingError, match="holds blocks"):
        rig.cache.watch(running)
    assert [rig.pool.num_references(block) for block in running.block_table] == [1, 1, 1]


def test_a_cache_that_is_off_only_counts_blocks() -> None:
    rig = Rig(is_enabled=False)
    rig.remember(TEN)
    request = rig.arrive(TEN)
    assert (request.block_hashes, rig.cache.num_watchers) == ([], 0)
    assert rig.run(request) == 0
    rig.decode(request, range(8))
    rig.preempt(request)
    assert (request.block_table, request.num_computed_tokens) == ([], 0)
    assert (rig.pool.num_free, rig.pool.num_cached) == (NUM_BLOCKS, 0)
    rig.cache.unwatch(request)
    assert rig.cache.is_idle
