"""`/telemetry/…` over HTTP: JSON, CSV, paging, and errors in OpenAI's shape."""

from __future__ import annotations

import csv
import inspect
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from controller.api.errors import install_error_handlers
from controller.api.telemetry import telemetry_router
from engine.clock import VirtualClock
from store import schema
from store.queries import TelemetryReader
from store.writer import TelemetryWriter
from tests.store.samples import RUN_AT, life_of_a_request, make_request, make_run


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[TelemetryReader]:
    """A reader of one request's life and a request that was refused."""
    url = f"sqlite:///{tmp_path}/telemetry.db"
    schema.migrate(url)
    writer = TelemetryWriter.open(url, make_run(), VirtualClock())
    for record in life_of_a_request():
        writer.offer(record)
    writer.offer(
        make_request(
            "req-2", slo_class="code", decision="reject", reason="@overloaded", attained=False
        )
    )
    assert writer.close()
    opened = TelemetryReader.open(url)
    yield opened
    opened.close()


@pytest.fixture
def client(reader: TelemetryReader) -> Iterator[TestClient]:
    """A client of an application with nothing but these routes."""
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(telemetry_router(reader))
    with TestClient(app, raise_server_exceptions=False) as opened:
        yield opened


def test_routes_never_run_on_the_event_loop(reader: TelemetryReader) -> None:
    routes = [route for route in telemetry_router(reader).routes if isinstance(route, APIRoute)]
    assert {route.path for route in routes} == {
        "/telemetry/steps",
        "/telemetry/requests",
        "/telemetry/requests/{request_id}",
        "/telemetry/events",
        "/telemetry/summary",
    }
    assert not any(inspect.iscoroutinefunction(route.endpoint) for route in routes)


def test_steps_in_pages(client: TestClient) -> None:
    first = client.get("/telemetry/steps", params={"limit": 3}).json()
    assert [row["step_no"] for row in first["data"]] == [4, 3, 2]
    second = client.get(
        "/telemetry/steps", params={"limit": 3, "cursor": first["next_cursor"]}
    ).json()
    assert [row["step_no"] for row in second["data"]] == [1]
    assert second["next_cursor"] is None


def test_a_span_may_be_iso_or_epoch_milliseconds(client: TestClient) -> None:
    spans = (
        {"since": "2023-11-14T22:13:20.200Z", "until": str(RUN_AT + 400)},
        {"since": str(RUN_AT + 200), "until": "2023-11-14T22:13:20.400"},
    )
    for span in spans:
        answer = client.get("/telemetry/steps", params=span).json()
        assert [row["step_no"] for row in answer["data"]] == [3, 2]


def test_requests_by_class_and_outcome(client: TestClient) -> None:
    for params in ({"class": "code"}, {"attained": "false"}, {"decision": "reject"}):
        answer = client.get("/telemetry/requests", params=params).json()
        assert [row["request_id"] for row in answer["data"]] == ["req-2"]


def test_one_requests_life(client: TestClient) -> None:
    life = client.get("/telemetry/requests/req-1").json()
    assert life["request"]["ttft_s"] == 0.29
    assert [row["kind"] for row in life["steps"]] == ["prefill", "prefill", "decode", "decode"]
    assert [event["reason"] for event in life["events"]] == ["kv_blocks"]


def test_summary_and_events(client: TestClient) -> None:
    summary = client.get("/telemetry/summary").json()
    assert summary["requests"]["attainment"] == 0.5
    assert summary["cost_model"] is None
    assert (
        client.get("/telemetry/summary", params={"since": RUN_AT + 1}).json()["requests"][
            "num_offered"
        ]
        == 0
    )
    events = client.get("/telemetry/events", params={"kind": "preemption"}).json()
    assert events["data"][0]["numbers"] == {"blocks": 3}


def test_csv_and_its_cursor(client: TestClient) -> None:
    answer = client.get("/telemetry/requests", params={"format": "csv", "limit": 1})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["request_id"], row["reason"]) == ("req-2", "'@overloaded")
    cursor = answer.headers["x-next-cursor"]
    rest = client.get("/telemetry/requests", params={"format": "csv", "cursor": cursor})
    assert [row["request_id"] for row in csv.DictReader(io.StringIO(rest.text))] == ["req-1"]
    assert "x-next-cursor" not in rest.headers
    life = client.get("/telemetry/requests/req-1", params={"format": "csv"})
    assert len(list(csv.DictReader(io.StringIO(life.text)))) == 4


@pytest.mark.parametrize(
    ("path", "params", "param"),
    [
        ("steps", {"limit": "0"}, "limit"),
        ("steps", {"limit": "1001"}, "limit"),
        ("steps", {"limit": "many"}, "limit"),
        ("steps", {"since": "yesterday"}, "since"),
        ("steps", {"until": "1e400"}, "until"),
        ("steps", {"until": "-5"}, "until"),
        ("steps", {"cursor": "zzz"}, "cursor"),
        ("steps", {"run_id": "a\x00b"}, "run_id"),
        ("requests", {"attained": "perhaps"}, "attained"),
        ("requests", {"format": "xml"}, "format"),
        ("requests", {"class": "c" * 200}, "class"),
        ("summary", {"since": "nan"}, "since"),
    ],
)
def test_bad_parameters_are_named(
    client: TestClient, path: str, params: dict[str, str], param: str
) -> None:
    answer = client.get(f"/telemetry/{path}", params=params)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    assert error["code"]


def test_an_unknown_request_is_404(client: TestClient) -> None:
    answer = client.get("/telemetry/requests/nope")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_a_database_that_went_away_is_503(client: TestClient, tmp_path: Path) -> None:
    assert client.get("/telemetry/steps").status_code == 200
    for path in tmp_path.iterdir():
        path.write_bytes(b"no longer a database" * 1000)
    answer = client.get("/telemetry/summary")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "telemetry_unavailable"
