"""`paceline_*` metrics of KV memory: what is cached, what was moved to the host, and forwards that
were repeated.

Owns those few metrics only; the rest of ours is in `controller.runtime.metrics`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.step import PreemptionMethod, StepReport


class MemoryMetrics:
    """Feeds the metrics from step reports; loop's thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._cached = Gauge(
            "paceline_kv_blocks_cached", "Free blocks that hold a known prefix", registry=registry
        )
        self._host_used = Gauge(
            "paceline_host_kv_blocks_used", "Host blocks that hold a preempted request's KV",
            registry=registry,
        )  # fmt: skip
        self._host_size = Gauge("paceline_host_kv_blocks", "Host blocks in all", registry=registry)
        self._swapped = Counter(
            "paceline_swapped_blocks", "Blocks moved to host memory or back", registry=registry
        )
        self._retries = Counter(
            "paceline_isolation_retries", "Forwards beyond a step's first, to find who fails",
            registry=registry,
        )  # fmt: skip
        preemptions = Counter(
            "paceline_preemptions", "Requests that gave way, by what became of their KV",
            ["method"], registry=registry,
        )  # fmt: skip
        self._preemptions = {
            method: preemptions.labels(method.value) for method in PreemptionMethod
        }

    def on_step(self, report: StepReport) -> None:
        """Take one step's report."""
        self._cached.set(report.num_blocks_cached)
        self._host_used.set(report.num_host_blocks_used)
        self._host_size.set(report.num_host_blocks_total)
        self._swapped.inc(report.num_swapped_blocks)
        self._retries.inc(report.num_retries)
        for preemption in report.plan.preemptions:
            self._preemptions[preemption.method].inc()
