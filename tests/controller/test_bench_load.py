"""The mixed load on virtual time: when requests are sent, what is counted, what is invalid."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from controller.bench.client import ReadListener, StreamClient
from controller.bench.load_classes import DEFAULT_CLASSES
from controller.bench.load_measures import Fate, numbers_of, outcomes_of
from controller.bench.load_rounds import (
    Calibration,
    LoadContestant,
    LoadSession,
    LoadTerms,
    calibrate_load,
    measure_loads,
)
from controller.bench.load_run import LoadError, LoadRun, measure_knee, run_load
from controller.bench.load_traffic import LoadTraffic, requests_of
from controller.bench.load_validity import check_machine, load_violations
from controller.bench.scenario import PromptSource, ScenarioRequest
from controller.bench.series import RequestSeries, TokenRead
from controller.bench.servers import ServerError
from controller.bench.validity import ViolationKind
from controller.policy.slo import Slo, SloClass
from controller.workload.arrivals import Arrival, Workload
from tests.controller.bench_load_double import DECODE_S, STEP_S, OpenServer, Timeline, open_client

TRAFFIC = LoadTraffic()
NORMAL_S = STEP_S + 4 * DECODE_S
CALIBRATION = Calibration(NORMAL_S)
TERMS = LoadTerms(TRAFFIC, (0.6, 1.8), num_rounds=2, duration_s=20.0, drain_s=30.0, seed=0)


class Scripted:
    """A client whose every answer takes as long as its script says: (first token, gap) seconds."""

    def __init__(self, timeline: Timeline, answers: list[tuple[float, float]]) -> None:
        self.sent_at: list[float] = []
        self._timeline = timeline
        self._answers = answers

    async def stream(
        self, request: ScenarioRequest, on_read: ReadListener | None = None
    ) -> RequestSeries:
        clock = self._timeline.clock
        first_s, gap_s = self._answers[len(self.sent_at)]
        sent_at = clock.now()
        self.sent_at.append(sent_at)
        reads = []
        for number in range(request.max_tokens):
            await self._timeline.sleep(first_s if number == 0 else gap_s)
            reads.append(TokenRead(clock.now(), 1))
            if on_read is not None:
                on_read(reads[-1])
        num = len(reads)
        return RequestSeries(
            request.name, sent_at, tuple(reads), "length", len(request.prompt_token_ids), 0, num,
            status=200,
        )  # fmt: skip


def workload(*instants: float, slo_class: str = "chat") -> Workload:
    return Workload("made", tuple(Arrival(at, 32, 3, slo_class) for at in instants))


def run_scripted(
    made: Workload,
    answers: list[tuple[float, float]],
    *,
    drain_s: float = 100.0,
    late_s: float = 0.0,
) -> tuple[LoadRun, Scripted]:
    timeline = Timeline()
    client = Scripted(timeline, answers)
    requests = requests_of(made, {"chat": SloClass("chat")}, PromptSource(1))

    async def sleep(seconds: float) -> None:
        await timeline.sleep(seconds + late_s)

    run = timeline.run(
        run_load(client, made, requests, timeline.clock, drain_s=drain_s, sleep=sleep)
    )
    return run, client


def test_arrivals_never_wait_for_answers() -> None:
    run, client = run_scripted(workload(1.0, 2.0, 2.0, 3.5), [(50.0, 1.0)] * 4)
    assert client.sent_at == [1.0, 2.0, 2.0, 3.5]
    assert [each.is_cut for each in run.requests] == [False] * 4
    assert (run.ended_ms - run.started_ms) == pytest.approx(55_500, abs=1)


def test_waiting_counts_from_the_scheduled_arrival_even_if_the_client_is_late() -> None:
    run, client = run_scripted(workload(1.0, 3.0), [(0.5, 0.1)] * 2, late_s=0.25)
    assert client.sent_at == [1.25, 3.25]
    outcomes = outcomes_of(run, {"chat": SloClass("chat", Slo(ttft_s=0.6))})
    assert [each.ttft_s for each in outcomes] == pytest.approx([0.75, 0.75])
    assert [each.late_s for each in outcomes] == pytest.approx([0.25, 0.25])
    # 0.5 s after it was sent would have been in time: the promise is kept to whoever waits.
    assert [each.is_kept for each in outcomes] == [False, False]


def test_a_late_client_invalidates_the_run() -> None:
    run, _ = run_scripted(workload(1.0, 3.0), [(0.5, 0.1)] * 2, late_s=0.25)
    assert load_violations(run, normal_s=0.6) == ()
    (violation,) = load_violations(run, normal_s=0.4)
    assert violation.kind is ViolationKind.LATE_CLIENT
    assert "250 ms late" in violation.message


def test_what_still_runs_at_the_end_is_cut_off_and_unserved() -> None:
    run, _ = run_scripted(workload(1.0, 2.0), [(0.5, 0.1), (0.5, 60.0)], drain_s=10.0)
    assert [each.is_cut for each in run.requests] == [False, True]
    assert run.ended_ms - run.started_ms == pytest.approx(12_000, abs=1)
    outcomes = outcomes_of(run, {"chat": SloClass("chat")})
    assert [each.fate for each in outcomes] == [Fate.SERVED, Fate.UNSERVED]
    assert [each.num_output_tokens for each in outcomes] == [3, 1]
    assert [each.is_kept for each in outcomes] == [True, False]
    assert load_violations(run, NORMAL_S) == ()


@pytest.mark.parametrize(
    ("slo", "is_kept"),
    [
        (Slo(), True),
        (Slo(ttft_s=0.5, tpot_s=0.2), True),
        (Slo(ttft_s=0.49), False),
        (Slo(tpot_s=0.19), False),
        (Slo(ttft_s=0.5, tpot_s=0.19), False),
    ],
)
def test_every_target_counts(slo: Slo, is_kept: bool) -> None:
    run, _ = run_scripted(workload(0.0), [(0.5, 0.2)])
    (outcome,) = outcomes_of(run, {"chat": SloClass("chat", slo)})
    assert outcome.ttft_s == 0.5
    assert outcome.tpot_s == pytest.approx(0.2)
    assert outcome.longest_gap_s == pytest.approx(0.2)
    assert outcome.is_kept is is_kept


def served_by(
    policy: str, made: Workload, slo: Slo, **faults: int
) -> tuple[LoadRun, dict[str, SloClass], OpenServer]:
    timeline = Timeline()
    server = OpenServer(timeline, policy, **faults)  # type: ignore[arg-type]
    classes = {"chat": SloClass("chat", slo)}

    async def main() -> LoadRun:
        async with open_client(timeline, server) as client:
            requests = requests_of(made, classes, PromptSource(1))
            return await run_load(
                client, made, requests, timeline.clock, drain_s=60.0, sleep=timeline.sleep
            )

    return timeline.run(main()), classes, server


def test_refusals_are_missed_promises_with_reason_and_retry_after() -> None:
    made = Workload("burst", tuple(Arrival(0.01 * i, 500, 4, "chat") for i in range(12)))
    run, classes, server = served_by("slo", made, Slo(ttft_s=4.0))
    outcomes = outcomes_of(run, classes)
    numbers = numbers_of(outcomes, duration_s=2.0)
    group = numbers.groups[0]
    assert load_violations(run, NORMAL_S) == ()
    assert group.num_offered == 12
    assert set(group.refusals) == {"overloaded"}
    assert 0 < group.num_refused < 12
    assert group.num_kept + group.num_refused == 12
    assert group.attainment == group.num_kept / 12
    assert numbers.goodput == group.num_kept / 2.0
    assert group.retry_after_s is not None
    assert group.retry_after_s.num == group.num_refused
    assert group.retry_after_s.p50 > 0
    assert server.headers[0]["x-llm-d-inference-objective"] == "chat"
    assert server.headers[0]["x-slo-ttft-ms"] == "4000.000"


def test_the_same_burst_under_a_static_budget_is_served_late() -> None:
    made = Workload("burst", tuple(Arrival(0.01 * i, 500, 4, "chat") for i in range(12)))
    run, classes, _ = served_by("fcfs-128", made, Slo(ttft_s=4.0))
    outcomes = outcomes_of(run, classes)
    assert {each.fate for each in outcomes} == {Fate.SERVED}
    kept = [each.is_kept for each in outcomes]
    assert 0 < sum(kept) < 6
    # In order of arrival: whoever came later is later.
    assert kept == sorted(kept, reverse=True)


@pytest.mark.parametrize(
    ("faults", "kind", "words"),
    [
        ({"num_lost": 1}, ViolationKind.WRONG_PROMPT, "counted 31 prompt tokens"),
        ({"fail_from": 3}, ViolationKind.FAILED_REQUEST, "HTTP 500 internal_error"),
    ],
)
def test_a_failure_is_no_result(faults: dict[str, int], kind: ViolationKind, words: str) -> None:
    run, _, _ = served_by("fcfs-128", workload(*range(12)), Slo(), **faults)
    found = load_violations(run, NORMAL_S)
    assert {each.kind for each in found} == {kind}
    assert words in found[0].message
    assert len(found) == 5
    assert found[-1].message.endswith("more)")


def test_a_machine_that_changed_is_noticed() -> None:
    assert check_machine(0.14, 0.1) == ()
    assert check_machine(0.07, 0.1) == ()
    for measured_s in (0.16, 0.06):
        (violation,) = check_machine(measured_s, 0.1)
        assert violation.kind is ViolationKind.MACHINE_CHANGED


class Recorded:
    """Contestants that note who was started when, and with what."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.turns: list[tuple[int, str, OpenServer]] = []

    def contestant(self, key: str, policy: str, **faults: float) -> LoadContestant:
        @contextlib.asynccontextmanager
        async def opened(round_no: int) -> AsyncIterator[StreamClient]:
            server = OpenServer(self.timeline, policy, **faults)  # type: ignore[arg-type]
            self.turns.append((round_no, key, server))
            async with open_client(self.timeline, server) as client:
                yield client

        return LoadContestant(key, key, opened)

    def measure(self, contestants: list[LoadContestant], terms: LoadTerms = TERMS) -> LoadSession:
        return self.timeline.run(
            measure_loads(
                contestants, terms, CALIBRATION, self.timeline.clock, sleep=self.timeline.sleep
            )
        )


def test_policies_take_turns_with_the_same_arrivals() -> None:
    recorded = Recorded()
    session = recorded.measure(
        [recorded.contestant("slo", "slo"), recorded.contestant("static-64", "fcfs-64")]
    )
    assert [turn[:2] for turn in recorded.turns] == [
        (0, "slo"), (0, "static-64"), (1, "slo"), (1, "static-64"),
    ]  # fmt: skip
    assert [(r.round_no, r.key, r.rate) for r in session.results] == [
        (round_no, key, rate)
        for round_no in (0, 1)
        for key in ("slo", "static-64")
        for rate in (0.6, 1.8)
    ]
    assert all(result.violations == () for result in session.results)

    def offered(index: int) -> list[tuple[float, str, int, int]]:
        return [
            (o.at_s, o.slo_class, o.num_prompt_tokens, o.num_wanted_tokens)
            for o in session.results[index].outcomes
        ]

    def same(first: list[tuple[float, str, int, int]], other: int) -> bool:
        pairs = list(zip(first, offered(other), strict=True))
        return all(a[1:] == b[1:] and abs(a[0] - b[0]) < 1e-6 for a, b in pairs)

    assert same(offered(0), 2)
    assert same(offered(1), 3)
    assert len(offered(1)) > len(offered(0))
    assert offered(0) != offered(4)
    assert all(result.normal_s == pytest.approx(NORMAL_S) for result in session.results)


def test_what_has_been_measured_is_told_after_every_turn() -> None:
    recorded = Recorded()
    heard: list[LoadSession] = []
    stages: list[tuple[str, int, int]] = []
    contestants = [recorded.contestant("slo", "slo"), recorded.contestant("static-64", "fcfs-64")]
    session = recorded.timeline.run(
        measure_loads(
            contestants,
            one_round(),
            CALIBRATION,
            recorded.timeline.clock,
            sleep=recorded.timeline.sleep,
            on_stage=lambda *stage: stages.append(stage),
            on_turn=heard.append,
        )
    )
    assert [(len(each.results), each.is_complete) for each in heard] == [(2, False), (4, False)]
    assert session.is_complete
    assert heard[-1].results == session.results
    total = sum(len(result.outcomes) for result in session.results)
    assert stages[0] == ("round 1, slo: starting", 0, total)
    assert stages[-2] == ("round 1, static-64: 1.80/s", total, total)
    assert stages[-1] == ("done", total, total)


def test_a_slower_server_is_invalid_against_targets_of_a_faster_machine() -> None:
    recorded = Recorded()
    session = recorded.measure([recorded.contestant("slo", "slo", speed=2.0)], one_round())
    kinds = {v.kind for result in session.results for v in result.violations}
    assert kinds == {ViolationKind.MACHINE_CHANGED}
    assert all(result.numbers is None for result in session.results)


def test_a_server_that_fails_does_not_stop_the_others() -> None:
    recorded = Recorded()

    @contextlib.asynccontextmanager
    async def broken(round_no: int) -> AsyncIterator[StreamClient]:
        raise ServerError("it ended before it was ready")
        yield

    session = recorded.measure(
        [LoadContestant("slo", "SLO planner", broken), recorded.contestant("static-64", "fcfs-64")],
        one_round(),
    )
    failed, served = session.results[:2], session.results[2:]
    assert {v.kind for result in failed for v in result.violations} == {ViolationKind.SERVER_FAILED}
    assert [result.rate for result in failed] == [0.6, 1.8]
    assert all(result.numbers is not None for result in served)


def one_round() -> LoadTerms:
    return replace(TERMS, num_rounds=1)


def test_calibration_measures_the_normal_step_and_the_knee() -> None:
    timeline = Timeline()

    async def main() -> Calibration:
        async with open_client(timeline, OpenServer(timeline, "fcfs-256")) as client:
            return await calibrate_load(client, TRAFFIC, 0, 8192, has_knee=True)

    calibration = timeline.run(main())
    assert calibration.normal_s == pytest.approx(NORMAL_S)
    assert calibration.knee_rate is not None
    # By the double's formula: a request of the mix is 228 prompt tokens and 27 decodes in steps of
    # 16 streams, 0.46 s + 27 · (0.005 + 0.1 / 16) s = 0.76 s; prompts wait for steps beside that.
    assert 0.8 < calibration.knee_rate < 1.4


def test_a_knee_needs_requests_that_succeed() -> None:
    timeline = Timeline()
    requests = [ScenarioRequest(f"r{i}", (9, i), 4) for i in range(8)]

    async def knee(num: int, fail_from: int | None = None) -> float:
        server = OpenServer(timeline, "fcfs-256", fail_from=fail_from)
        async with open_client(timeline, server) as client:
            return await measure_knee(client, requests[:num], 4)

    assert timeline.run(knee(8)) > 0
    with pytest.raises(LoadError, match="too few"):
        Timeline().run(knee(4))
    timeline = Timeline()
    with pytest.raises(LoadError, match="r6 failed while the knee was measured: HTTP 500"):
        timeline.run(knee(8, fail_from=6))


def test_a_load_that_cannot_be_made_is_refused_before_a_server_starts() -> None:
    recorded = Recorded()
    contestants = [recorded.contestant("slo", "slo")]
    for terms, words in (
        (replace(TERMS, rates=(1e-6,)), "nobody arrives"),
        (replace(TERMS, vocab_size=256, rates=(20.0,)), "--vocab-size"),
    ):
        with pytest.raises(LoadError, match=words):
            asyncio.run(measure_loads(contestants, terms, CALIBRATION, recorded.timeline.clock))
    assert recorded.turns == []


def test_the_targets_are_multiples_of_the_normal_step() -> None:
    classes = Calibration(0.2).classes(DEFAULT_CLASSES)
    assert classes["chat"].slo == Slo(ttft_s=12 * 0.2, tpot_s=3 * 0.2)
    assert classes["long"].slo == Slo(ttft_s=80 * 0.2, tpot_s=8 * 0.2)
    assert classes["batch"].slo == Slo()
