"""The closed loop on virtual time, and what is said about several contestants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from controller.bench.client import LoadClient
from controller.bench.closed import (
    ClosedRun,
    ClosedScenario,
    Percentiles,
    closed_numbers,
    closed_violations,
    run_closed,
)
from controller.bench.peers import (
    Agreement,
    ClosedResult,
    ClosedSession,
    agreements,
    fastest,
    measure_closed,
)
from controller.bench.peers_report import (
    closed_rows,
    closed_to_json,
    render_closed_markdown,
    render_closed_notes,
    render_closed_table,
)
from controller.bench.rounds import Contestant
from controller.bench.scenario import PromptSource
from controller.bench.series import RequestSeries, TokenRead
from controller.bench.servers import ServerError
from controller.bench.spike import PromiseRule
from controller.bench.validity import ViolationKind
from engine.clock import VirtualClock
from tests.controller.bench_double import PREFILL_TOKEN_S, STEP_S, ServedRequest, VirtualServer

SCENARIO = ClosedScenario(concurrency=4, prompt_tokens=16, output_tokens=5, num_requests=8)


def run_on(server: VirtualServer, scenario: ClosedScenario = SCENARIO) -> ClosedRun:
    async def run() -> ClosedRun:
        async with httpx.AsyncClient(transport=server, base_url="http://test") as http:
            client = LoadClient(http, server.clock, "demo")
            return await run_closed(client, scenario, scenario.requests(PromptSource(7)))

    return asyncio.run(run())


def contestant(key: str, log: list[str], **fault: Any) -> Contestant:
    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[LoadClient]:
        log.append(f"+{key}")
        server = VirtualServer(VirtualClock(), **fault)
        async with httpx.AsyncClient(transport=server, base_url="http://test") as http:
            yield LoadClient(http, server.clock, "demo")
        log.append(f"-{key}")

    return Contestant(key, key, PromiseRule(), open_client)


def broken(key: str, reason: str) -> Contestant:
    @contextlib.asynccontextmanager
    async def open_client() -> AsyncIterator[LoadClient]:
        raise ServerError(reason)
        yield  # pragma: no cover - makes this a generator

    return Contestant(key, key, PromiseRule(), open_client)


def measure_all(contestants: list[Contestant], rounds: int) -> ClosedSession:
    return asyncio.run(measure_closed(contestants, SCENARIO, PromptSource(3), rounds))


def test_so_many_run_at_once_and_never_more() -> None:
    crowds: list[int] = []
    server = VirtualServer(VirtualClock())

    def on_arrival(request: ServedRequest) -> None:
        crowds.append(len(server.active))

    server.on_arrival = on_arrival
    run = run_on(server)
    assert len(run.series) == 8
    # Those before it, at each arrival: the seats fill up, then one comes when one has gone.
    assert crowds[:4] == [0, 1, 2, 3]
    assert max(crowds) == 3
    assert [series.name for series in run.series] == [f"closed-{i}" for i in range(8)]


def test_tokens_per_second_are_output_tokens_over_wall_time() -> None:
    run = run_on(VirtualServer(VirtualClock(50.0)))
    assert closed_violations(run) == ()
    numbers = closed_numbers(run)
    # Two waves of four: each prefills 64 tokens in its first step and decodes in four more.
    wall_s = 2 * (5 * STEP_S + PREFILL_TOKEN_S * 64)
    assert numbers.wall_s == pytest.approx(wall_s)
    assert numbers.num_output_tokens == 40
    assert numbers.tokens_per_second == pytest.approx(40 / wall_s)
    assert numbers.ttft_s.p50 == pytest.approx(STEP_S + PREFILL_TOKEN_S * 64)
    assert numbers.gap_s.p50 == pytest.approx(STEP_S)
    assert numbers.num_merged_reads == 0


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"stop_after": 3}, ViolationKind.TOKENS_MISSING),
        ({"cached_tokens": 16}, ViolationKind.CACHED_PROMPT),
        ({"lost_prompt_tokens": 1}, ViolationKind.WRONG_PROMPT),
        ({"decision": "degraded"}, ViolationKind.BROKEN_PROMISE),
    ],
)
def test_a_run_that_was_something_else_gives_no_number(
    fault: dict[str, Any], kind: ViolationKind
) -> None:
    found = closed_violations(run_on(VirtualServer(VirtualClock(), **fault)))
    assert {violation.kind for violation in found} == {kind}
    session = measure_all([contestant("a", [], **fault)], 1)
    assert session.results[0].numbers is None


def test_a_run_that_lacks_requests_is_no_run() -> None:
    run = run_on(VirtualServer(VirtualClock()))
    short = replace(run, series=run.series[:-1])
    assert [v.kind for v in closed_violations(short)] == [ViolationKind.TOKENS_MISSING]


def test_rounds_alternate_and_share_their_prompts() -> None:
    log: list[str] = []
    stages: list[tuple[str, int, int]] = []
    seen: dict[str, list[list[int]]] = {"a": [], "b": []}

    def recording(key: str) -> Contestant:
        @contextlib.asynccontextmanager
        async def open_client() -> AsyncIterator[LoadClient]:
            log.append(key)
            server = VirtualServer(VirtualClock())
            server.on_arrival = lambda request: seen[key].append(request.body["prompt"])
            async with httpx.AsyncClient(transport=server, base_url="http://test") as http:
                yield LoadClient(http, server.clock, "demo")

        return Contestant(key, key, PromiseRule(), open_client)

    session = asyncio.run(
        measure_closed(
            [recording("a"), recording("b")],
            SCENARIO,
            PromptSource(3),
            2,
            lambda *stage: stages.append(stage),
        )
    )
    assert log == ["a", "b", "a", "b"]
    assert [(r.round_no, r.key) for r in session.results] == [
        (0, "a"),
        (0, "b"),
        (1, "a"),
        (1, "b"),
    ]
    # Four warm-up prompts, then eight measured ones, twice.
    measured = {key: prompts[4:12] + prompts[16:24] for key, prompts in seen.items()}
    assert measured["a"] == measured["b"]
    every = [tuple(prompt) for prompt in measured["a"]]
    assert len({prompt[0] for prompt in every}) == 16
    warm = seen["a"][:4] + seen["b"][:4] + seen["a"][12:16]
    assert len({prompt[0] for prompt in warm}) == 12
    assert stages[-1] == ("done", 32, 32)
    assert [done for _, done, _ in stages] == sorted(done for _, done, _ in stages)


def test_one_that_does_not_start_leaves_the_others_their_numbers() -> None:
    session = measure_all([broken("bad", "exit code 2"), contestant("good", [])], 1)
    bad, good = session.results
    assert [v.message for v in bad.violations] == ["exit code 2"]
    assert bad.run is None
    assert good.numbers is not None


def test_the_ratio_is_taken_within_a_round() -> None:
    session = measure_all(
        [contestant("ours", [], prefill_token_s=0.001), contestant("peer", [])], 2
    )
    ours, peer = closed_rows(session, "ours")
    assert ours.times_as_fast is not None
    assert (ours.times_as_fast.low, ours.times_as_fast.high) == (1.0, 1.0)
    assert peer.times_as_fast is not None
    expected = (5 * STEP_S + 0.003 * 64) / (5 * STEP_S + 0.001 * 64)
    assert peer.times_as_fast.median == pytest.approx(expected)
    assert peer.num_valid == peer.num_rounds == 2


def test_a_ratio_needs_a_valid_reference_in_its_round() -> None:
    session = measure_all([broken("ours", "gone"), contestant("peer", [])], 1)
    ours, peer = closed_rows(session, "ours")
    assert peer.times_as_fast is None
    assert peer.tokens_per_second is not None
    assert ours.tokens_per_second is None
    markdown = render_closed_markdown([ours, peer], "paceline")
    assert "| ours (INVALID: 1 of 1) | – | 0 |" in markdown
    assert render_closed_table([ours, peer], "t", "paceline").row_count == 2
    notes = render_closed_notes(session, [ours, peer], agreements(session, "ours"))
    assert "INVALID ours, round 1: gone" in notes


def test_many_reasons_are_told_as_one() -> None:
    session = measure_all([contestant("a", [], cached_tokens=3)], 1)
    notes = render_closed_notes(session, closed_rows(session, "a"), ())
    assert len(notes) == 1
    assert notes[0].endswith("3 prompt tokens came from a cache (and 7 more)")


def test_the_fastest_setting_is_chosen() -> None:
    candidates = [
        contestant("slow", [], prefill_token_s=0.01),
        broken("cannot", "no kernel"),
        contestant("quick", [], prefill_token_s=0.001),
    ]
    best, session = asyncio.run(fastest(candidates, SCENARIO, PromptSource(1)))
    assert best == "quick"
    assert {result.key for result in session.results} == {"slow", "cannot", "quick"}
    assert session.scenario.num_requests == SCENARIO.concurrency


def test_no_setting_that_runs_is_an_error_with_every_reason() -> None:
    with pytest.raises(ServerError, match="a: no kernel\nb: no memory"):
        asyncio.run(
            fastest([broken("a", "no kernel"), broken("b", "no memory")], SCENARIO, PromptSource(1))
        )


def result_of(key: str, round_no: int, *texts: str | None) -> ClosedResult:
    series = tuple(
        RequestSeries(f"closed-{i}", 0.0, (TokenRead(1.0, 1),), text=text)
        for i, text in enumerate(texts)
    )
    return ClosedResult(round_no, key, key, ClosedRun(SCENARIO, series), None, ())


def test_agreement_counts_equal_texts_and_their_common_beginning() -> None:
    session = ClosedSession(
        SCENARIO,
        2,
        (
            result_of("ours", 0, "abcd", "abcd"),
            result_of("peer", 0, "abcd", "abxyzzzz"),
            result_of("ours", 1, "abcd", "caf\ufffd"),
            result_of("peer", 1, "", "caf"),
        ),
    )
    (agreement,) = agreements(session, "ours")
    # A character that is not complete is no disagreement.
    assert agreement == Agreement("peer", "peer", 4, 2, (1 + 2 / 8 + 0 + 1) / 4)
    (note,) = render_closed_notes(session, (), [agreement])
    assert "2 of 4 greedy texts are the same; the common beginning is 56%" in note


def test_what_has_no_text_is_not_compared() -> None:
    session = ClosedSession(SCENARIO, 1, (result_of("ours", 0, "a"), result_of("peer", 0, None)))
    (agreement,) = agreements(session, "ours")
    assert (agreement.num_compared, agreement.common_share) == (0, None)
    assert render_closed_notes(session, (), [agreement]) == ["peer: no text to compare"]


def test_the_json_holds_every_token_time() -> None:
    session = measure_all([contestant("a", [])], 1)
    payload = closed_to_json(session, closed_rows(session, "a"), agreements(session, "a"))
    first = payload["results"][0]["run"]["series"][0]
    assert len(first["reads"]) == SCENARIO.output_tokens
    assert first["text"] == "x" * SCENARIO.output_tokens
    assert payload["agreement"] == []
    assert payload["scenario"]["concurrency"] == 4


@pytest.mark.parametrize(
    "sizes", [{"concurrency": 0}, {"output_tokens": 1}, {"num_requests": 3}, {"prompt_tokens": -1}]
)
def test_a_scenario_that_makes_no_sense_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        replace(SCENARIO, **sizes)


def test_percentiles() -> None:
    assert Percentiles.of([float(i) for i in range(101)]) == Percentiles(50.0, 90.0, 99.0)
    assert Percentiles.of([2.0]) == Percentiles(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="no value"):
        Percentiles.of([])
