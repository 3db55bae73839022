"""One long simulation in parts that run at the same time.

Owns the cut of a workload into stretches, their processes and the sum of what they found. Must not
simulate or measure by itself.
"""

from __future__ import annotations

import math
import multiprocessing
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from hashlib import blake2b
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Final

import numpy as np

from controller.simulation.hardware import HardwareProfile
from controller.simulation.records import SimulationResult, StepSummary, Stretch
from controller.simulation.run import Progress, SimulationConfig, simulate, simulate_stretch
from controller.workload.arrivals import Workload
from costmodel.features import FloatArray

# Seconds of arrivals that bring a part's machine into the state in which its own ones find it: more
# than most waits and answers take, even of classes that may wait for a minute.
RUN_IN_S: Final = 120.0
_LOOK_EVERY_S: Final = 0.2

Found = tuple[SimulationResult, "array[float]"]


def stretches(workload: Workload, num_parts: int) -> list[Stretch]:
    """Cut a workload into stretches of as many arrivals each, none of them empty."""
    total = workload.num_requests
    num_parts = max(1, min(num_parts, total))
    edges = [total * part // num_parts for part in range(num_parts + 1)]
    at_s = [arrival.at_s for arrival in workload.arrivals]
    starts_s = [-math.inf, *(at_s[edge] for edge in edges[1:-1]), math.inf]
    begins = [
        int(np.searchsorted(at_s, at_s[edge] - RUN_IN_S)) if edge else 0 for edge in edges[:-1]
    ]
    return [
        Stretch(begins[k], edges[k], edges[k + 1], starts_s[k], starts_s[k + 1])
        for k in range(num_parts)
    ]


def simulate_in_parts(
    workload: Workload,
    policy: str,
    hardware: HardwareProfile,
    config: SimulationConfig,
    num_parts: int,
    progress: Progress | None = None,
    *,
    workers: int = 1,
) -> SimulationResult:
    """Simulate a workload in `num_parts` stretches, each after the arrivals of `RUN_IN_S` seconds
    before it, and put them together; one part is `simulate`.

    The result depends on `num_parts`, for machine and cost model begin anew with each, not on
    `workers`, the processes (started afresh) that do it. Its real time is the sum of the parts'.
    Raises what `simulate` raises.
    """
    cut = stretches(workload, num_parts)
    if len(cut) == 1:
        return simulate(workload, policy, hardware, config, progress)
    jobs = [(workload, stretch, policy, hardware, config) for stretch in cut]
    if workers > 1:
        found = _at_once(jobs, min(workers, len(jobs)), workload.num_requests, progress)
    else:
        found = []
        for job in jobs:
            found.append(simulate_stretch(*job))
            if progress is not None:
                progress(job[1].last, workload.num_requests)
    return _together(found)


Job = tuple[Workload, Stretch, str, HardwareProfile, SimulationConfig]

# Of a worker process: how many requests of each part have ended.
_ended: list[SynchronizedArray[int]] = []


def _at_once(
    jobs: Sequence[Job], workers: int, total: int, progress: Progress | None
) -> list[Found]:
    context = multiprocessing.get_context("spawn")
    ended = context.Array("q", len(jobs))
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_share, initargs=(ended,)
    ) as pool:
        futures = [pool.submit(_one, part, job) for part, job in enumerate(jobs)]
        left: Iterable[Future[Found]] = futures
        try:
            while left:
                done, left = wait(left, _LOOK_EVERY_S, FIRST_COMPLETED)
                for each in done:
                    each.result()
                if progress is not None:
                    progress(sum(ended[:]), total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _share(ended: SynchronizedArray[int]) -> None:
    """Keep what is counted together, in a worker process."""
    _ended.append(ended)


def _one(part: int, job: Job) -> Found:
    """Simulate a part in a worker process."""
    ended = _ended[0]

    def note(num: int, _total: int) -> None:
        ended[part] = num

    return simulate_stretch(*job, note)


def _together(found: Sequence[Found]) -> SimulationResult:
    results = [result for result, _ in found]
    seconds = np.concatenate([np.array(each) for _, each in found])
    event_hash = blake2b("".join(each.event_hash for each in results).encode(), digest_size=16)
    requests = [request for each in results for request in each.requests]
    return replace(
        results[0],
        requests=tuple(sorted(requests, key=lambda request: request.index)),
        steps=_sum([each.steps for each in results], seconds * 1e6),
        event_hash=event_hash.hexdigest(),
        wall_s=sum(each.wall_s for each in results),
    )


def _sum(parts: Sequence[StepSummary], planner_us: FloatArray) -> StepSummary:
    names = sorted({name for part in parts for name in part.bindings})
    p50, p99 = np.percentile(planner_us, (50, 99)).tolist()
    # The cost model's quality is that of the end, as in one simulation.
    return replace(
        parts[-1],
        num_steps=sum(part.num_steps for part in parts),
        busy_s=sum(part.busy_s for part in parts),
        num_prefill_tokens=sum(part.num_prefill_tokens for part in parts),
        num_decode_tokens=sum(part.num_decode_tokens for part in parts),
        num_preemptions=sum(part.num_preemptions for part in parts),
        num_swapped_blocks=sum(part.num_swapped_blocks for part in parts),
        max_running=max(part.max_running for part in parts),
        max_waiting=max(part.max_waiting for part in parts),
        max_blocks_used=max(part.max_blocks_used for part in parts),
        bindings={name: sum(part.bindings.get(name, 0) for part in parts) for name in names},
        bound_s={name: sum(part.bound_s.get(name, 0.0) for part in parts) for name in names},
        planner_us_mean=float(planner_us.mean()),
        planner_us_p50=p50,
        planner_us_p99=p99,
        num_refits=sum(part.num_refits for part in parts),
    )
