"""`/docs`: everything of the OpenAPI document, nothing from elsewhere, nothing that runs."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

from controller.api.app import create_app
from controller.api.reference import render
from controller.runtime.metrics import Metrics
from store.queries import TelemetryReader
from store.schema import migrate
from tests.controller.service_double import ScriptedService, call


class Page(HTMLParser):
    """What a browser would make of the page: its tags, the places it names, the links to them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.style = self.text = ""
        self._tag = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_data(self, data: str) -> None:
        if self._tag == "style":
            self.style += data
            self._tag = ""
        else:
            self.text += data


def test_the_page_has_every_route_and_field_and_needs_no_network(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    migrate(url)
    reader = TelemetryReader.open(url)
    metrics = Metrics("tiny", block_size=16, num_blocks=1)
    app = create_app(ScriptedService(), metrics=metrics, telemetry_reader=reader)
    answer = call(app, "GET", "/docs")
    reader.close()
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    page = Page(answer.text)
    assert not page.tags & {"script", "link", "img", "iframe", "form", "object", "embed", "base"}
    assert page.attributes <= {"id", "href", "lang", "charset"}
    assert not re.search(r"url\(|@import", page.style)
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert (policy["default-src"], policy["style-src"]) == ("'none'", f"'sha256-{digest}'")
    # Every link leads to a place on the page, but for the one to the document itself.
    assert len(page.ids) == len(set(page.ids))
    assert {link for link in page.links if not link.startswith("#")} == {"openapi.json"}
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    document = app.openapi()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert f"{method.upper()} {path}" in page.ids
            for parameter in operation.get("parameters", ()):
                assert f"{parameter['in']} {parameter['name']}" in page.text
    for name, schema in document["components"]["schemas"].items():
        assert name in page.ids
        for field in schema.get("properties", ()):
            assert field in page.text
    assert "integer (≥ 1, ≤ 128) or null" in page.text
    assert "ttft_ms: number (> 0) or null" in page.text


def test_texts_of_the_document_are_no_markup() -> None:
    evil = '<script>alert("&")</script>'
    field = {"type": evil, "description": evil, "default": evil}
    operation = {
        "description": evil,
        "parameters": [{"in": "query", "name": evil, "schema": {"enum": [evil]}}],
        "responses": {"200": {"description": evil, "content": {evil: {"schema": field}}}},
    }
    page = render(
        {
            "info": {"title": evil, "version": evil, "description": evil},
            "paths": {f"/{evil}": {"get": operation}},
            "components": {"schemas": {evil: {"properties": {evil: field}, "description": evil}}},
        }
    )
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 12
    assert 'id="<' not in page
