"""`--replay` of `paceline simulate`: a stored run from a database to what is simulated.

Owns how a run is opened, what of it an option replaces, and the file that other processes read.
Must not make a workload itself (`controller.simulation.stored` does), or simulate.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from controller.cli.database import store_errors
from controller.simulation.stored import StoredRun, read_run, stored_run
from controller.workload.arrivals import Workload
from controller.workload.traces import write_trace
from store.queries import TelemetryReader


def open_run(run_id: str, db: str) -> StoredRun:
    """Read a run from a database; what the store says ends the command with one line."""
    with store_errors(), contextlib.closing(TelemetryReader.open(db)) as reader:
        return stored_run(read_run(reader, run_id))


def limits_of(
    given: Mapping[str, int | bool | None], stored: StoredRun | None
) -> dict[str, int | bool]:
    """Return the limits that options give (None = not given) over those of the run, if any."""
    kept = {} if stored is None else stored.limits
    return kept | {name: value for name, value in given.items() if value is not None}


def keep_arrivals(workload: Workload, out: Path | None, trace: str | None) -> str:
    """Write a run's arrivals to `out`, or to a folder that goes when this process ends, so that
    other processes can read them; ValueError if another trace was named too.
    """
    if trace is not None:
        raise ValueError("give --trace or --replay, not both")
    if out is None:
        folder = Path(tempfile.mkdtemp(prefix="paceline-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    else:
        folder = out
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / "arrivals.csv"
    write_trace(workload, path)
    return str(path)
