"""Profiles at rest: found by name, one active per model, trials beside them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import text

from store import schema
from store.database import Database
from store.errors import DamagedDataError, DatabaseBusyError, DatabaseUnavailableError
from store.profiles import ProfileRecord, ProfileStore, TrialRecord


def profile(name: str = "p", created_at: int = 1, **changes: Any) -> ProfileRecord:
    values: dict[str, Any] = {
        "model": "demo",
        "device": "cpu",
        "verdict": "better",
        "document": {"format": 1, "planner": {"pace": 0.9, "token_budget": None}},
        "study": "s",
    }
    return ProfileRecord(name, created_at, **(values | changes))


def trial(number: int, score: float | None = 0.5, study: str = "s") -> TrialRecord:
    state, reason = ("failed", "no work") if score is None else ("complete", None)
    measures = {"attainment": [0.1, 1e-300]}
    return TrialRecord(study, number, 7, state, score, {"pace": 0.8}, measures, reason)


def test_a_profile_comes_back_as_it_was_and_the_newest_is_first(empty_url: str) -> None:
    with ProfileStore.open_writer(empty_url) as store:
        store.save(profile("old"))
        store.save(profile("new", 2, model=None, device=None, study=None))
    with ProfileStore.open_reader(empty_url) as store:
        assert store.profile("old") == profile("old")
        assert [each.name for each in store.profiles()] == ["new", "old"]
        assert store.profile("none") is None


def test_saving_again_replaces_the_profile_and_its_studys_trials(url: str) -> None:
    with ProfileStore.open_writer(url) as store:
        store.save(profile(), [trial(0), trial(1, None), trial(2)])
        store.save(profile("other"), [trial(0, study="another")])
        store.save(profile(verdict="worse"), [trial(0, 0.9)])
        found = store.profile("p")
        assert found is not None
        assert found.verdict == "worse"
        assert store.trials("s") == (trial(0, 0.9),)
        assert len(store.trials("another")) == 1


def test_trials_come_back_in_order_with_the_reason_of_those_that_failed(url: str) -> None:
    with ProfileStore.open_writer(url) as store:
        store.save(profile(), [trial(2), trial(0), trial(1, None)])
        assert store.trials("s") == (trial(0), trial(1, None), trial(2))


def test_one_profile_per_model_and_device_is_active(url: str) -> None:
    with ProfileStore.open_writer(url) as store:
        elsewhere = profile("g", 9, device="cuda (X)")
        for each in (profile("a"), profile("b"), profile("x", model="other"), elsewhere):
            store.save(each)
        assert store.active("demo") == ()
        assert store.activate("a")
        assert store.activate("x")
        assert store.activate("b")
        assert store.active("demo") == (profile("b", is_active=True),)
        assert [each.name for each in store.profiles() if each.is_active] == ["b", "x"]
        assert store.activate("g")
        assert [each.name for each in store.active("demo")] == ["g", "b"]
        store.save(profile("c", is_active=True))
        assert [each.name for each in store.profiles() if each.is_active] == ["g", "c", "x"]
        assert store.deactivate("g")
        assert store.deactivate("c")
        assert not store.deactivate("c")
        assert store.active("demo") == ()
        assert not store.activate("nobody")


def test_a_database_from_before_profiles_holds_none(url: str) -> None:
    schema.downgrade(url, "0003")
    with ProfileStore.open_reader(url) as store:
        assert store.profiles() == ()
        assert store.profile("p") is None
        assert store.active("demo") == ()
        assert store.trials("s") == ()
    with ProfileStore.open_writer(url) as store:
        store.save(profile())
        assert store.profile("p") == profile()


def test_a_damaged_profile_is_told_as_a_damaged_database(sqlite_url: str) -> None:
    with ProfileStore.open_writer(sqlite_url) as store:
        store.save(profile(is_active=True))
    database = Database.open_writer(sqlite_url)
    with database.begin() as connection:
        connection.execute(text("UPDATE profile SET document = '{\"format\":'"))
    database.close()
    with ProfileStore.open_reader(sqlite_url) as store:
        for read in (store.profiles, lambda: store.profile("p"), lambda: store.active("demo")):
            with pytest.raises(DamagedDataError, match="is damaged: a cell holds no JSON"):
                read()


@pytest.mark.parametrize(
    "broken", [profile(""), profile("n" * 129), profile(document={"planner": {"pace": math.nan}})]
)
def test_what_cannot_be_kept_is_refused_and_changes_nothing(
    url: str, broken: ProfileRecord
) -> None:
    with ProfileStore.open_writer(url) as store:
        with pytest.raises(ValueError):
            store.save(broken)
        assert store.profiles() == ()


def test_a_running_writer_is_named_and_a_missing_database_is_said(
    sqlite_url: str, tmp_path: Any
) -> None:
    server = Database.open_writer(sqlite_url)
    try:
        with pytest.raises(DatabaseBusyError, match="pid"):
            ProfileStore.open_writer(sqlite_url)
        with ProfileStore.open_reader(sqlite_url) as store:
            assert store.profiles() == ()
            with pytest.raises(DatabaseUnavailableError, match="cannot write"):
                store.save(profile())
    finally:
        server.close()
    with pytest.raises(DatabaseUnavailableError, match="no database"):
        ProfileStore.open_reader(f"sqlite:///{tmp_path}/nothing.db")
