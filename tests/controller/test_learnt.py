"""What a server learnt, read back from the model that it stored: numbers, or why there are none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

from controller.runtime.learnt import learnt_costs
from costmodel.prior import flat_prior
from costmodel.refitted import RefittedLeastSquares
from costmodel.snapshot import SnapshotKey, dump_model
from costmodel.synthetic import TWO_CORES, synthetic_steps

KEY = SnapshotKey("model", "cpu", "float32", "reference", 16, "0.1.0")


class Rows:
    """A reader of one row, or of none."""

    def __init__(self, row: Mapping[str, Any] | None) -> None:
        self.row = row
        self.asked: list[str | None] = []

    def newest_model(self, run_id: str | None = None) -> Mapping[str, Any] | None:
        self.asked.append(run_id)
        return self.row


def _taught() -> RefittedLeastSquares:
    model = flat_prior(RefittedLeastSquares)
    for step in islice(synthetic_steps(TWO_CORES), 300):
        model.observe(step.features, step.measured_s)
    return model


def _row(document: Any, key: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "run_id": "run-a", "at": 7, "learner": "refitted_least_squares", "num_observed": 300,
        "key": asdict(KEY) if key is None else key, "document": document,
    }  # fmt: skip


def test_costs_are_those_of_the_model_that_was_stored() -> None:
    model = _taught()
    reader = Rows(_row(json.loads(json.dumps(dump_model(model, KEY)))))
    found = learnt_costs(reader, "run-a")
    assert reader.asked == ["run-a"]
    assert found == {
        "run_id": "run-a", "at": 7, "learner": "refitted_least_squares", "num_observed": 300,
        "problem": None, "mixing_ratio": model.quality().mixing_ratio, **asdict(model.marginals()),
    }  # fmt: skip
    assert 0.8 < found["mixing_ratio"] < 1.0


def test_nothing_stored_has_no_costs_and_what_is_broken_says_why() -> None:
    assert learnt_costs(Rows(None)) is None
    document = dump_model(_taught(), KEY)
    broken = learnt_costs(Rows(_row({**document, "format": 1})))
    assert broken is not None
    assert broken["problem"] == "format: must be 2, got 1"
    assert "floor_s" not in broken
    other = learnt_costs(Rows(_row(document, {"colour": "red"})))
    assert other is not None
    assert "colour" in other["problem"]
