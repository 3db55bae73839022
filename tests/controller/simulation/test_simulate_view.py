"""What `paceline simulate` prints: tables for 80 columns, and words for one seed or several."""

from __future__ import annotations

import dataclasses

import pytest

from controller.cli.simulate_view import print_report
from controller.simulation.report import Report, build_report
from tests.controller.simulation.test_report import ABOUT, bound, old, row, sweep

FULL = ABOUT | {"hardware": {"name": "fast", "source": "made up"}, "best_static": []}


def printed(capsys: pytest.CaptureFixture[str], report: Report) -> list[str]:
    print_report(report)
    return capsys.readouterr().out.splitlines()


def test_every_table_fits_a_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("smallest-feasible", load, seed, 9) for load in (0.75, 16.0) for seed in (0, 1)]
    lines = printed(capsys, build_report(rows, FULL))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    for title in (
        "Offered requests that met every target",
        "Times of whoever got so far",
        "Fairness, bursts and planning",
        "Goodput: offered requests/s up to which so many are in time",
    ):
        assert title in lines


def test_what_bound_steps_has_a_column_per_constraint(capsys: pytest.CaptureFixture[str]) -> None:
    shares = {"decode_slack": 0.75, "kv_blocks": 0.0, "idle": 0.25}
    rows = [bound(row("slo", 1.0, 0, 7), **shares), old(row("edf-256", 1.0, 0, 9))]
    lines = printed(capsys, build_report(rows, FULL))
    first = lines.index("What bound steps, share of the steps")
    table = [line.split() for line in lines[first : first + 8]]
    assert ["decode", "KV"] in table
    assert ["load", "rate/s", "policy", "slack", "blocks", "idle"] in table
    assert ["1", "2.00", "slo", "75.0%", "0%", "25.0%"] in table
    assert ["edf-256", "–", "–", "–"] in table
    first = lines.index("Offered requests that missed a target, by the first cause")
    table = [line.split() for line in lines[first : first + 8]]
    assert ["load", "rate/s", "policy", "refused", "token", "late", "too", "slow", "other"] in table
    assert ["1", "2.00", "slo", "10.0%", "0%", "0%", "20.0%"] in table
    assert ["edf-256", "–", "–", "–", "–"] in table
    # Where nobody knows there is no table without a column.
    lines = printed(capsys, build_report([old(row("slo", 1.0, 0, 9))], FULL))
    assert not any("bound steps" in line for line in lines)


def test_a_load_is_named_once_and_seeds_by_their_range(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, build_report(sweep(), FULL))
    assert lines[0].endswith("2 seeds, learned costs")
    assert lines[1] == "made up"
    first = lines.index("Offered requests that met every target")
    kept = [line.split() for line in lines[first:] if "slo" in line or "edf-256" in line][:4]
    assert kept[0][:5] == ["1", "2.05", "slo", "100%", "100%"]
    assert kept[1][:2] == ["edf-256", "90.0%"]
    assert kept[2][:5] == ["2", "4.05", "slo", "75.0%", "70.0–80.0%"]
    assert any(line.startswith("slo and edf-256 change places at 2.85/s") for line in lines)


def test_budgets_that_a_search_tried_stand_below_the_policies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ("slo", "edf-512", "edf-1024", "edf-64")
    report = build_report([row(name, 1.0, 0, 9) for name in names], FULL, ["slo"])
    lines = printed(capsys, report)
    goodput = [line.split()[0] for line in lines[-8:] if line.strip()]
    assert goodput[-4:] == ["slo", "edf-64", "edf-512", "edf-1024"]
    # They are no curves: the tables by load leave them out.
    assert sum("edf-64" in line for line in lines) == 1


def test_many_classes_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    report = build_report(sweep(), FULL)
    shares = {f"chat-{number}": number / 20 for number in range(20)}
    policies = tuple(
        dataclasses.replace(
            policy,
            points=tuple(dataclasses.replace(point, classes=shares) for point in policy.points),
        )
        for policy in report.policies
    )
    lines = printed(capsys, dataclasses.replace(report, policies=policies))
    assert max(map(len, lines)) <= 80
    assert sum(line.split()[-3:] == ["chat-19", "95.0%", "95.0%"] for line in lines) == 2
    assert sum(line.split() == ["2.05", "chat-0", "0%", "0%"] for line in lines) == 1


def test_a_burst_gets_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    calm = build_report([row("slo", 1.0, 0, 10)], FULL)
    assert not any("burst over" in line for line in printed(capsys, calm))
    (policy,) = calm.policies
    point = dataclasses.replace(policy.points[0], num_bursts=1, num_unrecovered=1)
    bursty = dataclasses.replace(calm, policies=(dataclasses.replace(policy, points=(point,)),))
    lines = printed(capsys, bursty)
    assert any("burst over" in line for line in lines)
    assert any(line.split()[-1:] == ["never"] for line in lines)
