"""Per-request targets from every channel that clients and gateways use, and the labels beside them.

Owns the order of the channels (docs/http.md) and what a target may look like. Must not know
deadlines or admission: it ends with an `Slo`, a class name and a tenant key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers

from controller.api.errors import ApiError, invalid
from controller.policy.slo import MAX_TARGET_S, Slo

KINDS = ("ttft", "tpot", "e2e")
HEADER_CHANNELS: tuple[Mapping[str, str], ...] = (
    {kind: f"x-paceline-slo-{kind}-ms" for kind in KINDS},
    {kind: f"x-slo-{kind}-ms" for kind in KINDS},
    {kind: f"x-llm-d-slo-{kind}-ms" for kind in ("ttft", "tpot")},
)
"""Header names by kind of target, most important channel first; the body's `slo` comes before all
of them.
"""

OBJECTIVE_HEADER = "x-llm-d-inference-objective"
TENANT_HEADER = "x-llm-d-inference-fairness-id"
CLIENT_ID_HEADER = "x-request-id"
MAX_TARGET_MS = MAX_TARGET_S * 1000

_DEFAULT_TIERS = frozenset({"auto", "default"})
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_MAX_LABEL_CHARS = 128

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Targets:
    """What a client asked of the latency of its request.

    `slo` holds the given targets in seconds, `slo_class` a class of the settings (None = the
    server's default) and `num_ignored` what the lenient mode left out.
    """

    slo: Slo
    slo_class: str | None
    num_ignored: int = 0


class _Reader:
    """Collects targets; in lenient mode a bad value counts instead of refusing the request."""

    def __init__(self, *, is_lenient: bool) -> None:
        self._is_lenient = is_lenient
        self.num_ignored = 0

    def attempt(self, read: Callable[..., ValueT | None], *args: Any) -> ValueT | None:
        try:
            return read(*args)
        except ApiError:
            if not self._is_lenient:
                raise
            self.num_ignored += 1
            return None


def read_targets(
    headers: Headers,
    *,
    body_slo: object = None,
    service_tier: str | None = None,
    classes: Collection[str] = (),
    is_lenient: bool = False,
) -> Targets:
    """Return the targets of a request, each kind from the first channel that gives it.

    Every given value is checked, also one that a stronger channel overrides. ApiError 400
    `invalid_slo` names the header or field; with `is_lenient` a bad value is left out and
    counted.
    """
    reader = _Reader(is_lenient=is_lenient)
    found: dict[str, float] = {}
    for kind, value in _body_targets(body_slo, reader).items():
        found.setdefault(kind, value)
    for channel in HEADER_CHANNELS:
        for kind, name in channel.items():
            target = reader.attempt(_header_target, headers, name)
            if target is not None:
                found.setdefault(kind, target)
    slo_class = reader.attempt(_class_name, headers, service_tier, classes)
    slo = Slo(**{f"{kind}_s": value / 1000 for kind, value in found.items()})
    return Targets(slo, slo_class, reader.num_ignored)


def _body_targets(body_slo: object, reader: _Reader) -> dict[str, float]:
    if body_slo is None:
        return {}
    found: dict[str, float] = {}
    for name, value in (reader.attempt(_body_object, body_slo) or {}).items():
        target = reader.attempt(_body_target, name, value)
        if target is not None:
            found[name.removesuffix("_ms")] = target
    return found


def _body_object(body_slo: object) -> dict[str, Any]:
    if not isinstance(body_slo, dict):
        raise invalid("slo", "slo must be an object such as {'ttft_ms': 500}", code="invalid_slo")
    return body_slo


def _body_target(name: str, value: object) -> float | None:
    param = f"slo.{name}"
    if name.removesuffix("_ms") not in KINDS or not name.endswith("_ms"):
        known = ", ".join(f"{kind}_ms" for kind in KINDS)
        raise invalid(param, f"{param} is not a target; known are {known}", code="invalid_slo")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"{param} must be a number of milliseconds, got {_shown(value)}"
        raise invalid(param, message, code="invalid_slo")
    return _checked(param, value)


def _header_target(headers: Headers, name: str) -> float | None:
    # A proxy may join repeated headers with commas; both spellings are duplicates.
    values = [part.strip() for value in headers.getlist(name) for part in value.split(",")]
    if not values:
        return None
    for value in values:
        if not _NUMBER.fullmatch(value):
            message = f"header {name} must be a number of milliseconds, got {_shown(value)}"
            raise invalid(name, message, code="invalid_slo")
    targets = {_checked(name, float(value)) for value in values}
    if len(targets) > 1:
        message = f"header {name} is given more than once with different values"
        raise invalid(name, message, code="invalid_slo")
    return targets.pop()


def _checked(param: str, value: float) -> float:
    # Compared before any conversion: an integer may be too large for a float.
    if not 0 < value <= MAX_TARGET_MS:  # false for NaN too
        shown = _shown(value)
        message = f"{param} must be a number of milliseconds in (0, {MAX_TARGET_MS:g}], got {shown}"
        raise invalid(param, message, code="invalid_slo")
    target = float(value)
    if target / 1000 <= 0:
        raise invalid(param, f"{param} is too small to be a target", code="invalid_slo")
    return target


def _class_name(headers: Headers, service_tier: str | None, classes: Collection[str]) -> str | None:
    """Return the tier's class before the objective's; both are checked."""
    is_known_tier = service_tier in classes
    if service_tier is not None and not is_known_tier and service_tier not in _DEFAULT_TIERS:
        raise _unknown_class("service_tier", service_tier, classes)
    objective = _objective(headers, classes)
    if service_tier is None:
        return objective
    return service_tier if is_known_tier else None


def _objective(headers: Headers, classes: Collection[str]) -> str | None:
    objectives = {value.strip() for value in headers.getlist(OBJECTIVE_HEADER)} - {""}
    if not objectives:
        return None
    if len(objectives) > 1:
        message = f"header {OBJECTIVE_HEADER} is given more than once with different values"
        raise invalid(OBJECTIVE_HEADER, message, code="invalid_slo")
    objective = objectives.pop()
    if objective not in classes:
        raise _unknown_class(OBJECTIVE_HEADER, objective, classes)
    return objective


def _unknown_class(param: str, name: str, classes: Collection[str]) -> ApiError:
    known = ", ".join(sorted(classes)) or "none"
    message = f"{param}: no SLO class is called {_shown(name)}; the server knows {known}"
    return invalid(param, message, code="invalid_slo")


def read_tenant(headers: Headers, user: str | None) -> str | None:
    """Return the key of the client's tenant: the gateway's header, else the body's `user`."""
    return headers.get(TENANT_HEADER) or user or None


def tenant_names(headers: Headers, user: str | None) -> tuple[str, ...]:
    """Return where the request names a tenant; no policy counts by tenant yet, so the answer says
    that nothing changed.
    """
    names = {TENANT_HEADER: headers.get(TENANT_HEADER), "user": user}
    return tuple(name for name, value in names.items() if value)


def read_client_id(headers: Headers) -> str | None:
    """Return the client's own request id, printable and at most 128 characters, or None."""
    given = headers.get(CLIENT_ID_HEADER)
    if not given or len(given) > _MAX_LABEL_CHARS or not given.isascii() or not given.isprintable():
        return None
    return given


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**18:
        return "a huge integer"  # its digits may be too many to print
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
