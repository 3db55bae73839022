"""`/metrics`: a scrape of the server's own registry.

Owns the route; the numbers are `controller.runtime.metrics`'.
"""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response


def metrics_router(registry: CollectorRegistry) -> APIRouter:
    """Return the scrape route of one registry."""
    router = APIRouter(tags=["system"])

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """Return every metric in Prometheus' text format."""
        # A plain function: it runs in a worker thread, away from the streams.
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
