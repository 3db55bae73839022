"""`simulate`: one workload, one policy, one machine, on virtual time.

Owns the wiring of a simulation: the production loop, planner, cost model and listeners, with a
simulated runner and clock. Must not hold a scheduling decision of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, Protocol

from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.policies import make_planner
from controller.policy.settings import PolicyConfig
from controller.policy.slo import SloClass
from controller.runtime.arrival_feed import ArrivalFeed
from controller.runtime.feedback import Learner, PromiseKeeper, Teacher
from controller.runtime.refits import Refitter
from controller.runtime.warmup import run_sweep, sweep_shapes
from controller.simulation.hardware import Device, HardwareProfile
from controller.simulation.oracle import OracleModel
from controller.simulation.population import Population, PopulationRunner
from controller.simulation.recorder import Recorder
from controller.simulation.records import SimulationResult, Stretch
from controller.workload.arrivals import Workload
from costmodel.base import CostModel
from costmodel.features import StepFeatures
from costmodel.hygiene import RejectReason
from costmodel.prior import fit_prior
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refitted import RefittedLeastSquares
from engine.blocks import BlockPool
from engine.clock import Clock, MonotonicClock, VirtualClock
from engine.config import DEFAULT_MAX_NUM_SEQS, EngineConfig
from engine.loop import EngineLoop
from engine.ports import EngineView, Planner, StepListener
from engine.request import Request
from engine.step import StepPlan, StepReport

Progress = Callable[[int, int], None]
"""Called with (requests ended, requests in all), now and then and at the end."""
LearnerKind = Literal["learned", "refitted", "prior", "oracle"]
LEARNERS: Final[tuple[LearnerKind, ...]] = ("learned", "refitted", "prior", "oracle")

# As the service does where a pass finds nothing to do although somebody waits.
_RETRY_S: Final = 0.05
_MAX_IDLE_S: Final = 900.0
_MAX_PASSES_AT_ONCE: Final = 10_000
_PROGRESS_STEPS: Final = 256


class SimulationError(Exception):
    """A simulation cannot go on; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Everything about a simulation but its workload, policy and machine.

    `engine` None takes limits that suit the machine's pool. `classes` stand beside `default`, which
    has no targets unless one of them is called so. `learner`: `learned` starts from a timed warm-up
    and learns from every step, as the service does; `refitted` takes over the service's refits of a
    window of steps too, each one step after it was due; `prior` keeps what the warm-up told;
    `oracle` knows the machine's formula. `max_tokens` is what clients ask for (answers end by
    themselves, at a length that no planner sees); None lets them ask for exactly what they get.
    ValueError names the field.
    """

    engine: EngineConfig | None = None
    classes: tuple[SloClass, ...] = ()
    default_class: str = "default"
    seed: int = 0
    learner: LearnerKind = "learned"
    planner: PolicyConfig = field(default_factory=PolicyConfig)
    max_tokens: int | None = 2048

    def __post_init__(self) -> None:
        """Check names and bounds."""
        if self.learner not in LEARNERS:
            raise ValueError(f"learner must be one of {', '.join(LEARNERS)}, got {self.learner!r}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.default_class not in self.classes_by_name:
            raise ValueError(f"default_class: no class {self.default_class!r}")

    @property
    def classes_by_name(self) -> dict[str, SloClass]:
        """Classes by name; `default` is always there."""
        return {"default": SloClass("default")} | {each.name: each for each in self.classes}


def engine_for(hardware: HardwareProfile, **changes: int | bool) -> EngineConfig:
    """Return the engine's limits on that machine; `changes` replace fields of `EngineConfig`.

    Running requests that are not among them stay within the tokens of a step, as in a server.
    """
    block_size = int(changes.get("block_size", 16))
    num_blocks = int(changes.get("num_blocks", max(1, hardware.num_pool_tokens // block_size)))
    most_tokens = int(changes.get("max_num_batched_tokens", DEFAULT_MAX_NUM_SEQS))
    limits: dict[str, int | bool] = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_model_len": min(131_072, num_blocks * block_size),
        "max_num_seqs": min(DEFAULT_MAX_NUM_SEQS, max(1, most_tokens)),
    }
    return EngineConfig(**(limits | changes))  # type: ignore[arg-type]  # checked by the class


class PlannerParts(NamedTuple):
    """What a planner that has no name may be made of."""

    config: PolicyConfig
    cost_model: CostModel
    output_lengths: OutputLengths
    demand: Demand


PlannerFactory = Callable[[PlannerParts], Planner]


class _Model(CostModel, Learner, Protocol):
    """A cost model that the feedback can teach."""

    @property
    def version(self) -> int: ...


class TimedPlanner:
    """Wraps a planner and keeps how long each call really took, in seconds."""

    def __init__(self, planner: Planner, clock: Clock) -> None:
        self._planner = planner
        self._clock = clock
        self.seconds = array("d")

    def plan(self, view: EngineView) -> StepPlan:
        """Return the planner's plan."""
        started_at = self._clock.now()
        plan = self._planner.plan(view)
        self.seconds.append(self._clock.now() - started_at)
        return plan


def simulate(
    workload: Workload,
    policy: str | PlannerFactory,
    hardware: HardwareProfile,
    config: SimulationConfig | None = None,
    progress: Progress | None = None,
    *,
    policy_name: str | None = None,
    listeners: Sequence[StepListener] = (),
) -> SimulationResult:
    """Run the workload to its end and return what became of every request.

    `policy` is a name (ValueError if there is none) or what makes a planner; `listeners` hear of
    every step. ValueError names an unknown class of the workload. SimulationError if a policy finds
    nothing to do for requests that wait.
    """
    whole = Stretch(0, 0, workload.num_requests)
    return simulate_stretch(
        workload,
        whole,
        policy,
        hardware,
        config,
        progress,
        policy_name=policy_name,
        listeners=listeners,
    )[0]


def simulate_stretch(
    workload: Workload,
    stretch: Stretch,
    policy: str | PlannerFactory,
    hardware: HardwareProfile,
    config: SimulationConfig | None = None,
    progress: Progress | None = None,
    *,
    policy_name: str | None = None,
    listeners: Sequence[StepListener] = (),
) -> tuple[SimulationResult, array[float]]:
    """Do as `simulate` does with a stretch of the workload; also return the real seconds of every
    call of the planner.
    """
    config = SimulationConfig() if config is None else config
    name = policy_name or (policy if isinstance(policy, str) else "custom")
    engine = engine_for(hardware) if config.engine is None else config.engine
    check_classes(workload, config)
    clock, wall = VirtualClock(), MonotonicClock()
    wall_started_at = wall.now()
    model = _cost_model(hardware, engine, config)
    lengths, demand = OutputLengths(), Demand()
    swap_block_s = hardware.swap_block_s if engine.num_host_blocks else None
    planner = TimedPlanner(
        make_planner(
            policy,
            model,
            lengths,
            config.planner,
            model_version=lambda: model.version,
            swap_block_s=swap_block_s,
            demand=demand,
        )
        if isinstance(policy, str)
        else policy(PlannerParts(config.planner, model, lengths, demand)),
        wall,
    )
    population = Population(config.classes_by_name, config.default_class, config.max_tokens)
    recorder = Recorder(population.output_lengths, stretch)
    taught: Learner = _Deaf() if config.learner == "prior" else model
    teachers: list[StepListener] = [Teacher(taught, lengths), ArrivalFeed(demand)]
    refitter = _refitter(model)
    if refitter is not None:
        teachers.append(_Refits(refitter))
    loop = EngineLoop(
        planner,
        PopulationRunner(
            clock,
            Device(hardware, _noise_seed(config.seed, stretch)),
            population.output_lengths,
            hardware.swap_block_s,
        ),
        BlockPool(engine.num_blocks, engine.block_size),
        engine,
        clock,
        (PromiseKeeper(), *teachers, recorder, *listeners),
    )
    _drive(loop, clock, workload, stretch, population, recorder, progress)
    quality = model.quality()
    result = SimulationResult(
        workload=workload.name,
        policy=name,
        hardware=hardware.name,
        seed=config.seed,
        offered_rate=workload.rate,
        requests=tuple(sorted(recorder.requests, key=lambda record: record.index)),
        steps=replace(
            recorder.summary(planner.seconds, quality.mape, quality.coverage),
            num_refits=0 if refitter is None else refitter.num_refits,
        ),
        event_hash=recorder.event_hash,
        wall_s=wall.now() - wall_started_at,
    )
    return result, planner.seconds


def check_classes(workload: Workload, config: SimulationConfig) -> None:
    """ValueError if the workload names a class that the configuration does not know."""
    known = config.classes_by_name
    for name in workload.class_counts:
        if name is not None and name not in known:
            raise ValueError(
                f"workload {workload.name!r} names class {name!r}, which has no targets;"
                f" known: {', '.join(sorted(known))}"
            )


def _drive(
    loop: EngineLoop,
    clock: VirtualClock,
    workload: Workload,
    stretch: Stretch,
    population: Population,
    recorder: Recorder,
    progress: Progress | None,
) -> None:
    """Hand in arrivals when they are due and step until all that count have ended."""
    arrivals = workload.arrivals
    total, index, num_idle, num_passes = len(arrivals), stretch.begin, 0, 0
    num_counted = stretch.last - stretch.first
    while not recorder.is_done:
        # Arrivals of a step that is under way are taken at the next one, as from a client.
        while index < total and arrivals[index].at_s <= clock.now():
            loop.submit(population.request(arrivals[index], index))
            index += 1
        before = clock.now()
        report = loop.step()
        num_passes += 1
        if report is not None:
            if clock.now() > before:
                num_idle = 0
                if progress is not None and num_passes % _PROGRESS_STEPS == 0:
                    progress(len(recorder.requests), num_counted)
                continue
        elif not loop.has_work:
            clock.advance(arrivals[index].at_s - clock.now())
            continue
        else:
            # Whoever waits is looked at again after a while, or when somebody else comes.
            until_next = arrivals[index].at_s - clock.now() if index < total else _RETRY_S
            clock.advance(min(_RETRY_S, max(until_next, 0.0)))
        num_idle += 1
        if num_idle > _MAX_PASSES_AT_ONCE + _MAX_IDLE_S / _RETRY_S:
            raise SimulationError(
                f"the policy finds no work for {loop.num_unfinished} requests that wait"
            )
    if progress is not None:
        progress(num_counted, num_counted)


def _noise_seed(seed: int, stretch: Stretch | None) -> int | tuple[int, int]:
    """Return the seed of the machine's noise: a later part of a run has noise of its own."""
    return seed if stretch is None or stretch.first == 0 else (seed, stretch.first)


def _cost_model(
    hardware: HardwareProfile, engine: EngineConfig, config: SimulationConfig
) -> _Model:
    """Return the model that the planner asks: the truth, or what a warm-up tells of it."""
    if config.learner == "oracle":
        return OracleModel(hardware, config.planner.margin_quantile)
    clock = VirtualClock()
    # The warm-up's noise is its own: the workload's begins at the same place for every learner.
    runner = PopulationRunner(clock, Device(hardware, config.seed + (1 << 32)), {})
    samples = run_sweep(runner, engine, clock, sweep_shapes(engine))
    learner = RefittedLeastSquares if config.learner == "refitted" else RecursiveLeastSquares
    model = fit_prior(samples, learner)
    model.aim_for(config.planner.margin_quantile)
    return model


def _refitter(model: CostModel) -> Refitter | None:
    """Return the service's refitter, without its thread; None for a model that takes no refits."""
    if not isinstance(model, RefittedLeastSquares):
        return None
    return Refitter(model, lambda _refit, _report: None)


class _Refits:
    """Runs each refit within the step that asks for it: a thread would not do the same twice."""

    def __init__(self, refitter: Refitter) -> None:
        self._refitter = refitter

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Hand over what was found at the last step, and look for the next."""
        self._refitter.on_step(report, requests)
        self._refitter.pump()


class _Deaf:
    """Takes every lesson and keeps none: the learner that `prior` teaches instead of the model."""

    num_drift_alarms = 0

    def observe(self, features: StepFeatures, latency_s: float) -> bool:
        """Forget it."""
        return False

    def reject(self, reason: RejectReason) -> None:
        """Forget it."""
