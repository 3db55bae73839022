"""The ledger counts shared blocks once, and gives way to nobody's cached beginning unseen."""

from __future__ import annotations

from controller.policy.kv import BlockLedger
from controller.policy.preemption import choose_methods
from engine.ports import EngineView
from engine.request import Request
from engine.step import Preemption, PreemptionMethod
from tests.controller.policy.doubles import running, view_of, waiting


def shared_view(num_free: int = 10) -> tuple[EngineView, Request, Request, Request]:
    """`a` and `b` run on the same first two blocks; `c` waits for those and a cached third."""
    a, b = running(waiting("a", 64), 48, 0), running(waiting("b", 64), 48, 0)
    b.block_table[:2] = a.block_table[:2]
    c = waiting("c", 64)
    c.block_table = [*a.block_table[:2], -1]
    c.num_computed_tokens = 48
    return view_of(waiting=[c], running=[a, b], num_free=num_free), a, b, c


def test_a_starter_takes_the_cached_blocks_that_nobody_holds() -> None:
    view, _, _, c = shared_view()
    ledger = BlockLedger.of(view)
    # One block for its last 16 tokens, and the cached third.
    assert ledger.needed(c, 16) == 2
    assert ledger.shared(c) == 2
    assert ledger.take(c, 16)
    assert ledger.num_free == 8
    # Now `c` holds the third: the next one shares it.
    d = waiting("d", 64)
    d.block_table, d.num_computed_tokens = list(c.block_table), 48
    assert ledger.needed(d, 16) == 1
    assert ledger.shared(d) == 3


def test_shared_blocks_are_free_when_the_last_holder_gives_way() -> None:
    view, a, b, c = shared_view(num_free=0)
    ledger = BlockLedger.of(view)
    ledger.release(a)
    assert (ledger.num_free, ledger.num_returned) == (1, 1)
    assert ledger.shared(c) == 2
    ledger.release(b)
    assert (ledger.num_free, ledger.num_returned) == (4, 4)
    assert ledger.shared(c) == 0
    assert ledger.needed(c, 16) == 4


def test_a_running_request_shares_nothing_more() -> None:
    view, a, _, _ = shared_view()
    assert BlockLedger.of(view).shared(a) == 0


def test_the_cheaper_method_is_chosen_while_the_host_has_room() -> None:
    victims = [running(waiting(name, 64), 48, 0) for name in "ab"]
    view = view_of(running=victims, num_free_host=5)

    def methods(seconds_per_token: float, swap_block_s: float | None) -> list[PreemptionMethod]:
        chosen = choose_methods(
            view, victims, lambda num_tokens: num_tokens * seconds_per_token, swap_block_s
        )
        assert [item.request_id for item in chosen] == ["a", "b"]
        return [item.method for item in chosen]

    drop, swap = PreemptionMethod.RECOMPUTE, PreemptionMethod.SWAP
    # Three blocks each way: 0.6 s; the host has room for one of the two.
    assert methods(0.02, 0.1) == [swap, drop]
    assert methods(0.01, 0.1) == [drop, drop]
    assert methods(0.02, None) == [drop, drop]
    assert choose_methods(view, [], lambda num_tokens: 0.0, 0.0) == ()
    empty = running(waiting("c", 64), 0, 0)
    assert choose_methods(view, [empty], lambda num_tokens: 1.0, 0.0) == (Preemption("c"),)
