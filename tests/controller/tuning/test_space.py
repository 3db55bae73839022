"""The space: every knob is a setting, every point valid, the defaults a point of it."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import numpy as np
import pytest

from controller.config import load_settings
from controller.policy.settings import PolicyConfig
from controller.tuning.space import (
    DEFAULTS,
    KNOBS,
    TunedSettings,
    knobs_named,
    neighbour,
    point_of,
    settings_at,
)


def test_the_defaults_are_what_a_server_ships_with(tmp_path: object) -> None:
    settings = load_settings({})
    assert TunedSettings(settings.planner, settings.max_num_seqs) == DEFAULTS


def test_every_knob_is_a_setting_with_its_default_in_range_and_a_reason() -> None:
    names = {each.name for each in fields(PolicyConfig)} | {"max_num_seqs"}
    for knob in KNOBS:
        assert knob.name in names
        assert knob.low < knob.high
        assert knob.low <= knob.default <= knob.high
        assert len(knob.reason) > 10
        assert not knob.is_log or knob.low > 0


@pytest.mark.parametrize("side", ["low", "high"])
def test_the_ends_of_every_range_are_valid_alone_and_together(side: str) -> None:
    for knob in KNOBS:
        settings_at({knob.name: getattr(knob, side)})
    settings_at({knob.name: getattr(knob, side) for knob in KNOBS})


def test_the_point_of_the_defaults_leads_back_to_them() -> None:
    assert settings_at(point_of(DEFAULTS, KNOBS)) == DEFAULTS
    for number in (1, 2, 5):
        some = KNOBS[::number]
        assert set(point_of(DEFAULTS, some)) == {knob.name for knob in some}


def test_the_top_of_the_token_budget_is_no_cap() -> None:
    assert settings_at({"token_budget": 8192}).planner.token_budget is None
    assert settings_at({"token_budget": 8191}).planner.token_budget == 8191


@pytest.mark.parametrize(
    ("number", "cap", "seats"), [(8, 8, 128), (127, 127, 128), (128, None, 128), (200, None, 200)]
)
def test_how_many_run_at_once_is_one_number(number: int, cap: int | None, seats: int) -> None:
    settings = settings_at({"max_running": number})
    assert (settings.planner.max_running, settings.max_num_seqs) == (cap, seats)
    (knob,) = knobs_named(["max_running"])
    assert point_of(settings, [knob]) == {"max_running": number}


def test_settings_survive_json_and_differences_are_named() -> None:
    changed = settings_at({"pace": 0.8, "token_budget": 512, "max_running": 192})
    assert TunedSettings.from_json(changed.to_json()) == changed
    assert TunedSettings.from_json({}) == DEFAULTS
    assert changed.changes_from(DEFAULTS) == {
        "pace": (0.95, 0.8), "token_budget": (None, 512), "max_num_seqs": (128, 192),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"pase": 1}, "pase: no such setting; known are bank"),
        ({"pace": 2.0}, "pace must be in"),
        ({"pace": True}, "pace must be in"),
        ({"drain_steps": math.inf}, "drain_steps must be finite"),
        ({"max_num_seqs": 0}, r"max_num_seqs must be an integer in \[1, 4096\]"),
        ({"max_num_seqs": 5.0}, "max_num_seqs"),
        ({"split_threshold": 1.5}, "split_threshold"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        TunedSettings.from_json(values)


def test_knobs_are_chosen_by_name_in_the_order_of_the_space() -> None:
    assert knobs_named([]) == KNOBS
    assert [k.name for k in knobs_named(["bank", "pace"])] == ["pace", "bank"]
    assert len({k.name for k in KNOBS}) == len(KNOBS)
    for a, b in itertools.combinations(KNOBS, 2):
        assert a.name != b.name
    with pytest.raises(ValueError, match="'paze' is no knob; there are pace"):
        knobs_named(["paze"])


def test_neighbours_move_every_knob_once_and_few_at_a_time() -> None:
    first = point_of(DEFAULTS, KNOBS)
    moved_by = []
    for number in range(len(KNOBS)):
        point = neighbour(KNOBS, first, number, np.random.default_rng(number))
        settings_at(point)
        for knob in KNOBS:
            assert knob.low <= point[knob.name] <= knob.high
            assert not knob.is_integer or isinstance(point[knob.name], int)
        moved_by.append({name for name in point if point[name] != first[name]})
    assert all(len(moved) <= 3 for moved in moved_by)
    assert sum(KNOBS[i].name in moved for i, moved in enumerate(moved_by)) >= len(KNOBS) - 1
    again = neighbour(KNOBS, first, 5, np.random.default_rng(5))
    assert again == neighbour(KNOBS, first, 5, np.random.default_rng(5))
