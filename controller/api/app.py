"""`create_app`: the HTTP door as one ASGI application.

Owns which routes and guards there are, and their order. Must not start or stop anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.middleware import Middleware

from controller.api.context import ApiContext
from controller.api.errors import install_error_handlers
from controller.api.guards import ArrivalStamp, BodyLimit, KeyGuard
from controller.api.inference import inference_router
from controller.api.metrics import metrics_router
from controller.api.models import models_router
from controller.api.profiles import profiles_router
from controller.api.reference import reference_router
from controller.api.responses import ChatChunk
from controller.api.system import system_router
from controller.api.telemetry import telemetry_router
from controller.policy.slo import SloClass
from controller.runtime.generation import InferenceService
from controller.runtime.metrics import Metrics
from engine.clock import Clock, MonotonicClock
from store.profiles import ProfileStore
from store.queries import TelemetryReader

DEFAULT_MAX_BODY_BYTES = 4 * 1024 * 1024


def create_app(
    service: InferenceService,
    *,
    slo_classes: Mapping[str, SloClass] | None = None,
    default_class: str = "default",
    lenient_slo: bool = False,
    api_key: str | None = None,
    telemetry_reader: TelemetryReader | None = None,
    metrics: Metrics | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    clock: Clock | None = None,
) -> FastAPI:
    """Return the application for a service; ValueError if `default_class` is not among the classes.

    `api_key` guards every route but `/health`, `/ready` and `/ping`. `/telemetry` and `/profiles`
    are there with a reader, `/metrics` with metrics. `lenient_slo` ignores and counts malformed
    targets. `clock` dates the answers.
    """
    classes = {"default": SloClass("default")} if slo_classes is None else dict(slo_classes)
    if default_class not in classes:
        raise ValueError(f"default_class {default_class!r} is not one of {sorted(classes)}")
    if api_key is not None and not api_key.strip():
        raise ValueError("api_key must not be empty")
    version = _version()
    context = ApiContext(
        service=service,
        clock=clock or MonotonicClock(),
        slo_classes=classes,
        metrics=metrics,
        is_slo_lenient=lenient_slo,
        version=version,
    )
    middleware = [Middleware(ArrivalStamp, now=service.now)]
    if api_key is not None:
        middleware.append(Middleware(KeyGuard, api_key=api_key))
    middleware.append(Middleware(BodyLimit, max_body_bytes=max_body_bytes))
    app = FastAPI(
        title="Paceline",
        version=version,
        description="LLM inference that keeps per-request latency promises.",
        middleware=middleware,
        # The framework's pages take their scripts from elsewhere: blank without a network.
        docs_url=None,
        redoc_url=None,
        # A redirect to the path with or without a slash would lose the body of a POST.
        redirect_slashes=False,
    )
    install_error_handlers(app)
    for router in (inference_router(context), models_router(context), system_router(context)):
        app.include_router(router)
    if metrics is not None:
        app.include_router(metrics_router(metrics.registry))
    if telemetry_reader is not None:
        app.include_router(telemetry_router(telemetry_reader))
        app.include_router(profiles_router(ProfileStore(telemetry_reader.database)))
    _correct_description(app)
    app.include_router(reference_router(app.openapi))
    return app


def _correct_description(app: FastAPI) -> None:
    """Add the models that only streams send to the OpenAPI page, which knows whole answers, and
    take out the 422 that the framework supposes: what is wrong with a request is a 400 here.
    """
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            template = "#/components/schemas/{model}"
            _, chunks = models_json_schema([(ChatChunk, "serialization")], ref_template=template)
            document = describe()
            for item in document["paths"].values():
                for operation in item.values():
                    operation["responses"].pop("422", None)
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for name, schema in chunks["$defs"].items():
                schemas.setdefault(name, schema)
        return describe()

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents


def _version() -> str:
    try:
        return metadata.version("paceline")
    except metadata.PackageNotFoundError:
        return "0+unknown"
