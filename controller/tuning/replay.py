"""A stored run as a task: what `controller.simulation.stored` makes of it, cut in two.

Owns which part of a run is held out, and whom its profile belongs to. Must not search.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.runtime.tuned_for import TunedFor
from controller.simulation.hardware import HardwareProfile
from controller.simulation.run import engine_for
from controller.simulation.stored import RunRows, stored_run
from controller.tuning.task import Scene, TuningTask, cut_in_time
from controller.workload.transforms import take


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """A task, the run's id, and whom it belongs to (named like the profile to be)."""

    task: TuningTask
    run_id: str
    tuned_for: TunedFor


def task_of_run(
    rows: RunRows,
    name: str,
    *,
    hardware: HardwareProfile | None = None,
    max_requests: int | None = None,
    seed: int = 0,
    num_seeds: int = 3,
    num_held_out_seeds: int = 5,
    held_out_share: float = 0.4,
) -> ReplayedRun:
    """Return the task of tuning profile `name` for the server that wrote `rows`.

    The last `held_out_share` of the time of the first `max_requests` (None = all) is held out;
    seeds draw the machine's noise. `hardware` replaces the machine that the run's cost model
    learnt. StoredRunError says what is missing.
    """
    run = rows.run
    stored = stored_run(rows)
    machine = stored.machine(hardware)
    workload = stored.workload if max_requests is None else take(stored.workload, max_requests)
    first, rest = cut_in_time(workload, held_out_share)
    held_out = range(seed + num_seeds, seed + num_seeds + num_held_out_seeds)
    task = TuningTask(
        name=workload.name,
        hardware=machine,
        # Running requests are a knob: replaced by what is tried, and below any budget until then.
        engine=engine_for(machine, **(stored.limits | {"max_num_seqs": 1})),
        classes=stored.classes,
        default_class=stored.classes[0].name,
        tuning=tuple(Scene(first, each) for each in range(seed, seed + num_seeds)),
        held_out=tuple(Scene(rest, each) for each in held_out),
        max_tokens=stored.max_tokens,
    )
    dtype = None if rows.key is None else rows.key.get("dtype")
    source = (run["settings"] or {}).get("model")
    owner = TunedFor(name, run["model"], run["device"], dtype, run["attention_backend"], source)
    return ReplayedRun(task, stored.run_id, owner)
