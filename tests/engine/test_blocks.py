"""The block pool: arithmetic, references, names, and its books under every sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.blocks import BlockPool, num_blocks_for
from engine.errors import BlockAccountingError, OutOfBlocksError

NUM_BLOCKS = 12


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_blocks_for_tokens(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 4) == expected


def test_missing_blocks_count_what_is_held() -> None:
    pool = BlockPool(NUM_BLOCKS, 4)
    assert pool.num_missing(9, []) == 3
    assert pool.num_missing(9, [0, 1]) == 1
    assert pool.num_missing(4, [0, 1]) == 0


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(NUM_BLOCKS, 4)
    pool.allocate(10)
    with pytest.raises(OutOfBlocksError, match="3 blocks asked for, 2 of 12 free"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("block", [-1, 12, 5])
def test_releasing_what_is_not_held_is_a_bug(block: int) -> None:
    pool = BlockPool(NUM_BLOCKS, 4)
    pool.allocate(2)
    with pytest.raises(BlockAccountingError, match=str(block)):
        pool.release([block])


@pytest.mark.parametrize(("num_total", "block_size"), [(0, 4), (4, 0)])
def test_sizes_must_be_positive(num_total: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        BlockPool(num_total, block_size)


def named_pool(*names: bytes) -> BlockPool:
    """A pool whose first blocks were named in order and released in order; the rest is held."""
    pool = BlockPool(NUM_BLOCKS, 4)
    pool.allocate(NUM_BLOCKS)
    for block, name in enumerate(names):
        assert pool.name(block, name)
    pool.release(range(len(names)))
    return pool


def test_unnamed_blocks_are_taken_before_named_ones() -> None:
    pool = named_pool(b"a", b"b")
    pool.release([7, 5])
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.allocate(3) == [7, 5, 0]
    assert (pool.find(b"a"), pool.find(b"b")) == (None, 1)


def test_the_least_recently_used_name_is_lost_first() -> None:
    pool = named_pool(b"a", b"b", b"c")
    pool.touch([2, 0])
    assert [pool.allocate(1), pool.allocate(1), pool.allocate(1)] == [[1], [2], [0]]


def test_blocks_in_use_are_not_touched() -> None:
    pool = named_pool(b"a", b"b")
    pool.acquire([0])
    pool.touch([0, 11])
    assert pool.num_cached == 1
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)


def test_a_released_name_is_the_most_recently_used() -> None:
    pool = named_pool(b"a", b"b")
    pool.acquire([0])
    pool.release([0])
    assert pool.allocate(2) == [1, 0]


def test_a_shared_block_is_held_until_the_last_one_lets_go() -> None:
    pool = named_pool(b"a")
    pool.acquire([0])
    pool.acquire([0])
    assert (pool.num_references(0), pool.num_used) == (2, NUM_BLOCKS)
    pool.release([0])
    assert (pool.num_references(0), pool.num_free) == (1, 0)
    pool.release([0])
    assert pool.num_cached == pool.num_free == 1


def test_a_free_block_without_a_name_cannot_be_acquired() -> None:
    pool = named_pool(b"a")
    pool.release([5])
    for block in (5, -1, NUM_BLOCKS):
        with pytest.raises(BlockAccountingError, match=f"block {block} "):
            pool.acquire([0, block])
    assert pool.num_references(0) == 0


def test_a_name_belongs_to_one_block() -> None:
    pool = named_pool(b"a")
    assert not pool.name(1, b"a")
    assert (pool.find(b"a"), pool.name_of(1)) == (0, None)
    assert pool.name(1, b"b")
    assert pool.name(1, b"b")
    with pytest.raises(BlockAccountingError, match="another name"):
        pool.name(1, b"c")
    assert (pool.find(b"c"), pool.name_of(1)) == (None, b"b")


@pytest.mark.parametrize("block", [0, -1, NUM_BLOCKS])
def test_only_a_held_block_can_be_named(block: int) -> None:
    pool = named_pool(b"a")
    with pytest.raises(BlockAccountingError, match="not held"):
        pool.name(block, b"new")
    assert pool.find(b"new") is None


def test_a_taken_name_is_free_again_after_its_eviction() -> None:
    pool = named_pool(b"a")
    assert pool.allocate(1) == [0]
    assert pool.name(0, b"b")
    assert pool.name(1, b"a")
    assert pool.find(b"a") == 1


def test_unheld_blocks_are_counted_once() -> None:
    pool = named_pool(b"a", b"b", b"c")
    pool.acquire([1])
    assert pool.count_unheld([0, 1, 2, 0, 7]) == 2
    assert pool.count_unheld([]) == 0


def test_evictions_are_announced_when_the_books_are_done() -> None:
    pool = named_pool(b"a", b"b", b"c")
    heard: list[tuple[bytes, int, int | None, int]] = []
    pool.on_evict = lambda name, block: heard.append(
        (name, pool.num_references(block), pool.find(name), pool.num_free)
    )
    pool.allocate(2)
    assert heard == [(b"a", 1, None, 1), (b"b", 1, None, 1)]


def test_a_failed_allocation_evicts_nothing() -> None:
    pool = named_pool(b"a")
    heard: list[bytes] = []
    pool.on_evict = lambda name, block: heard.append(name)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert (heard, pool.find(b"a")) == ([], 0)


def test_forgetting_names_keeps_the_holders() -> None:
    heard: list[tuple[bytes, int]] = []
    pool = named_pool(b"a", b"b", b"c")
    pool.on_evict = lambda name, block: heard.append((name, block))
    pool.acquire([1])
    pool.forget_names()
    assert sorted(heard) == [(b"a", 0), (b"b", 1), (b"c", 2)]
    assert (pool.num_free, pool.num_cached, pool.num_references(1)) == (2, 0, 1)
    assert [pool.find(name) for name in (b"a", b"b", b"c")] == [None] * 3
    assert pool.allocate(2) == [0, 2]


class PoolMachine(RuleBasedStateMachine):
    """Every sequence of calls, mistakes included, does what plain lists and dicts say it should."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[bytes, int]] = []
        self.pool = BlockPool(NUM_BLOCKS, 4, lambda name, block: self.heard.append((name, block)))
        self.held: list[list[int]] = []
        # The model: free blocks in the order in which they are taken.
        self.unnamed = list(range(NUM_BLOCKS))
        self.cached: list[int] = []
        self.names: dict[int, bytes] = {}
        self.evicted: list[tuple[bytes, int]] = []

    def is_held(self, block: int) -> bool:
        return any(block in table for table in self.held)

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        if count > len(self.unnamed) + len(self.cached):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        expected = [*self.unnamed, *self.cached][:count]
        self.evicted += [(self.names.pop(b), b) for b in expected if b in self.cached]
        self.unnamed = [b for b in self.unnamed if b not in expected]
        self.cached = [b for b in self.cached if b not in expected]
        assert self.pool.allocate(count) == expected
        self.held.append(expected)

    @rule(block=st.integers(-1, NUM_BLOCKS))
    def acquire(self, block: int) -> None:
        if not self.is_held(block) and block not in self.cached:
            with pytest.raises(BlockAccountingError):
                self.pool.acquire([block])
            return
        self.pool.acquire([block])
        self.held.append([block])
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        table = self.held.pop(index % len(self.held))
        self.pool.release(reversed(table))
        for block in reversed(table):
            if not self.is_held(block):
                (self.cached if block in self.names else self.unnamed).append(block)

    @rule(block=st.integers(-1, NUM_BLOCKS))
    def release_what_nobody_holds(self, block: int) -> None:
        if not self.is_held(block):
            with pytest.raises(BlockAccountingError):
                self.pool.release([block])

    @rule(block=st.integers(0, NUM_BLOCKS - 1), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def name(self, block: int, name: bytes) -> None:
        if not self.is_held(block) or self.names.get(block, name) != name:
            with pytest.raises(BlockAccountingError):
                self.pool.name(block, name)
            return
        is_taken = name in self.names.values() and self.names.get(block) != name
        assert self.pool.name(block, name) is not is_taken
        if not is_taken:
            self.names[block] = name

    @rule(blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
    def touch(self, blocks: list[int]) -> None:
        self.pool.touch(blocks)
        for block in blocks:
            if block in self.cached:
                self.cached.remove(block)
                self.cached.append(block)

    @rule()
    def forget_names(self) -> None:
        self.pool.forget_names()
        self.evicted += [(name, block) for block, name in self.names.items()]
        self.unnamed += self.cached
        self.cached = []
        self.names = {}

    @invariant()
    def books_balance(self) -> None:
        held = {block for table in self.held for block in table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_free + len(held) == NUM_BLOCKS
        assert self.pool.num_cached == len(self.cached)
        for block in range(NUM_BLOCKS):
            num_holders = sum(block in table for table in self.held)
            assert self.pool.num_references(block) == num_holders
            assert self.pool.name_of(block) == self.names.get(block)
        assert {name: self.pool.find(name) for name in self.names.values()} == {
            name: block for block, name in self.names.items()
        }
        assert sorted(self.heard) == sorted(self.evicted)


def test_pool_machine() -> None:
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=30),
    )
