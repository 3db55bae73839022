"""Blocks: exact accounting, who gives way, who may come in."""

from __future__ import annotations

import numpy as np
import pytest

from controller.policy.capacity import Intake, split_running
from controller.policy.facts import TTFT_S, ClassNames, FactReader
from controller.policy.kv import BlockLedger
from controller.policy.lengths import OutputLengths
from controller.policy.preemption import make_room
from controller.policy.settings import PolicyConfig
from controller.policy.slo import Slo
from engine.ports import RequestView
from engine.request import Request
from engine.step import Admission, AdmissionAction
from tests.controller.policy.doubles import (
    NAMES,
    decode,
    facts_of,
    queue_of,
    running,
    slo_class,
    table_of,
    view_of,
    waiting,
)


def latest_first(request: RequestView) -> tuple[float, ...]:
    return (-request.arrived_at,)


def test_the_ledger_counts_what_is_missing() -> None:
    ledger = BlockLedger(2, 16)
    request = running(waiting("a", 100), 20, 0)
    assert ledger.needed(request, 12) == 0
    assert ledger.needed(request, 13) == 1
    assert ledger.most_tokens(request) == 44
    assert not ledger.take(request, 45)
    assert ledger.num_free == 2
    assert ledger.take(request, 44)
    assert ledger.num_free == 0
    assert ledger.most_tokens(request) == 12
    ledger.release(request)
    assert ledger.num_free == 2


def test_running_requests_split_by_what_they_compute_next() -> None:
    stream, prompt = decode("a"), running(waiting("b"), 16, 0)
    assert split_running([stream, prompt]) == ([stream], [prompt])


def full(request_id: str, at: float, num_preemptions: int = 0) -> Request:
    """A decode whose next token needs a block."""
    request = decode(request_id, num_prompt=32, num_output=1, at=at)
    request.num_preemptions = num_preemptions
    return request


def test_nobody_gives_way_while_blocks_last() -> None:
    ledger = BlockLedger(2, 16)
    assert make_room([full("a", 0), full("b", 1)], [], ledger, latest_first) == []
    assert ledger.num_free == 0
    assert make_room([], [], ledger, latest_first) == []


def test_the_victims_blocks_serve_the_others() -> None:
    a, b, c = full("a", 0), full("b", 1), full("c", 2)
    ledger = BlockLedger(0, 16)
    assert make_room([a, b, c], [], ledger, latest_first) == [c]
    assert ledger.num_free == 0


def test_a_prefill_may_give_way_to_decodes() -> None:
    prompt = running(waiting("p", 100, at=5), 20, 0)
    ledger = BlockLedger(0, 16)
    assert make_room([full("a", 0)], [prompt], ledger, latest_first) == [prompt]
    assert ledger.num_free == 1


def test_a_victim_without_blocks_is_not_enough() -> None:
    empty = running(waiting("p", 100, at=5), 0, 0)
    ledger = BlockLedger(0, 16)
    assert make_room([full("a", 0), full("b", 1)], [empty], ledger, latest_first)[1:]


def test_whoever_gave_way_three_times_is_spared() -> None:
    a, b = full("a", 0), full("b", 1, num_preemptions=3)
    assert make_room([a, b], [], BlockLedger(0, 16), latest_first) == [a]


def test_prefills_that_block_each_other_are_untied() -> None:
    first, second = (running(waiting(i, 100, at=at), 32, 0) for i, at in (("a", 0), ("b", 1)))
    assert make_room([], [first, second], BlockLedger(0, 16), latest_first) == [second]
    assert make_room([], [first, second], BlockLedger(1, 16), latest_first) == []
    # Alone it can only wait for the loop to end it; there is nobody to take blocks from.
    assert make_room([], [first], BlockLedger(0, 16), latest_first) == []
    empty = running(waiting("c", 100, at=2), 0, 0)
    assert make_room([], [first, second, empty], BlockLedger(0, 16), latest_first) == [
        empty,
        second,
    ]


def intake(
    request: list[Request], num_blocks: int, *, seats: int = 8, reserve: float = 0.0
) -> tuple[Intake, BlockLedger]:
    view = view_of(running=request, num_blocks=num_blocks)
    ledger = BlockLedger(view.num_free_blocks, 16)
    table, lengths = table_of(request), OutputLengths(default=32)
    return Intake(view, ledger, table, NAMES, seats, reserve, lengths), ledger


def delays_s(door: Intake, *requests: Request, step_s: float = 0.5) -> list[float] | None:
    queue = queue_of(requests, PolicyConfig())
    delays = door.start_delays_s(queue, np.arange(len(requests)), step_s, door.yielding(queue))
    return None if delays is None else delays.tolist()


def test_only_what_can_grow_comes_in() -> None:
    # The stream holds 3 blocks and is expected to need 33 + 31 more tokens: 4 in all.
    stream = decode("a", num_prompt=32, num_output=2)
    door, ledger = intake([stream], 12)
    assert door.admit(waiting("b", 64))
    assert ledger.num_free == 5
    assert not door.is_short
    assert not door.admit(waiting("c", 64))
    assert door.is_short
    assert door.admit(waiting("d", 16, max_tokens=1))


def test_the_reserve_is_left_alone_but_never_keeps_the_first_out() -> None:
    door, _ = intake([decode("a")], 12, reserve=0.5)
    assert not door.admit(waiting("b", 64))
    alone, _ = intake([], 5, reserve=1.0)
    assert alone.admit(waiting("c", 64))
    nowhere, _ = intake([], 3)
    assert not nowhere.admit(waiting("d", 64))


def test_an_answer_that_outgrew_the_expectation_is_expected_to_go_on() -> None:
    long = decode("a", num_prompt=32, num_output=100, max_tokens=1000)
    door, _ = intake([long], 15)
    assert door.admit(waiting("b", 64, max_tokens=8))
    tight, _ = intake([long], 13)
    assert not tight.admit(waiting("b", 64, max_tokens=8))


def test_seats_run_out_and_may_be_kept() -> None:
    door, _ = intake([decode("a")], 100, seats=3)
    door.set_aside(waiting("due", 160))
    assert door.admit(waiting("b"))
    assert door.is_full
    assert not door.admit(waiting("c"))
    assert not door.is_short


def test_nobody_is_delayed_while_seats_and_blocks_last() -> None:
    door, _ = intake([decode("a")], 100, seats=3)
    assert delays_s(door, waiting("b"), waiting("c")) is None
    begun = running(waiting("a"), 16, 0)
    crowded, _ = intake([begun, decode("b")], 100, seats=2)
    assert delays_s(crowded, begun) is None
    assert delays_s(crowded, begun, waiting("b", at=1.0)) == [0.0, 7.5]


def test_newcomers_wait_for_the_seats_of_those_who_end_first() -> None:
    # 16 tokens are typical; the third stream is beyond that and given one block more.
    streams = [decode("a", num_output=6), decode("b", num_output=12), decode("c", num_output=20)]
    door, _ = intake(streams, 1000, seats=4)
    queue = [waiting(i) for i in "defgh"]
    assert delays_s(door, *queue) == [0.0, 2.0, 5.0, 8.0, 8.0]


def test_those_who_start_end_too_and_the_rest_follows_at_the_same_rate() -> None:
    # One seat; everybody takes 16 steps.
    door, _ = intake([], 1000, seats=1)
    assert delays_s(door, *(waiting(str(i)) for i in range(4))) == [0.0, 8.0, 16.0, 24.0]
    queue = [waiting(str(i)) for i in range(200)]
    assert delays_s(door, *queue) == pytest.approx([8.0 * i for i in range(200)])


def test_newcomers_wait_for_blocks() -> None:
    door, _ = intake([decode("a", num_output=6)], 12, seats=9)
    # 4 blocks are held for the stream; 8 are free.
    assert delays_s(door, waiting("b", 64), waiting("c", 64)) == [0.0, 5.0]


def test_facts_are_read_once_per_request_and_verdict() -> None:
    names = ClassNames()
    reader = FactReader(names)
    chat, code = (waiting(n, slo=Slo(ttft_s=2.0), of=slo_class(n)) for n in ("chat", "code"))
    plain = waiting("plain", at=3.0)

    def same(*requests: Request) -> bool:
        return np.array_equal(reader.read(list(requests)), FactReader(names).read(list(requests)))

    assert same()
    assert same(chat, plain)
    kept = reader.read([chat, plain])
    assert reader.read([chat, plain]) is kept
    assert same(plain, code)
    assert same(chat, plain, code)
    assert same(plain)
    code.admission = Admission("code", AdmissionAction.WAIT, "overloaded", is_degraded=True)
    assert same(code, plain)
    assert reader.read([code])[TTFT_S].tolist() == [np.inf]
    assert names.each(len, facts_of([])).size == 0
    of_two = reader.read([chat, code, chat])
    assert names.each(ord_sum, of_two).tolist() == [
        ord_sum("chat"),
        ord_sum("code"),
        ord_sum("chat"),
    ]


def ord_sum(name: str) -> int:
    return sum(map(ord, name))
