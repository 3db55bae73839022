"""`Demand`: who has been arriving lately, for the planner's view of who will come yet.

Owns a bounded window of arrivals per class, and who was told to come back (`returns.py`). Fed by
the runtime when a request is first judged, and when one is refused; a planner only reads it. Must
not hold requests or read a clock.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from controller.policy.returns import Returns
from controller.policy.slo import Slo

FloatArray = npt.NDArray[np.float64]

# Seconds over which arrivals are counted at least: the first ones tell no rate yet.
_LEAST_SPAN_S = 30.0
# Arrivals of a class that are remembered: those of so many seconds, but no fewer than so many of
# them, and never more.
_REMEMBERED_S = 60.0
_LEAST_REMEMBERED = 64
_MOST_REMEMBERED = 1024
# Where those are too many for a minute they count over so long at least.
_SHORTEST_S = 10.0
# After a silence of so many usual gaps a class is expected less often.
_MOST_SILENT = 3.0


class Expected(NamedTuple):
    """What is expected to arrive, a column per class that promises something; arrays (c,).

    `rate` arrivals per second of prompts of `num_prompt` tokens (the mean) with the usual targets
    `ttft_s` and `tpot_s` (medians, +inf without one) and the class weight; `share_served` of their
    tokens belonged to requests that were not turned away.
    """

    names: tuple[str, ...]
    rate: FloatArray
    num_prompt: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    weight: FloatArray
    share_served: FloatArray


class _Arrival:
    """One arrival: when, which, and what it asked."""

    __slots__ = ("at", "is_served", "no", "num_prompt", "request_id", "tpot_s", "ttft_s")

    def __init__(self, request_id: str, no: int, at: float, num_prompt: int, slo: Slo) -> None:
        self.request_id = request_id
        self.no = no
        self.at = at
        self.num_prompt = float(num_prompt)
        self.ttft_s = math.inf if slo.ttft_s is None else slo.ttft_s
        self.tpot_s = math.inf if slo.tpot_s is None else slo.tpot_s
        self.is_served = True


class _ClassDemand:
    """The recent arrivals of one class, the eldest first."""

    __slots__ = ("arrived_at", "forgotten_no", "recent", "usual", "weight")

    def __init__(self) -> None:
        self.recent: deque[_Arrival] = deque()
        self.forgotten_no = 0
        self.weight = 1.0
        self.usual: tuple[float, float, float, float] | None = None
        self.arrived_at: FloatArray | None = None

    def is_full(self, at: float) -> bool:
        """Whether the eldest is to be forgotten for one that arrives at `at`."""
        num = len(self.recent)
        if num >= _MOST_REMEMBERED:
            return True
        return num >= _LEAST_REMEMBERED and self.recent[0].at < at - _REMEMBERED_S

    def rate(self, now: float, since: float) -> float:
        """Return arrivals per second, of a count that began at `since`: of the last 64, or of the
        last minute, whichever is more, so that a class which comes again after a pause, or for the
        first time, is not thinned out by it; and less the longer nobody comes.
        """
        if self.arrived_at is None:
            self.arrived_at = np.sort([each.at for each in self.recent])
        arrived_at, num = self.arrived_at, len(self.recent)
        num_last = min(num, _LEAST_REMEMBERED)
        # Where more are known or forgotten the eldest of them begins the count.
        is_cut = num_last < num or self.forgotten_no > 0
        last_s = now - (float(arrived_at[-num_last]) if is_cut else since)
        num_lately = num - int(arrived_at.searchsorted(now - _REMEMBERED_S))
        lately_s = min(max(now - since, _LEAST_SPAN_S), _REMEMBERED_S)
        if num == _MOST_REMEMBERED:
            lately_s = min(lately_s, max(now - float(arrived_at[0]), _SHORTEST_S))
        rate = max(num_last / max(last_s, _LEAST_SPAN_S), num_lately / lately_s)
        silent_s = max(now - float(arrived_at[-1]), 1e-3)
        return min(rate, _MOST_SILENT / silent_s)

    def means(self) -> tuple[float, float, float, float]:
        """Return mean prompt tokens, median TTFT and TPOT targets and the share of prompt tokens
        that was served.
        """
        if self.usual is None:
            recent = self.recent
            total = sum([each.num_prompt for each in recent])
            served = sum([each.num_prompt for each in recent if each.is_served])
            self.usual = (
                total / len(recent),
                median([each.ttft_s for each in recent]),
                median([each.tpot_s for each in recent]),
                served / max(total, 1.0),
            )
        return self.usual


class Demand:
    """Arrivals per second and their usual size and targets, per class: those of the last minute, or
    the last 64 where that is longer.

    `returns` holds when those were told to come back who were refused.
    """

    def __init__(self) -> None:
        self.returns = Returns()
        self._classes: dict[str, _ClassDemand] = {}
        self._known: dict[str, tuple[_ClassDemand, _Arrival]] = {}
        # What is expected but for the rates, which alone change while nobody comes.
        self._usual: Expected | None = None
        self._since: float | None = None

    def observe(
        self,
        class_name: str,
        request_id: str,
        arrival_no: int,
        at: float,
        num_prompt: int,
        slo: Slo,
        weight: float,
    ) -> None:
        """Remember an arrival; one that is known, or was, teaches nothing."""
        if request_id in self._known:
            return
        found = self._classes.get(class_name)
        if found is None:
            found = self._classes[class_name] = _ClassDemand()
        elif arrival_no <= found.forgotten_no:
            return
        if self._since is None:
            self._since = at
        while found.is_full(at):
            gone = found.recent.popleft()
            del self._known[gone.request_id]
            found.forgotten_no = max(found.forgotten_no, gone.no)
        arrival = _Arrival(request_id, arrival_no, at, num_prompt, slo)
        found.recent.append(arrival)
        self._known[request_id] = (found, arrival)
        found.weight = weight
        found.usual = found.arrived_at = self._usual = None

    def refuse(self, request_id: str) -> None:
        """Remember that a request was turned away, or is served without its promise."""
        known = self._known.get(request_id)
        if known is not None:
            found, arrival = known
            arrival.is_served = False
            found.usual = self._usual = None

    def expected(self, now: float) -> Expected | None:
        """Return what is expected from `now` on; None before anything has arrived."""
        since = self._since
        if since is None:
            return None
        classes = self._classes.values()
        if self._usual is None:
            columns = [(*found.means(), found.weight) for found in classes]
            num_prompt, ttft_s, tpot_s, share, weight = np.array(columns).T
            self._usual = Expected(
                tuple(self._classes), weight, num_prompt, ttft_s, tpot_s, weight, share
            )
        return self._usual._replace(rate=np.array([found.rate(now, since) for found in classes]))
