from __future__ import annotations

import subprocess
import sys
from itertools import islice

import numpy as np
import pytest

from costmodel.basis import SCALES
from costmodel.envelope import NUM_PLANES
from costmodel.features import FloatArray, StepFeatures
from costmodel.plane import MIN_INTERCEPT_S
from costmodel.prior import flat_prior
from costmodel.refit import (
    MIN_SAMPLES,
    RefitJob,
    fit_planes,
    load_solver,
    relative_errors,
    search_planes,
)
from costmodel.refitted import RefittedLeastSquares
from costmodel.strata import Samples, StratifiedWindow
from costmodel.synthetic import DEVICES, TWO_CORES, SyntheticDevice, synthetic_steps
from costmodel.windowed import REFIT_EVERY, WindowedRegression


def _window(device: SyntheticDevice, count: int, seed: int = 0, outliers: float = 0.0) -> Samples:
    window = StratifiedWindow()
    for step in islice(synthetic_steps(device, seed, outlier_share=outliers), count):
        window.add(step.features, step.measured_s)
    return window.samples()


def _start(factor: float = 1.0) -> FloatArray:
    planes = np.array(flat_prior().coefficients) * SCALES
    return planes * factor


def _truth(device: SyntheticDevice) -> Samples:
    steps = list(islice(synthetic_steps(device, 77), 200))
    features = np.array([step.features for step in steps])
    return Samples(features, np.array([step.true_s for step in steps]), np.zeros(200))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outliers", [0.0, 0.02])
def test_a_fit_finds_the_device_among_outliers(device: SyntheticDevice, outliers: float) -> None:
    planes = fit_planes(_window(device, 800, outliers=outliers), _start())
    assert planes.shape == (NUM_PLANES, len(SCALES))
    assert (planes >= 0.0).all()
    assert (planes[:, 0] >= MIN_INTERCEPT_S).all()
    assert relative_errors(planes, _truth(device)).mean() < 0.02


def test_a_plane_without_samples_keeps_its_shape() -> None:
    decodes = Samples(np.array([[0.0, n, 100.0 * n, 0, 0, 0, 0] for n in range(1, 9)]),
                      np.linspace(0.1, 0.2, 8), np.arange(8.0))  # fmt: skip
    start = _start()
    start[1:, 0] *= 1e-3
    planes = fit_planes(decodes, start)
    factors = planes[1:][start[1:] > 0.0] / start[1:][start[1:] > 0.0]
    assert np.allclose(factors, factors[0])
    assert (planes[1:] > 0.0).sum() == (start[1:] > 0.0).sum()
    assert relative_errors(planes, decodes).max() < 0.02


def test_what_is_old_counts_less_but_still_counts() -> None:
    features = np.array([[0.0, n % 16 + 1.0, 16.0, 0, 0, 0, 0] for n in range(400)])
    ages = np.arange(400.0)[::-1] * 20.0
    latency_s = np.where(ages > 4000.0, 0.2, 0.1) * (1.0 + 0.02 * features[:, 1])
    planes = fit_planes(Samples(features, latency_s, ages), _start())
    fresh = Samples(features[ages < 1.0], latency_s[ages < 1.0], ages[ages < 1.0])
    assert relative_errors(planes, fresh).mean() < 0.1


def _uneven(count: int) -> Samples:
    """Prompts of 128 to 32,768 tokens, whole, on a machine that computes a token at half the speed
    from 4,096 of them on; and decodes. As measured of a 70B model on eight H100s.
    """
    rng = np.random.default_rng(3)
    tokens = 2.0 ** rng.integers(7, 16, count)
    is_decode = rng.random(count) < 0.5
    features = np.zeros((count, 7))
    features[~is_decode, 0] = tokens[~is_decode]
    chunks = np.maximum(1.0, tokens / rng.choice([512.0, 1e9], count))[~is_decode]
    features[~is_decode, 4] = tokens[~is_decode] ** 2 / chunks
    features[~is_decode, 5] = features[~is_decode, 6] = chunks
    features[is_decode, 1] = rng.integers(1, 33, int(is_decode.sum()))
    features[is_decode, 2] = features[is_decode, 1] * 500.0
    latency_s = np.maximum.reduce([np.full(count, 0.054), 0.022 + 55e-6 * tokens, 94e-6 * tokens])
    latency_s[is_decode] = 0.03 + 6e-4 * features[is_decode, 1]
    return Samples(features, latency_s, np.arange(count)[::-1].astype(float))


def test_a_search_leaves_the_nearest_minimum() -> None:
    samples = _uneven(600)
    # Where everything that a prompt can cost is spread over chunks, logits and pairs.
    start = np.tile([0.03, 0.02, 0.003, 0.0016, 0.0008, 0.0, 1e-3, 0.16, 0.16], (NUM_PLANES, 1))
    start[0, 2:] *= 0.1
    near, best = fit_planes(samples, start), search_planes(samples, start)
    assert relative_errors(near, samples).mean() > 2.0 * relative_errors(best, samples).mean()
    assert relative_errors(best, samples).mean() < 0.02


@pytest.mark.parametrize("larger", [None, 0, 1, 2])
def test_a_search_of_steps_without_prompts_has_one_start(larger: int | None) -> None:
    # Two planes start as twins: whichever of them rounding gives the samples to, the other one must
    # not be left behind.
    start = _start()
    if larger is not None:
        start[larger] *= 1.0 + 1e-12
    features = np.array([[0.0, n % 16 + 1.0, 16.0, 0, 0, 0, 0] for n in range(100)])
    samples = Samples(features, 0.1 + 0.02 * features[:, 1], np.zeros(100))
    assert relative_errors(search_planes(samples, start), samples).max() < 1e-3


def test_a_job_says_when_the_fit_is_better_and_when_it_is_not() -> None:
    samples = _window(TWO_CORES, 600)
    bad = RefitJob(samples, _start(), epoch=3).run()
    assert bad.is_better
    assert (bad.epoch, bad.num_held_out) == (3, -(-len(samples.latency_s) // 4))
    assert bad.error < 0.05 < bad.current_error
    # Against its own result there is nothing to win, and the coefficients stay.
    again = RefitJob(samples, bad.planes).run()
    assert not again.is_better
    assert np.array_equal(again.planes, bad.planes)


def test_the_solver_can_be_loaded_ahead() -> None:
    code = (
        "import sys; from costmodel.refit import load_solver; before = 'sklearn' in sys.modules\n"
        "load_solver(); print(before, 'sklearn.linear_model' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    load_solver()
    assert "sklearn.linear_model" in sys.modules


def test_an_outlier_is_no_verdict() -> None:
    wild = Samples(np.array([[0.0, 1, 9, 0, 0, 0, 0]]), np.array([1e-9]), np.zeros(1))
    assert relative_errors(_start(), wild).tolist() == [1.0]


def test_a_job_needs_enough_samples() -> None:
    few = _window(TWO_CORES, MIN_SAMPLES - 1)
    with pytest.raises(ValueError, match=f"at least {MIN_SAMPLES}"):
        RefitJob(few, _start()).run()


def _taught(count: int, factor: float = 1.0) -> RefittedLeastSquares:
    model = flat_prior(RefittedLeastSquares)
    for step in islice(synthetic_steps(TWO_CORES), count):
        model.observe(step.features, step.measured_s * factor)
    return model


def _spoil(model: RefittedLeastSquares) -> None:
    """Make the model forget what prompts cost, as a bad start would."""
    for plane in model._planes:
        plane.coefficients = plane.coefficients * np.array([1, 1, 0.1, 1, 1, 0, 0, 0, 0])
    for index, plane in enumerate(model._planes):
        model._install(index, type(plane)(plane.coefficients))


def test_a_model_takes_over_a_better_fit_and_goes_on_learning() -> None:
    model = _taught(500)
    _spoil(model)
    job = model.refit_job()
    assert job is not None
    refit = job.run()
    version = model.version
    assert model.adopt(refit)
    assert (model.num_adopted, model.version) == (1, version + 1)
    truth = _truth(TWO_CORES)
    candidates = truth.features
    before_s = model.predict(candidates).mean_s
    assert np.abs(before_s / truth.latency_s - 1.0).mean() < 0.03
    # The next samples refine it: what was adopted is believed like a memory, not like a guess.
    for step in islice(synthetic_steps(TWO_CORES, 5), 50):
        model.observe(step.features, step.measured_s)
    after_s = model.predict(candidates).mean_s
    assert not np.array_equal(after_s, before_s)
    assert np.abs(after_s / truth.latency_s - 1.0).mean() < 0.03


def test_a_fit_that_is_no_better_is_not_taken_over() -> None:
    model = _taught(500)
    job = model.refit_job()
    assert job is not None
    refit = RefitJob(job.samples, job.run().planes).run()
    assert not refit.is_better
    assert not model.adopt(refit)
    assert model.num_adopted == 0


def test_a_fit_from_before_a_change_of_speed_is_not_taken_over() -> None:
    model = _taught(500)
    _spoil(model)
    job = model.refit_job()
    assert job is not None
    refit = job.run()
    for step in islice(synthetic_steps(TWO_CORES, 9), 60):
        model.observe(step.features, step.measured_s * 3.0)
    assert model.num_drift_alarms > 0
    assert refit.is_better
    assert not model.adopt(refit)
    # What it kept moved along: the next fit is one at the new speed.
    renewed = model.refit_job()
    assert renewed is not None
    assert renewed.epoch > job.epoch
    assert np.median(renewed.samples.latency_s) > 2.0 * np.median(job.samples.latency_s)


def test_too_little_is_no_job() -> None:
    model = _taught(30)
    assert model.refit_job() is None
    assert 0 < model.num_remembered <= 30


def test_a_job_holds_copies() -> None:
    model = _taught(300)
    job = model.refit_job()
    assert job is not None
    before = job.samples.latency_s.copy(), job.planes.copy()
    for step in islice(synthetic_steps(TWO_CORES, 3), 100):
        model.observe(step.features, step.measured_s * 2.0)
    assert np.array_equal(job.samples.latency_s, before[0])
    assert np.array_equal(job.planes, before[1])


def test_the_batch_learner_refits_at_intervals() -> None:
    model = flat_prior(WindowedRegression)
    versions = []
    for step in islice(synthetic_steps(TWO_CORES), 400):
        model.observe(step.features, step.measured_s)
        versions.append(model.version)
    assert versions[-1] - versions[199] == 200 // REFIT_EVERY
    assert versions[20] >= 5, "a young model refits more often"


def test_a_refused_sample_causes_no_refit() -> None:
    model = flat_prior(WindowedRegression)
    assert not model.observe(StepFeatures(), 0.1)
    assert model.version == 0
