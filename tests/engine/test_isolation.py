"""One poisoned request ends alone, in few forwards; nothing of a failed forward is kept."""

from __future__ import annotations

import pytest

from engine.isolation import most_retries
from engine.ports import DeviceLostError
from engine.request import FinishReason, Request
from engine.step import StepPlan
from tests.engine.shadow import ShadowEngine, continuation, make_engine, make_request


def batch(num_requests: int) -> list[Request]:
    """Requests of different lengths, no two alike."""
    return [make_request(f"r{i}", range(i, 2 * i + 3), 6) for i in range(num_requests)]


def poison(engine: ShadowEngine, *names: str) -> None:
    engine.runner.is_failing = lambda plan: any(work.request_id in names for work in plan.work)


def check_survivors(requests: list[Request], *culprits: str) -> None:
    for request in requests:
        if request.request_id in culprits:
            assert request.finish_reason is FinishReason.ERROR
            assert request.failure == "RuntimeError: poisoned"
        else:
            assert request.output_token_ids == continuation(request.prompt_token_ids, 6)
            assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 64])
def test_one_culprit_is_found_in_the_first_step(num_requests: int) -> None:
    for culprit in {0, 1, num_requests // 2, num_requests - 1} & set(range(num_requests)):
        engine, requests = make_engine(num_blocks=2048), batch(num_requests)
        for request in requests:
            engine.loop.submit(request)
        poison(engine, f"r{culprit}")
        report = engine.step()
        assert report is not None
        assert report.finished == (f"r{culprit}",)
        assert engine.runner.num_forwards == 1 + report.num_retries
        bound = 2 * (num_requests - 1).bit_length() + 2
        assert most_retries(num_requests) == bound
        assert report.num_retries <= bound
        # The others have lost nothing: their chunk of this step is computed.
        assert report.is_executed is False
        assert (report.failure is None) == (num_requests > 1)
        assert all(r.num_computed_tokens > 0 for r in requests if r.finish_reason is None)
        engine.run()
        check_survivors(requests, f"r{culprit}")
        engine.assert_idle()


@pytest.mark.parametrize("begins_at", range(2, 6))
def test_poison_in_the_middle_of_a_life(begins_at: int) -> None:
    engine, requests = make_engine(), batch(5)
    for request in requests:
        engine.loop.submit(request)
    for _ in range(begins_at):
        engine.step()
    poison(engine, "r2")
    engine.run()
    check_survivors(requests, "r2")
    engine.assert_idle()


def test_many_culprits_take_more_steps_but_nobody_else() -> None:
    engine, requests = make_engine(num_blocks=512), batch(16)
    for request in requests:
        engine.loop.submit(request)
    culprits = [f"r{i}" for i in (0, 3, 4, 9, 10, 11, 15)]
    poison(engine, *culprits)
    engine.run()
    check_survivors(requests, *culprits)
    assert all(report.num_retries <= most_retries(16) for report in engine.reports)
    engine.assert_idle()


@pytest.mark.parametrize("num_requests", [5, 8])
def test_no_set_of_culprits_costs_more_than_the_bound(num_requests: int) -> None:
    for chosen in range(1, 1 << num_requests):
        engine, requests = make_engine(num_blocks=512), batch(num_requests)
        for request in requests:
            engine.loop.submit(request)
        poison(engine, *(f"r{i}" for i in range(num_requests) if chosen >> i & 1))
        report = engine.step()
        assert report is not None
        assert report.finished
        assert report.num_retries <= most_retries(num_requests)


def test_a_device_that_fails_everything_ends_everybody_within_as_many_steps() -> None:
    engine, requests = make_engine(num_blocks=512), batch(16)
    for request in requests:
        engine.loop.submit(request)
    engine.runner.is_failing = lambda plan: True
    engine.run(max_steps=16)
    check_survivors(requests, *(request.request_id for request in requests))
    assert all(report.failure == "RuntimeError: poisoned" for report in engine.reports)


def test_a_batch_that_is_only_too_large_loses_nobody() -> None:
    engine, requests = make_engine(num_blocks=512), batch(9)
    for request in requests:
        engine.loop.submit(request)
    engine.runner.is_failing = lambda plan: len(plan.work) > 3
    engine.run()
    check_survivors(requests)
    assert all(report.failure is None for report in engine.reports)


def test_everybody_comes_on_when_only_single_requests_fit() -> None:
    engine, requests = make_engine(num_blocks=512), batch(16)
    for request in requests:
        engine.loop.submit(request)
    engine.runner.is_failing = lambda plan: len(plan.work) > 1
    for _ in range(12):
        engine.step()
    # Nobody's turn waits for somebody else's end.
    assert all(request.num_computed_tokens > 0 for request in requests)
    engine.run()
    check_survivors(requests)


def test_a_lost_device_is_fatal() -> None:
    engine, requests = make_engine(), batch(4)
    for request in requests:
        engine.loop.submit(request)

    def lose(plan: StepPlan) -> bool:
        raise DeviceLostError("gone")

    engine.runner.is_failing = lose
    with pytest.raises(DeviceLostError, match="gone"):
        engine.step()
    assert engine.runner.num_forwards == 1
    ended = engine.loop.abort("gone")
    assert {r.request_id for r in ended} == {r.request_id for r in requests}
    assert engine.pool.num_used == 0


def test_a_spoilt_prompt_that_is_only_scored_fails_too() -> None:
    engine = make_engine()
    engine.runner.is_spoilt = lambda request_id: True
    request = make_request("r", range(9), 0, num_prompt_logprobs=0)
    engine.loop.submit(request)
    engine.run()
    assert (request.finish_reason, request.failure) == (FinishReason.ERROR, "not finite")
    engine.assert_idle()


def test_a_spoilt_row_leaves_nothing_for_others_to_begin_with() -> None:
    engine = make_engine()
    prompt = range(20)
    bad, good = make_request("bad", prompt), make_request("good", range(9, 30), 8)
    engine.runner.is_spoilt = lambda request_id: request_id == "bad"
    engine.loop.submit(bad)
    engine.loop.submit(good)
    engine.run()
    assert bad.finish_reason is FinishReason.ERROR
    assert good.output_token_ids == continuation(good.prompt_token_ids, 8)
    again = make_request("again", prompt)
    engine.loop.submit(again)
    engine.run()
    assert again.num_cached_tokens == 0
    assert again.output_token_ids == continuation(again.prompt_token_ids, 5)
