"""Before the model is loaded: alive, not ready, and a clear 503 for everything else."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from controller.api.door import Door


def ask(door: Door, method: str, path: str) -> httpx.Response:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(app=door)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.request(method, path)

    return asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_loading_server_is_alive(path: str) -> None:
    assert (ask(Door(), "GET", path).status_code, ask(Door(), "GET", path).json()) == (
        200,
        {"status": "ok"},
    )


def test_a_loading_server_is_not_ready() -> None:
    answer = ask(Door(), "GET", "/ready")
    assert answer.status_code == 503
    assert answer.json() == {"status": "unavailable", "reason": "loading"}


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/nowhere")]
)
def test_everything_else_is_told_to_come_back(method: str, path: str) -> None:
    answer = ask(Door(), method, path)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["x-llm-d-request-dropped-reason"] == "not_ready"
    assert answer.json()["error"]["code"] == "not_ready"
    assert "loading" in answer.json()["error"]["message"]


def test_an_open_door_passes_everything_on() -> None:
    door = Door()
    door.open(PlainTextResponse("inside"))
    for path in ("/health", "/ready", "/v1/models"):
        assert ask(door, "GET", path).text == "inside"
