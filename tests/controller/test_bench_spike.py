"""The whole spike on virtual time: the scenario that is sent, and the numbers that come out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import pytest

from controller.bench.client import LoadClient
from controller.bench.record import SpikeRun, numbers_of
from controller.bench.rounds import MAX_ATTEMPTS, Contestant, SpikeSession, measure_rounds
from controller.bench.scenario import Promises, PromptSource, SpikeScenario
from controller.bench.series import RequestSeries, TokenRead
from controller.bench.servers import ServerError
from controller.bench.spike import PromiseRule, SpikeError, measure
from controller.bench.validity import ViolationKind, violations
from engine.clock import VirtualClock
from tests.controller.bench_double import (
    PREFILL_TOKEN_S,
    STEP_S,
    ServedRequest,
    VirtualServer,
)

SCENARIO = SpikeScenario()


def run_on(
    server: VirtualServer,
    scenario: SpikeScenario = SCENARIO,
    rule: PromiseRule = PromiseRule(),  # noqa: B008 - frozen
) -> SpikeRun:
    async def run() -> SpikeRun:
        async with httpx.AsyncClient(transport=server, base_url="http://test") as http:
            client = LoadClient(http, server.clock, "demo")
            return await measure(client, scenario, PromptSource(7), rule)

    return asyncio.run(run())


def kinds(run: SpikeRun) -> set[ViolationKind]:
    return {violation.kind for violation in violations(run)}


@pytest.mark.parametrize(("budget", "chunk"), [(None, 1024), (256, 249), (128, 121)])
def test_the_largest_gap_is_the_step_that_holds_the_largest_chunk(
    budget: int | None, chunk: int
) -> None:
    server = VirtualServer(VirtualClock(5.0), token_budget=budget)
    run = run_on(server)
    assert violations(run) == ()
    numbers = numbers_of(run)
    assert numbers.normal_gap_s == pytest.approx(STEP_S)
    assert run.calibrated_gap_s == pytest.approx(STEP_S)
    # The seven prompts of 32 tokens are one or two chunks as well: smaller than the spike's.
    assert numbers.largest_gap_s == pytest.approx(STEP_S + PREFILL_TOKEN_S * chunk)
    num_steps = -(-1024 // chunk)
    assert numbers.long_ttft_s == pytest.approx(num_steps * STEP_S + PREFILL_TOKEN_S * 1024)
    assert numbers.num_merged_reads == 0


def test_the_largest_gap_of_a_whole_prompt_spans_its_arrival() -> None:
    run = run_on(VirtualServer(VirtualClock(5.0)))
    assert run.long is not None
    assert numbers_of(run).is_largest_at_arrival
    # Dropping the gap that is open at the arrival would leave nothing but normal gaps.
    for short in run.shorts:
        later = [read.at for read in short.reads if read.at > run.long.sent_at]
        steps = [b - a for a, b in itertools.pairwise(later)]
        assert max(steps) == pytest.approx(STEP_S)


@pytest.mark.parametrize("prefill_token_s", [0.001, 0.003])
def test_the_slo_planner_keeps_the_gap_that_it_was_asked_for(prefill_token_s: float) -> None:
    server = VirtualServer(VirtualClock(5.0), is_slo=True, prefill_token_s=prefill_token_s)
    run = run_on(server, rule=PromiseRule(3.0))
    assert violations(run) == ()
    numbers = numbers_of(run)
    assert numbers.target_gap_s == pytest.approx(3 * STEP_S)
    assert numbers.largest_gap_s <= 3 * STEP_S


def test_the_slo_planner_spends_the_slack_that_a_static_budget_leaves() -> None:
    """Where prompt tokens are cheap, 128 a step are fewer than the promise allows."""
    static = VirtualServer(VirtualClock(5.0), token_budget=128, prefill_token_s=0.001)
    slo = VirtualServer(VirtualClock(5.0), is_slo=True, prefill_token_s=0.001)
    static_s = numbers_of(run_on(static)).long_ttft_s
    assert numbers_of(run_on(slo, rule=PromiseRule(3.0))).long_ttft_s < static_s


def test_the_long_prompt_arrives_while_all_short_ones_decode() -> None:
    seen: list[tuple[int, list[int]]] = []
    server = VirtualServer(VirtualClock(), token_budget=128)

    def on_arrival(request: ServedRequest) -> None:
        seen.append(
            (request.engine.num_prompt_tokens, [other.num_output for other in server.active])
        )

    server.on_arrival = on_arrival
    run = run_on(server)
    assert [num_prompt for num_prompt, _ in seen] == [32] * 14 + [1024]
    others = seen[-1][1]
    assert len(others) == 7
    assert min(others) == SCENARIO.warm_tokens
    assert max(others) < SCENARIO.short_max_tokens
    # Open loop: it is sent in the instant in which the last of them became warm.
    assert run.long is not None
    assert run.long.sent_at == max(short.reads[11].at for short in run.shorts)


def test_no_two_prompts_begin_alike() -> None:
    server = VirtualServer(VirtualClock())
    run_on(server)
    firsts = [request.body["prompt"][0] for request in server.served]
    assert len(set(firsts)) == len(firsts) == 15


def test_promises_follow_from_the_calm_phase_of_the_same_server() -> None:
    server = VirtualServer(VirtualClock())
    run = run_on(server, rule=PromiseRule(3.0, 2.5))
    calm, shorts, long = server.served[:7], server.served[7:14], server.served[14]
    assert all("x-slo-tpot-ms" not in request.headers for request in calm)
    assert {request.headers["x-slo-tpot-ms"] for request in shorts} == {"300.000"}
    assert "x-slo-tpot-ms" not in long.headers
    assert long.headers["x-slo-ttft-ms"] == "2500.000"
    assert run.promises == Promises(pytest.approx(0.3), 2.5)  # type: ignore[arg-type]


def test_without_a_rule_nothing_is_promised() -> None:
    server = VirtualServer(VirtualClock())
    run_on(server)
    names = {name for request in server.served for name in request.headers}
    assert not {name for name in names if "slo" in name}


def test_a_short_request_that_ended_before_the_long_prefill_makes_the_run_invalid() -> None:
    short = replace(SCENARIO, short_max_tokens=16)
    run = run_on(VirtualServer(VirtualClock(), token_budget=128), short)
    assert kinds(run) == {ViolationKind.NOT_OUTLASTING}


def test_short_requests_that_stop_before_the_spike_do_not_hang_the_benchmark() -> None:
    run = run_on(VirtualServer(VirtualClock(), stop_after=5))
    assert run.long is None
    assert ViolationKind.NOT_DECODING in kinds(run)
    with pytest.raises(ValueError, match="never sent"):
        numbers_of(run)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"cached_tokens": 16}, ViolationKind.CACHED_PROMPT),
        ({"lost_prompt_tokens": 8}, ViolationKind.WRONG_PROMPT),
        ({"decision": "degraded"}, ViolationKind.BROKEN_PROMISE),
        ({"stop_after": 40}, ViolationKind.TOKENS_MISSING),
    ],
)
def test_a_server_that_runs_something_else_is_found_out(
    fault: dict[str, int | str], kind: ViolationKind
) -> None:
    server = VirtualServer(VirtualClock(), **fault)  # type: ignore[arg-type]
    assert kind in kinds(run_on(server))


def valid_run() -> SpikeRun:
    return run_on(VirtualServer(VirtualClock(), token_budget=128, decision="admitted"))


def change_short(run: SpikeRun, change: Callable[[RequestSeries], RequestSeries]) -> SpikeRun:
    return replace(run, shorts=(change(run.shorts[0]), *run.shorts[1:]))


def test_one_short_request_too_few_is_another_scenario() -> None:
    run = valid_run()
    assert violations(run) == ()
    assert kinds(replace(run, shorts=run.shorts[1:])) == {ViolationKind.NOT_DECODING}


def test_a_long_prompt_that_arrives_before_the_short_ones_are_warm_is_found_out() -> None:
    run = valid_run()
    assert run.long is not None
    early = replace(run.long, sent_at=run.shorts[0].sent_at)
    assert kinds(replace(run, long=early)) == {ViolationKind.NOT_DECODING}


def test_a_long_prompt_that_arrives_when_the_short_ones_are_done_is_found_out() -> None:
    run = valid_run()
    assert run.long is not None
    last = max(short.reads[-1].at for short in run.shorts)
    late = replace(
        run.long,
        sent_at=last + 1.0,
        reads=tuple(TokenRead(read.at + last, 1) for read in run.long.reads),
    )
    assert kinds(replace(run, long=late)) == {ViolationKind.NOT_DECODING}


def test_a_failed_request_makes_the_run_invalid() -> None:
    run = change_short(valid_run(), lambda series: replace(series, error="HTTP 429 overloaded"))
    assert [v.message for v in violations(run)] == ["short-0 failed: HTTP 429 overloaded"]


def test_tokens_that_the_client_did_not_see_make_the_run_invalid() -> None:
    run = change_short(valid_run(), lambda series: replace(series, reads=series.reads[:-2]))
    assert kinds(run) == {ViolationKind.TOKENS_MISSING}


def test_reads_that_merge_the_steady_state_leave_nothing_to_quote() -> None:
    run = valid_run()
    assert run.long is not None
    sent_at = run.long.sent_at

    def merge(series: RequestSeries) -> RequestSeries:
        early = [read.at for read in series.reads if read.at <= sent_at]
        num_late = series.num_output_tokens - len(early)
        reads = (TokenRead(early[-1], len(early)), TokenRead(series.reads[-1].at, num_late))
        return replace(series, reads=reads)

    merged = replace(run, shorts=tuple(merge(short) for short in run.shorts))
    assert kinds(merged) == {ViolationKind.TOO_FEW_READS}
    with pytest.raises(ValueError, match="too few tokens"):
        numbers_of(merged)


def test_calibration_names_what_failed() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503, json={"error": {"code": "draining", "message": "bye"}})

    async def run() -> None:
        transport = httpx.MockTransport(refuse)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            client = LoadClient(http, VirtualClock(), "demo")
            await measure(client, SCENARIO, PromptSource(1), PromiseRule())

    with pytest.raises(SpikeError, match="calm-0 failed: HTTP 503 draining: bye"):
        asyncio.run(run())


def contestant(key: str, log: list[str], **fault: int) -> Contestant:
    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[LoadClient]:
        log.append(f"+{key}")
        server = VirtualServer(VirtualClock(), **fault)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=server, base_url="http://test") as http:
            yield LoadClient(http, server.clock, "demo")
        log.append(f"-{key}")

    return Contestant(key, key, PromiseRule(), open_client)


def measure_all(
    contestants: list[Contestant], rounds: int, scenario: SpikeScenario = SCENARIO
) -> SpikeSession:
    return asyncio.run(measure_rounds(contestants, scenario, PromptSource(3), rounds))


def test_rounds_alternate_and_never_overlap() -> None:
    log: list[str] = []
    session = measure_all([contestant("a", log), contestant("b", log, token_budget=128)], 2)
    assert log == ["+a", "-a", "+b", "-b"] * 2
    assert [(r.round_no, r.key) for r in session.results] == [
        (0, "a"),
        (0, "b"),
        (1, "a"),
        (1, "b"),
    ]
    assert all(result.numbers is not None for result in session.results)


def test_short_requests_grow_until_they_outlast_every_policy() -> None:
    log: list[str] = []
    contestants = [contestant("whole", log), contestant("static", log, token_budget=64)]
    session = measure_all(contestants, 1, replace(SCENARIO, short_max_tokens=20))
    assert session.scenario.short_max_tokens == 40
    # The first policy ran again: rows of one table share one scenario.
    assert log == ["+whole", "-whole", "+static", "-static"] * 2
    assert {r.run.scenario for r in session.results if r.run} == {session.scenario}
    assert all(result.numbers is not None for result in session.results)


def test_a_run_that_never_outlasts_stays_invalid() -> None:
    log: list[str] = []
    scenario = replace(SCENARIO, short_max_tokens=13)
    session = measure_all([contestant("slow", log, token_budget=10)], 1, scenario)
    assert len(log) == 2 * MAX_ATTEMPTS
    (result,) = session.results
    assert result.numbers is None
    assert {v.kind for v in result.violations} == {ViolationKind.NOT_OUTLASTING}


def test_a_server_that_does_not_start_leaves_the_others_their_numbers() -> None:
    @contextlib.asynccontextmanager
    async def broken() -> AsyncIterator[LoadClient]:
        raise ServerError("exit code 2")
        yield  # pragma: no cover - makes this a generator

    log: list[str] = []
    session = measure_all(
        [Contestant("bad", "bad", PromiseRule(), broken), contestant("good", log)], 1
    )
    bad, good = session.results
    assert [v.message for v in bad.violations] == ["exit code 2"]
    assert bad.numbers is None
    assert good.numbers is not None


@pytest.mark.parametrize(
    "sizes", [{"num_short": 0}, {"short_max_tokens": 12}, {"long_prompt_tokens": -1}]
)
def test_a_scenario_that_makes_no_sense_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        replace(SCENARIO, **sizes)


def test_prompts_stay_within_the_vocabulary_and_run_out_loudly() -> None:
    source = PromptSource(1, vocab_size=256)
    prompts = [source.draw(8) for _ in range(256 - 32)]
    assert all(32 <= token < 256 for prompt in prompts for token in prompt)
    assert len({prompt[0] for prompt in prompts}) == len(prompts)
    with pytest.raises(RuntimeError, match="larger vocabulary"):
        source.draw(8)
    with pytest.raises(ValueError, match="vocab_size"):
        PromptSource(1, vocab_size=10)
    assert PromptSource(5).draw(9) == PromptSource(5).draw(9) != PromptSource(6).draw(9)
