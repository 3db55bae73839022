from __future__ import annotations

import numpy as np

from costmodel.drift import PageHinkley


def _alarms(detector: PageHinkley, residuals: list[float]) -> list[int]:
    return [index for index, residual in enumerate(residuals) if detector.record(residual)]


def test_a_stable_series_raises_no_alarm() -> None:
    residuals = np.random.default_rng(0).standard_t(3, 20_000).tolist()
    assert _alarms(PageHinkley(), residuals) == []


def test_a_lasting_rise_or_fall_is_noticed_within_a_few_steps() -> None:
    noise = np.random.default_rng(1).normal(0.0, 1.0, 60)
    for direction in (1.0, -1.0):
        alarms = _alarms(PageHinkley(), (noise + 3.0 * direction).tolist())
        assert alarms
        assert alarms[0] < 15


def test_one_wild_residual_is_no_drift() -> None:
    detector = PageHinkley()
    assert _alarms(detector, [1e9, -1e9, 0.0, 1e9]) == []


def test_an_alarm_starts_again_from_zero() -> None:
    detector = PageHinkley()
    alarms = _alarms(detector, [3.0] * 30)
    assert len(alarms) >= 2
    assert alarms[1] - alarms[0] == alarms[0] + 1


def test_a_restored_detector_remembers() -> None:
    detector = PageHinkley()
    _alarms(detector, [3.0] * 5)
    twin = PageHinkley.restore(detector.state(), "drift")
    assert _alarms(detector, [3.0] * 10) == _alarms(twin, [3.0] * 10)
    detector.reset()
    assert detector.state() == PageHinkley().state()
