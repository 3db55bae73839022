"""Command-line options made from the settings: one fact, one home.

Owns the translation of `Settings` fields into typer options. Must not hold a default of its own.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from controller.config import Settings

_FLAG_NAMES = {
    "is_warmup_enabled": "warmup",
    "is_lenient_slo": "lenient-slo",
    "is_prefix_caching_enabled": "enable-prefix-caching",
    "is_eager_enforced": "enforce-eager",
}
_NOT_FLAGS = frozenset({"model", "planner"})


def with_settings(function: Callable[..., None]) -> Callable[..., None]:
    """Give `function(flags, …)` one option per setting.

    `flags` holds only those that were given.
    """
    own = [
        parameter
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if name != "flags"
    ]
    names = [name for name in Settings.model_fields if name not in _NOT_FLAGS]

    @functools.wraps(function)
    def wrapper(**kwargs: Any) -> None:
        flags = {name: kwargs.pop(name) for name in names}
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        function(flags=given, **kwargs)

    parameters = own + [_parameter(name, Settings.model_fields[name]) for name in names]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    # typer follows `__wrapped__` to the undecorated signature otherwise.
    del wrapper.__wrapped__
    return wrapper


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    extra = typing.cast("dict[str, Any]", field.json_schema_extra or {})
    kind = _plain_type(field.annotation)
    flag = f"--{_FLAG_NAMES.get(name, name).replace('_', '-')}"
    if kind is bool:
        flag += f"/--no-{flag[2:]}"
    default = "" if field.default in (None, ()) else f" (default: {_shown(field.default)})"
    option = typer.Option(
        flag,
        help=f"{field.description}{default}",
        rich_help_panel=extra.get("panel"),
        show_default=False,
        metavar=None if kind is bool else extra.get("metavar", _metavar(field.annotation)),
    )
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]  # made at run time
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _plain_type(annotation: Any) -> Any:
    """Reduce a field's type to what a command line can carry; pydantic does the checking."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [item for item in typing.get_args(annotation) if item is not type(None)]
        return _plain_type(inner[0])
    if origin is tuple:
        return list[str]
    if annotation in (bool, Path):
        return annotation
    # Numbers and choices stay text: the settings' own check names the field and the bound.
    return str


def _metavar(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        inner = [item for item in typing.get_args(annotation) if item is not type(None)]
        return _metavar(inner[0])
    if origin is Literal:
        return "|".join(typing.get_args(annotation))
    if origin is tuple:
        return "NAME:KEY=VALUE,…"
    return {int: "INT", float: "FLOAT", Path: "FILE", SecretStr: "KEY"}.get(annotation, "TEXT")
