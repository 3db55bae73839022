"""The block pool: arithmetic, and its books under every sequence of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.blocks import BlockAccountingError, BlockPool, OutOfBlocksError, num_blocks_for

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


class PoolMachine(RuleBasedStateMachine):
    """Allocations, releases and mistakes in any order never lose or duplicate a block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
        else:
            blocks = self.pool.allocate(count)
            assert len(blocks) == count
            self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        self.pool.release(self.held.pop(index % len(self.held)))

    @precondition(lambda self: any(self.held))
    @rule()
    def release_twice(self) -> None:
        blocks = next(table for table in self.held if table)
        self.held.remove(blocks)
        self.pool.release(blocks)
        with pytest.raises(BlockAccountingError):
            self.pool.release(blocks[:1])

    @invariant()
    def books_balance(self) -> None:
        held = [block for table in self.held for block in table]
        assert len(set(held)) == len(held) == self.pool.num_used
        assert self.pool.num_free + self.pool.num_used == NUM_BLOCKS


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(derandomize=True, deadline=None, max_examples=60)
