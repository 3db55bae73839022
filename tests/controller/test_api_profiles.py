"""`/profiles` over HTTP: what the database holds, and errors in OpenAI's shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.api.app import create_app
from store.profiles import ProfileRecord, ProfileStore
from store.queries import TelemetryReader
from tests.controller.service_double import ScriptedService, call


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/p.db"
    with ProfileStore.open_writer(url) as store:
        for number, name in enumerate(("old", "new")):
            document = {"name": name, "settings": {"pace": 0.9}}
            store.save(ProfileRecord(name, number, "demo", "cpu", "better", document, "s"))
        store.activate("old")
    return url


def test_profiles_are_listed_and_read_whole(url: str) -> None:
    reader = TelemetryReader.open(url)
    app = create_app(ScriptedService(), telemetry_reader=reader)
    listed = call(app, "GET", "/profiles")
    found = call(app, "GET", "/profiles/new")
    missing = call(app, "GET", "/profiles/none")
    reader.close()
    assert listed.status_code == 200
    assert listed.json()["data"] == [
        {
            "name": name, "is_active": name == "old", "model": "demo", "device": "cpu",
            "verdict": "better", "created_at": number,
        }
        for number, name in ((1, "new"), (0, "old"))
    ]  # fmt: skip
    assert found.json() == {"name": "new", "settings": {"pace": 0.9}}
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert missing.json()["error"]["param"] == "name"


def test_a_database_that_cannot_be_read_is_503_and_a_key_guards_the_route(
    url: str, tmp_path: Path
) -> None:
    reader = TelemetryReader.open(url)
    app = create_app(ScriptedService(), telemetry_reader=reader, api_key="secret")
    assert call(app, "GET", "/profiles").status_code == 401
    reader.close()
    (tmp_path / "p.db").unlink()
    headers = {"authorization": "Bearer secret"}
    for path in ("/profiles", "/profiles/old"):
        answer = call(app, "GET", path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            503,
            "telemetry_unavailable",
        )
