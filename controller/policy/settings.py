"""`PolicyConfig`: every number that the SLO planner may be tuned with, checked once.

Owns settings only. Must not hold behaviour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodel.margin import MAX_COVERAGE, MIN_COVERAGE


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Settings of `SloPlanner`. ValueError names the field.

    Pacing: `pace` is the share of every target that is steered for with the mean of a step,
    `upper_pace` the share that its upper bound may take; `bank` in [0, 1] the share of
    banked slack that a stream may spend; `gap_limit_s` bounds every stream's gap, whatever it was
    promised.

    Budget: `token_budget` caps the tokens of one step (None = the engine's own cap only);
    `knee_share` is the share of the best prompt tokens per second that a light load asks of a step,
    `stream_knee_share` that beside streams with token promises while everybody who waits has a
    deadline: their first tokens are aimed at `patience` of the way from arrival to the paced
    deadline, at `patience_s` seconds at the latest, until what waits is work for more than
    `patience_backlog` of the shortest such time;
    `drain_steps` is the number of steps in which the queued prompt work should be done, so that a
    growing queue moves the budget to N⁺ (math.inf = never for the queue's sake); `split_threshold`
    is the prompt length in tokens up to which a prompt is not split; `exploration` is the share of
    steps that try another budget within the bounds.

    Waiting: `max_wait_s` is the age at which a request without a live deadline is due;
    `turn_period` says that every so many steps the oldest due request goes first; `max_age_factor`
    and `min_max_age_s` bound the age of a waiting promise (max(factor·T, minimum));
    `max_overtaken` bounds how many later arrivals of its class may start before a waiting request
    (None = no bound);
    `max_waiting_tokens` bounds the queued prompt tokens (None = no bound); `max_judged` bounds how
    many waiting requests one step looks at.

    Probes: a target that the model calls unreachable is tried all the same on an empty engine, in
    one of `probe_period` passes, if the prediction is within `probe_factor` times the target. In as
    many steps a block of prompt tokens is computed beside streams where the mean allows it and the
    upper bound does not: a margin that is too wide would otherwise forbid what narrows it.

    Margin: `margin_quantile` in [0.5, 0.99] is the probability that the cost model's upper bound is
    steered to hold with.

    Order: `order_blend` is how many seconds later a prompt counts as due per second of work that is
    left of it: 0 is the order of deadlines, more serves short prompts before long ones.

    Conflict: `started_factor` is how much dearer a started prefill is to drop; `length_neutrality`
    in [0, 1] moves shedding from count-optimal (0: long prompts go first) to length-neutral (1:
    weights alone decide).

    Room: `kv_reserve` is the share of the pool that admissions leave free; `max_running` caps how
    many requests run at once (None = the engine's own cap only).
    """

    pace: float = 0.95
    upper_pace: float = 1.2
    bank: float = 0.0
    gap_limit_s: float = 1.0
    token_budget: int | None = None
    knee_share: float = 0.9
    stream_knee_share: float = 0.4
    patience: float = 0.8
    patience_s: float = 1.0
    patience_backlog: float = 0.4
    drain_steps: float = 8.0
    split_threshold: int = 32
    exploration: float = 0.01
    margin_quantile: float = 0.9
    max_wait_s: float = 30.0
    turn_period: int = 8
    max_age_factor: float = 10.0
    min_max_age_s: float = 30.0
    max_overtaken: int | None = 64
    max_waiting_tokens: int | None = None
    max_judged: int = 512
    probe_period: int = 8
    probe_factor: float = 8.0
    order_blend: float = 0.0
    started_factor: float = 8.0
    length_neutrality: float = 0.0
    kv_reserve: float = 0.02
    max_running: int | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_share("pace", low_open=True)
        self._check_positive("upper_pace")
        if self.upper_pace < 1.0:
            raise ValueError(f"upper_pace must be at least 1, got {self.upper_pace!r}")
        self._check_share("bank")
        for name in ("knee_share", "stream_knee_share", "patience"):
            self._check_share(name, low_open=True)
        self._check_share("exploration")
        self._check_share("length_neutrality")
        self._check_share("kv_reserve")
        for name in ("patience_s", "gap_limit_s", "max_wait_s", "max_age_factor", "min_max_age_s"):
            self._check_positive(name)
        self._check_positive("started_factor")
        for name in ("patience_backlog", "drain_steps"):
            self._check_positive(name, may_be_infinite=True)
        quantile = self.margin_quantile
        if not (_is_number(quantile) and MIN_COVERAGE <= quantile <= MAX_COVERAGE):
            raise ValueError(
                f"margin_quantile must be in [{MIN_COVERAGE}, {MAX_COVERAGE}], got {quantile!r}"
            )
        if not (_is_number(self.order_blend) and 0.0 <= self.order_blend < math.inf):
            raise ValueError(
                f"order_blend must be a number of at least 0, got {self.order_blend!r}"
            )
        for name in ("token_budget", "max_overtaken", "max_waiting_tokens", "max_running"):
            if getattr(self, name) is not None:
                self._check_count(name, 1)
        self._check_count("split_threshold", 0)
        self._check_count("turn_period", 1)
        self._check_count("probe_period", 1)
        self._check_positive("probe_factor")
        self._check_count("max_judged", 1)

    @property
    def upper_share(self) -> float:
        """What of an upper bound a drained queue is held against: pace / upper_pace."""
        return self.pace / self.upper_pace

    def _check_share(self, name: str, *, low_open: bool = False) -> None:
        value = getattr(self, name)
        if not (_is_number(value) and 0.0 <= value <= 1.0) or (low_open and value == 0.0):
            interval = "(0, 1]" if low_open else "[0, 1]"
            raise ValueError(f"{name} must be in {interval}, got {value!r}")

    def _check_positive(self, name: str, *, may_be_infinite: bool = False) -> None:
        value = getattr(self, name)
        if not (_is_number(value) and value > 0.0 and (may_be_infinite or math.isfinite(value))):
            raise ValueError(f"{name} must be a positive number, got {value!r}")

    def _check_count(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
