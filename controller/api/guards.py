"""What stands before the routes: the arrival stamp, the key, the limit on a body, the strict JSON
parser.

Owns plain ASGI middleware (nothing that buffers an answer) and the route class of JSON endpoints.
Must not know what a generation is.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.api.errors import ApiError

PUBLIC_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Routes that answer without the key, spelled exactly; everything else, unknown routes included,
needs it.
"""


class ArrivalStamp:
    """Stamps `scope["state"]["arrived_at"]` on the service's clock before a byte of the body is
    read.
    """

    def __init__(self, app: ASGIApp, now: Callable[[], float]) -> None:
        self._app = app
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "http":
            scope.setdefault("state", {})["arrived_at"] = self._now()
        await self._app(scope, receive, send)


class KeyGuard:
    """Answers 401 unless the request carries `authorization: Bearer KEY` or the route is public.

    The decision is taken on the ASGI path that the router matches, never on a URL rebuilt from
    the Host header, and it is closed by default: a path that is spelled differently from a public
    route is guarded.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] == "lifespan" or scope.get("path") in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and hmac.compare_digest(_normal_scheme(given[0]), self._expected):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "invalid_api_key",
            "a valid API key is required: send the header 'authorization: Bearer KEY'",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)


def _normal_scheme(value: bytes) -> bytes:
    # RFC 9110: the scheme is case-insensitive, the credentials are not.
    scheme, _, key = value.partition(b" ")
    return b"Bearer " + key.strip() if scheme.lower() == b"bearer" else value


class BodyLimit:
    """Answers 413 to a body over `max_body_bytes`, at once where its length is declared, else
    when it grows too long.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > self._max_body_bytes:
            await self._error().response()(scope, receive, send)
            return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._error()
            return message

        await self._app(scope, limited, send)

    def _error(self) -> ApiError:
        message = f"the body must not exceed {self._max_body_bytes} bytes"
        # What is left of the body is not read, so the connection cannot be used again.
        return ApiError(413, "request_too_large", message, headers={"connection": "close"})


class StrictJsonRequest(Request):
    """A request whose `json()` refuses what the standard parser lets through or dies of."""

    async def json(self) -> Any:
        """Return the body; ApiError 400 `invalid_json` if it is not one JSON text in UTF-8."""
        body = await self.body()
        try:
            # NaN and Infinity are let through here, so that validation can name the field that
            # holds them.
            return json.loads(body.decode("utf-8-sig"), object_pairs_hook=_unique_object)
        except UnicodeDecodeError as error:
            message = f"the body is not UTF-8: byte {error.start} is invalid"
            raise ApiError(400, "invalid_json", message) from error
        except RecursionError as error:
            raise ApiError(400, "invalid_json", "the body is nested too deeply") from error
        except ValueError as error:
            raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from error


def _unique_object(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    # Two values for one name would be settled by position, differently by every proxy on the way.
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ApiError(400, "invalid_json", f"{twice!r} appears twice in one object", param=twice)
    for name in members:
        if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
            # JSON can spell half of a surrogate pair; nothing behind this door can.
            raise ApiError(400, "invalid_json", f"{name!r} is not a name: unpaired surrogate")
    return members


class StrictJsonRoute(APIRoute):
    """Routes with a JSON body: 415 unless it is declared as JSON, parsed by `StrictJsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler behind the strict parser."""
        handle = super().get_route_handler()
        has_body = self.body_field is not None

        async def strict(request: Request) -> Response:
            if has_body:
                _require_json(request.headers.get("content-type"))
            return await handle(StrictJsonRequest(request.scope, request.receive, request._send))

        return strict


def _require_json(content_type: str | None) -> None:
    essence = (content_type or "").split(";", 1)[0].strip().lower()
    is_json = essence == "application/json" or (
        essence.startswith("application/") and essence.endswith("+json")
    )
    if not is_json:
        given = f"got {essence!r}" if essence else "no content-type was sent"
        message = f"the body must be declared as content-type: application/json ({given})"
        raise ApiError(415, "unsupported_media_type", message)
