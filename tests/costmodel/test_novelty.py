"""A surprise in work of an unknown kind tells what such work takes, not how fast the machine is."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from costmodel.basis import NUM_BASIS
from costmodel.features import StepFeatures
from costmodel.plane import FORGETTING, NonNegativePlane
from costmodel.prior import fit_prior, flat_prior, sweep_plan
from costmodel.recursive import RecursiveLeastSquares
from costmodel.synthetic import ACCELERATOR, synthetic_steps

SWEEP = sweep_plan(512, 64, 2048)
USUAL = [step.features for step in islice(synthetic_steps(ACCELERATOR, 7), 50)]


def served(num_steps: int = 600) -> RecursiveLeastSquares:
    """A model of the make-believe accelerator, at contexts of up to 4,096 tokens a request."""
    model = fit_prior([(s.features(), ACCELERATOR.latency_s(s.features())) for s in SWEEP])
    for step in islice(synthetic_steps(ACCELERATOR), num_steps):
        model.observe(step.features, step.measured_s)
    return model


def predicted_s(model: RecursiveLeastSquares, steps: list[StepFeatures]) -> np.ndarray:
    return model.predict(np.array(steps)).mean_s


def unknown(model: RecursiveLeastSquares, index: int) -> tuple[StepFeatures, float]:
    """A chunk behind a past fifty times as long as any before, which takes half as long again as
    is believed.
    """
    chunk, past = 64.0, 100_000.0 + 64.0 * index
    features = StepFeatures(chunk, 0.0, 0.0, chunk * past, chunk * chunk, 1.0)
    return features, 1.5 * float(predicted_s(model, [features])[0])


def test_unknown_work_changes_nothing_of_what_is_known() -> None:
    model = served()
    before_s, alarms = predicted_s(model, USUAL), model.num_drift_alarms
    first, latency_s = unknown(model, 0)
    for index in range(12):
        features, _ = unknown(model, index)
        model.observe(features, latency_s)
    assert predicted_s(model, [first])[0] == pytest.approx(latency_s, rel=0.05)
    assert model.num_drift_alarms == alarms
    assert predicted_s(model, USUAL) == pytest.approx(before_s, rel=0.03)


def test_one_step_of_an_unknown_kind_teaches_most_of_it() -> None:
    model = served()
    features, latency_s = unknown(model, 0)
    model.observe(features, latency_s)
    assert predicted_s(model, [features])[0] > 0.85 * latency_s


def test_known_work_that_is_slower_is_a_slower_machine() -> None:
    model = served()
    far, _ = unknown(model, 0)
    before_s = predicted_s(model, [far])[0]
    for step in islice(synthetic_steps(ACCELERATOR, 1), 60):
        model.observe(step.features, 1.5 * step.measured_s)
    assert model.num_drift_alarms >= 1
    assert predicted_s(model, [far])[0] == pytest.approx(1.5 * before_s, rel=0.15)


def test_an_outlier_of_an_unknown_kind_teaches_nothing() -> None:
    model = served()
    before = model.coefficients
    features, latency_s = unknown(model, 0)
    assert not model.observe(features, 1000.0 * latency_s)
    assert model.coefficients == before
    assert model.quality().num_rejected == {"outlier": model.quality().num_rejected["outlier"]}


def test_a_model_that_knows_nothing_still_takes_its_scale_from_the_first_steps() -> None:
    model = flat_prior()
    steps = [(features, ACCELERATOR.latency_s(features)) for features in USUAL[:8]]
    for features, latency_s in steps:
        model.observe(features, 20.0 * latency_s)
    ratio = predicted_s(model, [features for features, _ in steps]) / [s for _, s in steps]
    assert np.median(ratio) == pytest.approx(20.0, rel=0.3)


def test_novelty_falls_as_one_over_the_steps_that_are_remembered() -> None:
    plane = NonNegativePlane(np.full(NUM_BASIS, 0.03))
    row = np.zeros(NUM_BASIS)
    row[[0, 3]] = 1.0
    other = np.zeros(NUM_BASIS)
    other[[0, 5]] = 1.0
    assert not plane.is_trusted
    plane.believe(np.tile(row, (20, 1)), np.full(20, 0.05))
    assert plane.is_trusted
    assert plane.novelty(row, 0.05) == pytest.approx(1.0 / 20.0, rel=0.05)
    assert plane.novelty(other, 0.05) > 1.0
    # Half of the time at the same work, a step would have told four times as much.
    assert plane.novelty(row, 0.1) == pytest.approx(0.25 / 20.0, rel=0.05)
    for _ in range(500):
        plane.learn(row, 0.05, 0.05)
    assert plane.novelty(row, 0.05) == pytest.approx(FORGETTING, rel=0.25)
    assert plane.novelty(other, 0.05) > 1.0
