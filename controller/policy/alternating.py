"""Machines on which any prompt token makes a step much longer, up to a bend for nothing more.

Owns what follows from that: where the bend is; when prompts had better have steps of their own now
and then instead of a share of every step (streams that would be late in every mixed step keep their
mean pace if quick steps of decodes alone come first); and in how few steps prompts are best
computed. Must not know a request, a block or a clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from controller.policy.budget import DecodeLoad, LatencyCurve, PrefillLoad, latency_curve
from controller.policy.facts import greatest, least
from costmodel.base import CostModel
from costmodel.features import FloatArray

BoolArray = npt.NDArray[np.bool_]

# The first prompt token of a step costs so many times the cheapest one where mixing may be worse;
# a jump it is from this share of a step of decodes alone on: less a fit may make of noise.
LEAST_JUMP = 2.0
LEAST_JUMP_SHARE = 0.1
# A step beyond the period is a gap beyond it: as many times as it is longer the rate must be
# better, and by a tenth at least.
LEAST_GAIN = 1.1
# A bend is where a token begins to cost so much more, and the tokens of a cell so much of a step.
_LEAST_BEND = 1.2
_LEAST_RISE = 0.01
# A stream is waited for as long as it takes to bank for so many steps of prompts.
_MOST_SAVED = 4.0


class Banks(NamedTuple):
    """What running streams have in hand of their means, shape (n,): seconds until the next token
    must come for the mean to keep its pace (`due_s`, negative where it is behind), and that pace in
    seconds per token (`paced_s`).
    """

    due_s: FloatArray
    paced_s: FloatArray

    def saving(self, step_s: float, idle_s: float) -> Banks:
        """Return those that a step of `step_s` waits for, where steps of decodes alone take
        `idle_s`.

        Whoever would have to save for more than `_MOST_SAVED` of such steps is behind for good, or
        for so long that prompts cannot wait for it; whose pace is no longer than `idle_s` saves
        nothing.
        """
        is_near = step_s - self.due_s <= _MOST_SAVED * np.maximum(step_s - self.paced_s, 0.0)
        is_saving = (is_near | (self.due_s >= self.paced_s)) & (self.paced_s > idle_s)
        return Banks(self.due_s[is_saving], self.paced_s[is_saving])

    def limit_s(self) -> float:
        """Return how long a step may last with everything spent; +inf without a stream."""
        return least(self.due_s) if self.due_s.size else math.inf

    def wait_s(self, step_s: float, idle_s: float) -> float:
        """Return how long the streams, all of them saving, take to bank for a step of `step_s`."""
        if not self.due_s.size:
            return 0.0
        num_idle = (step_s - self.due_s) / (self.paced_s - idle_s)
        return max(0.0, greatest(np.ceil(num_idle))) * idle_s


NO_BANKS = Banks(np.empty(0), np.empty(0))


class Sustained(NamedTuple):
    """The rate that prompts can have beside streams for long: `token_s` seconds per prompt token,
    in steps of `tokens` of them; infinite and 0 where there is none. Arrays of shape (k,).

    `is_alternating` says that such a step comes after steps of decodes alone.
    """

    token_s: FloatArray
    tokens: FloatArray
    is_alternating: BoolArray


def sustained_rate(
    curve: LatencyCurve,
    steered_s: FloatArray,
    period_s: FloatArray,
    saved_s: FloatArray,
    longest_s: float = math.inf,
) -> Sustained:
    """Return the best rate that keeps the mean period of the streams at `period_s` (k,) and no step
    longer than `longest_s`, where every step takes `saved_s` (k,) less than the curve says.

    A step of N prompt tokens that takes S(N) is either short enough, or it follows steps of decodes
    alone, D each, that are ahead of the period P by P - D: (S - P) / (P - D) of them. On a curve
    that rises evenly from D both give the same rate, and only mixing keeps every gap short. So the
    longer step is taken only where the rate gains by more than the gap loses: the best is that of
    the least time per token times max(1, S / P).
    """
    tokens = np.interp(period_s + saved_s, steered_s, curve.tokens)
    step_s = np.interp(tokens, curve.tokens, curve.mean_s) - saved_s
    token_s = np.full(tokens.size, math.inf)
    np.divide(step_s, tokens, out=token_s, where=tokens >= 1.0)
    is_alternating: BoolArray = np.zeros(tokens.size, dtype=np.bool_)
    if may_alternate(curve):
        # A jump that may be noise takes nothing from a mix that works.
        is_open = jumps(curve) | (tokens < 1.0)
        idle_s = curve.mean_s[0] - saved_s
        spare_s = period_s - idle_s
        over_s = np.maximum(steered_s[1:] - (saved_s + period_s)[:, None], 0.0)
        num_idle = over_s / np.where(spare_s > 0.0, spare_s, math.nan)[:, None]
        cycle_s = curve.mean_s[1:] - saved_s[:, None] + num_idle * idle_s[:, None]
        is_out = np.isnan(cycle_s) | (curve.upper_s[1:] > longest_s)
        each_s = np.where(is_out, math.inf, cycle_s / curve.tokens[1:])
        gap_s = steered_s[1:] - saved_s[:, None]
        stretch = np.maximum(gap_s / np.maximum(period_s, 1e-9)[:, None], 1.0)
        best = (each_s * stretch).argmin(axis=1)
        at_best = np.arange(best.size), best
        is_better = each_s[at_best] * stretch[at_best] * LEAST_GAIN < token_s
        is_alternating = is_open & is_better & (over_s[at_best] > 0.0)
        token_s = np.where(is_alternating, each_s[at_best], token_s)
        tokens = np.where(is_alternating, curve.tokens[1 + best], tokens)
    return Sustained(token_s, tokens, is_alternating)


def may_alternate(curve: LatencyCurve) -> bool:
    """Whether the first prompt tokens of a step cost much more than those of a large one: where
    they do not, mixing is never the worse. By the mean: a wide margin is no cost of a machine.
    """
    if curve.tokens.size < 2:
        return False
    extra_s = (curve.mean_s[1:] - curve.mean_s[0]) / curve.tokens[1:]
    return bool(extra_s[0] > LEAST_JUMP * extra_s.min())


def jumps(curve: LatencyCurve) -> bool:
    """Whether that is so for more than what a fit makes of noise."""
    mean_s = curve.mean_s
    # Two numbers tell most machines apart.
    if mean_s.size < 2 or not jumps_by(float(mean_s[0]), float(mean_s[1])):
        return False
    return may_alternate(curve)


def jumps_by(idle_s: float, first_s: float) -> bool:
    """Whether the first prompt token makes a step longer by more than noise."""
    return first_s - idle_s > LEAST_JUMP_SHARE * idle_s


def bent_curve(
    cost_model: CostModel, decodes: DecodeLoad, load: PrefillLoad, num_tokens: FloatArray
) -> LatencyCurve:
    """Return `latency_curve`, asked once more with the bends among the candidates on a machine that
    jumps: up to a bend tokens cost next to nothing, and candidates lie far apart.
    """
    curve = latency_curve(cost_model, decodes, load, num_tokens)
    if not jumps(curve):
        return curve
    bends = bends_of(curve)
    if not bends.size:
        return curve
    tokens = np.sort(np.concatenate((num_tokens, bends)))
    return latency_curve(cost_model, decodes, load, tokens)


def bends_of(curve: LatencyCurve) -> FloatArray:
    """Return where a convex curve bends between its candidates, whole tokens: where the straight
    lines through the neighbours on both sides meet.
    """
    tokens, mean_s = curve.tokens, curve.mean_s
    if tokens.size < 4:
        return np.empty(0)
    slope_s = np.diff(mean_s) / np.diff(tokens)
    before_s, after_s = slope_s[:-2], slope_s[2:]
    left, right = slice(1, -2), slice(2, -1)
    more_s = (after_s - before_s) * (tokens[right] - tokens[left])
    is_bend = (after_s > _LEAST_BEND * before_s) & (more_s > _LEAST_RISE * mean_s[0])
    rise_s = mean_s[right] - mean_s[left] - after_s * (tokens[right] - tokens[left])
    meeting = np.floor(tokens[left] + rise_s / np.where(is_bend, before_s - after_s, -1.0))
    is_between = is_bend & (meeting > tokens[left]) & (meeting < tokens[right])
    found: FloatArray = meeting[is_between]
    return found


def fewest_steps_tokens(curve: LatencyCurve, total: int, most: float) -> int:
    """Return the prompt tokens, at most `most`, of a step that computes `total` of them (and later
    steps the rest) so that streams wait least in all for it.

    A step of N tokens makes them wait S(N) - D longer than decodes alone. Per token that is least
    at one N; as many equal steps are taken as fit that best, one more or one less.
    """
    extra_s = curve.mean_s - curve.mean_s[0]
    best = curve.tokens[1 + int((extra_s[1:] / curve.tokens[1:]).argmin())]
    num_steps = max(1.0, math.floor(total / best))
    steps = np.array([num_steps, num_steps + 1.0])
    tokens = np.ceil(total / steps)
    waits_s = steps * np.interp(tokens, curve.tokens, extra_s)
    waits_s[tokens > most] = math.inf
    found = waits_s.argmin()
    return int(tokens[found] if waits_s[found] < math.inf else min(best, most))
