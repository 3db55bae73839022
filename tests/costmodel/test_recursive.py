from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.basis import NUM_BASIS, SCALES
from costmodel.features import NUM_FEATURES, FloatArray, Regime, StepFeatures
from costmodel.hygiene import SHIFT_RUN, RejectReason
from costmodel.plane import NonNegativePlane
from costmodel.prior import fit_prior, flat_prior, sweep_plan
from costmodel.recursive import RecursiveLeastSquares
from costmodel.synthetic import ACCELERATOR, DEVICES, TWO_CORES, SyntheticDevice, synthetic_steps

SWEEP = sweep_plan(1024, 64, 4096)
EYE = np.eye(NUM_FEATURES)


def _taught(device: SyntheticDevice, count: int, seed: int = 0) -> RecursiveLeastSquares:
    model = flat_prior()
    for step in islice(synthetic_steps(device, seed), count):
        model.observe(step.features, step.measured_s)
    return model


def _error(model: RecursiveLeastSquares, device: SyntheticDevice, regime: Regime) -> float:
    steps = [s for s in islice(synthetic_steps(device, 99), 300) if s.features.regime is regime]
    predicted_s = model.predict(np.array([step.features for step in steps])).mean_s
    true_s = np.array([step.true_s for step in steps])
    return float((np.abs(predicted_s - true_s) / true_s).mean())


def test_the_version_counts_changes_of_the_coefficients() -> None:
    model = flat_prior()
    assert model.version == model.quality().version == 0
    decode = StepFeatures(0.0, 1.0, 16.0)
    before = model.coefficients
    assert model.observe(decode, 0.021)
    assert model.version == 1
    assert model.coefficients != before
    assert not model.observe(decode, -1.0)
    assert model.version == 1


def test_what_only_the_caller_knows_is_counted_too() -> None:
    model = flat_prior()
    for _ in range(3):
        model.reject(RejectReason.SWAP)
    model.reject(RejectReason.FAILED_STEP)
    assert model.quality().num_rejected == {"swap": 3, "failed_step": 1}


def test_an_outlier_is_counted_and_missed_but_teaches_nothing() -> None:
    model = _taught(TWO_CORES, 600)
    before, coefficients = model.quality(), model.coefficients
    assert not model.observe(StepFeatures(0.0, 4.0, 400.0), 100.0)
    after = model.quality()
    assert after.num_rejected["outlier"] == before.num_rejected.get("outlier", 0) + 1
    assert after.coverage <= before.coverage
    assert after.mape == before.mape
    assert after.num_observed == before.num_observed
    assert model.coefficients == coefficients


@pytest.mark.parametrize("device", DEVICES)
def test_a_change_of_speed_seen_in_one_regime_is_believed_of_all(device: SyntheticDevice) -> None:
    model = _taught(device, 1000)
    alarms = model.num_drift_alarms
    decode = StepFeatures(0.0, 20.0, 20.0 * 1000.0)
    for _ in range(SHIFT_RUN):
        model.observe(decode, 2.0 * device.latency_s(decode))
    assert model.num_drift_alarms == alarms + 1
    mixed = StepFeatures(512.0, 20.0, 20.0 * 1000.0, 0.0, 512.0**2)
    predicted_s = model.predict(mixed.to_array()[None]).mean_s[0]
    assert predicted_s == pytest.approx(2.0 * device.latency_s(mixed), rel=0.2)


def test_a_regime_that_did_not_change_returns_alone() -> None:
    model = _taught(ACCELERATOR, 1000)
    for step in islice(synthetic_steps(ACCELERATOR, 5), 400):
        is_slow = step.features.num_prefill_tokens > 0.0
        model.observe(step.features, step.measured_s * (1.5 if is_slow else 1.0))
    assert model.num_drift_alarms >= 2
    decode = StepFeatures(0.0, 20.0, 20.0 * 1000.0)
    predicted_s = model.predict(decode.to_array()[None]).mean_s[0]
    assert predicted_s == pytest.approx(ACCELERATOR.latency_s(decode), rel=0.08)
    large = StepFeatures(1024.0, 0.0, 0.0, 0.0, 2.0 * 512.0**2)
    predicted_s = model.predict(large.to_array()[None]).mean_s[0]
    assert predicted_s == pytest.approx(1.5 * ACCELERATOR.latency_s(large), rel=0.1)


def test_a_slow_drift_within_the_limit_raises_an_alarm_and_widens_the_margin() -> None:
    model = _taught(TWO_CORES, 1000)
    before = model.quality().regimes[0].margin
    alarms = model.num_drift_alarms
    decode = StepFeatures(0.0, 20.0, 20.0 * 1000.0)
    rng = np.random.default_rng(3)
    widest = before
    for _ in range(60):
        model.observe(decode, TWO_CORES.latency_s(decode) * 1.07 * np.exp(rng.normal(0.0, 0.005)))
        widest = max(widest, model.quality().regimes[0].margin)
        if model.num_drift_alarms > alarms:
            break
    assert model.num_drift_alarms > alarms
    assert widest > before


def test_a_long_idle_phase_does_not_wash_out_the_busy_regime() -> None:
    model = _taught(ACCELERATOR, 1000)
    before = _error(model, ACCELERATOR, Regime.MIXED)
    rng = np.random.default_rng(4)
    for _ in range(5000):
        decode = StepFeatures(0.0, 1.0, float(rng.integers(16, 200)))
        noise = float(np.exp(rng.normal(0.0, 0.03)))
        model.observe(decode, ACCELERATOR.latency_s(decode) * noise)
    assert _error(model, ACCELERATOR, Regime.MIXED) < before + 0.03


def test_an_unknown_device_a_thousand_times_slower_is_learnt_within_fifty_steps() -> None:
    slow = SyntheticDevice(5.0, 9.0, 85e-3, 85e-3, 66e-6, 1.6e-6)
    model = _taught(slow, 50)
    assert _error(model, slow, Regime.MIXED) < 0.25
    assert model.num_drift_alarms <= 2


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.builds(StepFeatures, *([st.floats(0.0, 1e6)] * NUM_FEATURES)),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=60,
    )
)
def test_whatever_is_observed_predictions_stay_sound(
    samples: list[tuple[StepFeatures, float]],
) -> None:
    model = flat_prior()
    for features, latency_s in samples:
        model.observe(features, latency_s)
    candidates: FloatArray = np.vstack([np.zeros((1, NUM_FEATURES)), EYE, 1e6 * EYE])
    mean_s, upper_s = model.predict(candidates)
    assert np.isfinite(upper_s).all()
    assert (mean_s > 0.0).all()
    assert (upper_s >= mean_s).all()
    assert (mean_s >= mean_s[0]).all()
    assert (upper_s >= upper_s[0]).all()


def test_a_regime_without_data_borrows_the_margin_of_one_with_data() -> None:
    model = flat_prior()
    steps = synthetic_steps(TWO_CORES)
    decodes = (step for step in steps if step.features.regime is Regime.DECODE_ONLY)
    for step in islice(decodes, 300):
        model.observe(step.features, step.measured_s)
    decode, *others = model.quality().regimes
    assert decode.margin < 0.15
    assert [part.margin for part in others] == [decode.margin, decode.margin]


def test_a_fitted_prior_survives_autocorrelated_noise_on_one_kind_of_step() -> None:
    model = fit_prior(
        [(shape.features(), TWO_CORES.latency_s(shape.features())) for shape in SWEEP]
    )
    rng = np.random.default_rng(1)
    level = 0.0
    for index in range(3000):
        level = 0.95 * level + 0.03 * float(rng.standard_normal())
        chunk = 128.0 * (index % 4 == 0)
        step = StepFeatures(chunk, 8.0, 8.0 * (300.0 + index % 200), chunk * 256.0, chunk**2)
        model.observe(step, TWO_CORES.latency_s(step) * float(np.exp(level)))
    for chunk in (16.0, 64.0, 256.0, 1024.0):
        step = StepFeatures(chunk, 8.0, 3200.0, 0.0, chunk**2)
        predicted_s = model.predict(step.to_array()[None]).mean_s[0]
        assert predicted_s == pytest.approx(TWO_CORES.latency_s(step), rel=0.3)


def test_numbers_of_numpy_do_not_leak_into_the_quality() -> None:
    model = flat_prior()
    model.observe(StepFeatures(0.0, 1.0, 16.0), np.float64(0.02))
    quality = model.quality()
    assert type(quality.mape) is float
    assert type(quality.coverage) is float
    assert type(quality.regimes[0].margin) is float


def test_the_upper_bound_holds_as_often_as_asked() -> None:
    model = _taught(TWO_CORES, 600)
    assert model.target_coverage == model.quality().target_coverage == 0.9
    row = StepFeatures(64.0, 4.0, 400.0, 0.0, 4096.0).to_array()[None, :]
    before = model.predict(row)
    model.aim_for(0.6)
    narrow = model.predict(row)
    assert narrow.mean_s == before.mean_s
    assert narrow.upper_s < before.upper_s
    for step in islice(synthetic_steps(TWO_CORES, 1), 1200):
        model.observe(step.features, step.measured_s)
    assert model.quality().target_coverage == 0.6
    assert abs(model.quality().coverage - 0.6) <= 0.03


@pytest.mark.parametrize("coverage", [0.49, 1.0, float("nan")])
def test_a_target_out_of_range_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="coverage must be in"):
        flat_prior().aim_for(coverage)


def test_a_regime_that_lends_its_margin_lends_it_at_the_target() -> None:
    model = flat_prior()
    model.aim_for(0.99)
    for _ in range(60):
        model.observe(StepFeatures(0.0, 4.0, 400.0), 0.02)
    margins = {regime.regime: regime.margin for regime in model.quality().regimes}
    # Nothing but the prior is known of prompts, and no more of it is believed than of decodes.
    assert margins[Regime.MIXED] == margins[Regime.PREFILL_ONLY] <= margins[Regime.DECODE_ONLY]


def test_a_plane_that_answers_elsewhere_is_not_asleep_at_home() -> None:
    # Short prompts take what a floor says, whatever is at home there; the middle plane answers for
    # the middle ones alone, which are large against the median. Taught by the short ones, it would
    # lose them.
    known = np.zeros((3, NUM_BASIS))
    known[:, 0] = 0.03, 0.022, 1e-6
    known[0, 1], known[1, 2], known[2, 2] = 0.024, 55e-6, 94e-6
    model = RecursiveLeastSquares([NonNegativePlane(plane * SCALES) for plane in known])
    sizes = (128.0, 8192.0, 256.0, 8192.0, 384.0, 8192.0, 128.0, 1024.0, 256.0, 2048.0)
    for size in sizes * 60:
        prompt = StepFeatures(size, 0.0, 0.0, 0.0, size * size, 1.0, 1.0)
        actual_s = max(0.054, 0.022 + 55e-6 * size, 94e-6 * size)
        model.observe(prompt, actual_s)
    for size in set(sizes):
        prompt = StepFeatures(size, 0.0, 0.0, 0.0, size * size, 1.0, 1.0)
        actual_s = max(0.054, 0.022 + 55e-6 * size, 94e-6 * size)
        predicted_s = float(model.predict(prompt.to_array()[None]).mean_s[0])
        assert predicted_s == pytest.approx(actual_s, rel=0.025)
