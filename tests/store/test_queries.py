"""What readers are told: pages that lose nothing, a request's life, an honest summary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.clock import VirtualClock
from store.database import Database
from store.errors import CursorError
from store.queries import MAX_PAGE_ROWS, RequestFilter, Span, TelemetryReader
from store.records import Record, StepWorkRecord
from store.writer import TelemetryWriter
from tests.store.samples import (
    RUN_AT,
    life_of_a_request,
    make_event,
    make_request,
    make_run,
    make_step,
)


def written(url: str, *records: Record, run_id: str = "run-a") -> TelemetryReader:
    """Write records as a whole run and return a reader."""
    run = make_run(run_id, RUN_AT if run_id == "run-a" else RUN_AT + 1)
    writer = TelemetryWriter(Database.open_writer(url), run, VirtualClock())
    for record in records:
        assert writer.offer(record)
    assert writer.close()
    return TelemetryReader.open(url)


def test_pages_hold_every_row_once_while_rows_are_added(url: str) -> None:
    # All at one instant: the cursor must tell rows apart by more than their time.
    reader = written(url, *(make_step(number, at=RUN_AT) for number in range(25)))
    first = reader.steps(limit=10)
    assert [row["step_no"] for row in first.rows] == list(range(24, 14, -1))
    newer = make_step(0, run_id="run-b", at=RUN_AT + 9)
    written(url, newer, run_id="run-b").close()
    second = reader.steps(limit=10, cursor=first.next_cursor)
    third = reader.steps(limit=10, cursor=second.next_cursor)
    assert [row["step_no"] for row in second.rows + third.rows] == list(range(14, -1, -1))
    assert third.next_cursor is None
    assert reader.steps(limit=26).next_cursor is None
    reader.close()


def test_a_span_includes_its_start_and_not_its_end(url: str) -> None:
    reader = written(url, *(make_step(number) for number in range(5)))
    page = reader.steps(span=Span(RUN_AT + 100, RUN_AT + 300))
    assert [row["step_no"] for row in page.rows] == [2, 1]
    assert reader.steps(run_id="other").rows == ()
    reader.close()


def test_requests_are_filtered(url: str) -> None:
    reader = written(
        url,
        make_request("a"),
        make_request("b", attained=False, slo_class="code"),
        make_request("c", attained=None, slo_class="batch", arrived_at=RUN_AT + 1),
        make_request(
            "d", attained=False, decision="reject", reason="overloaded", finish_reason="rejected"
        ),
    )

    def ids(**where: object) -> list[str]:
        page = reader.requests(where=RequestFilter(**where))  # type: ignore[arg-type]
        return [row["request_id"] for row in page.rows]

    assert ids() == ["c", "d", "b", "a"]
    assert ids(slo_class="code") == ["b"]
    assert ids(attained=True) == ["a"]
    assert ids(attained=False) == ["d", "b"]
    assert ids(decision="reject") == ids(reason="overloaded") == ids(finish_reason="rejected")
    assert ids(decision="reject") == ["d"]
    reader.close()


def test_a_requests_life_step_by_step(url: str) -> None:
    reader = written(url, *life_of_a_request())
    life = reader.request("req-1")
    assert life is not None
    json.dumps(life, allow_nan=False)
    steps = life["steps"]
    assert [(row["kind"], row["num_tokens"], row["num_computed_tokens"]) for row in steps] == [
        ("prefill", 64, 0),
        ("prefill", 32, 64),
        ("decode", 1, 96),
        ("decode", 1, 97),
    ]
    assert [row["token_index"] for row in steps] == [None, 0, 1, 2]
    assert [row["since_arrival_s"] for row in steps] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert steps[0]["token_since_arrival_s"] is None
    assert steps[1]["token_since_arrival_s"] == pytest.approx(0.29)
    assert [row["gap_s"] for row in steps[:2]] == [None, None]
    assert [row["gap_s"] for row in steps[2:]] == pytest.approx([0.1, 0.105])
    assert steps[1]["binding_constraint"] == "decode_slack"
    assert [event["kind"] for event in life["events"]] == ["preemption"]
    assert life["request"]["attained"] is True
    reader.close()


def test_a_running_request_has_steps_but_no_row(url: str) -> None:
    reader = written(url, *life_of_a_request())
    life = reader.request("req-0")
    assert life is not None
    assert life["request"] is None
    assert [row["since_arrival_s"] for row in life["steps"]] == [None]
    assert reader.request("req-9") is None
    reader.close()


def test_the_newest_run_answers_for_an_id_that_two_runs_know(url: str) -> None:
    written(url, make_request("x")).close()
    reader = written(url, make_request("x", run_id="run-b", num_prompt_tokens=5), run_id="run-b")
    newest, older = reader.request("x"), reader.request("x", run_id="run-a")
    assert newest is not None
    assert older is not None
    assert newest["request"]["num_prompt_tokens"] == 5
    assert older["request"]["num_prompt_tokens"] == 96
    found = reader.run("run-a")
    assert found is not None
    assert found["run_id"] == "run-a"
    assert reader.run("run-c") is None
    reader.close()


@pytest.mark.parametrize("cursor", ["", "!", "AAAA", "bnVsbA", "WzFd", "é"])
def test_cursors_of_nobody_are_refused(url: str, cursor: str) -> None:
    reader = written(url, make_step(1))
    with pytest.raises(CursorError):
        reader.steps(cursor=cursor)
    reader.close()


def test_a_cursor_of_another_listing_is_refused(url: str) -> None:
    reader = written(url, make_step(1), make_step(2))
    cursor = reader.steps(limit=1).next_cursor
    with pytest.raises(CursorError, match="another listing"):
        reader.events(cursor=cursor)
    for limit in (0, MAX_PAGE_ROWS + 1):
        with pytest.raises(ValueError, match="limit"):
            reader.steps(limit=limit)
    reader.close()


def test_summary_of_nothing(url: str) -> None:
    reader = written(url)
    summary = reader.summary()
    reader.close()
    json.dumps(summary, allow_nan=False)
    assert summary["requests"]["num_offered"] == 0
    assert summary["requests"]["attainment"] is None
    assert summary["prediction"]["mape"] is None
    assert summary["steps"]["duration_s"] == {"p50": None, "p90": None, "p99": None}


def test_attainment_counts_the_refused_and_leaves_out_those_without_a_promise(url: str) -> None:
    bare: dict[str, Any] = {"ttft_target_s": None, "tpot_target_s": None, "attained": None}
    reader = written(
        url,
        make_request("kept"),
        make_request("late", attained=False, is_ttft_met=False, ttft_s=2.0),
        make_request(
            "refused",
            attained=None,
            decision="reject",
            reason="overloaded",
            finish_reason="rejected",
            ttft_s=None,
            tpot_s=None,
            num_output_tokens=0,
        ),
        make_request("free", slo_class="batch", ended_at=RUN_AT + 2000, ttft_s=9.0, **bare),
    )
    summary = reader.summary()
    total = summary["requests"]
    assert (total["num_offered"], total["num_promised"], total["num_attained"]) == (4, 3, 1)
    assert total["attainment"] == pytest.approx(1 / 3)
    assert summary["duration_s"] == 2.0
    assert total["goodput_per_s"] == 0.5
    assert total["ttft_s"] == {"p50": 2.0, "p90": 9.0, "p99": 9.0}
    batch, chat = total["by_class"]
    assert (batch["slo_class"], batch["attainment"], batch["ttft_s"]["p50"]) == ("batch", None, 9.0)
    assert (chat["num_rejected"], chat["num_ttft_missed"]) == (1, 1)
    assert chat["ttft_s"]["p50"] == 0.29
    assert summary["admissions"] == [
        {"decision": "admit", "reason": "feasible", "num_requests": 3},
        {"decision": "reject", "reason": "overloaded", "num_requests": 1},
    ]
    reader.close()


def test_percentiles_are_nearest_rank(url: str) -> None:
    reader = written(
        url, *(make_request(f"r{index:03d}", ttft_s=float(index)) for index in range(1, 101))
    )
    assert reader.summary()["requests"]["ttft_s"] == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    reader.close()


def test_prediction_error_and_coverage_by_regime(url: str) -> None:
    chunk = (StepWorkRecord("req-2", "prefill", 64, 0),)
    mixed = (*chunk, StepWorkRecord("req-1", "decode", 1, 9, 1, 0.09))
    reader = written(
        url,
        make_step(1, duration_s=0.10, predicted_mean_s=0.11, predicted_upper_s=0.12),
        make_step(2, duration_s=0.10, predicted_mean_s=0.08, predicted_upper_s=0.09),
        make_step(3, work=chunk, duration_s=0.2, predicted_mean_s=0.2, predicted_upper_s=0.2),
        make_step(4, work=mixed, duration_s=0.4, predicted_mean_s=0.2, predicted_upper_s=None),
        # Neither a failed step nor one without a prediction says anything about the model.
        make_step(5, failure="device lost", duration_s=9.0),
        make_step(6, predicted_mean_s=None, predicted_upper_s=None),
        # Nor one that paid for a swap, or for one that failed.
        make_step(7, duration_s=9.0, num_swapped_blocks=1),
        make_step(8, duration_s=9.0, num_failed_swaps=1),
    )
    prediction = reader.summary()["prediction"]
    assert prediction["num_steps"] == 4
    assert prediction["mape"] == pytest.approx((0.1 + 0.2 + 0 + 0.5) / 4)
    assert prediction["coverage"] == pytest.approx(2 / 3)
    decode_only, mixed_steps, prefill_only = prediction["regimes"]
    assert [row["regime"] for row in prediction["regimes"]] == [
        "decode_only",
        "mixed",
        "prefill_only",
    ]
    assert decode_only["coverage"] == 0.5
    assert mixed_steps["coverage"] is None
    assert prefill_only["mape"] == 0
    reader.close()


def test_rates_use_the_span_when_it_is_given(url: str) -> None:
    reader = written(url, *(make_step(number) for number in range(10)))
    summary = reader.summary(span=Span(RUN_AT, RUN_AT + 4000))
    assert summary["steps"]["computed_tokens_per_s"] == 2.5
    assert summary["steps"]["num_emitted_tokens"] == 10
    assert summary["steps"]["planner_share"] == pytest.approx(0.001)
    assert summary["steps"]["binding_constraints"] == [
        {"binding_constraint": "decode_slack", "num_steps": 10}
    ]
    reader.close()


def test_losses_are_summed_by_reason(url: str) -> None:
    reader = written(
        url,
        make_event("telemetry_loss", reason="queue_full", numbers={"num_step_rows": 3}),
        make_event(
            "telemetry_loss",
            reason="queue_full",
            numbers={"num_step_rows": 1, "num_step_work_rows": 4, "prefill_tokens": 99},
        ),
    )
    assert reader.summary()["losses"] == {
        "num_loss_events": 2,
        "num_rows_dropped": 8,
        "num_rows_dropped_by_reason": {"queue_full": 8},
        "num_lost_runs": 0,
    }
    reader.close()
