"""A pool, a prefix cache and requests, moved between them as the loop does; for the tests here."""

from __future__ import annotations

from collections.abc import Sequence

from engine.blocks import BlockPool
from engine.prefix import PrefixCache
from engine.request import Request, RequestPhase, SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 16


class Rig:
    """A pool, a cache, and the part of the loop that moves requests between them."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, is_enabled: bool = True) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.cache = PrefixCache(self.pool, is_enabled)

    def arrive(
        self, prompt: Sequence[int], salt: str | None = None, num_prompt_logprobs: int | None = None
    ) -> Request:
        sampling = SamplingParams(num_prompt_logprobs=num_prompt_logprobs)
        request = Request(
            "r", tuple(prompt), max_tokens=99, arrived_at=0.0, sampling=sampling, cache_salt=salt
        )
        self.cache.watch(request)
        return request

    def start(self, request: Request) -> int:
        request.move(RequestPhase.RUNNING)
        return self.cache.start(request)

    def compute(self, request: Request, num_tokens: int) -> None:
        """Compute so many known tokens of a running request."""
        num_computed = request.num_computed_tokens + num_tokens
        missing = self.pool.num_missing(num_computed, request.block_table)
        request.block_table.extend(self.pool.allocate(missing))
        request.num_computed_tokens = num_computed
        self.cache.commit(request)

    def run(self, request: Request) -> int:
        """Start and compute all known tokens; return the tokens spared."""
        num_spared = self.start(request)
        self.compute(request, request.num_remaining_tokens)
        return num_spared

    def decode(self, request: Request, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            request.output_token_ids.append(token_id)
            self.compute(request, 1)

    def preempt(self, request: Request) -> None:
        request.move(RequestPhase.PREEMPTED)
        self.cache.release(request)
        self.cache.watch(request)

    def remember(self, prompt: Sequence[int], salt: str | None = None) -> list[int]:
        """Run a prompt to its end and return the blocks that its tokens were in."""
        request = self.arrive(prompt, salt)
        self.run(request)
        blocks = list(request.block_table)
        self.cache.release(request)
        return blocks

    def fill_unnamed(self) -> list[int]:
        """Hold every free block without a name, so that the next allocation must evict."""
        return self.pool.allocate(self.pool.num_free - self.pool.num_cached)


def matches(*requests: Request) -> list[int]:
    for request in requests:
        assert request.num_computed_tokens == BLOCK_SIZE * len(request.block_table)
    return [len(request.block_table) for request in requests]
