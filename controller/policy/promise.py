"""`Promise`: the targets of one request as instants, and what became of its tokens.

Owns deadlines, their re-basing and the judgement. Must not know a step or change a request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controller.policy.slo import Slo, SloClass


@dataclass(slots=True, eq=False)
class Promise:
    """The SLO of one request as instants, plus what has happened to its tokens so far.

    Carried by the engine as `Request.promise`, unread. Mutable: `record_token` is called once per
    emitted token by the loop's listener, never by a planner.
    """

    slo: Slo
    slo_class: SloClass
    arrived_at: float
    priority: int = 0
    is_degraded: bool = False
    base_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_tokens: int = 0
    num_tokens_on_time: int = 0
    longest_gap_s: float = 0.0

    @property
    def weight(self) -> float:
        """Class weight; a degraded request keeps no weight against promises."""
        return 0.0 if self.is_degraded else self.slo_class.weight

    @property
    def first_deadline_at(self) -> float:
        """D_1 = a + T; +inf without a TTFT target."""
        return math.inf if self.slo.ttft_s is None else self.arrived_at + self.slo.ttft_s

    @property
    def last_deadline_at(self) -> float:
        """a + E, by which the last token is promised; +inf without an end-to-end target."""
        return math.inf if self.slo.e2e_s is None else self.arrived_at + self.slo.e2e_s

    def token_deadline_at(self, number: int) -> float:
        """D_n for the n-th output token (1-based): B + (n-1)·p, with B = D_1 while no token was
        emitted.

        +inf where no target bounds that token. ValueError if `number` is below 1.
        """
        if number < 1:
            raise ValueError(f"number of an output token counts from 1, got {number}")
        if number == 1:
            return self.first_deadline_at
        if self.slo.tpot_s is None:
            return math.inf
        base_at = self.first_deadline_at if self.base_at is None else self.base_at
        return base_at + (number - 1) * self.slo.tpot_s

    def record_token(self, at: float) -> None:
        """Account for one emitted token at instant `at`: gaps, fluidity and re-basing of B.

        B = max(first_token_at, D_1) at the first token. A later token that is late by more than one
        p moves B so that its own deadline would have been `at`: one stall counts once.
        """
        num_before, last_at, base_at = self.num_tokens, self.last_token_at, self.base_at
        if last_at is None or base_at is None:
            deadline_at = self.first_deadline_at
            self.first_token_at = at
            self.base_at = at if math.isinf(deadline_at) else max(at, deadline_at)
        else:
            if at - last_at > self.longest_gap_s:
                self.longest_gap_s = at - last_at
            tpot_s = self.slo.tpot_s
            deadline_at = math.inf
            if tpot_s is not None:
                # `token_deadline_at`, written out: this runs for every token.
                deadline_at = base_at + num_before * tpot_s
                if at - deadline_at > tpot_s:
                    self.base_at = at - num_before * tpot_s
        self.num_tokens_on_time += at <= deadline_at
        self.num_tokens = num_before + 1
        self.last_token_at = at

    def judge(self) -> Judgement:
        """Return what became of the promise, given the tokens recorded so far (control.md section
        1, "Judging").

        A target without the tokens to judge it is missed, except TPOT, which one token or none
        cannot miss. Judged against the targets that were asked for, also when the request was
        degraded.
        """
        slo = self.slo
        first_at, last_at = self.first_token_at, self.last_token_at
        ttft_s = tpot_s = e2e_s = None
        if first_at is not None and last_at is not None:
            ttft_s = first_at - self.arrived_at
            e2e_s = last_at - self.arrived_at
            if self.num_tokens > 1:
                tpot_s = (last_at - first_at) / (self.num_tokens - 1)
        is_ttft_met = _is_met(slo.ttft_s, ttft_s)
        is_tpot_met = (
            True if slo.tpot_s is not None and tpot_s is None else _is_met(slo.tpot_s, tpot_s)
        )
        is_e2e_met = _is_met(slo.e2e_s, e2e_s)
        verdicts = [met for met in (is_ttft_met, is_tpot_met, is_e2e_met) if met is not None]
        return Judgement(
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=e2e_s,
            is_ttft_met=is_ttft_met,
            is_tpot_met=is_tpot_met,
            is_e2e_met=is_e2e_met,
            attained=first_at is not None and all(verdicts) if verdicts else None,
            fluidity=self.num_tokens_on_time / self.num_tokens if self.num_tokens else None,
            longest_gap_s=self.longest_gap_s,
        )


@dataclass(frozen=True, slots=True)
class Judgement:
    """A promise measured: seconds, and per target whether it was met (None = no such target).

    `tpot_s` is (t_last - t_first)/(n - 1), None for fewer than two tokens. `attained` is None for
    best effort and False without a token. `fluidity` is the share of tokens that met their deadline
    (a token without one counts as met), None without a token.
    """

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    is_ttft_met: bool | None
    is_tpot_met: bool | None
    is_e2e_met: bool | None
    attained: bool | None
    fluidity: float | None
    longest_gap_s: float


def _is_met(target_s: float | None, actual_s: float | None) -> bool | None:
    """None without a target; a target without a measurement is missed."""
    if target_s is None:
        return None
    return actual_s is not None and actual_s <= target_s
