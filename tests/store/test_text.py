"""CSV that no spreadsheet takes for formulas, and times as people type them."""

from __future__ import annotations

import csv
import io

import pytest

from store.text import format_instant, parse_instant, to_csv


def test_text_that_looks_like_a_formula_is_quoted_and_numbers_are_not() -> None:
    rows = [
        {"a": "=1+1", "b": -1.5, "c": "+x", "d": "@x", "e": "-x", "f": None, "g": True},
        {"a": 'say "hi",\nthere', "b": 2, "c": "x=1", "d": {"k": 1}, "e": "\t=1", "f": "", "g": 0},
    ]
    header, first, second = csv.reader(io.StringIO(to_csv(rows)))
    assert header == ["a", "b", "c", "d", "e", "f", "g"]
    assert first == ["'=1+1", "-1.5", "'+x", "'@x", "'-x", "", "true"]
    assert second == ['say "hi",\nthere', "2", "x=1", '{"k": 1}', "'\t=1", "", "0"]


def test_no_rows_still_have_a_header() -> None:
    assert to_csv([], ["a", "b"]) == "a,b\r\n"


@pytest.mark.parametrize(
    ("text", "instant"),
    [
        ("0", 0),
        ("1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T22:13:20", 1_700_000_000_000),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000_000),
        ("2023-11-14T23:13:20 01:00", 1_700_000_000_000),
        ("2023-11-14", 1_699_920_000_000),
        ("15m", 1_700_000_000_000 - 900_000),
    ],
)
def test_instants(text: str, instant: int) -> None:
    assert parse_instant(text, now_ms=1_700_000_000_000) == instant


@pytest.mark.parametrize(
    "text", ["", "now", "-1", "1e3", "nan", "2023-13-01", "9" * 40, "1969-01-01", "١٢"]
)
def test_what_is_no_instant(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        parse_instant(text)


def test_ages_need_a_now() -> None:
    with pytest.raises(ValueError, match="epoch milliseconds"):
        parse_instant("15m")


def test_instants_round_trip() -> None:
    assert format_instant(1_700_000_000_042) == "2023-11-14T22:13:20.042Z"
    assert parse_instant(format_instant(1_700_000_000_042)) == 1_700_000_000_042
