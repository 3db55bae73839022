"""The benchmark of cost models: where steps come from, what is counted, what it says of goals."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from controller.bench.costmodel import (
    LEARNERS,
    CostModelNumbers,
    Recovery,
    RegimeNumbers,
    averages,
    measure,
    misses,
    steps_to_recover,
)
from controller.bench.costmodel_load import MixedLoad, send_mixed
from controller.bench.costmodel_report import render_notes, render_tables, to_json
from controller.bench.costmodel_steps import (
    SourceError,
    StepSeries,
    TimedStep,
    measured_series,
    stored_series,
    synthetic_series,
)
from controller.bench.scenario import ScenarioRequest
from controller.bench.series import RequestSeries
from controller.cli.bench_costmodel import costmodel
from costmodel.features import StepFeatures
from costmodel.synthetic import TWO_CORES, synthetic_steps
from engine.clock import VirtualClock
from store import schema
from store.database import Database
from store.queries import TelemetryReader
from store.writer import TelemetryWriter
from tests.store.samples import make_run, make_step

HEADER = (
    "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,"
    "token_time,e2e_time,tensor_parallel\n"
)


def a_table(path: Path, *rows: str) -> Path:
    path.write_text(HEADER + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def test_a_synthetic_series_knows_its_outliers() -> None:
    series = synthetic_series("two cores", 400, outlier_share=0.05, seed=3)
    outliers = [step for step in series.steps if step.is_outlier]
    assert 5 < len(outliers) < 50
    assert all(step.latency_s > 50.0 for step in outliers)
    assert synthetic_series("two cores", 400, outlier_share=0.05, seed=3) == series


def test_a_slowed_series_changes_from_one_step_on() -> None:
    series = StepSeries("s", (TimedStep(StepFeatures(1.0), 1.0),) * 4)
    slowed = series.slowed(2.0, 3)
    assert [step.latency_s for step in slowed.steps] == [1.0, 1.0, 1.0, 2.0]
    assert slowed.name == "s ×2"


def test_a_blinded_series_has_everything_but_chunks_and_logits() -> None:
    series = synthetic_series("two cores", 50)
    blind = series.blinded()
    assert [step.features[:5] for step in blind.steps] == [s.features[:5] for s in series.steps]
    assert {step.features[5:] for step in blind.steps} == {(0.0, 0.0)}
    assert [step.latency_s for step in blind.steps] == [s.latency_s for s in series.steps]


def test_measured_rows_become_prefills_and_decodes(tmp_path: Path) -> None:
    path = a_table(
        tmp_path / "t.csv",
        "big,gpu,512,2,128,1,1,200,50,7000,4",
        "big,gpu,512,4,128,1,1,20,50,7000,4",
        "small,gpu,512,2,128,1,1,200,50,7000,4",
        "big,cpu,16,1,8,1,1,30,10,7000,2",
    )
    on_cpu, on_gpu = measured_series(path, "big", 200)
    assert (on_cpu.name, on_gpu.name) == ("big on 2 cpu", "big on 4 gpu")
    prefill = TimedStep(StepFeatures(1024.0, 0.0, 0.0, 0.0, 2 * 512.0**2, 2.0, 2.0), 0.2)
    decodes = {TimedStep(StepFeatures(0.0, n, n * 576.0), 0.05) for n in (2.0, 4.0)}
    # Twice the batch in a tenth of the time: the table is wrong there.
    assert set(on_gpu.steps) == {prefill} | decodes
    assert on_gpu.num_left_out == 1
    assert len(on_gpu.steps) == 200


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("big,gpu,512,2,128,1,1,fast,50,7000,4", "line 2, prompt_time: no number in 'fast'"),
        ("big,gpu,512,2,128,1,1,200,-1,7000,4", "line 2, token_time: must be positive, got -1"),
        ("big,gpu,512,2,128,1,1,200,nan,7000,4", "line 2, token_time"),
        ("other,gpu,512,2,128,1,1,200,50,7000,4", "no row of model 'big'"),
    ],
)
def test_a_bad_table_is_refused_by_place(tmp_path: Path, row: str, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        measured_series(a_table(tmp_path / "t.csv", row), "big", 10)


@pytest.mark.parametrize("text", [HEADER.encode() + b"\xff\xfe,\n", b"a,b\n" + b"x" * 200_000])
def test_a_table_that_is_no_text_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(text)
    with pytest.raises(SourceError, match=r"table\.csv"):
        measured_series(path, "m", 100)


def test_a_table_without_a_column_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("model,hardware\nbig,gpu\n", encoding="utf-8")
    with pytest.raises(SourceError, match="no column batch_size, prompt_size"):
        measured_series(path, "big", 10)


def stored(path: Path, *steps: Any) -> str:
    url = f"sqlite:///{path}"
    schema.migrate(url)
    writer = TelemetryWriter(Database.open_writer(url), make_run(), VirtualClock())
    for step in steps:
        assert writer.offer(step)
    assert writer.close()
    return url


def test_stored_steps_come_back_in_order_without_those_that_never_taught(tmp_path: Path) -> None:
    good = [make_step(n, duration_s=0.1 + n, num_chunks=n % 3, num_prompt_logits=1)
            for n in range(1200)]  # fmt: skip
    spoilt = [
        make_step(2001, failure="boom"),
        make_step(2002, num_retries=1),
        make_step(2003, num_swapped_blocks=4),
        make_step(2004, num_failed_swaps=1),
    ]
    url = stored(tmp_path / "t.db", *good, *spoilt, make_step(2005, num_chunks=None))
    reader = TelemetryReader.open(url)
    series = stored_series(reader, "run-a")
    few = stored_series(reader, "run-a", max_steps=10)
    with pytest.raises(SourceError, match="stored no step"):
        stored_series(reader, "run-x")
    reader.close()
    assert series.num_left_out == 4
    assert [step.latency_s for step in series.steps] == [*(0.1 + n for n in range(1200)), 0.1]
    first, last = series.steps[1].features, series.steps[-1].features
    assert (first.num_chunks, first.num_prompt_logits, first.num_decode_requests) == (1.0, 1.0, 1.0)
    assert last.num_chunks == 0.0
    assert len(few.steps) == 6, "the newest ten, four of which are spoilt"


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_is_measured_on_a_known_device(learner: str) -> None:
    series = synthetic_series("accelerator", 1200, seed=1)
    numbers = measure(series, learner, VirtualClock())
    assert numbers.mape < 0.04
    assert numbers.p90_error > numbers.mape
    assert {regime.regime for regime in numbers.regimes} == {"decode_only", "mixed", "prefill_only"}
    assert sum(regime.num_steps for regime in numbers.regimes) == 700
    assert [recovery.factor for recovery in numbers.recoveries] == [1.5, 2.0]
    assert all(0 < (recovery.num_steps or 0) <= 40 for recovery in numbers.recoveries)
    assert (numbers.num_refits > 0) == (learner == "refitted")
    # The clock stood still, so nothing was timed: the numbers are not made up.
    assert (numbers.predict_s, numbers.observe_s) == (0.0, 0.0)
    assert misses(numbers) == ()


def test_outliers_count_for_coverage_but_not_for_the_error() -> None:
    steps = [TimedStep(s.features, s.measured_s) for s in islice(synthetic_steps(TWO_CORES), 700)]
    for index in range(520, 700, 10):
        steps[index] = TimedStep(steps[index].features, 1000.0, is_outlier=True)
    numbers = measure(StepSeries("s", tuple(steps)), "recursive", VirtualClock())
    assert numbers.mape < 0.05
    assert numbers.coverage < 0.93


def test_a_short_series_is_judged_as_a_whole() -> None:
    series = synthetic_series("two cores", 60)
    numbers = measure(series, "recursive", VirtualClock())
    assert sum(regime.num_steps for regime in numbers.regimes) == 60


def test_what_cannot_be_predicted_never_recovers() -> None:
    steps = tuple(
        TimedStep(s.features, 0.1 if index % 2 else 0.2)
        for index, s in enumerate(islice(synthetic_steps(TWO_CORES), 300))
    )
    numbers = measure(StepSeries("coin", steps), "recursive", VirtualClock())
    assert [recovery.num_steps for recovery in numbers.recoveries] == [None, None]
    assert "G5: ×2 never recovered" in misses(numbers)


def _errors(*parts: tuple[int, float]) -> Any:
    return np.concatenate([np.full(count, error) for count, error in parts])


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        # Two steps of 50 % among 20 leave a mean of 6.8 %.
        (_errors((300, 0.02)), 0),
        # One quiet stretch of 20 steps is no recovery.
        (_errors((30, 0.02), (100, 0.5), (170, 0.02)), 128),
        (_errors((30, 0.02), (250, 0.5)), None),
        (_errors((150, 0.02), (100, 0.5), (50, 0.02)), 248),
        # What comes after step 200 is another story.
        (_errors((60, 0.5), (160, 0.02), (100, 0.5)), 58),
        (_errors((10, 0.5), (20, 0.02)), 8),
        (_errors((19, 0.02)), None),
    ],
)
def test_an_error_has_to_stay_small_to_count_as_recovered(
    errors: Any, expected: int | None
) -> None:
    assert steps_to_recover(np.arange(len(errors)), errors) == expected


def test_recovery_is_told_in_steps_that_happened_not_in_those_judged() -> None:
    assert steps_to_recover(np.arange(0, 600, 2), _errors((40, 0.5), (260, 0.02))) == 76


GOOD = CostModelNumbers(
    "s", "recursive", 1000, 0, 0.03, 0.06, 0.9,
    (RegimeNumbers("mixed", 500, 0.03, 0.06, 0.9),),
    (Recovery(1.5, 10), Recovery(2.0, 20)), 0, 0, 2e-5, 3e-5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, ()),
        ({"mape": 0.051}, ("G4: MAPE 5.1% > 5 %",)),
        ({"coverage": 0.95}, ("G4: coverage 95.0% outside 87–93 %",)),
        (
            {"regimes": (RegimeNumbers("mixed", 200, 0.0, 0.0, 0.8),)},
            ("G4: coverage of mixed 80.0%",),
        ),
        ({"regimes": (RegimeNumbers("mixed", 199, 0.0, 0.0, 0.8),)}, ()),
        ({"recoveries": (Recovery(2.0, 201),)}, ("G5: ×2 took 201 steps",)),
    ],
)
def test_goals_that_were_missed_are_named(changes: dict[str, Any], missed: tuple[str, ...]) -> None:
    assert misses(replace(GOOD, **changes)) == missed


def test_the_report_states_goals_and_misses_beside_the_numbers() -> None:
    bad = replace(GOOD, learner="windowed", mape=0.09, num_refits=3, num_adopted=1, num_left_out=7,
                  recoveries=(Recovery(1.5, None), Recovery(2.0, 5)))  # fmt: skip
    printed = io.StringIO()
    console = Console(width=80, file=printed)
    for table in render_tables([GOOD, bad]):
        # The series, and a line per learner.
        assert table.row_count == 3
        console.print(table)
    text = printed.getvalue()
    assert "never" in text
    assert "1 of 3" in text
    assert "…" not in text
    notes = list(render_notes([GOOD, bad]))
    assert any("G4 MAPE ≤ 5 %" in note for note in notes)
    assert any("7 steps left out" in note for note in notes)
    assert [note for note in notes if note.startswith("Missed")] == [
        "Missed: s, windowed: G4: MAPE 9.0% > 5 %.",
        "Missed: s, windowed: G5: ×1.5 never recovered.",
    ]
    assert list(render_notes([GOOD]))[-1] == "No goal was missed."
    assert averages([GOOD, bad]) == {"recursive": 0.03, "windowed": 0.09}
    payload = json.loads(json.dumps(to_json([GOOD, bad], {"seed": 1}), allow_nan=False))
    assert payload["rows"][1]["missed"][0].startswith("G4")
    assert payload["rows"][0]["regimes"][0]["regime"] == "mixed"


class Answering:
    """A client that answers at once and remembers; every fifth answer is an error."""

    def __init__(self) -> None:
        self.sent: list[ScenarioRequest] = []

    async def stream(self, request: ScenarioRequest, on_read: Any = None) -> RequestSeries:
        self.sent.append(request)
        error = "refused" if len(self.sent) % 5 == 0 else None
        return RequestSeries(name=request.name, sent_at=0.0, reads=(), error=error)


def test_a_mixed_load_is_sent_for_as_long_as_asked_and_is_reproducible() -> None:
    def send() -> tuple[Answering, tuple[int, int]]:
        client, clock = Answering(), VirtualClock()

        async def sleep(duration_s: float) -> None:
            clock.advance(duration_s)
            await asyncio.sleep(0)

        counts = asyncio.run(send_mixed(client, clock, 60.0, 7, lambda *stage: None, sleep))
        return client, counts

    client, (num_sent, num_failed) = send()
    assert num_sent == len(client.sent) > 40
    assert num_failed == num_sent // 5
    assert send()[0].sent == client.sent
    lengths = [len(request.prompt_token_ids) for request in client.sent]
    assert min(lengths) < 10 < 300 < max(lengths)
    assert len({request.name for request in client.sent}) == num_sent


def test_bursts_are_of_short_prompts() -> None:
    load = MixedLoad(1)
    arrivals = [load.next_arrivals() for _ in range(60)]
    bursts = [arrival for arrival in arrivals if len(arrival) > 1]
    assert bursts
    assert all(len(each.prompt_token_ids) <= 32 for burst in bursts for each in burst)
    assert load.gap_s(0.0) > 0.0


APP = typer.Typer()
APP.command()(costmodel)


@pytest.mark.parametrize("run", ["last", "latest", "run-a"])
def test_the_command_replays_a_stored_run(run: str, tmp_path: Path) -> None:
    steps = [make_step(n, duration_s=0.1 + 0.001 * (n % 7)) for n in range(120)]
    url = stored(tmp_path / "t.db", *steps)
    # A server that has only just begun has nothing to replay.
    begun = make_run("run-b", started_at=2**41)
    assert TelemetryWriter(Database.open_writer(url), begun, VirtualClock()).close()
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        APP, ["--db", url, "--run", run, "--no-synthetic", "--learner", "recursive",
              "--out", str(out)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["series"], row["learner"], row["num_steps"]) == ("run run-a", "recursive", 120)
    assert "Goals: G4" in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["--learner", "tree"], 2, "unknown learner 'tree'"),
        (["--no-synthetic"], 2, "nothing to replay"),
        (["--measured", "missing.csv"], 2, "missing.csv"),
        (["--seed", "-1"], 2, "--seed"),
        (["--noise", "50"], 2, "--noise"),
        (["--out", "."], 2, ". is a directory: name a file"),
        (["--out", "no/where.json"], 2, "no is not a directory"),
        (["--db", "sqlite:///missing.db", "--run", "last"], 2, "no database"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], code: int, problem: str) -> None:
    done = CliRunner().invoke(APP, arguments, env={"COLUMNS": "300"})
    assert done.exit_code == code
    assert problem in done.output


def test_a_recording_never_overwrites_a_database(tmp_path: Path) -> None:
    path = tmp_path / "steps.db"
    path.touch()
    done = CliRunner().invoke(APP, ["--record", str(path)])
    assert done.exit_code == 2
    assert "exists already" in done.output
    nowhere = CliRunner().invoke(APP, ["--record", str(tmp_path / "no" / "steps.db")])
    assert "is not a directory" in nowhere.output
