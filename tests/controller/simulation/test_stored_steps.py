"""Stored steps: which of them teach, and how far back they are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from controller.simulation.stored_steps import features_of, is_lesson, read_steps
from costmodel.features import StepFeatures
from tests.controller.simulation.stored_runs import database, reading, write
from tests.store.samples import make_step

ROW: dict[str, Any] = {
    "failure": None, "num_retries": 0, "num_swapped_blocks": None, "num_failed_swaps": None,
    "duration_s": 0.1,
}  # fmt: skip


def test_steps_that_the_server_did_not_learn_from_are_no_lesson() -> None:
    assert is_lesson(ROW)
    for changes in (
        {"failure": "boom"}, {"num_retries": 1}, {"num_swapped_blocks": 2},
        {"num_failed_swaps": 1}, {"duration_s": 0.0}, {"duration_s": math.inf},
    ):  # fmt: skip
        assert not is_lesson(ROW | changes), changes


def test_the_newest_steps_are_read_oldest_first(tmp_path: Path) -> None:
    url = database(tmp_path)
    write(url, *(make_step(i, at=1000 + i) for i in range(1, 8)))
    with reading(url) as reader:
        every = read_steps(reader, "run-a")
        newest = read_steps(reader, "run-a", 3)
    assert [row["step_no"] for row in every] == list(range(1, 8))
    assert [row["step_no"] for row in newest] == [5, 6, 7]


def test_what_an_older_revision_did_not_write_down_is_no_work() -> None:
    row = dict.fromkeys(
        ("prefill_tokens", "decode_requests", "decode_context_tokens", "chunk_past_tokens",
         "chunk_squared_tokens"), 2,
    ) | {"num_chunks": None, "num_prompt_logits": None}  # fmt: skip
    assert features_of(row) == StepFeatures(2.0, 2.0, 2.0, 2.0, 2.0, 0.0, 0.0)
