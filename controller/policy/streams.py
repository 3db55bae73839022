"""How many more streams the token promises allow: a step of decodes alone must keep every pace,
and leave room for streams with a closer one that are worth more.

Owns that one count. Must not spend seats or blocks, or look at a prompt's deadline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from controller.policy.alternating import LEAST_JUMP_SHARE
from controller.policy.budget import made_safe
from controller.policy.demand import Expected
from controller.policy.facts import (
    CLASS,
    TPOT_S,
    ClassNames,
    IntArray,
    RunningTable,
    least,
    live_promise,
)
from controller.policy.settings import PolicyConfig
from costmodel.base import CostModel
from costmodel.features import NUM_FEATURES, FloatArray
from engine.ports import RequestView

BoolArray = npt.NDArray[np.bool_]

# Whoever costs so many times as much per weight makes room for those who are expected, as heavier
# promises are insured at the cost of lighter ones (`on_time.py`).
_YIELDING_RATIO = 4.0
# A context so long tells what one token of it costs a step.
_PROBED_TOKENS = 4096.0
# Fewer streams than that at once are not expected: a class that hardly comes keeps nobody out.
_LEAST_USUAL = 0.5


class Joiner(NamedTuple):
    """Somebody who wants to stream: paced promise in seconds per token (+inf without), known
    tokens, rent per weight, number of its class.
    """

    target_s: float
    num_tokens: float = 0.0
    rent: float = 0.0
    class_no: int = -1


class Joiners(NamedTuple):
    """Many who want to stream: the columns of their `Joiner`s, shape (n,)."""

    target_s: FloatArray
    num_tokens: FloatArray
    rent: FloatArray
    class_no: IntArray

    def at(self, places: IntArray) -> list[Joiner]:
        """Return those at the places, one by one."""
        return list(map(Joiner, *(column[places].tolist() for column in self)))


class Guard(NamedTuple):
    """Room for a class that is expected: `rent` is what one of its streams costs per weight,
    seconds of steps over its answer; `pace_s` its paced seconds per token; `num_missing` of its
    streams are expected and do not run yet, each of which adds `each_s` to a step.
    """

    class_no: int
    rent: float
    pace_s: float
    num_missing: float
    each_s: float

    def missing_s(self, num_came: dict[int, int]) -> float:
        """Return what those who are missing add to a step, with `num_came` of each class here."""
        return max(0.0, self.num_missing - num_came.get(self.class_no, 0)) * self.each_s


class Rents(NamedTuple):
    """What streams cost, and for whom they make room: seconds that one stream adds to a step, and
    one token of its context; what the first prompt token of a step adds (`jump_s`); and the guards.
    """

    stream_s: float
    token_s: float
    jump_s: float
    guards: tuple[Guard, ...]

    def of(self, num_prompt: FloatArray, num_output: FloatArray, weight: FloatArray) -> FloatArray:
        """Return the rent per weight of streams behind prompts of so many tokens (n,), for answers
        of `num_output` tokens (n,); +inf for weight 0, 0 where there is no answer.
        """
        rent = (self.stream_s + self.token_s * num_prompt) * num_output
        each: FloatArray = np.where(rent > 0.0, math.inf, 0.0)
        np.divide(rent, weight, out=each, where=weight > 0.0)
        return each

    def of_one(self, num_prompt: float, num_output: float, weight: float) -> float:
        """Return `of` for a single stream: no arrays for one number."""
        rent = (self.stream_s + self.token_s * num_prompt) * num_output
        if weight > 0.0:
            return rent / weight
        return math.inf if rent > 0.0 else 0.0

    def limit_s(self, who: Joiner, num_came: dict[int, int]) -> float:
        """Return how long a step of decodes alone may be with that stream; +inf if it makes room
        for nobody. `num_came` of each class have joined since the guards were counted, less those
        that have ended.
        """
        pace_s, missing_s = math.inf, 0.0
        for guard in self.guards:
            if guard.pace_s < who.target_s and 0.0 < guard.rent * _YIELDING_RATIO <= who.rent:
                pace_s = min(pace_s, guard.pace_s)
                missing_s += guard.missing_s(num_came)
        return pace_s - self.jump_s - missing_s

    def limits_s(self, who: Joiners, num_came: dict[int, int]) -> FloatArray:
        """`limit_s` of each of them, shape (n,)."""
        pace_s, missing_s = np.full(who.rent.size, math.inf), np.zeros(who.rent.size)
        for guard in self.guards:
            least_rent = guard.rent * _YIELDING_RATIO
            if least_rent > 0.0:
                is_bound = (guard.pace_s < who.target_s) & (least_rent <= who.rent)
                np.minimum(pace_s, guard.pace_s, out=pace_s, where=is_bound)
                np.add(missing_s, guard.missing_s(num_came), out=missing_s, where=is_bound)
        return pace_s - self.jump_s - missing_s


def paced_target_s(request: RequestView, pace: float) -> float:
    """The paced time per token that the request is promised; +inf without a TPOT promise."""
    promise = live_promise(request)
    if promise is None or promise.slo.tpot_s is None:
        return math.inf
    return pace * promise.slo.tpot_s


class StreamRoom:
    """Streams that may join while the mean of a decode-only step keeps the tightest promise.

    Without this bound a burst is admitted as a whole, for its prompts are cheap, and then nobody
    keeps a pace. `step_s[k]` is that mean with the first k newcomers, who have `known[k]` tokens in
    all; others may join than those, and a token more or less is `token_s`, a stream less than run
    now `stream_s`. `period_s` is the tightest paced promise among those who run. A stream that
    cannot keep its promise any more protects nobody.

    `rents` says for whom streams with looser promises make room. Their contexts may make every step
    longer than a closer pace for as long as they last; then those who hold it, many of whom one of
    them may cost, find no room at all.
    """

    __slots__ = (
        "_known",
        "_num_came",
        "_num_joined",
        "_num_running",
        "_num_tokens",
        "_period_s",
        "_step_s",
        "_stream_s",
        "_token_s",
        "rents",
    )

    def __init__(
        self,
        step_s: Sequence[float],
        known: Sequence[float],
        token_s: float,
        stream_s: float,
        period_s: float,
        num_running: int,
    ) -> None:
        self._step_s = step_s
        self._known = known
        self._token_s = token_s
        self._stream_s = stream_s
        self._period_s = period_s
        self._num_running = num_running
        self._num_joined = 0
        self._num_tokens = 0.0
        self._num_came: dict[int, int] = {}
        self.rents: Rents | None = None

    @classmethod
    def of(
        cls,
        running: RunningTable,
        newcomers: Sequence[RequestView],
        most: int,
        config: PolicyConfig,
        cost_model: CostModel,
    ) -> StreamRoom:
        """Predict steps with up to `most` of the `newcomers`, in that order, beside `running`."""
        num_running = len(running)
        before = float(running.num_known.sum())
        more = [float(request.num_known_tokens) for request in newcomers[: max(0, most)]]
        known = list(itertools.accumulate(more, initial=0.0))
        rows = np.zeros((len(known) + 2, NUM_FEATURES))
        rows[:-2, 1] = range(num_running, num_running + len(known))
        rows[:-2, 2] = known
        # One more token of context, and one more stream.
        rows[-2:] = rows[-3]
        rows[-2, 2] += _PROBED_TOKENS
        rows[-1, 1] += 1.0
        rows[:, 2] += before
        mean_s = made_safe(cost_model.predict(rows).mean_s)
        token_s = max(0.0, float(mean_s[-2] - mean_s[-3])) / _PROBED_TOKENS
        stream_s = max(0.0, float(mean_s[-1] - mean_s[-3]))
        step_s = np.maximum.accumulate(mean_s[:-2]).tolist()
        targets = config.pace * running.facts[TPOT_S]
        targets = targets[targets >= step_s[0]]
        period_s = least(targets) if targets.size else math.inf
        return cls(step_s, known, token_s, stream_s, period_s, num_running)

    def make_room(
        self,
        expected: Expected,
        running: RunningTable,
        newcomers: FloatArray,
        names: ClassNames,
        typical: Callable[[str], int],
        config: PolicyConfig,
        cost_model: CostModel,
    ) -> None:
        """Keep room for the streams that are `expected` and have closer promises than some of the
        `newcomers` (their facts); `typical` are the output tokens of an answer of a class.
        """
        pace_s = config.pace * expected.tpot_s
        is_guarded = pace_s < config.pace * newcomers[TPOT_S].max(initial=0.0)
        if not is_guarded.any() or len(running) + newcomers.shape[1] < 2:
            return
        num_output = np.array([typical(name) for name in expected.names], dtype=np.float64)
        rows = np.zeros((5 + pace_s.size, NUM_FEATURES))
        rows[1:, 1], rows[1:, 2] = len(running), running.num_known.sum()
        rows[2, [0, 4, 5]] = 1.0
        rows[3, 1] += 1.0
        rows[4, 2] += _PROBED_TOKENS
        rows[5:, 1] += 1.0
        rows[5:, 2] += expected.num_prompt + num_output / 2.0
        mean_s = made_safe(cost_model.predict(rows).mean_s)
        empty_s, now_s, first_s, one_s, long_s = mean_s[:5].tolist()
        jump_s = first_s - now_s if first_s - now_s > LEAST_JUMP_SHARE * now_s else 0.0
        stream_s, token_s = max(one_s - now_s, 0.0), max(long_s - now_s, 0.0) / _PROBED_TOKENS
        rents = Rents(stream_s, token_s, jump_s, ())
        each = rents.of(expected.num_prompt, num_output, expected.weight)
        # At the closest pace an answer takes so long, and so many stream at once.
        num_usual = expected.rate * num_output * max(now_s, least(pace_s))
        # Where not even an empty step leaves that room nobody is kept out for it, nor for a class
        # that hardly comes any more.
        is_guarded &= (pace_s - jump_s > empty_s) & (num_usual >= _LEAST_USUAL)
        numbers = [names.index(name) for name in expected.names]
        num_now = np.bincount(running.facts[CLASS].astype(np.intp), minlength=max(numbers) + 1)
        num_missing = np.maximum(num_usual - num_now[numbers], 0.0)
        each_s = np.maximum(mean_s[5:] - now_s, 0.0)
        guards = tuple(
            Guard(numbers[k], *column)
            for k, column in enumerate(
                zip(
                    each.tolist(),
                    pace_s.tolist(),
                    num_missing.tolist(),
                    each_s.tolist(),
                    strict=True,
                )
            )
            if is_guarded[k]
        )
        if guards:
            self.rents = rents._replace(guards=guards)

    def copy(self) -> StreamRoom:
        """Return an independent count, to try things out."""
        twin = StreamRoom(
            self._step_s,
            self._known,
            self._token_s,
            self._stream_s,
            self._period_s,
            self._num_running,
        )
        twin.rents = self.rents
        twin._num_joined, twin._num_tokens = self._num_joined, self._num_tokens
        twin._num_came = dict(self._num_came)
        return twin

    def yields(self, who: Joiner) -> bool:
        """Whether that stream is kept out for the sake of those who are expected, though no promise
        of those who run would break.
        """
        if self.rents is None or self._is_first:
            return False
        return self._step_with(who) > self.rents.limit_s(who, self._num_came)

    def yielding(self, who: Joiners) -> BoolArray:
        """`yields` of each of them, as if it came alone; shape (n,)."""
        if self.rents is None or self._is_first:
            return np.zeros(who.rent.size, dtype=np.bool_)
        index, num_gone = self._next()
        tokens = self._num_tokens + who.num_tokens - self._known[index]
        step_s = self._step_s[index] + self._token_s * tokens + self._stream_s * num_gone
        found: BoolArray = step_s > self.rents.limits_s(who, self._num_came)
        return found

    def can_all_join(self, joiners: Sequence[Joiner]) -> bool:
        """Whether these streams may join one after another."""
        twin = self.copy()
        return all(map(twin.join, joiners))

    def join(self, who: Joiner) -> bool:
        """Let one stream join; False if a promise would break, or for the sake of those who are
        expected.

        The first stream of an empty engine always may: nobody is faster than alone.
        """
        period_s = min(self._period_s, who.target_s)
        if not self._is_first:
            if self._num_joined + 1 >= len(self._step_s):
                return False
            if self._step_with(who) > period_s or self.yields(who):
                return False
        self._num_joined += 1
        self._num_tokens += who.num_tokens
        self._period_s = period_s
        self._num_came[who.class_no] = self._num_came.get(who.class_no, 0) + 1
        return True

    def leave(self, num_tokens: float, class_no: int) -> None:
        """Count one stream of that class less, and its known tokens: somebody is expected to have
        ended.
        """
        self._num_joined -= 1
        self._num_tokens -= num_tokens
        # Whoever ends of those who are expected will be missing.
        self._num_came[class_no] = self._num_came.get(class_no, 0) - 1

    @property
    def _is_first(self) -> bool:
        return self._num_running + self._num_joined <= 0

    def _step_with(self, who: Joiner) -> float:
        """Return the mean of a step of decodes alone with that stream too, in seconds."""
        index, num_gone = self._next()
        tokens = self._num_tokens + who.num_tokens - self._known[index]
        return self._step_s[index] + self._token_s * tokens + self._stream_s * num_gone

    def _next(self) -> tuple[int, int]:
        """Return the place in `_step_s` for one stream more, and how many fewer there are then than
        ran at first (negative).
        """
        num = self._num_joined + 1
        return min(max(0, num), len(self._step_s) - 1), min(0, num)
