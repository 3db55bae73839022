"""The `vllm:*` metrics under the names, labels and buckets that existing dashboards and gateways
use.

Owns compatibility only: what is ours alone is in `controller.runtime.metrics`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.request import FinishReason, Request
from engine.step import StepReport

LATENCY_BUCKETS: Mapping[str, tuple[float, ...]] = {
    "ttft": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    ),
    "tpot": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0,
    ),
    "request": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
        120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
    ),
}  # fmt: skip
_ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LABELS = ("model_name", "engine")
_ENDINGS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


class TokenHistogram(Collector):
    """A histogram that is cheap enough to observe once per token: one writer, no lock.

    A scrape may see a sum that is one observation ahead of its buckets.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Mapping[str, str],
        buckets: tuple[float, ...],
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = dict(labels)
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def collect(self) -> Iterator[Metric]:
        """Yield the buckets, cumulative as Prometheus wants them."""
        names = [*map(str, self._bounds), "+Inf"]
        counts = list(accumulate(self._counts))
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        buckets = list(zip(names, counts, strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


class VllmMetrics:
    """Feeds the compatible names from step reports; loop's thread only."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        *,
        block_size: int,
        num_blocks: int,
        is_prefix_cache_enabled: bool = True,
    ) -> None:
        labels = {"model_name": model_name, "engine": "0"}

        def counter(name: str, documentation: str) -> Counter:
            return Counter(name, documentation, _LABELS, registry=registry).labels(**labels)

        def gauge(name: str, documentation: str) -> Gauge:
            return Gauge(name, documentation, _LABELS, registry=registry).labels(**labels)

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, documentation, _LABELS, buckets=buckets, registry=registry)
            return metric.labels(**labels)

        self._running = gauge("vllm:num_requests_running", "Requests in the running batch")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests waiting to be processed")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "KV cache usage, 1 = 100 percent")
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "Time to first token", LATENCY_BUCKETS["ttft"]
        )
        self._itl = TokenHistogram(
            "vllm:inter_token_latency_seconds",
            "Gap between tokens",
            labels,
            LATENCY_BUCKETS["tpot"],
        )
        registry.register(self._itl)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token of a request",
            LATENCY_BUCKETS["tpot"],
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end", LATENCY_BUCKETS["request"]
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "Arrival to first work", LATENCY_BUCKETS["request"]
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated")
        self._preemptions = counter("vllm:num_preemptions", "Preemptions")
        self._is_prefix_cache_enabled = is_prefix_cache_enabled
        self._cache_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._cache_hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._iteration_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens of a step", _ITERATION_BUCKETS
        )
        success = Counter(
            "vllm:request_success", "Ended requests", (*_LABELS, "finished_reason"),
            registry=registry,
        )  # fmt: skip
        self._success = {
            reason: success.labels(**labels, finished_reason=name)
            for reason, name in _ENDINGS.items()
        }
        Gauge(
            "vllm:cache_config_info", "KV cache settings, as labels",
            ("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"), registry=registry,
        ).labels(
            "0", str(block_size), str(num_blocks), str(is_prefix_cache_enabled)
        ).set(1)  # fmt: skip
        self._last_token_at: dict[str, float] = {}
        self._started: set[str] = set()

    def on_step(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Take one step's gauges, work and tokens."""
        self._running.set(report.num_running)
        # A preempted request waits for its turn again.
        self._waiting.set(report.num_waiting + report.num_preempted)
        if report.num_blocks_total:
            self._kv_usage.set(report.num_blocks_used / report.num_blocks_total)
        self._preemptions.inc(len(report.plan.preemptions))
        if report.is_executed:
            self._iteration_tokens.observe(
                report.plan.num_prefill_tokens + report.plan.num_decode_tokens
            )
        self._count_lookups(report, requests)
        self._generation_tokens.inc(len(report.tokens))
        last_token_at = self._last_token_at
        for token in report.tokens:
            request_id, at = token.request_id, token.at
            if token.index == 0:
                request = requests[request_id]
                self._ttft.observe(at - request.arrived_at)
                self._prompt_tokens.inc(request.num_prompt_tokens)
            elif request_id in last_token_at:
                self._itl.observe(at - last_token_at[request_id])
            last_token_at[request_id] = at

    def _count_lookups(self, report: StepReport, requests: Mapping[str, Request]) -> None:
        """Count each request once, in the step in which it first computes something."""
        for work in report.plan.work:
            if work.request_id in self._started:
                continue
            self._started.add(work.request_id)
            request = requests[work.request_id]
            # Whoever wants the prompt scored computes all of it and looks nothing up.
            if self._is_prefix_cache_enabled and request.sampling.num_prompt_logprobs is None:
                self._cache_queries.inc(request.num_prompt_tokens)
                self._cache_hits.inc(request.num_cached_tokens)

    def on_abort(self) -> None:
        """Show that nothing runs, waits or holds blocks any more."""
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.set(0)

    def on_request_finished(self, request: Request) -> None:
        """Take one request's whole times; rejected requests were never processed."""
        self._last_token_at.pop(request.request_id, None)
        self._started.discard(request.request_id)
        reason = request.finish_reason
        if reason not in self._success:
            return
        if reason is FinishReason.LENGTH and request.num_output_tokens == 0:
            # Nothing was asked for but the prompt.
            self._prompt_tokens.inc(request.num_prompt_tokens)
        self._success[reason].inc()
        if request.first_scheduled_at is not None:
            self._queue.observe(request.first_scheduled_at - request.arrived_at)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if request.finished_at is not None:
            self._e2e.observe(request.finished_at - request.arrived_at)
        first_at, last_at = request.first_token_at, request.last_token_at
        if first_at is not None and last_at is not None and request.num_output_tokens > 1:
            self._tpot.observe((last_at - first_at) / (request.num_output_tokens - 1))
