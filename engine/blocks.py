"""`BlockPool`: pages of KV as pure arithmetic.

Owns which block is free and which is held. Must not touch a tensor or know whose block it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free: a planner's bug, since plans must fit the pool."""


class BlockAccountingError(RuntimeError):
    """A block was released that is not held: a bug in the caller's books."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens: ⌈num_tokens / block_size⌉."""
    return -(-num_tokens // block_size)


class BlockPool:
    """A fixed set of `num_total` blocks of `block_size` tokens; free + held = total, always."""

    def __init__(self, num_total: int, block_size: int) -> None:
        if num_total < 1 or block_size < 1:
            raise ValueError(
                f"num_total and block_size must be positive, got {num_total} and {block_size}"
            )
        self.num_total = num_total
        self.block_size = block_size
        # First in, first out: a block rests as long as possible before its content is overwritten.
        self._free: deque[int] = deque(range(num_total))
        self._is_held = bytearray(num_total)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return self.num_total - len(self._free)

    def num_missing(self, num_tokens: int, block_table: list[int]) -> int:
        """Return how many more blocks `block_table` needs to hold `num_tokens` tokens."""
        return max(0, num_blocks_for(num_tokens, self.block_size) - len(block_table))

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks; OutOfBlocksError (nothing taken) if there are fewer."""
        if num_blocks > len(self._free):
            raise OutOfBlocksError(
                f"{num_blocks} blocks asked for, {len(self._free)} of {self.num_total} free"
            )
        blocks = [self._free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            self._is_held[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back; BlockAccountingError on one that is not held (a double release)."""
        for block in blocks:
            if not (0 <= block < self.num_total and self._is_held[block]):
                raise BlockAccountingError(f"block {block} is not held")
            self._is_held[block] = 0
            self._free.append(block)
