"""A writer killed at work leaves a readable prefix, and the next start says so."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from sqlalchemy import func, select

from engine.clock import VirtualClock
from store import tables
from store.database import Database
from store.queries import TelemetryReader
from store.writer import TelemetryWriter
from tests.store.samples import make_run

_ROOT = Path(__file__).resolve().parents[2]
# Writes without end and says after each commit how far it got; the pipe is the only
# synchronisation.
_WRITE = """
import sys
from engine.clock import VirtualClock
from store.records import StepWorkRecord
from store.writer import TelemetryWriter
from tests.store.samples import make_run, make_step

writer = TelemetryWriter.open(sys.argv[1], make_run("killed"), VirtualClock())
number = 0
while True:
    for number in range(number, number + 40):
        work = tuple(StepWorkRecord(f"req-{index}", "decode", 1, number) for index in range(3))
        writer.offer(make_step(number, run_id="killed", work=work))
    number += 1
    while writer.stats().num_rows_queued:
        assert writer.pump()
        print(writer.stats().kinds["step"].committed, flush=True)
"""


def test_a_kill_leaves_a_prefix_of_whole_steps(url: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITE, url], stdout=subprocess.PIPE, cwd=_ROOT, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        acknowledged = [int(process.stdout.readline()) for _ in range(5)][-1]
        process.send_signal(signal.SIGKILL)
        # What was printed before the signal arrived counts too; a torn line does not.
        lines = process.stdout.read().split("\n")[:-1]
    assert process.wait() == -signal.SIGKILL
    acknowledged = int(lines[-1]) if lines else acknowledged

    database = Database.open_reader(url)
    with database.read() as connection:
        numbers = list(
            connection.scalars(select(tables.step.c.step_no).order_by(tables.step.c.step_no))
        )
        works = connection.execute(
            select(tables.step_work.c.step_no, func.count())
            .group_by(tables.step_work.c.step_no)
            .order_by(tables.step_work.c.step_no)
        ).all()
    database.close()
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= acknowledged
    assert [tuple(row) for row in works] == [(number, 3) for number in numbers]

    # The lock died with its process: the next start takes over at once and marks the run.
    writer = TelemetryWriter.open(url, make_run("next"), VirtualClock())
    assert writer.close()
    reader = TelemetryReader.open(url)
    ends = {run["run_id"]: run["end_reason"] for run in reader.runs()}
    (event,) = reader.events(kind="run_lost").rows
    reader.close()
    assert ends == {"killed": "lost", "next": "closed"}
    assert event["numbers"]["num_open_requests"] == 3
