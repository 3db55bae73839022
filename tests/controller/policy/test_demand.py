"""Who arrives lately: rates, sizes and targets per class, within bounds."""

from __future__ import annotations

import math

import pytest

from controller.policy.demand import Demand, Expected
from controller.policy.slo import Slo

CHAT = Slo(ttft_s=1.0, tpot_s=0.1)


def expected_of(demand: Demand, now: float) -> Expected:
    found = demand.expected(now)
    assert found is not None
    return found


def arrive(demand: Demand, no: int, at: float, num_prompt: int = 100, name: str = "chat") -> None:
    demand.observe(name, f"r{no}", no, at, num_prompt, CHAT, 2.0)


def test_before_anything_arrives_nobody_is_expected() -> None:
    assert Demand().expected(5.0) is None


def test_the_first_arrivals_are_no_rate_yet() -> None:
    demand = Demand()
    arrive(demand, 1, 0.0)
    arrive(demand, 2, 0.1)
    # Two within a tenth of a second, but over half a minute at least.
    assert expected_of(demand, 0.1).rate.tolist() == [pytest.approx(2 / 30)]


@pytest.mark.parametrize("num", [60, 1000])
def test_rates_fall_while_nobody_comes(num: int) -> None:
    demand = Demand()
    for no in range(1, num + 1):
        arrive(demand, no, no * 60.0 / num)
    assert expected_of(demand, 60.0).rate[0] == pytest.approx(num / 60, rel=0.02)
    # However many they were: three in as long a silence at the most.
    assert expected_of(demand, 660.0).rate[0] == pytest.approx(3 / 600)
    assert expected_of(demand, 36_060.0).rate[0] == pytest.approx(3 / 36_000)


def test_a_class_that_comes_again_is_expected_at_once() -> None:
    demand = Demand()
    arrive(demand, 1, 0.0)
    for no in range(2, 62):
        arrive(demand, no, 3600.0 + no * 0.5)
    assert expected_of(demand, 3631.0).rate[0] == pytest.approx(1.0)


def test_of_those_who_come_seldom_the_last_64_count() -> None:
    demand = Demand()
    for no in range(1, 129):
        arrive(demand, no, no * 100.0, num_prompt=1 if no <= 64 else 10)
    found = expected_of(demand, 12_900.0)
    assert found.rate[0] == pytest.approx(0.01)
    assert found.num_prompt[0] == 10.0


def test_of_those_who_come_often_the_last_minute_counts() -> None:
    demand = Demand()
    for no in range(1, 1201):
        arrive(demand, no, no * 0.1, num_prompt=1 if no < 600 else 10)
    found = expected_of(demand, 120.0)
    assert found.rate[0] == pytest.approx(10.0, rel=0.01)
    assert found.num_prompt[0] == 10.0


def test_a_burst_is_no_rate() -> None:
    demand = Demand()
    arrive(demand, 1, 0.0)
    for no in range(2, 202):
        arrive(demand, no, 59.5)
    # 201 in a minute, not 200 in a second.
    assert expected_of(demand, 60.0).rate[0] == pytest.approx(201 / 60)


def test_what_is_remembered_is_bounded() -> None:
    demand = Demand()
    for no in range(1, 5001):
        arrive(demand, no, no * 0.001)
    # A thousand a second, of which as many are remembered: they count over ten seconds.
    assert expected_of(demand, 5.0).rate[0] == pytest.approx(102.4)


def test_sizes_are_means_and_targets_medians() -> None:
    demand = Demand()
    slos = [Slo(ttft_s=1.0), Slo(ttft_s=2.0, tpot_s=0.1), Slo(ttft_s=9.0, tpot_s=0.3)]
    for no, slo in enumerate(slos, 1):
        demand.observe("code", f"r{no}", no, 0.0, 10**no, slo, 3.0)
    found = expected_of(demand, 0.0)
    assert found.names == ("code",)
    assert found.num_prompt[0] == pytest.approx(370.0)
    assert found.ttft_s[0] == 2.0
    assert found.tpot_s[0] == 0.3, "one without a target waits for ever: +inf, 0.1, 0.3"
    assert found.weight[0] == 3.0


def test_classes_are_counted_apart() -> None:
    demand = Demand()
    arrive(demand, 1, 0.0)
    demand.observe("batch", "r2", 2, 0.0, 5000, Slo(e2e_s=60.0), 1.0)
    arrive(demand, 3, 0.0)
    found = expected_of(demand, 10.0)
    assert found.names == ("chat", "batch")
    assert found.rate.tolist() == [pytest.approx(2 / 30), pytest.approx(1 / 30)]
    assert found.ttft_s.tolist() == [1.0, math.inf]


def test_a_verdict_that_is_repeated_is_no_arrival() -> None:
    demand = Demand()
    arrive(demand, 1, 0.0, num_prompt=1)
    arrive(demand, 1, 0.0, num_prompt=1)
    assert expected_of(demand, 30.0).rate[0] == pytest.approx(1 / 30)
    for no in range(2, 66):
        arrive(demand, no, 100.0, num_prompt=300)
    arrive(demand, 1, 0.0, num_prompt=1)
    # The first is forgotten, and does not come back with a second verdict.
    assert expected_of(demand, 130.0).num_prompt[0] == 300.0


def test_who_is_refused_takes_nobodys_time() -> None:
    demand = Demand()
    for no in range(1, 4):
        arrive(demand, no, 0.0, num_prompt=100 * no)
    assert expected_of(demand, 0.0).share_served[0] == 1.0
    demand.refuse("r3")
    assert expected_of(demand, 0.0).share_served[0] == pytest.approx(0.5)
    demand.refuse("nobody")
    assert expected_of(demand, 0.0).share_served[0] == pytest.approx(0.5)
    for no in range(4, 69):
        arrive(demand, no, 100.0)
    demand.refuse("r1")
    assert expected_of(demand, 100.0).share_served[0] == 1.0, "all three are forgotten"
