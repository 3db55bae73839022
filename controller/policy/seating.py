"""Who may compute prompt tokens in a step: seats and blocks, handed out in serving order.

Owns that order of handing out. Must not choose how many tokens are computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controller.policy.budget import PrefillLoad
from controller.policy.capacity import Intake
from controller.policy.facts import RunningTable
from controller.policy.judging import Judged
from controller.policy.kv import BlockLedger
from controller.policy.ordering import oldest_due
from controller.policy.overtaking import Elders
from controller.policy.settings import PolicyConfig
from engine.ports import EngineView, RequestView
from engine.request import RequestPhase

# Waiting requests that are tried for a seat in one step.
_MOST_TRIED = 64


class Seated(NamedTuple):
    """Who may compute prompt tokens in this step, in serving order, and how many at most.

    `indices` say where they stand in the list of those who want to, `places` in the judged queue.
    `is_turn` says that the first one has its turn by age; `is_short_of_blocks` that KV kept
    somebody out; `is_outpaced` that the pace of the streams did.
    """

    requests: list[RequestView]
    indices: list[int]
    places: list[int]
    load: PrefillLoad
    is_turn: bool
    is_short_of_blocks: bool
    is_outpaced: bool


def seat(
    view: EngineView,
    judged: Judged,
    ledger: BlockLedger,
    intake: Intake,
    running: RunningTable,
    within: int,
    room: int,
    config: PolicyConfig,
) -> Seated:
    """Reserve seats and blocks: for running prefills first, then preempted ones, then new ones.

    Each group in serving order; a preempted request that cannot resume lets nobody new in
    before it. In every `turn_period`-th step the oldest due request is served first; in the
    others its seat and blocks are set aside, so that neither a stream of promises nor one of
    small prompts keeps it out for ever.

    Only as many are looked at as can matter: nobody is seated behind the tokens that fit the
    step (twice `within`, N⁺ for the head of the queue), and at most `_MOST_TRIED` are tried.
    Where nothing fits beside the decodes and it is nobody's turn, nobody is.
    """
    queue = judged.queue
    due = oldest_due(queue, judged.is_relegated, view.now, config.max_wait_s)
    # An empty engine has nobody to be fair to, and only steps that do something are counted.
    is_turn = due is not None and (view.step_no % config.turn_period == 0 or not view.running)
    if within == 0 and running.num_decodes and not is_turn:
        return Seated([], [], [], PrefillLoad(np.empty(0), np.empty(0)), False, False, False)
    reach = min(room, max(2 * within, view.block_size))
    is_started = queue.is_started
    started = is_started.nonzero()[0].tolist()
    unstarted = (~is_started).nonzero()[0]
    # Who is kept out for others' sake uses up nobody's try.
    is_kept_out = judged.is_kept_out
    tried = unstarted[~is_kept_out[unstarted]][:_MOST_TRIED].tolist()
    if due is not None and is_turn:
        group = started if is_started[due] else tried
        group[:] = [due, *(i for i in group if i != due)]
    elif due is not None and queue.at(due).phase is not RequestPhase.RUNNING:
        intake.set_aside(queue.at(due))
    held = [(i, queue.at(i)) for i in started]
    amounts: dict[int, int] = {}
    for i, request in held:
        if request.phase is RequestPhase.RUNNING:
            amount = min(room, request.num_remaining_tokens, ledger.most_tokens(request))
            ledger.take(request, amount)
            amounts[i] = amount
    is_resuming = False
    for i, request in held:
        if request.phase is RequestPhase.PREEMPTED and not intake.is_full:
            if not is_resuming and intake.admit(request, has_turn=is_turn and i == due):
                amounts[i] = min(room, request.num_remaining_tokens)
            else:
                is_resuming = True
    # Served by place; but whoever must not be overtaken stands before the overtaker.
    rank = {i: (i, 1, 0) for i in amounts}
    ahead = sorted(amounts)
    num_ahead = 0
    elders = Elders(queue, unstarted, config.max_overtaken, view.now)
    for i in tried:
        has_turn = is_turn and i == due
        while ahead and ahead[0] < i and not has_turn:
            num_ahead += amounts[ahead.pop(0)]
        if is_resuming or num_ahead >= reach:
            break
        while i not in amounts and not intake.is_full:
            first = elders.first_before(i)
            request = queue.at(first)
            is_elder = first != i
            if not intake.admit(request, has_turn=has_turn and not is_elder, is_elder=is_elder):
                if has_turn and not is_elder:
                    # No room for it yet: what is free stays its own in this step too.
                    intake.set_aside(request)
                break
            elders.start(first)
            rank[first] = (-1 if has_turn else i, int(first == i), len(rank))
            amounts[first] = min(room, request.num_remaining_tokens)
            num_ahead += amounts[first]
    order = sorted((i for i, amount in amounts.items() if amount > 0), key=rank.__getitem__)
    if is_turn and due in order and is_started[due]:
        order.remove(due)
        order.insert(0, due)
    return Seated(
        requests=[queue.at(i) for i in order],
        indices=queue.index[order].tolist(),
        places=order,
        load=PrefillLoad(
            np.array([amounts[i] for i in order], dtype=np.float64), queue.past[order]
        ),
        is_turn=is_turn and bool(order) and (order[0] == due or rank[order[0]][0] < 0),
        is_short_of_blocks=intake.is_short,
        is_outpaced=intake.is_outpaced or (bool(is_kept_out.any()) and not intake.is_full),
    )
