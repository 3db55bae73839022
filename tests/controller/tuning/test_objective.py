"""The score: attained weight of offered requests, and what guards cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.tuning.objective import Outcome, overstepped, run_scene, score
from controller.tuning.space import DEFAULTS, settings_at
from controller.tuning.task import Scene
from tests.controller.tuning.tuning_tasks import crowd, task

USUAL = Outcome(
    attainment=0.8,
    attainment_by_class={"chat": 0.9, "bulk": 0.7},
    num_offered={"chat": 1000, "bulk": 100},
    useful_tokens_per_s=1000.0,
    gap_p99_s=0.4,
    ttft_p99_s=1.0,
    tpot_p99_s=0.05,
)


def test_the_score_is_attainment_where_no_guard_is_overstepped() -> None:
    better = replace(USUAL, attainment=0.9)
    assert score([USUAL], [USUAL]) == 0.8
    assert score([better, USUAL], [USUAL, USUAL]) == pytest.approx(0.85)
    with pytest.raises(ValueError, match="as many of the defaults"):
        score([USUAL, USUAL], [USUAL])


@pytest.mark.parametrize(
    ("changes", "guard", "excess"),
    [
        ({"useful_tokens_per_s": 951.0}, "goodput", None),
        ({"useful_tokens_per_s": 900.0}, "goodput", 0.05),
        ({"gap_p99_s": 0.5}, "longest gap", None),
        ({"gap_p99_s": 0.6}, "longest gap", 0.2),
        ({"gap_p99_s": 9.0}, "longest gap", 1.0),
        ({"attainment_by_class": {"chat": 0.88, "bulk": 0.7}}, "worst class", None),
        ({"attainment_by_class": {"chat": 0.95, "bulk": 0.6}}, "worst class", 0.08),
    ],
)
def test_every_guard_costs_what_it_is_overstepped_by(
    changes: dict[str, object], guard: str, excess: float | None
) -> None:
    tried = replace(USUAL, **changes)  # type: ignore[arg-type]
    found = overstepped([tried], [USUAL])
    assert found == ({} if excess is None else {guard: pytest.approx(excess)})
    assert score([tried], [USUAL]) == pytest.approx(0.8 - (excess or 0.0))


def test_one_request_of_a_small_class_is_no_loss_and_a_short_gap_may_grow_by_50_ms() -> None:
    few = replace(USUAL, num_offered={"chat": 1000, "bulk": 5}, gap_p99_s=0.02)
    lost = replace(few, attainment_by_class={"chat": 0.9, "bulk": 0.5}, gap_p99_s=0.069)
    assert overstepped([lost], [few]) == {}
    assert "worst class" in overstepped([lost], [USUAL])


def test_numbers_that_nobody_has_guard_nothing() -> None:
    empty = replace(USUAL, gap_p99_s=None, useful_tokens_per_s=0.0)
    assert overstepped([empty], [empty]) == {}


def test_a_scene_counts_offered_requests_by_weight() -> None:
    tried = task(crowd(24))
    outcome = run_scene(tried, DEFAULTS, tried.tuning[0])
    assert outcome.attainment == 1.0
    assert outcome.num_offered == {"chat": 18, "bulk": 6}
    crowded = Scene(crowd(400, 0.0005, output=20), 0)
    outcome = run_scene(tried, settings_at({"max_running": 16}), crowded)
    chat, bulk = outcome.attainment_by_class["chat"], outcome.attainment_by_class["bulk"]
    assert chat < 0.9
    # 300 chats that weigh 2, and 100 that weigh 1.
    assert outcome.attainment == pytest.approx((600 * chat + 100 * bulk) / 700)
    assert Outcome.from_json(outcome.to_json()) == outcome


def test_progress_ends_at_one() -> None:
    tried = task(crowd(4))
    told: list[float] = []
    run_scene(tried, DEFAULTS, tried.tuning[0], told.append)
    assert told[-1] == 1.0
    assert told == sorted(told)
