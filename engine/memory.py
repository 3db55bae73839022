"""`KvMemory`: where each request's keys and values are: in blocks on the device, on the host, or in
the prefix cache's.

Owns every change of a block table, and the order that keeps copies right. Must not choose a victim
or a method: plans do.
"""

from __future__ import annotations

import logging

from engine.blocks import BlockPool, num_blocks_for
from engine.config import EngineConfig
from engine.ports import DeviceLostError, ModelRunner
from engine.prefix import PrefixCache
from engine.request import Request
from engine.step import PreemptionMethod

logger = logging.getLogger("paceline")


class KvMemory:
    """The device's pool with its prefix cache, the host's pool, and the copies between them."""

    def __init__(self, pool: BlockPool, config: EngineConfig, runner: ModelRunner) -> None:
        self._pool = pool
        self._prefix = PrefixCache(pool, config.is_prefix_cache_enabled)
        self._host = (
            BlockPool(config.num_host_blocks, pool.block_size) if (config.num_host_blocks) else None
        )
        self._runner = runner
        self._num_swapped = 0
        self._num_failed_swaps = 0

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that hold nothing."""
        return 0 if self._host is None else self._host.num_free

    @property
    def num_host_blocks_used(self) -> int:
        """Host blocks that hold a preempted request's KV."""
        return 0 if self._host is None else self._host.num_used

    @property
    def num_host_blocks_total(self) -> int:
        """Size of the host's pool in blocks."""
        return 0 if self._host is None else self._host.num_total

    @property
    def most_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self._pool.num_total * self._pool.block_size

    def take_num_swapped(self) -> int:
        """Return the blocks copied since the last call, in either direction."""
        count, self._num_swapped = self._num_swapped, 0
        return count

    def take_num_failed_swaps(self) -> int:
        """Return the copies that failed since the last call, in either direction."""
        count, self._num_failed_swaps = self._num_failed_swaps, 0
        return count

    def watch(self, request: Request) -> None:
        """A request waits from now on: let it know which cached blocks hold its beginning."""
        self._prefix.watch(request)

    def start(self, request: Request) -> None:
        """Make the blocks that a waiting request hopes for its own.

        To be called for every starter of a step before anything is allocated: what one of them
        hopes for must not be evicted for another.
        """
        if not request.host_block_table:
            self._prefix.start(request)

    def bring_back(self, request: Request) -> bool:
        """Copy a swapped request's KV to newly allocated blocks; nothing to do for others.

        False if the copy failed (no memory for it, say): then the KV is dropped, and the request
        waits like one that was preempted to be computed again.
        """
        if not request.host_block_table:
            return True
        blocks = self._pool.allocate(len(request.host_block_table))
        try:
            self._runner.swap_in(request.host_block_table, blocks)
        except Exception as error:
            self._pool.release(blocks)
            if isinstance(error, DeviceLostError):
                raise
            logger.warning(
                "%s is computed again: swapping in failed: %s", request.request_id, error
            )
            self._num_failed_swaps += 1
            self._release_host(request)
            self._drop(request)
            return False
        request.block_table.extend(blocks)
        self._num_swapped += len(blocks)
        self._release_host(request)
        self._prefix.commit(request)
        return True

    def grow(self, request: Request, num_tokens: int) -> None:
        """Give a request the blocks that `num_tokens` tokens need; OutOfBlocksError if too few."""
        missing = self._pool.num_missing(num_tokens, request.block_table)
        if missing:
            request.block_table.extend(self._pool.allocate(missing))

    def commit(self, request: Request) -> None:
        """Tell the prefix cache that more of a running request's tokens are computed."""
        self._prefix.commit(request)

    def preempt(self, request: Request, method: PreemptionMethod) -> PreemptionMethod:
        """Take a request's blocks: its KV is dropped, or copied to the host first.

        Returns what was done: a swap without room on the host, of nothing, or whose copy fails is a
        drop.
        """
        if method is PreemptionMethod.SWAP and self._copy_out(request):
            self._prefix.release(request)
            return PreemptionMethod.SWAP
        self._drop(request)
        return PreemptionMethod.RECOMPUTE

    def forget_prefixes(self) -> None:
        """Nobody may begin with what is cached now: a row that is not finite came from somewhere,
        and keys and values of the same forward may be spoilt as well.
        """
        self._prefix.forget_names()

    def release_running(self, request: Request) -> None:
        """A running request ends: its blocks are free again, and host blocks that a lost device
        did not bring back.
        """
        if request.host_block_table:
            self._release_host(request)
        self._prefix.release(request)

    def release_waiting(self, request: Request) -> None:
        """A waiting or preempted request ends."""
        if request.host_block_table:
            self._release_host(request)
        self._prefix.unwatch(request)

    def _copy_out(self, request: Request) -> bool:
        """Copy a running request's KV to the host; False, and nothing changed, where it cannot."""
        num_blocks = num_blocks_for(request.num_computed_tokens, self._pool.block_size)
        if self._host is None or not 0 < num_blocks <= self._host.num_free:
            return False
        host_blocks = self._host.allocate(num_blocks)
        try:
            self._runner.swap_out(request.block_table[:num_blocks], host_blocks)
        except Exception as error:
            self._host.release(host_blocks)
            if isinstance(error, DeviceLostError):
                raise
            logger.warning(
                "%s is computed again: swapping out failed: %s", request.request_id, error
            )
            self._num_failed_swaps += 1
            return False
        request.host_block_table = host_blocks
        self._num_swapped += num_blocks
        return True

    def _drop(self, request: Request) -> None:
        self._prefix.release(request)
        request.num_computed_tokens = 0
        self._prefix.watch(request)

    def _release_host(self, request: Request) -> None:
        assert self._host is not None  # noqa: S101 - nothing is swapped without it
        self._host.release(request.host_block_table)
        request.host_block_table = []
