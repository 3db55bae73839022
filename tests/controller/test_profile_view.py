"""How profiles look: measures in words, three digits, one unit a line."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from controller.cli.profile_view import (
    print_alone,
    print_changes,
    print_judged,
    print_tuned,
    promises_of,
)
from controller.policy.slo import Slo, SloClass
from controller.tuning.influence import Effect, Influence
from controller.tuning.profile import Judged, Spread, Verdict
from controller.tuning.space import DEFAULTS, settings_at

BEFORE = {
    "attainment": Spread(0.9, 0.85, 0.953),
    "useful_tokens_per_s": Spread(6515.2, 6070.0, 6959.0),
    "ttft_p99_s": Spread(7.433, 0.672, 8.142),
    "tpot_p99_s": Spread(0.04707, 0.04707, 0.04707),
    "attainment of chat": Spread(1.0, 1.0, 1.0),
}


def judged(after: dict[str, Spread]) -> Judged:
    return Judged(
        verdict=Verdict.UNCLEAR,
        statement="Hard to say.",
        before=BEFORE,
        after=after,
        difference=Spread(0.0, -0.1, 0.1),
        harms={},
    )


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split("  ") for line in capsys.readouterr().out.splitlines()]


def cells(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line if cell.strip()] for line in rows(capsys)]
    return {line[0]: line[1:] for line in lines}


def test_measures_are_words_with_three_digits_and_one_unit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_judged(judged(BEFORE | {"attainment": Spread(0.95, 0.9, 1.0)}))
    found = cells(capsys)
    assert found["promises kept, by weight"] == ["90.0%", "85.0–95.3%", "95.0%", "90.0–100%"]
    assert found["useful tokens/s"][:2] == ["6,515", "6,070–6,959"]
    assert found["TTFT P99"][:2] == ["7.43 s", "0.672–8.14 s"]
    # What does not vary has no range.
    assert found["TPOT P99"][:2] == ["47.1 ms", "47.1 ms"]
    assert found["in time: chat"][:2] == ["100%", "100%"]
    assert "unclear: Hard to say." in found


def test_the_defaults_are_not_compared_with_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    print_judged(judged(BEFORE))
    found = cells(capsys)
    assert found["held-out part"] == ["defaults", "range"]
    assert found["promises kept, by weight"] == ["90.0%", "85.0–95.3%"]


def test_a_measure_that_is_new_has_nothing_to_be_compared_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_judged(judged(BEFORE | {"gap_p99_s": Spread(0.2, 0.1, 0.3)}))
    assert cells(capsys)["longest gap P99"] == ["–", "–", "200 ms", "100–300 ms"]


def test_knobs_alone_are_shown_with_what_they_did_and_named_where_they_did_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    effects = (
        Effect("pace", 0.91234, 0.006, 0.006),
        Effect("kv_reserve", 0.1, 0.0, 0.0),
        Effect("bank", 0.11, -0.7, 0.001, ("longest gap", "worst class")),
        Effect("speed", 2.0, 0.0, 0.0),
        Effect("of_a_later_version", 2.0, -0.01, -0.01),
    )
    print_alone(Influence(alone=effects))
    found = cells(capsys)
    assert found["one knob alone"] == ["default", "tried", "kept", "guards"]
    assert found["pace"] == ["0.95", "0.9123", "+0.60"]
    assert found["bank"] == ["0", "0.11", "+0.10", "-70.10", "longest gap, worst class"]
    assert found["of_a_later_version"] == ["–", "2", "-1.00"]
    assert "no difference: kv_reserve, speed" in found
    print_alone(Influence())
    assert capsys.readouterr().out == ""


def test_promises_are_told_in_words_whatever_the_document_holds() -> None:
    classes = [
        asdict(SloClass("chat", Slo(1.0, 0.05), weight=2.0)),
        asdict(SloClass("bulk", Slo())),
        {"name": "odd", "slo": "soon"},
        {"slo": {"e2e_s": "x", "ttft_s": 0.25}},
    ]
    assert promises_of(classes) == (
        "chat (TTFT 1000 ms, TPOT 50 ms, weight 2.0); bulk (no targets); odd (no targets);"
        " None (TTFT 250 ms)"
    )


def test_a_knob_that_was_tried_often_stands_once_and_its_values_in_their_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    effects = (
        Effect("max_running", 96.0, 0.2, 0.2),
        Effect("pace", 0.9, 0.1, 0.1),
        Effect("max_running", 72.0, 0.0, 0.0),
        Effect("max_running", 80.0, 0.1, 0.1),
    )
    print_alone(Influence(alone=effects))
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["max_running", "128", "80", "+10.00"],
        ["96", "+20.00"],
        ["pace", "0.95", "0.9", "+10.00"],
    ]


def test_tuned_settings_say_what_each_gained_and_what_it_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tuned = settings_at({"pace": 0.9, "max_running": 192, "bank": 0.1})
    print_tuned(
        tuned,
        Influence(
            found=(Effect("pace", 0.9, 0.02, 0.02), Effect("max_running", 192.0, 0.011, 0.011))
        ),
    )
    found = cells(capsys)
    assert found["setting"] == ["default", "tuned", "kept", "guards", "what it does"]
    assert found["pace"][:3] == ["0.95", "0.9", "+2.00"]
    assert found["max_num_seqs"][:3] == ["128", "192", "+1.10"]
    assert found["max_num_seqs"][3].startswith("few keep steps short")
    # Nobody measured it.
    assert found["bank"][:3] == ["0", "0.1", "–"]
    print_tuned(DEFAULTS, Influence())
    assert capsys.readouterr().out == "no setting differs from the defaults\n"


def test_changes_are_shown_or_said_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_changes({"pace": (0.95, 0.912345), "token_budget": (None, 512)}, "default", "tuned")
    assert cells(capsys)["pace"] == ["0.95", "0.9123"]
    print_changes({}, "default", "tuned")
    assert capsys.readouterr().out == "no setting differs\n"
