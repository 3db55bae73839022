"""`BlockLedger`: exact block arithmetic while a step is being planned.

Owns the one place where a planner counts KV blocks; every policy shares it. Must not touch a pool
or a request: it works on a copy of the free count.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.blocks import num_blocks_for
from engine.ports import RequestView


class BlockLedger:
    """Free blocks as the plan takes shape: what goes through it never needs more than are free."""

    __slots__ = ("block_size", "num_free")

    def __init__(self, num_free: int, block_size: int) -> None:
        self.num_free = num_free
        self.block_size = block_size

    def needed(self, request: RequestView, num_tokens: int) -> int:
        """New blocks that computing `num_tokens` more tokens of the request takes."""
        context = request.num_computed_tokens + num_tokens
        return max(0, num_blocks_for(context, self.block_size) - len(request.block_table))

    def take(self, request: RequestView, num_tokens: int) -> bool:
        """Reserve the blocks for that work; False, and nothing reserved, if they are not free."""
        needed = self.needed(request, num_tokens)
        if needed > self.num_free:
            return False
        self.num_free -= needed
        return True

    def take_next_tokens(self, decodes: Sequence[RequestView]) -> bool:
        """Reserve one token's block for every decode; False, and nothing reserved, if too few are
        free.
        """
        size = self.block_size
        needed = sum(len(r.block_table) * size <= r.num_computed_tokens for r in decodes)
        if needed > self.num_free:
            return False
        self.num_free -= needed
        return True

    def release(self, request: RequestView) -> None:
        """Count the request's blocks as free: it is preempted in this plan."""
        self.num_free += len(request.block_table)

    def most_tokens(self, request: RequestView) -> int:
        """The largest number of further tokens of the request that the free blocks can hold."""
        capacity = (len(request.block_table) + self.num_free) * self.block_size
        return max(0, capacity - request.num_computed_tokens)
