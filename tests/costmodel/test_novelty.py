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
from costmodel.synthetic import ACCELERATOR, DEVICES, SyntheticDevice, synthetic_steps

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


@pytest.mark.parametrize("num_steps", [600, 601, 602, 603])
def test_two_steps_of_an_unknown_kind_teach_most_of_it_and_a_lone_one_little(
    num_steps: int,
) -> None:
    model = served(num_steps)
    features, latency_s = unknown(model, 0)
    # Another kind of surprise is no confirmation.
    for factor in (1.0, 0.4, 1.0):
        model.observe(features, factor * latency_s)
        assert predicted_s(model, [features])[0] == pytest.approx(latency_s / 1.5, rel=0.1)
    model.observe(features, latency_s)
    assert predicted_s(model, [features])[0] > 0.9 * latency_s


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
    before, num_before = model.coefficients, model.quality().num_rejected.get("outlier", 0)
    features, latency_s = unknown(model, 0)
    assert not model.observe(features, 1000.0 * latency_s)
    assert model.coefficients == before
    assert model.quality().num_rejected["outlier"] == num_before + 1


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


@pytest.mark.parametrize("factor", [0.05, 0.3, 3.0, 7.0, 12.0])
def test_a_run_of_unknown_work_far_off_is_learnt_and_known_work_stays(factor: float) -> None:
    model = served()
    before_s, alarms = predicted_s(model, USUAL), model.num_drift_alarms
    features = StepFeatures(64.0, 0.0, 0.0, 64.0 * 100_000.0, 64.0**2, 1.0)
    # Below the machine's own floor nothing can be.
    latency_s = max(0.02, factor * float(predicted_s(model, [features])[0]))
    for _ in range(12):
        model.observe(features, latency_s)
    assert predicted_s(model, [features])[0] == pytest.approx(latency_s, rel=0.1)
    # A past that costs twelve times as much is felt where it is usual, too.
    moved = np.abs(predicted_s(model, USUAL) / before_s - 1.0)
    assert np.median(moved) < 0.03
    assert moved.max() < 0.03 * max(1.0, factor)
    # What is left of a surprise may look like a small drift: that only widens a margin.
    assert model.num_drift_alarms <= alarms + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("num_known", [0, 600])
def test_known_work_at_another_speed_is_not_taken_for_unknown_work(
    device: SyntheticDevice, factor: float, num_known: int
) -> None:
    model = fit_prior([(s.features(), device.latency_s(s.features())) for s in SWEEP])
    steps = list(islice(synthetic_steps(device, 1), num_known + 100))
    for step in steps[:num_known]:
        model.observe(step.features, step.measured_s)
    errors = []
    for step in steps[num_known:]:
        true_s = factor * step.true_s
        errors.append(abs(float(predicted_s(model, [step.features])[0]) / true_s - 1.0))
        model.observe(step.features, factor * step.measured_s)
    assert np.mean(errors[30:]) < 0.04


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_slow_spell_of_decodes_leaves_prompts_as_they_were(
    device: SyntheticDevice, factor: float
) -> None:
    model = fit_prior([(s.features(), device.latency_s(s.features())) for s in SWEEP])
    for step in islice(synthetic_steps(device, 1), 600):
        model.observe(step.features, step.measured_s)
    decodes = [s for s in islice(synthetic_steps(device, 2), 800) if not s.features.num_chunks]
    for index, step in enumerate(decodes[:210]):
        model.observe(step.features, (factor if index < 60 else 1.0) * step.measured_s)
    prompts = [s for s in islice(synthetic_steps(device, 3), 200) if s.features.num_chunks]
    said_s = predicted_s(model, [step.features for step in prompts])
    assert np.median(said_s / [step.true_s for step in prompts]) == pytest.approx(1.0, rel=0.08)
