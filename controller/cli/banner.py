"""What the server says of itself: the banner at start-up and the status line.

Owns words and layout only.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from controller.policy.policies import budget_of
from controller.policy.slo import SloClass
from store.urls import mask_url

if TYPE_CHECKING:
    from controller.config import Settings
    from controller.runtime.wiring import Runtime
    from engine.config import EngineConfig


def banner(runtime: Runtime, url: str) -> str:
    """Describe the running server in a dozen lines."""
    engine, settings = runtime.engine, runtime.settings
    config = runtime.engine_config
    source = "" if engine.source == settings.model_name else f"  ({engine.source})"
    rows = [
        ("model", f"{settings.model_name}{source}"),
        (
            "dtype",
            f"{engine.dtype} on {engine.device_name}, attention {engine.attention_backend}"
            f"{_graphs(runtime)}",
        ),
        (
            "KV pool",
            f"{config.num_pool_tokens:,} tokens in {engine.num_blocks:,} blocks of"
            f" {engine.block_size} ({engine.kv_bytes / 2**20:,.0f} MiB);"
            f" context {engine.max_model_len:,}",
        ),
        ("KV reuse", _reuse(config)),
        (
            "policy",
            f"{settings.policy}: {_policy(settings)}; at most {config.max_num_seqs} running",
        ),
        ("profile", settings.profile or "none, the shipped defaults"),
        ("classes", "; ".join(_describe(item) for item in settings.slo_classes.values())),
        ("cost model", _cost_model(runtime)),
        ("telemetry", mask_url(settings.db)),
        ("API", f"{url}/v1   docs {url}/docs"),
        ("metrics", f"{url}/metrics   telemetry {url}/telemetry/summary"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([f"Paceline {metadata.version('paceline')}", *lines])


_POLICIES = {
    "slo": "token budget per step from deadlines",
    "whole": "whole prompts, no chunking",
    "slack-greedy": "the largest chunk that banked slack allows",
    "smallest-feasible": "the smallest chunk that deadlines allow",
}


def _policy(settings: Settings) -> str:
    name = settings.planner_name
    if name in _POLICIES:
        return _POLICIES[name]
    family, budget = budget_of(name)
    order = {
        "fcfs": "first come, first served",
        "edf": "earliest deadline first",
        "edf-shed": "earliest deadline first, what cannot be in time is shed",
    }[family]
    return f"fixed budget of {budget} tokens, {order}"


def _graphs(runtime: Runtime) -> str:
    engine = runtime.engine
    if engine.graph_sizes:
        return f", CUDA graphs of up to {max(engine.graph_sizes)} decodes"
    return f", no CUDA graphs ({engine.graphs_off})" if engine.graphs_off else ""


def _reuse(config: EngineConfig) -> str:
    prefix = "prefix cache on" if config.is_prefix_cache_enabled else "prefix cache off"
    if not config.num_host_blocks:
        return f"{prefix}; preempted requests are computed again"
    num_tokens = config.num_host_blocks * config.block_size
    return (
        f"{prefix}; host memory for {num_tokens:,} tokens in {config.num_host_blocks:,} blocks"
        " of preempted requests"
    )


def _describe(item: SloClass) -> str:
    targets = [
        f"{name} {value * 1000:g} ms"
        for name, value in (
            ("TTFT", item.slo.ttft_s),
            ("TPOT", item.slo.tpot_s),
            ("E2E", item.slo.e2e_s),
        )
        if value is not None
    ]
    return f"{item.name} ({', '.join(targets) or 'no targets'})"


def _cost_model(runtime: Runtime) -> str:
    costs = runtime.cost_model.marginals()
    origin = f"{runtime.warmup_steps} warm-up steps" if runtime.warmup_steps else "no warm-up"
    return (
        f"{costs.floor_s * 1000:.1f} ms a step, {costs.prefill_token_s * 1e3:.3f} ms a prompt"
        f" token, {costs.decode_request_s * 1e3:.2f} ms a decode (from {origin})"
    )


class StatusCounts(NamedTuple):
    """What the status line is about; equal counts mean that there is nothing new to tell."""

    num_steps: int
    num_running: int
    num_waiting: int
    num_finished: int
    num_refused: int
    num_tokens: int
    num_blocks_used: int
    num_rows_dropped: int


def status_line(runtime: Runtime, previous: StatusCounts | None) -> tuple[str, StatusCounts]:
    """Return one line about the time since `previous`, and the counts to hand in next time."""
    tally = runtime.tally
    dropped = sum(runtime.writer.stats().num_dropped_by_reason.values())
    counts = StatusCounts(
        tally.num_steps,
        tally.num_running,
        tally.num_waiting,
        tally.num_finished,
        tally.num_refused,
        tally.num_tokens,
        tally.num_blocks_used,
        dropped,
    )
    before = previous or StatusCounts(0, 0, 0, 0, 0, 0, 0, 0)
    quality = runtime.cost_model.quality()
    line = (
        f"paceline: running {counts.num_running}, waiting {counts.num_waiting};"
        f" +{counts.num_tokens - before.num_tokens} tokens"
        f" in {counts.num_steps - before.num_steps} steps,"
        f" {counts.num_finished - before.num_finished} ended,"
        f" {counts.num_refused - before.num_refused} refused;"
        f" KV {counts.num_blocks_used / runtime.engine.num_blocks:.0%};"
        f" prediction error {quality.mape:.1%}, coverage {quality.coverage:.0%}"
    )
    if dropped:
        line += f"; {dropped} telemetry rows dropped"
    return line, counts
