"""Tiny tasks for tests of tuning: seconds of traffic on a machine without noise."""

from __future__ import annotations

from dataclasses import replace

from controller.policy.slo import Slo, SloClass
from controller.simulation.hardware import A100_8B
from controller.simulation.run import engine_for
from controller.tuning.task import Scene, TuningTask
from controller.workload.arrivals import Arrival, Workload

QUIET = replace(A100_8B, name="quiet", noise=0.0)
CHAT = SloClass("chat", Slo(0.6, 0.5), weight=2.0)
BULK = SloClass("bulk", Slo(5.0))


def crowd(num: int = 24, every_s: float = 0.01, prompt: int = 8, output: int = 4) -> Workload:
    """Requests at even intervals, three of four of them chats."""
    arrivals = tuple(
        Arrival(i * every_s, prompt + i % 3, output, "bulk" if i % 4 == 3 else "chat")
        for i in range(num)
    )
    return Workload(f"crowd of {num}", arrivals)


def task(*workloads: Workload, held_out: tuple[Workload, ...] | None = None) -> TuningTask:
    """A task over these scenes, which are held out too unless others are given."""
    scenes = tuple(Scene(each, seed) for seed, each in enumerate(workloads or (crowd(),)))
    judged = (
        scenes if held_out is None else tuple(Scene(w, 100 + i) for i, w in enumerate(held_out))
    )
    return TuningTask(
        name="test",
        hardware=QUIET,
        engine=engine_for(QUIET),
        classes=(CHAT, BULK),
        default_class="default",
        tuning=scenes,
        held_out=judged,
        max_tokens=None,
    )
