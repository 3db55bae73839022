from __future__ import annotations

import copy
import json
import math
from itertools import islice
from typing import Any

import numpy as np
import pytest

from costmodel import snapshot
from costmodel.basis import NUM_BASIS
from costmodel.fields import SnapshotError, read_array, read_count, read_numbers
from costmodel.prior import flat_prior
from costmodel.recursive import RecursiveLeastSquares
from costmodel.refitted import RefittedLeastSquares
from costmodel.snapshot import SnapshotKey, dump_model, load_model
from costmodel.synthetic import TWO_CORES, synthetic_steps
from costmodel.window import QualityWindow
from costmodel.windowed import WindowedRegression

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
        ("kind", [], "kind"),
        ("state.version", 10**400, "state.version"),
        ("state.version", 2**53 + 1, "state.version"),
        ("state.split_s", 1e308, "state.split_s"),
        ("state.planes.0.coefficients", [10**400] * NUM_BASIS, "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", [1e308] * NUM_BASIS, "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", [2e4] * NUM_BASIS, "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", ["1.5"] * NUM_BASIS, "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", [True] * NUM_BASIS, "state.planes.0.coefficients"),
        ("state.planes.0.coefficients", [True, *[1.0] * 8], "state.planes.0.coefficients"),
        ("state.planes.0.moment", [1e300] * NUM_BASIS, "state.planes.0.moment"),
        ("state.planes.0.moment", [-1.0] * NUM_BASIS, "state.planes.0.moment"),
        ("state.planes.0.moment", [1e30] * NUM_BASIS, "state.planes.0.moment"),
        (
            "state.planes.0.information",
            [[1e300 * (i == j) for j in range(NUM_BASIS)] for i in range(NUM_BASIS)],
            "state.planes.0.information",
        ),
        ("state.screens.0.run", [-1.0], "state.screens.0.run"),
        ("state.screens.0.run", [1e308], "state.screens.0.run"),
        ("state.margins.mixed.prior", 1e308, "state.margins.mixed.prior"),
        ("state.margins.mixed.scores", [1e308], "state.margins.mixed.scores"),
        ("state.margins.mixed.scores", [-5.0], "state.margins.mixed.scores"),
        ("state.window.errors", [1e308], "state.window.errors"),
        ("state.window.errors", [-0.1], "state.window.errors"),
        ("state.window.error_sum", 1e30, "state.window.error_sum"),
        ("state.window.error_sum", math.nan, "state.window.error_sum"),
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


NASTY: tuple[Any, ...] = (
    ..., None, True, "1.5", [], {}, [None], [[[[]]]], -1, 0, 10**400, 2**64, 1e-320, 1e30, -1e30,
    1e150, 1e308, -1e308, math.nan, -math.inf,
)  # fmt: skip


def _places(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to everything in a document; of a list its first and last members."""
    members: list[Any] = []
    if isinstance(part, dict):
        members = list(part)
    elif isinstance(part, list):
        members = sorted({0, len(part) - 1} if part else ())
    below = [each for member in members for each in _places(part[member], (*path, member))]
    return [path, *below]


def _replaced(part: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a document with something else at the end of the path."""
    if not path:
        return None if value is ... else value
    copied = part.copy()
    if len(path) == 1 and value is ...:
        del copied[path[0]]
    else:
        copied[path[0]] = _replaced(part[path[0]], path[1:], value)
    return copied


def _memory_document() -> dict[str, Any]:
    model = flat_prior(WindowedRegression)
    for step in islice(synthetic_steps(TWO_CORES), 20):
        model.observe(step.features, step.measured_s)
    document: dict[str, Any] = json.loads(json.dumps(dump_model(model, KEY), allow_nan=False))
    return document


@pytest.mark.parametrize("start", [(), ("state", "memory")], ids=["all", "memory"])
def test_whatever_stands_in_a_document_it_is_refused_or_predicts_and_learns(
    start: tuple[str, ...],
) -> None:
    document = _memory_document() if start else DOCUMENT
    part = document
    for name in start:
        part = part[name]
    steps = list(islice(synthetic_steps(TWO_CORES, seed=1), 12))
    candidates = np.array([step.features for step in steps])
    num_refused = 0
    for path in _places(part, start):
        for value in NASTY:
            try:
                model = load_model(_replaced(document, path, value), KEY)
            except SnapshotError:
                num_refused += 1
                continue
            for step in steps[: 1 if start else 3]:
                model.observe(step.features, step.measured_s)
            mean_s, upper_s = model.predict(candidates)
            assert np.isfinite(upper_s).all(), (path, value)
            assert (mean_s > 0.0).all(), (path, value)
            assert math.isfinite(model.quality().mape), (path, value)
    assert num_refused > 100


def test_a_restore_that_fails_in_a_way_nobody_thought_of_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(state: Any, path: str) -> Any:
        raise OverflowError("too large")

    monkeypatch.setattr(RecursiveLeastSquares, "restore", fail)
    monkeypatch.setitem(snapshot._KINDS, RecursiveLeastSquares.kind, fail)
    with pytest.raises(SnapshotError, match=r"snapshot: cannot be read \(OverflowError: too large"):
        load_model(DOCUMENT, KEY)


@pytest.mark.parametrize("learner", [RecursiveLeastSquares, WindowedRegression])
def test_what_a_model_stores_is_never_refused(learner: Any) -> None:
    """Not while young, nor between two solutions, after outliers or a change of speed."""
    model = flat_prior(learner)
    steps = islice(synthetic_steps(TWO_CORES, outlier_share=0.05), 400)
    for index, step in enumerate(steps):
        factor = (1.0, 3.0, 0.2, 40.0)[index // 100]
        model.observe(step.features, step.measured_s * factor)
        if index % 7 == 0 or index < 60:
            document = json.loads(json.dumps(dump_model(model, KEY), allow_nan=False))
            assert load_model(document, KEY).state() == model.state()
    model.change_speed(1e-3)
    load_model(dump_model(model, KEY), KEY)
    model.change_speed(1e6)
    load_model(dump_model(model, KEY), KEY)


def test_the_served_learner_comes_back_without_its_window_of_steps() -> None:
    model = flat_prior(RefittedLeastSquares)
    for step in islice(synthetic_steps(TWO_CORES), 150):
        model.observe(step.features, step.measured_s)
    twin = load_model(json.loads(json.dumps(dump_model(model, KEY))), KEY)
    assert isinstance(twin, RefittedLeastSquares)
    assert model.num_remembered > 100
    assert (twin.num_remembered, twin.refit_job()) == (0, None)
    assert twin.coefficients == model.coefficients


def test_an_error_against_next_to_nothing_leaves_the_mean_finite() -> None:
    window = QualityWindow()
    window.record(math.inf, is_covered=True)
    for _ in range(500):
        window.record(0.5, is_covered=True)
    assert window.mape == pytest.approx(0.5)
    assert QualityWindow.restore(window.state(), "window").state() == window.state()


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
