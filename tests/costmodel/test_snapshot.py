from __future__ import annotations

import copy
import json
import math
from itertools import islice
from typing import Any

import pytest

from costmodel.basis import NUM_BASIS
from costmodel.fields import SnapshotError, read_array, read_count, read_numbers
from costmodel.prior import flat_prior
from costmodel.recursive import RecursiveLeastSquares
from costmodel.snapshot import SnapshotKey, dump_model, load_model
from costmodel.synthetic import TWO_CORES, synthetic_steps

KEY = SnapshotKey("demo", "cpu", "float32", "reference", 16, "0.1.0")


def _document() -> dict[str, Any]:
    model = flat_prior()
    for step in islice(synthetic_steps(TWO_CORES, outlier_share=0.05), 50):
        model.observe(step.features, step.measured_s)
    document: dict[str, Any] = json.loads(json.dumps(dump_model(model, KEY), allow_nan=False))
    return document


DOCUMENT = _document()


def _set(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        document = document[name]
    if value is ...:
        del document[last]
    else:
        document[last] = value


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("format", 1, "format"),
        ("format", ..., "format"),
        ("kind", "gradient_boosting", "kind"),
        ("kind", ..., "kind"),
        ("key", ..., "snapshot.key"),
        ("key.model", "another", "key.model"),
        ("key.device", "cuda", "key.device"),
        ("key.dtype", "bfloat16", "key.dtype"),
        ("key.attention_backend", "flash_attn", "key.attention_backend"),
        ("key.block_size", 32, "key.block_size"),
        ("key.engine_version", ..., "key.engine_version"),
        ("state", [], "snapshot.state"),
        ("state", ..., "snapshot.state"),
        ("state.version", -1, "state.version"),
        ("state.version", 1.5, "state.version"),
        ("state.version", "7", "state.version"),
        ("state.version", True, "state.version"),
        ("state.num_drift_alarms", math.nan, "state.num_drift_alarms"),
        ("state.num_rejected.sunspots", 1, "state.num_rejected.sunspots"),
        ("state.num_rejected.outlier", -1, "state.num_rejected.outlier"),
        ("state.presence", [0.5, 0.5, 2.0], "state.presence"),
        ("state.planes.1", ..., "state.planes.1"),
        ("state.planes.0.coefficients", [math.nan] * NUM_BASIS, "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", [math.inf] * NUM_BASIS, "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", [-1.0] * NUM_BASIS, "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", [1.0] * (NUM_BASIS - 1), "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", [1.0, [2.0]], "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", {"a": 1.0}, "state.planes.0.coefficients"),
        ("state.planes.1.moment", None, "state.planes.1.moment"),
        ("state.planes.1.num_samples", ..., "state.planes.1.num_samples"),
        (
            "state.planes.1.information",
            [[float(i * 9 + j) for j in range(NUM_BASIS)] for i in range(NUM_BASIS)],
            "state.planes.1.information",
        ),
        ("state.screens.0.size", 0.0, "state.screens.0.size"),
        ("state.screens.0.run", [2.0] * 99, "state.screens.0.run"),
        ("state.margins.mixed.level", 0.9, "state.margins.mixed.level"),
        ("state.margins.mixed.scores", "none", "state.margins.mixed.scores"),
        ("state.margins.mixed.scores", [0.1] * 501, "state.margins.mixed.scores"),
        ("state.drifts.decode_only.rise", 1e9, "state.drifts.decode_only.rise"),
        ("state.windows.mixed.covered", [0.5], "state.windows.mixed.covered"),
        ("state.window.errors", [math.inf], "state.window.errors"),
    ],
)
def test_a_document_that_does_not_fit_is_refused_by_field(
    path: str, value: Any, field: str
) -> None:
    document = copy.deepcopy(DOCUMENT)
    _set(document, path, value)
    with pytest.raises(SnapshotError) as caught:
        load_model(document, KEY)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize("document", [None, "text", [1.0]])
def test_a_document_that_is_no_object_is_refused(document: Any) -> None:
    with pytest.raises(SnapshotError, match="must be an object"):
        load_model(document, KEY)


def test_an_information_matrix_that_is_not_positive_definite_is_refused() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["state"]["planes"]["0"]["information"] = [
        [-1.0 if row == column else 0.0 for column in range(NUM_BASIS)] for row in range(NUM_BASIS)
    ]
    with pytest.raises(SnapshotError, match="positive definite") as caught:
        load_model(document, KEY)
    assert caught.value.field == "state.planes.0.information"


def test_the_document_is_plain_json_and_loads_again() -> None:
    model = load_model(DOCUMENT, KEY)
    assert json.loads(json.dumps(dump_model(model, KEY), allow_nan=False)) == DOCUMENT


def test_readers_return_numbers() -> None:
    state = {"count": 3, "numbers": [1, 2.5], "matrix": [[1, 2]]}
    assert read_count(state, "count", "s") == 3
    assert read_numbers(state, "numbers", "s", 2) == [1.0, 2.5]
    assert read_array(state, "matrix", "s", (1, 2)).tolist() == [[1.0, 2.0]]


def test_a_model_that_was_stored_under_another_target_starts_warm() -> None:
    document = copy.deepcopy(DOCUMENT)
    # As written before there was a choice.
    for state in document["state"]["margins"].values():
        del state["coverage"]
    model = load_model(document, KEY)
    assert isinstance(model, RecursiveLeastSquares)
    assert model.target_coverage == 0.9
    before = model.quality()
    model.aim_for(0.75)
    again = load_model(json.loads(json.dumps(dump_model(model, KEY))), KEY)
    assert again.quality() == model.quality()
    assert again.quality().target_coverage == 0.75
    assert again.quality().num_observed == before.num_observed
    for wide, narrow in zip(before.regimes, again.quality().regimes, strict=True):
        assert narrow.margin < wide.margin
