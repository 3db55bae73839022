"""What the routes share: the service, the settings of this door, and how many answers are under
way.

Owns one frozen bundle that `create_app` hands to every router. Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from controller.api.errors import ApiError, unavailable
from controller.policy.slo import SloClass
from controller.runtime.generation import InferenceService
from controller.runtime.metrics import Metrics
from engine.clock import Clock


class InFlight:
    """Counts generations between the body and the last byte; event loop only."""

    def __init__(self) -> None:
        self.num_requests = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one more while the block runs."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


def _tokenizer_limiter() -> anyio.CapacityLimiter:
    # Its own few threads, so that slow telemetry queries cannot hold up a prompt, nor many prompts
    # take every core from the step.
    return anyio.CapacityLimiter(4)


@dataclass(frozen=True, slots=True)
class ApiContext:
    """Everything a route may use. `slo_classes` is by name; `metrics` may be None."""

    service: InferenceService
    clock: Clock
    slo_classes: Mapping[str, SloClass]
    metrics: Metrics | None = None
    is_slo_lenient: bool = False
    version: str = "0"
    in_flight: InFlight = field(default_factory=InFlight)
    tokenizer_limiter: anyio.CapacityLimiter = field(default_factory=_tokenizer_limiter)

    def created_at(self) -> int:
        """Return the wall clock in whole seconds, for the `created` of an answer."""
        return self.clock.epoch_ms() // 1000

    def check_model(self, name: str | None) -> str:
        """Return the served model's name; ApiError 404 `model_not_found` if another one is asked
        for.
        """
        served = self.service.model.name
        if name is not None and name != served:
            message = f"the model {name[:200]!r} is not served here; this server serves {served!r}"
            raise ApiError(404, "model_not_found", message, param="model")
        return served

    def require_ready(self) -> None:
        """Raise ApiError 503 while the server loads, drains or is dead."""
        health = self.service.health()
        if not health.is_live:
            raise unavailable("dead", health.reason or "the engine has stopped")
        if not health.is_ready:
            code = "draining" if "drain" in health.reason else "not_ready"
            raise unavailable(code, health.reason or "the server is not ready")
