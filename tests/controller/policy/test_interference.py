"""Later arrivals that are due earlier: when is somebody done whom they pass?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.policy.demand import Expected
from controller.policy.interference import overtaken_s
from costmodel.features import FloatArray

INF = float("inf")


def expected(*classes: tuple[float, float, float]) -> Expected:
    """Classes of (arrivals per second, prompt tokens, TTFT target), all of weight 1."""
    rate, num_prompt, ttft_s = np.array(classes).T
    ones = np.ones(len(classes))
    names = tuple(f"c{i}" for i in range(len(classes)))
    return Expected(names, rate, num_prompt, ttft_s, ones, ones, ones)


def passed(
    who: Expected,
    done: float,
    left: float,
    num_tokens: float = 1e9,
    token_s: float = 0.001,
    *,
    weight: float = 1.0,
    is_passable: bool = True,
) -> float:
    found = overtaken_s(
        who,
        np.full(who.rate.size, token_s),
        1.0,
        np.array([done]),
        np.array([left]),
        np.array([num_tokens]),
        np.array([weight]),
        np.array([is_passable]),
    )
    return float(found[0])


def test_half_of_the_machine_for_others_doubles_the_wait() -> None:
    # 5 chats a second of 100 tokens take half of it; they go first for as long as it waits.
    assert passed(expected((5.0, 100.0, 1.0)), 10.0, 60.0) == pytest.approx(20.0)


def test_who_comes_within_its_own_target_of_the_deadline_is_due_later() -> None:
    # Of 12 s only those that come in the first 2 are due before it.
    assert passed(expected((5.0, 100.0, 10.0)), 11.0, 12.0) == pytest.approx(12.0)


def test_who_is_done_before_anybody_new_is_due_is_not_passed() -> None:
    assert passed(expected((5.0, 100.0, 1.0)), 0.9, 60.0) == 0.9


def test_who_has_no_deadline_or_is_late_already_is_left_alone() -> None:
    who = expected((5.0, 100.0, 1.0))
    assert passed(who, 10.0, INF) == 10.0
    assert passed(who, 10.0, 9.0) == 10.0


def test_who_goes_first_whenever_it_is_due_is_passed_by_nobody() -> None:
    assert passed(expected((5.0, 100.0, 1.0)), 10.0, 60.0, is_passable=False) == 10.0


def test_dearer_arrivals_are_dropped_for_its_sake() -> None:
    who = expected((5.0, 100.0, 1.0))
    assert passed(who, 10.0, 60.0, num_tokens=99.0) == 10.0
    assert passed(who, 10.0, 60.0, num_tokens=100.0) > 10.0


def test_more_than_the_machine_can_do_passes_until_it_would_be_due_later() -> None:
    # Twice the machine for 59 s.
    assert passed(expected((20.0, 100.0, 1.0)), 10.0, 60.0) == pytest.approx(10.0 + 2.0 * 59.0)


def test_classes_without_a_first_token_target_pass_nobody() -> None:
    assert passed(expected((5.0, 100.0, 1.0), (50.0, 100.0, INF)), 10.0, 60.0) == 20.0
    assert passed(expected((50.0, 100.0, INF)), 10.0, 60.0) == 10.0


def test_of_its_like_half_of_those_count_that_were_served() -> None:
    who = expected((5.0, 100.0, 1.0))._replace(share_served=np.array([0.8]))
    # A fifth of the machine.
    assert passed(who, 8.0, 60.0, num_tokens=399.0) == pytest.approx(10.0)


def test_what_costs_four_times_as_much_counts_them_in_full() -> None:
    who = expected((5.0, 100.0, 1.0))._replace(share_served=np.array([0.1]))
    assert passed(who, 10.0, 60.0, num_tokens=400.0) == pytest.approx(20.0)


def test_weights_say_who_passes_but_not_that_all_of_them_will_come() -> None:
    who = expected((5.0, 100.0, 1.0))._replace(weight=np.array([20.0]))
    assert passed(who, 9.0, 60.0, num_tokens=4.0) == 9.0
    # Twenty times as much per weight, but no longer than three of theirs: half of them.
    assert passed(who, 9.0, 60.0, num_tokens=300.0) == pytest.approx(12.0)
    assert passed(who, 9.0, 60.0, num_tokens=400.0, weight=20.0) == pytest.approx(18.0)
    # Long, but worth more than they are.
    assert passed(who, 9.0, 60.0, num_tokens=400.0, weight=90.0) == 9.0


shares = st.lists(
    st.tuples(
        st.floats(0.0, 20.0), st.floats(1.0, 500.0), st.sampled_from([0.5, 1.0, 4.0, 30.0, INF])
    ),
    min_size=1,
    max_size=4,
)


@given(shares, st.floats(0.01, 80.0), st.floats(0.01, 100.0))
def test_it_is_the_least_fixed_point(
    classes: list[tuple[float, float, float]], done: float, left: float
) -> None:
    who = expected(*classes)
    found = passed(who, done, left)
    assert found >= done
    if not (done > who.ttft_s.min() and done < left):
        assert found == done
        return
    share = who.rate * who.num_prompt * 0.001
    windows_s = np.maximum(left - who.ttft_s, 0.0)

    def later(at: float) -> float:
        return done + float((share * np.minimum(at, windows_s)).sum())

    assert later(found) == pytest.approx(found, rel=1e-9)
    # From below it is reached by going on.
    below: float = done
    for _ in range(200):
        below = later(below)
    assert below <= found * (1.0 + 1e-9)


def test_everybody_is_asked_at_once() -> None:
    who = expected((5.0, 100.0, 1.0), (1.0, 100.0, 20.0))
    done_s: FloatArray = np.array([0.5, 10.0, 40.0])
    left_s = np.array([1.0, 30.0, 60.0])
    found = overtaken_s(
        who, np.full(2, 0.001), 1.0, done_s, left_s, np.full(3, 1e9), np.ones(3), np.full(3, True)
    )
    each = [passed(who, float(d), float(left)) for d, left in zip(done_s, left_s, strict=True)]
    assert found.tolist() == pytest.approx(each)
    assert done_s.tolist() == [0.5, 10.0, 40.0], "what is handed in stays"
