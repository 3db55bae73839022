"""`/docs`: the interface as one page that loads nothing, for people.

Owns the page's markup. Must not know a route or a field: all of it comes from the OpenAPI document.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse

_REF = "#/components/schemas/"
_METHODS = ("get", "put", "post", "delete", "options", "head", "patch")
_BOUNDS = {
    "minimum": "≥ {:g}", "exclusiveMinimum": "> {:g}", "maximum": "≤ {:g}",
    "exclusiveMaximum": "< {:g}", "minLength": "at least {} characters",
    "maxLength": "at most {} characters", "minItems": "at least {}", "maxItems": "at most {}",
}  # fmt: skip
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:auto;padding:1rem}"
    "table{border-collapse:collapse;margin:.5rem 0}"
    "td,th{border:1px solid #8888;padding:.1rem .5rem;text-align:left;vertical-align:top}"
    "section{border-top:1px solid #8888;margin-top:2rem}"
)
# No script, no image, no request to anywhere: only the style above, named by its hash.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src 'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


def reference_router(describe: Callable[[], Mapping[str, Any]]) -> APIRouter:
    """Return the route of the page for the OpenAPI document that `describe` returns."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(render(describe()), headers={"content-security-policy": _POLICY})

    return router


def render(document: Mapping[str, Any]) -> str:
    """Return the whole page; every text of the document is escaped."""
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in _METHODS
    ]
    schemas = document.get("components", {}).get("schemas", {})
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    index = "".join(f"<li>{_link(name, name)}" for name, _ in operations)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(info.get('description', ''))}"
        ' For programs: <a href="openapi.json">openapi.json</a>.'
        f"<ul>{index}</ul>"
        + "".join(_operation(name, operation) for name, operation in operations)
        + "".join(_section(name, schema, _fields(schema)) for name, schema in schemas.items())
        + "</html>\n"
    )


def _operation(name: str, operation: Mapping[str, Any]) -> str:
    parameters = [
        (f"{each['in']} {each['name']}", each.get("schema", {}), each.get("description", ""))
        for each in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {})
    answers = [
        (status, _content(answer), escape(answer.get("description", "")))
        for status, answer in operation.get("responses", {}).items()
    ]
    return _section(
        name,
        operation,
        (f"<p>Body: {_content({'content': body})}" if body else "")
        + _table(
            ("parameter", "type", "meaning"),
            [(escape(label), _type(schema), escape(text)) for label, schema, text in parameters],
        )
        + _table(("status", "answer", "when"), answers),
    )


def _section(name: str, described: Mapping[str, Any], inner: str) -> str:
    heading = f'<section id="{escape(name)}"><h2>{escape(name)}</h2>'
    return f"{heading}<p>{escape(described.get('description', ''))}{inner}</section>"


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else ""
        if field.get("default") is not None:
            default = json.dumps(field["default"])
        rows.append(
            (escape(name), _type(field), escape(default), escape(field.get("description", "")))
        )
    return _table(("field", "type", "default", "meaning"), rows) or f"<p>{_type(schema)}"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table of cells that are markup already; nothing without rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{cell}" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _content(answer: Mapping[str, Any]) -> str:
    return "<br>".join(
        f"{escape(kind)}: {_type(body.get('schema', {}))}"
        for kind, body in answer.get("content", {}).items()
    )


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema in words; what it refers to is a link."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_REF)
        return _link(name, name)
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return " or ".join(_type(each) for each in schema[word])
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
    if values is not None:
        return escape(" or ".join(json.dumps(value) for value in values))
    kind = schema.get("type", "anything")
    if kind == "array":
        kind = f"list of {_type(schema.get('items', {}))}"
    elif properties := schema.get("properties"):
        members = (f"{escape(name)}: {_type(each)}" for name, each in properties.items())
        kind = f"object of {'; '.join(members)}"
    else:
        kind = escape(kind)
    bounds = [text.format(schema[word]) for word, text in _BOUNDS.items() if word in schema]
    return kind + (f" ({escape(', '.join(bounds))})" if bounds else "")


def _link(target: str, text: str) -> str:
    return f'<a href="#{escape(target)}">{escape(text)}</a>'
