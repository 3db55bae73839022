"""How many later arrivals of its class may start before a waiting request (control.md section 4).

Owns that bound. Must not remember anybody: arrival numbers tell who could have been before whom.
"""

from __future__ import annotations

import numpy as np

from controller.policy.facts import (
    ARRIVAL_NO,
    CLASS,
    E2E_S,
    IS_DEGRADED,
    PROMISED_AT,
    TTFT_S,
    IntArray,
)
from controller.policy.ordering import PrefillQueue


class Elders:
    """Says who must start before a request may.

    A request may start before an earlier arrival of its class only if it arrived at most
    `max_overtaken` requests later. So no more than `max_overtaken` can ever overtake one, whatever
    other steps decided. None bounds nothing.

    Promises that are lost (degraded, or the target has passed) are protected against each other
    only: if those that can still be kept had to wait for them, soon none could.
    """

    __slots__ = ("_by_class", "_classes", "_max_overtaken", "_numbers", "_places", "_started")

    def __init__(
        self, queue: PrefillQueue, waiting: IntArray, max_overtaken: int | None, now: float
    ) -> None:
        """Look at the requests at the places `waiting` of the queue, rising."""
        self._by_class: dict[float, list[int]] = {}
        self._started: set[int] = set()
        # One alone has nobody to overtake.
        self._max_overtaken = max_overtaken if waiting.size > 1 else None
        self._places = waiting
        if self._max_overtaken is None:
            return
        facts = queue.facts_at(waiting)
        lost_at = facts[PROMISED_AT] + np.minimum(facts[TTFT_S], facts[E2E_S])
        is_lost = (lost_at <= now) | (facts[IS_DEGRADED] > 0.0)
        self._numbers = facts[ARRIVAL_NO]
        self._classes = 2.0 * facts[CLASS] + is_lost

    def first_before(self, place: int) -> int:
        """Return who has to start first: `place`, or the eldest that it must not overtake."""
        if self._max_overtaken is None:
            return place
        row = int(self._places.searchsorted(place))
        elders = self._of_class(float(self._classes[row]))
        while elders[-1] in self._started:
            elders.pop()
        eldest = elders[-1]
        number = self._numbers[self._places.searchsorted(eldest)]
        return eldest if self._numbers[row] - number > self._max_overtaken else place

    def start(self, place: int) -> None:
        """The request at that place starts in this step."""
        self._started.add(place)

    def _of_class(self, number: float) -> list[int]:
        """Places of those of the class, lost or not, the eldest last."""
        if number not in self._by_class:
            rows = (self._classes == number).nonzero()[0]
            by_age = rows[(-self._numbers[rows]).argsort(kind="stable")]
            self._by_class[number] = self._places[by_age].tolist()
        return self._by_class[number]
