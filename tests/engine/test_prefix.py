"""The prefix cache: who matches what, and when a match grows or is cut."""

from __future__ import annotations

import pytest

from engine.request import Request
from tests.engine.prefix_rig import BLOCK_SIZE, NUM_BLOCKS, Rig, matches

TEN = list(range(10))


# Matching


def test_a_second_prompt_finds_the_blocks_of_the_first() -> None:
    rig = Rig()
    blocks = rig.remember(TEN)
    request = rig.arrive([*TEN[:8], 77, 78, 79])
    assert request.block_table == blocks[:2]
    assert rig.pool.num_free == NUM_BLOCKS
    assert rig.start(request) == 8
    assert [rig.pool.num_references(block) for block in blocks[:2]] == [1, 1]
    rig.compute(request, 3)
    assert request.block_table[:2] == blocks[:2]
    assert request.block_table[2] not in blocks[:2]


@pytest.mark.parametrize(
    ("num_tokens", "num_matched"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_at_least_one_token_is_left_to_compute(num_tokens: int, num_matched: int) -> None:
    rig = Rig()
    rig.remember(range(13))
    request = rig.arrive(range(num_tokens))
    assert matches(request) == [num_matched]
    assert request.num_remaining_tokens >= 1
    assert len(request.block_hashes) == num_tokens // BLOCK_SIZE


def test_a_match_ends_at_the_first_difference() -> None:
    rig = Rig()
    rig.remember(range(16))
    assert matches(rig.arrive([*range(4), 99, *range(5, 16)])) == [1]
    assert matches(rig.arrive([99, *range(1, 16)])) == [0]


def test_the_same_tokens_at_another_depth_have_another_name() -> None:
    rig = Rig()
    same = [5, 5, 5, 5]
    rig.remember([*same, 1])
    request = rig.arrive([*same, *same, *same])
    assert len(set(request.block_hashes)) == 3
    assert matches(request) == [1]
    assert matches(rig.arrive([1, 2, 3, 4, *same, 1])) == [0]


@pytest.mark.parametrize(
    ("salt", "other", "num_matched"),
    [
        (None, None, 2),
        ("a", "a", 2),
        ("\ud800", "\ud800", 2),
        ("a", "b", 0),
        ("a", None, 0),
        (None, "", 0),
        ("", None, 0),
    ],
)
def test_salts_keep_requests_apart(salt: str | None, other: str | None, num_matched: int) -> None:
    rig = Rig()
    rig.remember(TEN, salt)
    assert matches(rig.arrive(TEN, other)) == [num_matched]


def test_large_token_ids_are_not_folded() -> None:
    rig = Rig()
    rig.remember([2**40 + i for i in range(5)])
    assert matches(rig.arrive(range(5))) == [0]
    assert matches(rig.arrive([2**40 + i for i in range(5)])) == [1]


def test_the_next_turn_of_a_chat_begins_with_the_answer() -> None:
    rig = Rig()
    first = rig.arrive([1, 2, 3, 4, 5])
    rig.run(first)
    rig.decode(first, [6, 7, 8, 9])
    assert first.num_computed_tokens == 9
    rig.cache.release(first)
    assert matches(rig.arrive([1, 2, 3, 4, 5, 6, 7, 8, 10, 11])) == [2]


def test_a_block_that_is_not_full_is_not_shared() -> None:
    rig = Rig()
    request = rig.arrive(range(20))
    rig.start(request)
    waiting = rig.arrive(range(20))
    for num_tokens, expected in [(3, 0), (1, 1), (3, 1), (6, 3)]:
        rig.compute(request, num_tokens)
        assert matches(waiting) == [expected]


def test_the_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_blocks=64)
    request = rig.arrive(range(100))
    read: list[tuple[int, int]] = []
    original = Request.known_token_ids

    def known_token_ids(self: Request, start: int, stop: int) -> list[int]:
        read.append((start, stop))
        return original(self, start, stop)

    monkeypatch.setattr(Request, "known_token_ids", known_token_ids)
    rig.start(request)
    for _ in range(10):
        rig.compute(request, 10)
    rig.decode(request, range(9))
    rig.preempt(request)
    assert read == [(100, 104), (104, 108)]
    undisturbed = rig.arrive([*range(100), *range(9)])
    assert request.block_hashes == undisturbed.block_hashes


# Requests that want their prompt scored


def test_a_prompt_to_be_scored_reads_nothing_and_still_shares() -> None:
    rig = Rig()
    rig.remember(range(5))
    request = rig.arrive(TEN, num_prompt_logprobs=0)
    assert matches(request) == [0]
    assert rig.run(request) == 0
    assert matches(rig.arrive(TEN)) == [2]


@pytest.mark.parametrize(("num_scored", "expected"), [(0, 0), (8, 0), (9, 2)])
def test_scores_that_are_still_owed_forbid_the_cache(num_scored: int, expected: int) -> None:
    rig = Rig()
    request = rig.arrive(TEN, num_prompt_logprobs=3)
    rig.run(request)
    request.num_scored_tokens = num_scored
    rig.preempt(request)
    assert matches(request) == [expected]


def test_a_prompt_to_be_scored_is_not_woken() -> None:
    rig = Rig()
    request = rig.arrive(TEN, num_prompt_logprobs=0)
    rig.remember(TEN)
    assert matches(request) == [0]


# Events


def test_identical_prompts_at_once_all_follow_the_first() -> None:
    rig = Rig()
    first, *others = [rig.arrive(TEN) for _ in range(5)]
    rig.start(first)
    rig.compute(first, 4)
    assert matches(*others) == [1] * 4
    rig.compute(first, 6)
    assert matches(*others) == [2] * 4
    assert [rig.run(request) for request in others] == [8] * 4
    assert rig.pool.num_used == 2 + 5
    for request in [first, *others]:
        rig.cache.release(request)
    assert rig.pool.num_free == NUM_BLOCKS
    assert rig.cache.is_idle


def test_matches_that_wait_for_one_block_grow_each_its_own_way() -> None:
    rig = Rig()
    prompts = [range(13), [*range(8), 77, 78, 79, 80, 81], range(9), range(8), range(13)]
    waiting = [rig.arrive(prompt) for prompt in prompts]
    request = rig.arrive(range(12))
    rig.run(request)
    assert matches(*waiting) == [3, 2, 2, 1, 3]
    for match in waiting:
        assert match.block_table == request.block_table[: len(match.block_table)]
    rig.remember([*range(8), 77, 78, 79, 80])
    assert matches(*waiting) == [3, 3, 2, 1, 3]


def test_identical_prompts_in_one_step_keep_their_own_blocks() -> None:
    rig = Rig()
    twins = [rig.arrive(TEN), rig.arrive(TEN)]
    for request in twins:
        rig.start(request)
    for request in twins:
        rig.compute(request, 10)
    assert not set(twins[0].block_table) & set(twins[1].block_table)
    assert rig.arrive(TEN).block_table == twins[0].block_table[:2]
    rig.cache.release(twins[0])
    rig.cache.release(twins[1])
    assert (rig.pool.num_free, rig.pool.num_cached) == (NUM_BLOCKS, 2)


def test_an_eviction_cuts_every_match_that_contains_the_block() -> None:
    rig = Rig()
    rig.remember(range(14))
    deep, shallow, other = rig.arrive(range(13)), rig.arrive(range(9)), rig.arrive([50, 51])
    assert matches(deep, shallow, other) == [3, 2, 0]
    rig.fill_unnamed()
    for expected in ([2, 2, 0], [1, 1, 0], [0, 0, 0]):
        rig.pool.allocate(1)
        assert matches(deep, shallow, other) == expected


def test_a_cut_in_the_middle_takes_what_follows() -> None:
    rig = Rig()
    blocks = rig.remember(range(14))
    request = rig.arrive(range(14))
    assert matches(request) == [3]
    rig.pool.touch([blocks[2], blocks[0]])
    rig.fill_unnamed()
    assert rig.pool.allocate(1) == [blocks[1]]
    assert request.block_table == blocks[:1]
    assert matches(request) == [1]


def test_a_match_grows_over_blocks_that_are_known_again() -> None:
    rig = Rig()
    blocks = rig.remember(range(14))
    waiting = rig.arrive(range(14))
    rig.pool.touch([blocks[1], blocks[2]])
    rig.fill_unnamed()
    lost = rig.pool.allocate(1)
    assert lost == blocks[:1]
    assert matches(waiting) == [0]
    rig.pool.release(lost)
    request = rig.arrive([*range(4), 90])
    rig.start(request)
    rig.compute(request, 4)
    assert waiting.block_table == [request.block_table[0], *blocks[1:3]]
    assert matches(waiting) == [3]


def test_a_cut_match_grows_again() -> None:
    rig = Rig()
    rig.remember(range(9))
    waiting = rig.arrive(range(9))
    rig.fill_unnamed()
    rig.pool.release(rig.pool.allocate(1))
    assert matches(waiting) == [1]
    rig.pool.release(range(NUM_BLOCKS - 3, NUM_BLOCKS))
    again = rig.arrive(range(9))
    assert rig.run(again) == 4
    assert waiting.block_table == again.block_table[:2]


def test_a_match_of_held_blocks_is_cut_when_names_are_forgotten() -> None:
    rig = Rig()
    request = rig.arrive(TEN)
    rig.run(request)
    waiting = rig.arrive(TEN)
    assert matches(waiting) == [2]
    rig.pool.forget_names()
    assert matches(waiting) == [0]
    rig.remember(TEN)
    assert matches(waiting) == [2]
    assert not set(waiting.block_table) & set(request.block_table)


def test_whoever_runs_on_spoilt_blocks_names_none_until_it_starts_again() -> None:
    rig = Rig()
    rig.remember(range(4))
    request, idle = rig.arrive(TEN), rig.arrive(TEN)
    assert rig.start(request) == 4
    rig.cache.forget_names()
    rig.compute(request, 6)
    rig.decode(request, [10, 11, 12])
    assert [rig.pool.name_of(block) for block in request.block_table] == [None] * 4
    assert matches(idle) == [0]
    rig.preempt(request)
    assert matches(request) == [0]
    rig.run(request)
    assert matches(idle) == [2]


def test_a_started_request_is_left_alone() -> None:
    rig = Rig()
    rig.remember(range(5))
    started, gone, other = rig.arrive(TEN), rig.arrive(TEN), rig.arrive(TEN)
    rig.start(started)
    rig.cache.unwatch(gone)
    rig.run(other)
    assert matches(started, gone) == [1, 0]
    assert rig.cache.num_watchers == 0


def test_watching_again_changes_nothing() -> None:
    rig = Rig()
    blocks = rig.remember(TEN)
    request = rig.arrive(TEN)
    names = list(request.block_hashes)
    rig.cache.watch(request)
    assert (request.block_table, request.block_hashes) == (blocks[:2], names)
    assert rig.cache.num_watchers == 1
    rig.cache.unwatch(request)
    assert (request.block_table, request.num_computed_tokens) == ([], 0)
    rig.cache.unwatch(request)
    assert rig.cache.is_idle


# Least recently used


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    rig = Rig()
    blocks = rig.remember(range(12))
    rig.fill_unnamed()
    assert [rig.pool.allocate(1)[0] for _ in range(3)] == blocks[::-1]


def test_what_a_waiting_request_hopes_for_is_evicted_last() -> None:
    rig = Rig()
    hoped_for = rig.remember([1] * 8)
    others = rig.remember([2] * 8)
    rig.arrive([1] * 9)
    rig.fill_unnamed()
    assert [rig.pool.allocate(1)[0] for _ in range(4)] == [*others[::-1], *hoped_for[::-1]]


def test_a_match_that_grew_over_free_blocks_is_evicted_from_its_end() -> None:
    rig = Rig()
    blocks = rig.remember(range(12))
    waiting = rig.arrive(range(13))
    rig.pool.touch(blocks[1:])
    strangers = rig.fill_unnamed()
    rig.pool.release(rig.pool.allocate(1))
    rig.pool.release(strangers[:1])
    other = rig.remember([7, 7, 7, 7])
    first = rig.remember(range(4))
    assert matches(waiting) == [3]
    assert [rig.pool.allocate(1)[0] for _ in range(4)] == [*other, *blocks[:0:-1], *first]
