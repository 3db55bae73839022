"""`/health`, `/ready`, `/ping`, `/version`, `/load`: for orchestrators and balancers.

Owns no judgement: liveness and readiness are the service's.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from controller.api.context import ApiContext
from controller.api.responses import HealthAnswer, LoadAnswer, VersionAnswer

_UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"model": HealthAnswer}}


def system_router(context: ApiContext) -> APIRouter:
    """Return the routes about the server itself."""
    router = APIRouter(tags=["system"])

    @router.get("/health", response_model=HealthAnswer, responses=_UNAVAILABLE)
    async def health() -> Response:
        """200 while steps make progress or nothing is to do; 503 with a reason if stuck or dead."""
        state = context.service.health()
        return _answer(state.is_live, state.reason)

    @router.get("/ready", response_model=HealthAnswer, responses=_UNAVAILABLE)
    async def ready() -> Response:
        """200 when requests are taken; 503 while loading, draining or dead."""
        state = context.service.health()
        return _answer(state.is_live and state.is_ready, state.reason)

    @router.get("/ping", response_model=HealthAnswer, responses=_UNAVAILABLE)
    async def ping() -> Response:
        """Same as `/health`, under the name that some platforms ask for."""
        return await health()

    @router.get("/version")
    async def version() -> VersionAnswer:
        """Return the version of the server."""
        return VersionAnswer(version=context.version)

    @router.get("/load")
    async def load() -> LoadAnswer:
        """Return how many generations are under way at this door."""
        return LoadAnswer(server_load=context.in_flight.num_requests)

    return router


def _answer(is_well: bool, reason: str) -> JSONResponse:
    if is_well:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": reason or "unknown"}, 503)
