"""Aggregation over rounds, and the words around it."""

from __future__ import annotations

import io
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from controller.bench.record import SpikeNumbers
from controller.bench.report import (
    Spread,
    render_markdown,
    render_notes,
    render_table,
    rows_of,
    to_json,
)
from controller.bench.rounds import SpikeResult, SpikeSession
from controller.bench.scenario import SpikeScenario
from controller.bench.validity import Violation, ViolationKind


def numbers(
    gap_s: float, ttft_s: float, slowness: float = 1.0, target_s: float | None = None
) -> SpikeNumbers:
    return SpikeNumbers(
        largest_gap_s=gap_s * slowness,
        is_largest_at_arrival=True,
        normal_gap_s=0.1 * slowness,
        long_ttft_s=ttft_s * slowness,
        tokens_per_second=30.0 / slowness,
        target_gap_s=None if target_s is None else target_s * slowness,
        num_merged_reads=0,
    )


def result(round_no: int, key: str, found: SpikeNumbers | None, *reasons: str) -> SpikeResult:
    violations = tuple(Violation(ViolationKind.FAILED_REQUEST, reason) for reason in reasons)
    return SpikeResult(round_no, key, key.upper(), None, found, violations)


def session(*results: SpikeResult) -> SpikeSession:
    return SpikeSession(SpikeScenario(), 1 + max(r.round_no for r in results), results)


def two_rounds() -> SpikeSession:
    """The second round runs on a machine that has become twice as slow."""
    return session(
        result(0, "static-128", numbers(0.5, 2.0)),
        result(0, "slo", numbers(0.25, 1.5, target_s=0.3)),
        result(1, "static-128", numbers(0.5, 2.0, slowness=2.0)),
        result(1, "slo", numbers(0.35, 1.5, slowness=2.0, target_s=0.3)),
    )


def test_ratios_are_taken_within_a_round() -> None:
    static, slo = rows_of(two_rounds())
    assert slo.ttft_vs_reference == Spread(0.75, 0.75, 0.75)
    assert slo.gap_vs_reference == Spread(pytest.approx(0.6), 0.5, 0.7)  # type: ignore[arg-type]
    assert static.gap_vs_reference == static.speed_vs_reference == Spread(1.0, 1.0, 1.0)
    assert slo.gap_ratio == Spread(pytest.approx(3.0), 2.5, pytest.approx(3.5))  # type: ignore[arg-type]
    assert slo.long_ttft_s == Spread(2.25, 1.5, 3.0)


def test_a_target_is_held_nearly_held_or_missed() -> None:
    gaps = (0.3, 0.4, 0.41)
    (row,) = rows_of(
        session(*(result(i, "slo", numbers(g, 1.0, target_s=0.3)) for i, g in enumerate(gaps)))
    )
    assert (row.num_held, row.num_held_nearly, row.num_valid) == (1, 1, 3)
    (static,) = rows_of(session(result(0, "static-128", numbers(0.3, 1.0))))
    assert (static.num_held, static.num_held_nearly) == (None, None)


def test_an_invalid_run_gives_no_number_but_its_reason() -> None:
    measured = session(
        result(0, "static-128", numbers(0.5, 2.0)),
        result(0, "slo", None, "short-3 had ended"),
        result(1, "static-128", None, "short-1 failed"),
        result(1, "slo", numbers(0.2, 1.0)),
    )
    static, slo = rows = rows_of(measured)
    assert (static.num_valid, slo.num_valid, slo.num_rounds) == (1, 1, 2)
    # Round 2 has no valid reference, round 1 no valid run: there is nothing to compare.
    assert slo.ttft_vs_reference is None
    notes = render_notes(measured, rows)
    assert "INVALID SLO, round 1: short-3 had ended" in notes
    assert "INVALID STATIC-128, round 2: short-1 failed" in notes
    assert "SLO (INVALID: 1 of 2)" in render_markdown(rows)


def test_a_row_without_any_valid_run_shows_dashes() -> None:
    rows = rows_of(session(result(0, "slo", None, "refused")))
    assert "| SLO (INVALID: 1 of 1) | – | – | – | – |" in render_markdown(rows)


def test_markdown_quotes_ratios_only() -> None:
    text = render_markdown(rows_of(two_rounds()))
    header, _, static, slo = text.splitlines()
    assert header.count("|") == static.count("|") == slo.count("|") == 6
    assert slo == "| SLO | 3.0× (2.5–3.5) | 0.60× (0.50–0.70) | 0.75× | 1.00× |"
    assert " ms" not in text


def printed(measured: SpikeSession) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_table(rows_of(measured), "Spike"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_shows_every_quantity() -> None:
    text = printed(two_rounds())
    for words in (
        "largest gap, ms",
        "normal gap, ms",
        "long TTFT, ms",
        "tokens/s",
        "3.0× (2.5–3.5)",
    ):
        assert words in text
    assert "TTFT vs static 128" in text
    alone = printed(session(result(0, "slo", numbers(0.2, 1.0))))
    assert "static 128" not in alone


def test_notes_tell_of_promises_and_merged_reads() -> None:
    merged = SpikeNumbers(**{**asdict(numbers(0.2, 1.0, target_s=0.3)), "num_merged_reads": 4})
    measured = session(result(0, "slo", merged))
    held, reads = render_notes(measured, rows_of(measured))
    assert "target 3.00× the normal gap" in held
    assert "in 1 of 1 rounds" in held
    assert "4 reads" in reads


def test_json_holds_everything_and_no_nan() -> None:
    measured = two_rounds()
    value = to_json(measured, rows_of(measured), {"model": "demo", "seed": 1})
    again = json.loads(json.dumps(value, allow_nan=False))
    assert again["scenario"]["long_prompt_tokens"] == 1024
    assert again["rows"][1]["ttft_vs_reference"] == {"median": 0.75, "low": 0.75, "high": 0.75}
    assert again["results"][0]["numbers"]["largest_gap_s"] == 0.5
