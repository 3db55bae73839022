"""Rows, ratios and words of mixed loads, from results that are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.table import Table

from controller.bench.load_measures import Fate, Outcome, numbers_of
from controller.bench.load_report import (
    render_attainment,
    render_deciles,
    render_latencies,
    render_notes,
    to_json,
)
from controller.bench.load_rounds import Calibration, LoadResult, LoadSession, LoadTerms
from controller.bench.load_rows import best_static, everybody, goodputs, rows_of
from controller.bench.load_traffic import LoadTraffic
from controller.bench.report import Spread
from controller.bench.validity import Violation, ViolationKind

TERMS = LoadTerms(LoadTraffic(), (1.0, 2.0), num_rounds=2, duration_s=10.0, drain_s=5.0, seed=0)
SERVED = Outcome(
    0, "chat", 0.0, 50, 20, 20, Fate.SERVED, "", None, False, 0.001, 0.4, 0.2, 0.3, True
)  # fmt: skip
LATE = replace(SERVED, is_kept=False, ttft_s=4.0, tpot_s=0.4)
REFUSED = replace(
    SERVED, fate=Fate.REFUSED, reason="overloaded", retry_after_s=2.5, is_kept=False,
    ttft_s=None, tpot_s=None, longest_gap_s=None, num_output_tokens=0,
)  # fmt: skip
UNSERVED = replace(REFUSED, fate=Fate.UNSERVED, reason="", retry_after_s=None)


def result(
    round_no: int, key: str, rate: float, outcomes: Sequence[Outcome], *found: Violation
) -> LoadResult:
    numbers = None if found else numbers_of(outcomes, TERMS.duration_s)
    return LoadResult(round_no, key, key.upper(), rate, 0.1, 0, 1, tuple(outcomes), numbers, found)


def session(*results: LoadResult) -> LoadSession:
    return LoadSession(TERMS, Calibration(0.1, 1.0), results, is_complete=True)


def mix(kept: int, missed: int, refused: int = 0, unserved: int = 0) -> list[Outcome]:
    return [SERVED] * kept + [LATE] * missed + [REFUSED] * refused + [UNSERVED] * unserved


SESSION = session(
    result(0, "slo", 1.0, mix(10, 0)),
    result(0, "slo", 2.0, mix(14, 0, refused=6)),
    result(0, "static-64", 1.0, mix(9, 1)),
    result(0, "static-64", 2.0, mix(10, 6, unserved=4)),
    result(0, "static-128", 1.0, mix(6, 4)),
    result(0, "static-128", 2.0, mix(5, 15)),
    result(1, "slo", 1.0, mix(10, 0)),
    result(1, "slo", 2.0, mix(12, 0, refused=8)),
    result(1, "static-64", 1.0, mix(10, 0)),
    result(1, "static-64", 2.0, mix(6, 14)),
    result(1, "static-128", 1.0, mix(4, 6)),
    result(1, "static-128", 2.0, mix(5, 15)),
)


def cells(table: Table, column: int) -> list[str]:
    return [str(cell) for cell in table.columns[column].cells]


def test_shares_are_of_offered_requests() -> None:
    numbers = numbers_of(mix(10, 4, refused=4, unserved=2), 10.0)
    group = numbers.groups[0]
    assert group.attainment == 0.5
    assert (group.num_served, group.num_refused, group.num_unserved) == (14, 4, 2)
    assert group.refusals == {"overloaded": 4}
    assert group.retry_after_s is not None
    assert group.retry_after_s.p50 == 2.5
    assert group.ttft_s is not None
    assert group.ttft_s.num == 14
    assert numbers.goodput == 1.0
    with pytest.raises(ValueError, match="nobody was offered"):
        numbers_of([], 10.0)


def test_everybody_comes_first_then_each_class() -> None:
    numbers = numbers_of([SERVED, replace(LATE, slo_class="batch")], 1.0)
    assert [group.name for group in numbers.groups] == ["all", "batch", "chat"]
    assert [group.attainment for group in numbers.groups] == [0.5, 0.0, 1.0]
    assert numbers.group("long") is None


def test_ratios_are_taken_within_a_round_against_the_best_static_budget() -> None:
    rows = {(row.key, row.rate): row for row in rows_of(SESSION)}
    assert list(rows) == [
        (key, rate) for rate in (1.0, 2.0) for key in ("slo", "static-64", "static-128")
    ]
    slo = rows["slo", 2.0]
    assert slo.best_static == "static-64"
    assert slo.goodput is not None
    assert slo.goodput.median == pytest.approx(1.3)
    # 14 against 10 and 12 against 6: the median of the ratios, not the ratio of the medians.
    assert slo.goodput_vs_static is not None
    assert slo.goodput_vs_static.median == pytest.approx(1.7)
    total = everybody(slo)
    assert total is not None
    assert total.refused == Spread(0.35, 0.3, 0.4)
    assert total.refusals == {"overloaded": 14}
    assert total.tpot_p90_vs_static is not None
    assert total.tpot_p90_vs_static.median == pytest.approx(0.5)


def test_an_invalid_run_gives_no_number_and_no_reference() -> None:
    broken = Violation(ViolationKind.FAILED_REQUEST, "load-3 failed")
    partly = session(
        result(0, "slo", 1.0, mix(10, 0)),
        result(0, "static-64", 1.0, mix(9, 1), broken),
        result(1, "slo", 1.0, mix(8, 2)),
        result(1, "static-64", 1.0, mix(4, 6)),
    )
    slo, static = rows_of(partly)
    assert slo.goodput_vs_static == Spread(2.0, 2.0, 2.0)
    assert (static.num_rounds, static.num_valid) == (2, 1)
    table = render_attainment(partly, [slo, static], "title")
    assert cells(table, 1) == ["SLO", "STATIC-64 * (INVALID: 1 of 2)"]
    assert "INVALID STATIC-64 at 1.00/s, round 1: load-3 failed" in render_notes(
        partly, [slo, static]
    )


def test_without_a_valid_static_budget_there_is_nothing_to_compare_with() -> None:
    alone = session(result(0, "slo", 1.0, mix(10, 0)))
    (row,) = rows_of(alone)
    assert row.best_static is None
    assert row.goodput_vs_static is None
    assert best_static([]) is None


def test_a_static_budget_that_kept_nothing_divides_nothing() -> None:
    none_kept = session(
        result(0, "slo", 1.0, mix(10, 0)), result(0, "static-64", 1.0, mix(0, 0, unserved=10))
    )
    slo, static = rows_of(none_kept)
    assert slo.goodput_vs_static is None
    total = everybody(static)
    assert total is not None
    assert total.ttft_s is None
    assert total.unserved == Spread(1.0, 1.0, 1.0)
    assert cells(render_latencies([slo, static]), 3)[-1] == "–"


def test_goodput_is_read_off_the_rates() -> None:
    found = goodputs(SESSION)
    # All kept at 1/s, 65 % of those offered at 2/s: 90 % at 1 + 0.1 / 0.35.
    assert found["slo"][0].rate == pytest.approx(1.0 + 0.1 / 0.35)
    assert found["static-128"][0].rate is None
    notes = render_notes(SESSION, rows_of(SESSION))
    assert "SLO: goodput at 90% 1.29/s, at 99% 1.03/s" in notes
    assert (
        "STATIC-128: goodput at 90% below every rate measured, at 99% below every rate measured"
        in notes
    )
    assert (
        "SLO at 2.00/s refused 14 of 40 chat: overloaded 14; 14 said when to come back,"
        " median 2.5 s"
    ) in notes
    assert "the client's own lateness: at most 1 ms at P99" in notes


def test_the_table_of_promises() -> None:
    table = render_attainment(SESSION, rows_of(SESSION), "title")
    assert cells(table, 0) == ["1.00"] * 3 + ["2.00"] * 3
    assert cells(table, 1)[3:] == ["SLO", "STATIC-64 *", "STATIC-128"]
    headings = [str(column.header) for column in table.columns]
    kept = cells(table, headings.index("kept, %"))
    assert kept[3:] == ["65 (60–70)", "40 (30–50)", "25"]
    assert cells(table, headings.index("long, %"))[3] == "–"
    assert cells(table, headings.index("vs best static"))[3:5] == ["1.70× (1.40–2.00)", "–"]


def test_what_was_kept_by_prompt_length() -> None:
    def of_length(num_tokens: int, *, is_kept: bool) -> Outcome:
        return replace(SERVED, num_prompt_tokens=num_tokens, is_kept=is_kept)

    # Whatever order they arrive in: the shortest two of twenty are a tenth.
    short = [of_length(n, is_kept=True) for n in range(10, 1, -1)]
    long = [of_length(100 * n, is_kept=n % 2 == 0) for n in range(1, 12)]
    rows = rows_of(session(result(0, "slo", 1.0, [*long[:5], *short, *long[5:]])))
    (row,) = rows
    assert [each.num_offered for each in row.deciles] == [2] * 10
    assert [each.longest_prompt for each in row.deciles[:5]] == [3, 5, 7, 9, 100]
    assert [each.attainment for each in row.deciles] == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    table = render_deciles(rows)
    assert [cells(table, column)[0] for column in (1, 2, 6)] == ["SLO", "100", "50"]


def test_few_requests_make_fewer_tenths() -> None:
    (row,) = rows_of(session(result(0, "slo", 1.0, mix(2, 1))))
    assert [each.num_offered for each in row.deciles] == [1, 1, 1]
    broken = Violation(ViolationKind.FAILED_REQUEST, "x")
    (row,) = rows_of(session(result(0, "slo", 1.0, mix(2, 1), broken)))
    assert row.deciles == ()
    assert len(render_deciles([row]).columns) == 2


def test_latencies_in_milliseconds() -> None:
    table = render_latencies(rows_of(session(result(0, "slo", 1.0, mix(10, 0)))))
    assert cells(table, 3) == ["400 / 400 / 400"] * 2
    assert cells(table, 4) == ["200 / 200 / 200"] * 2


def test_everything_is_json() -> None:
    document = json.loads(json.dumps(to_json(SESSION, None, {"model": "demo"}), allow_nan=False))
    assert document["benchmark"] == "load"
    assert document["model"] == "demo"
    assert document["rates"] == [1.0, 2.0]
    assert document["traffic"]["classes"][0].startswith("chat:share=60")
    assert document["results"][0]["outcomes"][0]["fate"] == "served"
    assert document["rows"][0]["groups"][0]["attainment"]["median"] == 1.0
    assert document["simulated"] is None
