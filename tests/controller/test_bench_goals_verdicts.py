"""Ratios and verdicts: met, missed, a bound that does not tell, nothing measured."""

from __future__ import annotations

import pytest

from controller.bench.goals_calm import is_equal
from controller.bench.goals_ladder import Curve, rate_of
from controller.bench.goals_report import paragraph, verdict_of
from controller.bench.goals_verdicts import (
    Check,
    Measured,
    Sign,
    Verdict,
    goodput_ratio,
    shown,
    wanted_text,
)


def curve(*falls: int, lowest: int = 0, highest: int = 20) -> Curve:
    """Return a curve whose seeds keep 1 before these rungs, and 0.8 from there on."""
    points = tuple(
        (rung, tuple(1.0 if rung < fall else 0.8 for fall in falls))
        for rung in range(lowest, highest + 1)
    )
    return Curve("any", tuple(range(len(falls))), points)


def at(fall: int) -> float:
    """Return the 90 % goodput of such a curve: half-way between 1 and 0.8."""
    return (rate_of(fall - 1) + rate_of(fall)) / 2.0


def check(measured: Measured | None, **changes: object) -> Check:
    words: dict[str, object] = {
        "goal": "G1",
        "claim": "goodput",
        "case": "here",
        "wanted": 1.6,
        "is_least": True,
        "unit": "×",
    }
    return Check(**(words | {"measured": measured} | changes))  # type: ignore[arg-type]


def test_a_ratio_is_taken_seed_by_seed() -> None:
    found = goodput_ratio(curve(10, 12, 14), curve(5, 8, 6), 0.9)

    assert found is not None
    ratios = [at(10) / at(5), at(12) / at(8), at(14) / at(6)]
    assert (found.value, found.low, found.high) == pytest.approx(
        (sorted(ratios)[1], min(ratios), max(ratios))
    )
    assert found.sign is Sign.EXACT


@pytest.mark.parametrize(
    ("ours", "theirs", "sign"),
    [
        # A seed of ours never falls: at least.
        (curve(30, 10), curve(5, 5), Sign.AT_LEAST),
        # A seed of theirs holds nowhere: at least.
        (curve(10, 10), curve(0, 5), Sign.AT_LEAST),
        (curve(10, 10), curve(30, 5), Sign.AT_MOST),
        (curve(30, 10), curve(30, 5), Sign.UNKNOWN),
    ],
)
def test_a_curve_that_ends_too_early_makes_a_bound(ours: Curve, theirs: Curve, sign: Sign) -> None:
    found = goodput_ratio(ours, theirs, 0.9)

    assert found is not None
    assert found.sign is sign


def test_without_a_goodput_of_ours_the_lowest_rate_is_a_bound() -> None:
    found = goodput_ratio(curve(0, 0), curve(5, 5), 0.9)

    assert found is not None
    assert found.value == pytest.approx(rate_of(0) / at(5))
    assert found.sign is Sign.AT_MOST
    assert check(found).verdict is Verdict.MISSED
    assert goodput_ratio(curve(0, 0), curve(0, 0), 0.9) is None


def test_what_was_looked_for_in_vain_is_open() -> None:
    neither = check(None, is_open=True, note="neither holds 90 %")
    assert neither.verdict is Verdict.OPEN
    assert "open (neither holds 90 %)" in paragraph([neither])


def test_a_number_without_a_goal_is_only_reported() -> None:
    found = check(Measured(1.2, 1.2, 1.2), wanted=None)

    assert (found.verdict, found.margin, wanted_text(found)) == (Verdict.REPORTED, None, "–")
    assert verdict_of([found, check(Measured(2.0, 2.0, 2.0))]) is Verdict.MET
    assert "Goodput (no goal): 1.20× (here)." in paragraph([found])


@pytest.mark.parametrize(
    ("value", "sign", "is_least", "verdict"),
    [
        (1.7, Sign.EXACT, True, Verdict.MET),
        (1.5, Sign.EXACT, True, Verdict.MISSED),
        (1.7, Sign.AT_LEAST, True, Verdict.MET),
        (1.5, Sign.AT_LEAST, True, Verdict.OPEN),
        (1.7, Sign.AT_MOST, True, Verdict.OPEN),
        (1.5, Sign.AT_MOST, True, Verdict.MISSED),
        (1.7, Sign.UNKNOWN, True, Verdict.OPEN),
        (1.5, Sign.EXACT, False, Verdict.MET),
        (1.7, Sign.EXACT, False, Verdict.MISSED),
        (1.5, Sign.AT_MOST, False, Verdict.MET),
        (1.7, Sign.AT_MOST, False, Verdict.OPEN),
        (1.5, Sign.AT_LEAST, False, Verdict.OPEN),
        (1.7, Sign.AT_LEAST, False, Verdict.MISSED),
    ],
)
def test_a_verdict_heeds_bounds(value: float, sign: Sign, is_least: bool, verdict: Verdict) -> None:
    found = check(Measured(value, value, value, sign), is_least=is_least)

    assert found.verdict is verdict


def test_nothing_measured_is_no_verdict() -> None:
    assert check(None).verdict is Verdict.MISSING
    assert check(None).margin is None


def test_a_condition_beside_the_number_can_miss_the_goal() -> None:
    good = Measured(2.0, 2.0, 2.0)
    assert check(good, holds_beside=False).verdict is Verdict.MISSED
    text = paragraph([check(good, holds_beside=False, note="kept 80 % against 90 %")])
    assert "unequal attainment (kept 80 % against 90 %)" in text


def test_a_margin_is_a_share_of_the_goal() -> None:
    assert check(Measured(1.2, 1.2, 1.2)).margin == pytest.approx(-0.25)
    assert check(Measured(2.0, 2.0, 2.0), is_least=False).margin == pytest.approx(-0.25)
    assert check(Measured(3.0, 3.0, 3.0), is_least=False, wanted=0.0).margin == -3.0


def test_the_verdict_of_a_goal_is_the_worst_of_its_checks() -> None:
    met, missed = check(Measured(2.0, 2.0, 2.0)), check(Measured(1.0, 1.0, 1.0))
    open_ = check(Measured(1.0, 1.0, 1.0, Sign.AT_LEAST))

    assert verdict_of([met, met]) is Verdict.MET
    assert verdict_of([met, open_]) is Verdict.OPEN
    assert verdict_of([met, open_, check(None)]) is Verdict.MISSING
    assert verdict_of([check(None), missed, met]) is Verdict.MISSED
    assert verdict_of([]) is Verdict.MISSING


def test_a_paragraph_says_where_a_goal_is_missed_and_by_how_much() -> None:
    met = check(Measured(2.0, 1.9, 2.1), case="first")
    missed = check(Measured(1.2, 1.1, 1.3), case="second")

    text = paragraph([met, missed])

    assert "**missed**" in text
    assert "met in 1 of 2 cases; furthest away second with 1.20× (1.10–1.30)" in text
    assert "25 % short of the goal" in text
    assert "at worst 2.00× (1.90–2.10) (first)" in paragraph([met])
    assert paragraph([]) == "Not measured."
    assert "not measured (no trace)" in paragraph([check(None, note="no trace")])


def test_numbers_are_shown_with_unit_and_spread() -> None:
    assert shown(Measured(0.0123, 0.01, 0.02), "%") == "1.2 % (1.0–2.0)"
    assert shown(Measured(1.5, 1.5, 1.5, Sign.AT_LEAST), "×") == "≥ 1.50×"
    assert shown(Measured(3.0, 3.0, 3.0)) == "3"
    assert shown(None) == "–"
    assert wanted_text(check(None)) == "≥ 1.60×"
    assert wanted_text(check(None, wanted=0.01, unit="%", is_least=False)) == "≤ 1.0 %"
    with pytest.raises(ValueError, match="values"):
        Measured.of([])


@pytest.mark.parametrize(
    ("ours", "theirs", "is_as_good"),
    [(0.0, 0.0, True), (0.002, 0.0, True), (0.003, 0.0, False), (0.05, 0.04, True)],
)
def test_misses_are_equal_to_a_quarter_or_a_fifth_of_a_point(
    ours: float, theirs: float, is_as_good: bool
) -> None:
    assert is_equal(ours, theirs) is is_as_good
    assert not is_equal(0.051, 0.04)
