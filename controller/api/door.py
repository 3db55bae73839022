"""`Door`: the address answers before the model is loaded.

Owns what is said while there is no application yet: alive, not ready, come back. Must not know what
is being loaded.
"""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from controller.api.errors import unavailable

LOADING = "loading"
_LIVENESS_PATHS = frozenset({"/health", "/ping"})


class Door:
    """An ASGI application that is closed until `open` gives it one to pass everything on to."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """Pass requests on to `app` from now on."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _closed(scope["path"])(scope, receive, send)


def _closed(path: str) -> JSONResponse:
    if path in _LIVENESS_PATHS:
        return JSONResponse({"status": "ok"})
    if path == "/ready":
        return JSONResponse({"status": "unavailable", "reason": LOADING}, 503)
    message = "the model is still loading; /ready says when it is done"
    return unavailable("not_ready", message).response()
