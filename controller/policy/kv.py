"""`BlockLedger`: exact block arithmetic while a step is being planned.

Owns the one place where a planner counts KV blocks; every policy shares it. Must not touch a pool
or a request: it works on a copy of the free count, and remembers what this plan gives and takes of
blocks that several requests share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence

from engine.blocks import num_blocks_for
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase


class BlockLedger:
    """Free blocks as the plan takes shape: what goes through it never needs more than are free.

    `num_returned` counts the blocks that preemptions of this plan set free.
    """

    __slots__ = ("_num_holders", "_shifts", "block_size", "num_free", "num_returned")

    def __init__(
        self, num_free: int, block_size: int, num_holders: Callable[[int], int] = lambda block: 1
    ) -> None:
        self.num_free = num_free
        self.block_size = block_size
        self.num_returned = 0
        self._num_holders = num_holders
        # Holders that this plan adds to a block, or takes away.
        self._shifts: defaultdict[int, int] = defaultdict(int)

    @classmethod
    def of(cls, view: EngineView) -> BlockLedger:
        """Return the ledger of a step that is about to be planned."""
        return cls(view.num_free_blocks, view.block_size, view.num_holders)

    def needed(self, request: RequestView, num_tokens: int) -> int:
        """Free blocks that computing `num_tokens` more tokens of the request takes.

        One that is not running takes those of its cached beginning, too, as far as nobody holds
        them.
        """
        context = request.num_computed_tokens + num_tokens
        new = max(0, num_blocks_for(context, self.block_size) - len(request.block_table))
        if request.phase is RequestPhase.RUNNING or not request.block_table:
            return new
        return new + sum(self._holders(block) == 0 for block in request.block_table)

    def shared(self, request: RequestView) -> int:
        """How many blocks of a waiting request's cached beginning somebody holds already.

        Holders of a block hold what comes before it, so the held ones are the first ones.
        """
        if request.phase is RequestPhase.RUNNING:
            return 0
        return bisect_left(request.block_table, True, key=lambda block: self._holders(block) == 0)

    def take(self, request: RequestView, num_tokens: int) -> bool:
        """Reserve the blocks for that work; False, and nothing reserved, if they are not free."""
        needed = self.needed(request, num_tokens)
        if needed > self.num_free:
            return False
        self.num_free -= needed
        if request.phase is not RequestPhase.RUNNING:
            for block in request.block_table:
                self._shifts[block] += 1
        return True

    def take_next_tokens(self, decodes: Sequence[RequestView]) -> bool:
        """Reserve one token's block for every decode; False, and nothing reserved, if too few are
        free.
        """
        size = self.block_size
        needed = sum([len(r.block_table) * size <= r.num_computed_tokens for r in decodes])
        if needed > self.num_free:
            return False
        self.num_free -= needed
        return True

    def release(self, request: RequestView) -> None:
        """The request is preempted in this plan: its blocks that nobody else holds are free."""
        for block in request.block_table:
            self._shifts[block] -= 1
            if self._holders(block) == 0:
                self.num_free += 1
                self.num_returned += 1

    def most_tokens(self, request: RequestView) -> int:
        """The largest number of further tokens of a running request that free blocks can hold."""
        capacity = (len(request.block_table) + self.num_free) * self.block_size
        return max(0, capacity - request.num_computed_tokens)

    def _holders(self, block: int) -> int:
        return self._num_holders(block) + self._shifts.get(block, 0)
