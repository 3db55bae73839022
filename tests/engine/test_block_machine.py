"""Block pool and prefix cache under every order of events, against a model that knows the content.

Every slot of every block has a shadow: the salt and ALL tokens up to the one whose keys and values
stand there, which is what they depend on. Whatever happens, a request finds its own beginning.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.blocks import BlockPool
from engine.prefix import PrefixCache
from engine.request import Request, RequestPhase, SamplingParams

NUM_BLOCKS = 9
BLOCK_SIZE = 2
MAX_TOKENS = 12
Content = tuple[str | None, tuple[int, ...]]
GARBAGE: Content = (None, ())

indices = st.integers(0, 30)
token_ids = st.integers(0, 1)


def content(request: Request, num_tokens: int) -> Content:
    """What stands in the slot of a request's token number `num_tokens` (from 1)."""
    return request.cache_salt, tuple(request.known_token_ids(0, num_tokens))


class BlockMachine(RuleBasedStateMachine):
    """What the loop does to requests and blocks, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.strangers: list[list[int]] = []
        self.num_arrived = 0
        self.num_spared = 0
        # What each name has ever stood for.
        self.promises: dict[bytes, Content] = {}

    @initialize(is_enabled=st.sampled_from([True, True, True, False]))
    def build(self, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.cache = PrefixCache(self.pool, is_enabled)
        self.slots = [[GARBAGE] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.host: dict[Request, list[list[Content]]] = {}
        # Requests whose keys and values are spoilt.
        self.spoilt: set[Request] = set()

    def having(self, *phases: RequestPhase) -> list[Request]:
        return [request for request in self.requests if request.phase in phases]

    def take(self, num_blocks: int) -> list[int]:
        """Allocate; whoever gets a block may write anything into it."""
        blocks = self.pool.allocate(num_blocks)
        for block in blocks:
            self.slots[block] = [GARBAGE] * BLOCK_SIZE
        return blocks

    def watch(self, request: Request) -> None:
        self.cache.watch(request)
        self.note_names(request)

    def note_names(self, request: Request) -> None:
        """A name stands for one content, and a content has one name."""
        for number, name in enumerate(request.block_hashes, start=1):
            promised = content(request, number * BLOCK_SIZE)
            assert self.promises.setdefault(name, promised) == promised
        assert len(set(self.promises.values())) == len(self.promises)

    @rule(
        prompt=st.lists(token_ids, min_size=1, max_size=9),
        salt=st.sampled_from([None, None, None, "other"]),
        is_scored=st.sampled_from([False, False, False, True]),
    )
    def arrive(self, prompt: list[int], salt: str | None, is_scored: bool) -> None:
        self.num_arrived += 1
        request = Request(
            f"r{self.num_arrived}",
            tuple(prompt),
            max_tokens=9,
            arrived_at=0.0,
            sampling=SamplingParams(num_prompt_logprobs=0 if is_scored else None),
            cache_salt=salt,
        )
        self.requests.append(request)
        self.watch(request)

    @precondition(lambda self: self.having(RequestPhase.WAITING, RequestPhase.PREEMPTED))
    @rule(index=indices, num_tokens=st.integers(1, 9), token_id=token_ids)
    def start(self, index: int, num_tokens: int, token_id: int) -> None:
        waiting = self.having(RequestPhase.WAITING, RequestPhase.PREEMPTED)
        request = waiting[index % len(waiting)]
        if request in self.host:
            saved = self.host[request]
            if len(saved) > self.pool.num_free:
                return
            assert self.cache.start(request) == 0
            request.block_table.extend(self.take(len(saved)))
            for block, slots in zip(request.block_table, saved, strict=True):
                self.slots[block] = slots
            request.host_block_table.clear()
            del self.host[request]
        else:
            num_tokens = min(num_tokens, request.num_remaining_tokens)
            missing = self.pool.num_missing(
                request.num_computed_tokens + num_tokens, request.block_table
            )
            if self.pool.count_unheld(request.block_table) + missing > self.pool.num_free:
                return
            matched = list(request.block_table)
            num_spared = self.cache.start(request)
            assert num_spared == request.num_computed_tokens == len(matched) * BLOCK_SIZE
            assert request.block_table == matched
            self.num_spared += num_spared
        request.move(RequestPhase.RUNNING)
        self.compute_tokens(request, num_tokens, token_id)

    @precondition(lambda self: self.having(RequestPhase.RUNNING))
    @rule(index=indices, num_tokens=st.integers(1, 9), token_id=token_ids)
    def compute(self, index: int, num_tokens: int, token_id: int) -> None:
        running = self.having(RequestPhase.RUNNING)
        self.compute_tokens(running[index % len(running)], num_tokens, token_id)

    def compute_tokens(self, request: Request, num_tokens: int, token_id: int) -> None:
        first = request.num_computed_tokens
        last = first + min(num_tokens, request.num_remaining_tokens)
        missing = self.pool.num_missing(last, request.block_table)
        if missing > self.pool.num_free:
            return
        request.block_table.extend(self.take(missing))
        for position in range(first, last):
            block = request.block_table[position // BLOCK_SIZE]
            assert self.pool.num_references(block) == 1, "a shared block is written"
            assert self.pool.name_of(block) is None, "a named block is written"
            self.slots[block][position % BLOCK_SIZE] = (
                GARBAGE if request in self.spoilt else content(request, position + 1)
            )
        request.num_computed_tokens = last
        self.cache.commit(request)
        self.note_names(request)
        request.num_scored_tokens = max(
            request.num_scored_tokens, min(last, request.num_prompt_tokens - 1)
        )
        if request.num_remaining_tokens == 0 and request.num_known_tokens < MAX_TOKENS:
            request.output_token_ids.append(token_id)
        elif request.num_remaining_tokens == 0:
            self.end(request)

    @precondition(lambda self: self.having(RequestPhase.RUNNING))
    @rule(index=indices, is_swapped=st.booleans())
    def preempt(self, index: int, is_swapped: bool) -> None:
        running = self.having(RequestPhase.RUNNING)
        request = running[index % len(running)]
        request.move(RequestPhase.PREEMPTED)
        if is_swapped:
            self.host[request] = [list(self.slots[block]) for block in request.block_table]
            request.host_block_table.extend(range(len(request.block_table)))
            self.cache.release(request)
        else:
            self.cache.release(request)
            self.spoilt.discard(request)
            self.watch(request)

    @precondition(lambda self: self.requests)
    @rule(index=indices)
    def finish(self, index: int) -> None:
        self.end(self.requests[index % len(self.requests)])

    def end(self, request: Request) -> None:
        if request.phase is RequestPhase.RUNNING:
            self.cache.release(request)
        else:
            self.cache.unwatch(request)
        request.move(RequestPhase.FINISHED)
        self.requests.remove(request)
        self.host.pop(request, None)
        assert request.block_table == []

    @precondition(lambda self: self.having(RequestPhase.WAITING))
    @rule(index=indices)
    def watch_again(self, index: int) -> None:
        waiting = self.having(RequestPhase.WAITING)
        self.watch(waiting[index % len(waiting)])

    @precondition(lambda self: self.pool.num_free)
    @rule(count=st.integers(1, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        self.strangers.append(self.take(min(count, self.pool.num_free)))

    @precondition(lambda self: self.strangers)
    @rule(index=indices)
    def give_back(self, index: int) -> None:
        self.pool.release(self.strangers.pop(index % len(self.strangers)))

    @rule()
    def forget_names(self) -> None:
        self.pool.forget_names()
        assert self.pool.num_cached == 0

    @rule()
    def spoil_everything(self) -> None:
        self.cache.forget_names()
        self.slots = [[GARBAGE] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.spoilt.update(self.having(RequestPhase.RUNNING))
        # What was moved away may have been spoilt before.
        self.spoilt.update(self.host)
        for saved in self.host.values():
            saved[:] = [[GARBAGE] * BLOCK_SIZE for _ in saved]
        assert self.pool.num_cached == 0

    @invariant()
    def references_are_tables(self) -> None:
        tables = [r.block_table for r in self.having(RequestPhase.RUNNING)] + self.strangers
        held = Counter(block for table in tables for block in table)
        assert [self.pool.num_references(block) for block in range(NUM_BLOCKS)] == [
            held[block] for block in range(NUM_BLOCKS)
        ]
        assert self.pool.num_free + len(held) == self.pool.num_free + self.pool.num_used
        assert self.pool.num_free + len(held) == NUM_BLOCKS
        assert self.pool.num_cached == sum(
            self.pool.name_of(block) is not None and not held[block] for block in range(NUM_BLOCKS)
        )

    @invariant()
    def named_blocks_keep_their_promise(self) -> None:
        for block in range(NUM_BLOCKS):
            name = self.pool.name_of(block)
            if name is not None:
                salt, tokens = self.promises[name]
                assert self.pool.find(name) == block
                assert self.slots[block] == [
                    (salt, tokens[: len(tokens) - BLOCK_SIZE + offset])
                    for offset in range(1, BLOCK_SIZE + 1)
                ]

    @invariant()
    def whoever_runs_reads_its_own_past(self) -> None:
        for request in set(self.having(RequestPhase.RUNNING)) - self.spoilt:
            for position in range(request.num_computed_tokens):
                block = request.block_table[position // BLOCK_SIZE]
                assert self.slots[block][position % BLOCK_SIZE] == content(request, position + 1)

    @invariant()
    def whoever_waits_knows_its_longest_match(self) -> None:
        blocks = {
            self.promises[name]: block
            for block in range(NUM_BLOCKS)
            if (name := self.pool.name_of(block)) is not None
        }
        for request in self.having(RequestPhase.WAITING, RequestPhase.PREEMPTED):
            if request in self.host:
                assert request.block_table == []
                continue
            is_scoring = (
                request.sampling.num_prompt_logprobs is not None
                and request.num_scored_tokens < request.num_prompt_tokens - 1
            )
            expected: list[int] = []
            while not is_scoring and (len(expected) + 1) * BLOCK_SIZE < request.num_known_tokens:
                block = blocks.get(content(request, (len(expected) + 1) * BLOCK_SIZE))
                if block is None:
                    break
                expected.append(block)
            assert request.block_table == expected
            assert request.num_computed_tokens == len(expected) * BLOCK_SIZE

    @invariant()
    def a_cache_that_is_off_names_nothing(self) -> None:
        if not self.is_enabled:
            assert self.pool.num_cached == self.num_spared == self.cache.num_watchers == 0

    def teardown(self) -> None:
        for request in list(self.requests):
            self.end(request)
        for blocks in self.strangers:
            self.pool.release(blocks)
        assert self.pool.num_free == NUM_BLOCKS
        assert self.cache.is_idle


def test_block_machine() -> None:
    run_state_machine_as_test(
        BlockMachine,
        settings=settings(
            derandomize=True, deadline=None, max_examples=120, stateful_step_count=40
        ),
    )
