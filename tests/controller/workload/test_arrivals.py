"""The words of a workload, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from controller.workload.arrivals import (
    MAX_LENGTH_TOKENS,
    Arrival,
    Workload,
    sorted_workload,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at_s": -0.001}, "at_s"),
        ({"at_s": math.nan}, "at_s"),
        ({"at_s": math.inf}, "at_s"),
        ({"at_s": "1"}, "at_s"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": 1.0}, "num_prompt_tokens"),
        ({"num_prompt_tokens": True}, "num_prompt_tokens"),
        ({"num_output_tokens": -3}, "num_output_tokens"),
        ({"num_output_tokens": MAX_LENGTH_TOKENS + 1}, "num_output_tokens"),
        ({"prefix_block_tokens": 0}, "prefix_block_tokens"),
        ({"slo_class": ""}, "slo_class"),
        ({"slo_class": " chat"}, "slo_class"),
        ({"prefix_ids": (-1,)}, "prefix_ids"),
        ({"prefix_ids": (1.5,)}, "prefix_ids"),
        ({"prefix_ids": (2**63,)}, "prefix_ids"),
        ({"prefix_ids": (1, 2, 3), "num_prompt_tokens": 1024}, "prefix_ids names 3 blocks"),
    ],
)
def test_an_arrival_refuses_nonsense_by_the_name_of_its_field(
    change: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {"at_s": 0.0, "num_prompt_tokens": 1, "num_output_tokens": 1}
    assert Arrival(**fields).slo_class is None
    with pytest.raises(ValueError, match=message):
        Arrival(**fields | change)


def test_the_last_block_of_a_prefix_need_not_be_full() -> None:
    arrival = Arrival(0.0, 1025, 1, prefix_ids=(1, 2, 3))
    assert arrival.prefix_block_tokens == 512


def test_a_workload_refuses_arrivals_out_of_order_and_says_which() -> None:
    arrivals = (Arrival(1.0, 1, 1), Arrival(1.0, 2, 1), Arrival(0.5, 3, 1))
    with pytest.raises(ValueError, match=r"number 2 .* arrives at 0\.5 s, after one at 1\.0 s"):
        Workload("mine", arrivals)
    with pytest.raises(ValueError, match="name"):
        Workload("", ())


def test_requests_that_arrive_at_once_keep_their_order() -> None:
    arrivals = [Arrival(2.0, 1, 1), Arrival(1.0, 2, 1), Arrival(2.0, 3, 1), Arrival(1.0, 4, 1)]
    workload = sorted_workload("mine", arrivals)
    assert [a.num_prompt_tokens for a in workload.arrivals] == [2, 4, 1, 3]


def test_the_numbers_that_are_shown() -> None:
    workload = Workload(
        "mine",
        tuple(
            Arrival(number / 10, number, 2 * number, "chat" if number % 2 else None)
            for number in range(1, 102)
        ),
    )
    assert workload.num_requests == 101
    assert workload.duration_s == pytest.approx(10.1)
    assert workload.rate == pytest.approx(10.0)
    assert workload.class_counts == {"chat": 51, None: 50}
    prompts, outputs = workload.prompt_summary, workload.output_summary
    assert prompts is not None
    assert outputs is not None
    assert (prompts.mean, prompts.p50, prompts.p90, prompts.p99, prompts.max) == pytest.approx(
        (51, 51, 91, 100, 101)
    )
    assert outputs.p99 == pytest.approx(200)


def test_a_workload_without_requests_has_no_numbers() -> None:
    empty = Workload("empty", ())
    assert (empty.num_requests, empty.duration_s, empty.rate) == (0, 0.0, 0.0)
    assert empty.prompt_summary is None
    assert empty.output_summary is None
    assert empty.class_counts == {}


def test_a_workload_that_arrives_all_at_once_has_no_rate() -> None:
    assert Workload("burst", (Arrival(0.0, 1, 1), Arrival(0.0, 1, 1))).rate == 0.0
