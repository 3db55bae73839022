"""Refusals as OpenAI error JSON: one exception, one body, one table of codes.

Owns the shape of every error that leaves the HTTP door. Must not decide whether something is
refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.step import Admission

logger = logging.getLogger("paceline.api")

CLIENT_CLOSED_STATUS = 499
"""Logged for a client that went away; never received by anyone."""

ERROR_CODES: Mapping[str, str] = {
    "invalid_json": "the body is not JSON (or not UTF-8)",
    "invalid_value": "a field has a wrong type or lies outside its range",
    "missing_required_parameter": "a field that the endpoint needs is missing",
    "unknown_parameter": "a field that the endpoint does not know",
    "unsupported_parameter": "a known field with a value that is not supported yet",
    "invalid_slo": "a target that is not a positive number of milliseconds, or an unknown class",
    "invalid_token_id": "a token id outside the vocabulary",
    "invalid_messages": "the chat template cannot render these messages",
    "context_length_exceeded": "the prompt does not fit the context or the KV pool",
    "kv_never_fits": "the KV pool could never hold the request",
    "invalid_api_key": "the key is missing or wrong",
    "model_not_found": "no such model is served",
    "not_found": "no such route",
    "method_not_allowed": "the route does not know this method",
    "request_too_large": "the body exceeds the limit",
    "unsupported_media_type": "the body is not declared as application/json",
    "ttft_unreachable": "the target cannot be met even on an idle server",
    "tpot_unreachable": "the pace cannot be kept even on an idle server",
    "overloaded": "the target cannot be met now",
    "queue_full": "too many requests or prompt tokens are waiting",
    "deadline_expired": "the target passed while the request was waiting",
    "generation_failed": "this request failed in the engine",
    "internal_error": "a bug of the server",
    "cancelled": "the server ended the request",
    "draining": "the server is shutting down",
    "not_ready": "the server is loading",
    "dead": "the engine has stopped",
    "telemetry_unavailable": "the telemetry database cannot be read",
}
"""Every `error.code` that this door can send, and what it means."""

RETRY_AFTER_S = 2
"""When to come back to a server that loads or leaves: another one may answer, or this one again."""

_MAX_MESSAGE_CHARS = 2000
_MAX_PARAM_CHARS = 200
_PROMPT_REASONS = frozenset({"context_length", "context_length_exceeded", "kv_never_fits"})
_PASSING_REASONS = frozenset({"draining", "not_ready"})
_UNAVAILABLE_REASONS = _PASSING_REASONS | {"dead"}
_STATUS_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    503: "not_ready",
}
_PYDANTIC_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "json_invalid": "invalid_json",
    "unsupported_parameter": "unsupported_parameter",
}


class ApiError(HTTPException):
    """A refusal with an HTTP status, a stable `code` and the field (`param`) or header that
    caused it.
    """

    def __init__(
        self,
        status_code: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status_code, message, dict(headers) if headers else None)
        self.code = code
        self.param = param
        self.extra = dict(extra or {})

    def body(self) -> dict[str, Any]:
        """Return the OpenAI error object, `{"error": {...}}`."""
        return error_body(self.status_code, self.code, self.detail, self.param, self.extra)

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        return JSONResponse(self.body(), status_code=self.status_code, headers=self.headers)


def error_body(
    status_code: int,
    code: str,
    message: str,
    param: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return `{"error": {message, type, param, code, ...extra}}`; the type follows the status."""
    error = {
        "message": _printable(message, _MAX_MESSAGE_CHARS),
        "type": error_type(status_code),
        "param": None if param is None else _printable(param, _MAX_PARAM_CHARS),
        "code": code,
    }
    return {"error": {**error, **(extra or {})}}


def _printable(text: str, max_chars: int) -> str:
    # Names of fields come from the client: they may be long, or not even be encodable.
    shown = text if len(text) <= max_chars else f"{text[:max_chars]}..."
    return shown.encode("utf-8", "backslashreplace").decode()


def error_type(status_code: int) -> str:
    """Return OpenAI's error type for a status."""
    if status_code == 401:
        return "authentication_error"
    if status_code == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status_code < 500 else "server_error"


def invalid(param: str, message: str, *, code: str = "invalid_value") -> ApiError:
    """Return a 400 that names its field."""
    return ApiError(400, code, message, param=param)


def unavailable(code: str, message: str) -> ApiError:
    """Return a 503; `retry-after` says when to come back, unless the engine is `dead`."""
    headers = {"x-llm-d-request-dropped-reason": code}
    if code in _PASSING_REASONS:
        headers.update(_retry_headers(RETRY_AFTER_S))
    return ApiError(503, code, message, headers=headers)


def _retry_headers(retry_s: float) -> dict[str, str]:
    retry_ms = max(1, math.ceil(retry_s * 1000))
    return {
        "retry-after": str(max(1, math.ceil(retry_ms / 1000))),
        "retry-after-ms": str(retry_ms),
    }


def refusal(admission: Admission, headers: Mapping[str, str] | None = None) -> ApiError:
    """Return the answer to a rejected request: 400 if it can never fit, 503 if the server is
    leaving, else 429.

    It tells when to come back (`retry-after` in whole seconds, at least 1; `retry-after-ms`); a 429
    that waiting cannot help says `x-should-retry: false` instead.
    """
    sent = {**(headers or {}), "x-slo-decision": "rejected"}
    extra: dict[str, Any] = {}
    if admission.predicted_ttft_s is not None and math.isfinite(admission.predicted_ttft_s):
        predicted_ms = round(admission.predicted_ttft_s * 1000, 3)
        extra["predicted_ttft_ms"] = predicted_ms
        sent["x-slo-predicted-ttft-ms"] = f"{predicted_ms:g}"
    reason = admission.reason
    message = admission.message or f"the request was rejected: {reason}"
    if reason in _PROMPT_REASONS:
        code = "kv_never_fits" if reason == "kv_never_fits" else "context_length_exceeded"
        return ApiError(400, code, message, param="prompt", headers=sent, extra=extra)
    sent["x-llm-d-request-dropped-reason"] = reason
    retry_s = admission.retry_after_s
    if retry_s is None and reason in _PASSING_REASONS:
        retry_s = RETRY_AFTER_S
    if retry_s is not None and math.isfinite(retry_s):
        sent.update(_retry_headers(retry_s))
    elif reason not in _UNAVAILABLE_REASONS:
        sent["x-should-retry"] = "false"
    status = 503 if reason in _UNAVAILABLE_REASONS else 429
    return ApiError(status, reason, message, headers=sent, extra=extra)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of `app`, the framework's own included, OpenAI error JSON."""
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    if isinstance(exc, ApiError):
        return exc.response()
    if not isinstance(exc, HTTPException):
        raise exc
    status = exc.status_code
    default = "internal_error" if status >= 500 else "invalid_value"
    code = _STATUS_CODES.get(status, default)
    message = str(exc.detail)
    if status in {404, 405} and message in {"Not Found", "Method Not Allowed"}:
        message = f"{message}: {request.method} {request.url.path}"
    return JSONResponse(error_body(status, code, message), status, headers=exc.headers)


async def _on_validation_error(_: Request, exc: Exception) -> Response:
    if not isinstance(exc, RequestValidationError):
        raise exc
    return validation_error(exc.errors()).response()


async def _on_bug(request: Request, exc: Exception) -> Response:
    # The traceback is logged by the server (Starlette re-raises after this answer); the client
    # learns nothing of it.
    logger.error("%s %s failed: %s", request.method, request.url.path, type(exc).__name__)
    body = error_body(500, "internal_error", "the server failed to handle this request")
    return JSONResponse(body, 500)


def validation_error(errors: Sequence[Any]) -> ApiError:
    """Return the 400 for pydantic's findings: the first one, named by its field."""
    first = errors[0]
    kind = str(first["type"])
    context = first.get("ctx") or {}
    code = str(context.get("code") or _PYDANTIC_CODES.get(kind, "invalid_value"))
    # A validator that looks inside a field says where in `suffix`.
    param = f"{field_path(first['loc'])}{context.get('suffix', '')}".lstrip(".")
    message = str(first["msg"])
    if kind == "extra_forbidden":
        message = f"Unknown parameter: {param!r}"
    elif kind == "missing":
        message = f"Missing required parameter: {param!r}" if param else "a JSON body is required"
    elif kind in {"model_type", "model_attributes_type"}:
        message = f"{param or 'the body'} must be a JSON object"
    elif param:
        message = f"{param}: {message}"
    return ApiError(400, code, message, param=param or None)


def field_path(location: Sequence[Any]) -> str:
    """Return a pydantic location as OpenAI names fields: `messages[0].content`."""
    path = ""
    for part in location[1:] if location and location[0] in {"body", "query", "path"} else location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else str(part)
    return path
