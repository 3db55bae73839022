"""Wiring: the one place that chooses concrete classes and hands them to each other.

Owns the order of start-up and shutdown. Must not parse flags or speak HTTP.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, TemplateSyntaxError

from controller.config import Settings
from controller.policy.demand import Demand
from controller.policy.lengths import OutputLengths
from controller.policy.policies import make_planner
from controller.runtime.arrival_feed import ArrivalFeed
from controller.runtime.feedback import PromiseKeeper, Teacher, TelemetryFeed
from controller.runtime.generation import ServedModel
from controller.runtime.metrics import Metrics
from controller.runtime.refits import Refitter
from controller.runtime.service import PromiseTerms, Service
from controller.runtime.snapshots import SnapshotKeeper, Start, start_model
from controller.runtime.streams import StreamHub
from controller.runtime.tally import Tally
from controller.runtime.tuned_for import TunedFor
from controller.runtime.warmup import run_sweep, settle_in, sweep_shapes, time_swap
from costmodel.prior import Sample, SweepShape
from costmodel.refitted import RefittedLeastSquares
from costmodel.snapshot import SnapshotKey
from engine.blocks import BlockPool
from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.ports import Planner, StepListener
from engine.request import Request
from store.errors import StoreError
from store.queries import TelemetryReader
from store.records import RunRecord
from store.schema import migrate
from store.writer import TelemetryWriter

if TYPE_CHECKING:
    from engine.device.loading import LoadedEngine

_LOGGER = logging.getLogger("paceline")

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what comes next)."""


class StartupError(Exception):
    """The server cannot start; the message is one line that says what to change."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A wired server without its doors. `close` ends it in order."""

    settings: Settings
    service: Service
    engine: LoadedEngine
    engine_config: EngineConfig
    cost_model: RefittedLeastSquares
    metrics: Metrics
    tally: Tally
    writer: TelemetryWriter
    reader: TelemetryReader
    warmup_steps: int
    refitter: Refitter
    keeper: SnapshotKeeper
    start: Start

    def close(self) -> None:
        """Drain and stop the loop, then flush telemetry; the database is closed last."""
        self.service.stop(self.settings.drain_timeout_s)
        self.refitter.close()
        if not self.service.is_hung:
            # The loop's thread has ended: nobody else touches the model now.
            self.keeper.save()
        self.writer.close(reason="engine_stopped" if self.service.failure else "closed")
        self.reader.close()


def build_runtime(
    settings: Settings,
    progress: Progress,
    tuned_for: TunedFor | None = None,
    otherwise: Sequence[tuple[Settings, TunedFor | None]] = (),
) -> Runtime:
    """Load, warm up and wire everything; the loop's thread is started. StartupError says why not.

    The database comes first: a wrong URL should not cost the loading of a model. `tuned_for` is
    whom the profile belongs to that the settings were taken from; if this engine may not take it,
    the first of `otherwise` is used that it may.
    """
    try:
        migrate(settings.db)
    except StoreError as error:
        raise StartupError(f"--db: {error}") from error
    choices = [(settings, tuned_for), *otherwise]
    # Which of them it will be is known once the device is: graphs for the most seats serve all.
    engine = _load(settings, max(each.effective_max_num_seqs for each, _ in choices), progress)
    settings, tuned_for = _first_fitting(engine, choices)
    clock = MonotonicClock()
    config = _engine_config(settings, engine)
    try:
        reader = TelemetryReader.open(settings.db)
    except StoreError as error:
        raise StartupError(f"--db: {error}") from error
    key = _snapshot_key(settings, engine)
    start = _start_model(settings, engine, config, clock, progress, reader, key)
    cost_model = start.model
    cost_model.aim_for(settings.planner.margin_quantile)
    output_lengths, demand = OutputLengths(), Demand()
    swap_block_s = time_swap(engine.runner, config, clock) if settings.is_warmup_enabled else None
    planner = _planner(settings, cost_model, output_lengths, demand, swap_block_s)
    run = RunRecord(
        run_id=uuid.uuid4().hex[:12],
        started_at=clock.epoch_ms(),
        model=settings.model_name,
        device=engine.device_name,
        attention_backend=engine.attention_backend,
        policy=settings.policy,
        code_version=metadata.version("paceline"),
        profile=None if tuned_for is None else tuned_for.profile,
        settings=settings.to_json(),
    )
    try:
        writer = TelemetryWriter.open(settings.db, run, clock)
    except StoreError as error:
        raise StartupError(f"--db: {error}") from error
    metrics = Metrics(
        settings.model_name,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        is_prefix_cache_enabled=config.is_prefix_cache_enabled,
        quality=cost_model.quality,
        telemetry_counts=writer.stats,
    )
    hub = StreamHub()
    tally = Tally()
    feed = TelemetryFeed(writer.offer, clock, run.run_id, cost_model)
    feed.tell_start(start.origin, start.problem, start.numbers)
    refitter = Refitter(cost_model, feed.tell_refit)
    keeper = SnapshotKeeper(cost_model, key, run.run_id, writer.offer, clock)
    # The order matters: promises are judged by what streams report, streams go before whoever
    # merely watches.
    listeners: tuple[StepListener, ...] = (
        PromiseKeeper(),
        hub,
        Teacher(cost_model, output_lengths),
        ArrivalFeed(demand),
        refitter,
        keeper,
        feed,
        metrics,
        tally,
    )
    loop = EngineLoop(
        planner,
        engine.runner,
        BlockPool(engine.num_blocks, engine.block_size),
        config,
        clock,
        listeners,
    )

    def record_endings(requests: tuple[Request, ...]) -> None:
        feed.record_endings(requests)
        metrics.on_abort(requests)

    service = Service(
        loop,
        hub,
        clock,
        ServedModel(
            name=settings.model_name,
            source=settings.model,
            created_at=clock.epoch_ms() // 1000,
            max_model_len=engine.max_model_len,
            num_pool_tokens=config.num_pool_tokens,
            eos_token_ids=engine.eos_token_ids,
            has_chat_template=engine.tokenizer.has_chat_template,
            prefix_block_size=engine.block_size if config.is_prefix_cache_enabled else None,
        ),
        engine.tokenizer,
        PromiseTerms(settings.slo_classes, settings.default_slo_class),
        run_id=run.run_id,
        on_abort=record_endings,
        on_failure=feed.tell_failure,
        settle_in=partial(_settle_in, settings, engine),
        stuck_after_s=settings.stuck_after_s,
    )
    writer.start()
    refitter.start()
    service.start()
    return Runtime(
        settings=settings,
        service=service,
        engine=engine,
        engine_config=config,
        cost_model=cost_model,
        metrics=metrics,
        tally=tally,
        writer=writer,
        reader=reader,
        warmup_steps=start.num_sweep_steps,
        refitter=refitter,
        keeper=keeper,
        start=start,
    )


def _load(settings: Settings, max_num_seqs: int, progress: Progress) -> LoadedEngine:
    # Imported here: only a server needs torch, and importing it costs seconds.
    from engine.device.loading import DeviceOptions, load_engine
    from engine.device.model import ModelLoadError

    options = DeviceOptions(
        dtype=settings.dtype,
        device=settings.device,
        attention_backend=settings.attention_backend,
        block_size=settings.block_size,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        max_model_len=settings.max_model_len,
        chat_template=_chat_template(settings.chat_template),
        seed=settings.seed,
        host_kv_bytes=_host_kv_bytes(settings.swap_space),
        max_graph_batch=0 if settings.is_eager_enforced else max_num_seqs,
    )
    try:
        return load_engine(settings.model, options, progress)
    except ModelLoadError as error:
        raise StartupError(str(error)) from error


def _first_fitting(
    engine: LoadedEngine, choices: Sequence[tuple[Settings, TunedFor | None]]
) -> tuple[Settings, TunedFor | None]:
    """Return the first settings whose profile the engine may take; StartupError without any.

    Settings without a profile fit, and whoever reaches them is told what was left out.
    """
    refusals: list[str] = []
    for settings, tuned_for in choices:
        refusal = None
        if tuned_for is not None:
            refusal = tuned_for.refusal(
                settings.model_name,
                engine.device_name,
                engine.dtype,
                engine.attention_backend,
                settings.model,
            )
        if refusal is None:
            for left_out in refusals if tuned_for is None else ():
                _LOGGER.warning("an active profile is left out: %s", left_out)
            return settings, tuned_for
        refusals.append(refusal)
    raise StartupError(f"--profile: {refusals[0]}")


def _host_kv_bytes(swap_space: float | None) -> int:
    """Return bytes in the loader's words: 0 is its own choice, less than a block is none."""
    return 0 if swap_space is None else max(1, int(swap_space * 2**30))


def _chat_template(file: Path | None) -> str | None:
    """Read and compile the template now: a typo should not wait for the first conversation."""
    if file is None:
        return None
    try:
        text = file.read_text(encoding="utf-8")
        Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(text)  # noqa: S701 - parsed only
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        raise StartupError(f"--chat-template {file}: {error}") from error
    return text


def _engine_config(settings: Settings, engine: LoadedEngine) -> EngineConfig:
    try:
        return EngineConfig(
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            max_model_len=engine.max_model_len,
            max_num_seqs=settings.effective_max_num_seqs,
            max_num_batched_tokens=settings.effective_max_num_batched_tokens,
            max_waiting_requests=settings.max_waiting_requests,
            num_host_blocks=engine.num_host_blocks,
            is_prefix_cache_enabled=settings.is_prefix_caching_enabled,
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def _snapshot_key(settings: Settings, engine: LoadedEngine) -> SnapshotKey:
    return SnapshotKey(
        model=settings.model,
        device=engine.device_name,
        dtype=engine.dtype,
        attention_backend=engine.attention_backend,
        block_size=engine.block_size,
        engine_version=metadata.version("paceline"),
    )


def _start_model(
    settings: Settings,
    engine: LoadedEngine,
    config: EngineConfig,
    clock: MonotonicClock,
    progress: Progress,
    reader: TelemetryReader,
    key: SnapshotKey,
) -> Start:
    """Return the model that an earlier run left, or one whose prior is a timed sweep."""
    shapes: Sequence[SweepShape] = ()
    if settings.is_warmup_enabled:
        shapes = sweep_shapes(config)

    def time_steps(chosen: Sequence[SweepShape]) -> list[Sample]:
        try:
            return run_sweep(engine.runner, config, clock, _count(chosen, progress))
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise StartupError(
                f"a warm-up step failed ({type(error).__name__}: {text}): lower"
                " --kv-cache-memory-bytes or --max-num-batched-tokens if the device is out of"
                " memory"
            ) from error

    return start_model(reader, key, shapes, time_steps)


def _settle_in(settings: Settings, engine: LoadedEngine) -> None:
    """What the loop's thread does before its first step."""
    if settings.is_warmup_enabled:
        settle_in(engine.runner, engine.block_size)


def _count(shapes: Sequence[SweepShape], progress: Progress) -> Iterator[SweepShape]:
    for index, shape in enumerate(shapes):
        progress(index, len(shapes), "timing warm-up steps")
        yield shape
    progress(len(shapes), len(shapes), "done")


def _planner(
    settings: Settings,
    cost_model: RefittedLeastSquares,
    output_lengths: OutputLengths,
    demand: Demand,
    swap_block_s: float | None,
) -> Planner:
    return make_planner(
        settings.planner_name,
        cost_model,
        output_lengths,
        settings.planner,
        model_version=lambda: cost_model.version,
        swap_block_s=swap_block_s,
        demand=demand,
    )
