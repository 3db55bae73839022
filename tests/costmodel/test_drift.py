from __future__ import annotations

import numpy as np
import pytest

from costmodel.drift import PageHinkley


def _alarms(detector: PageHinkley, residuals: list[float]) -> list[int]:
    return [index for index, residual in enumerate(residuals) if detector.record(residual)]


@pytest.mark.parametrize(("is_heavy", "most"), [(False, 2), (True, 30)])
def test_a_stable_series_raises_hardly_an_alarm(is_heavy: bool, most: int) -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_t(3, 60_000) if is_heavy else rng.normal(0.0, 1.0, 60_000)
    # In the detector's unit, which is not the standard deviation.
    residuals = noise / np.median(np.abs(noise))
    assert len(_alarms(PageHinkley(), residuals.tolist())) <= most


def test_a_lasting_rise_or_fall_is_noticed_within_a_few_steps() -> None:
    noise = np.random.default_rng(1).normal(0.0, 1.0 / 0.6745, 60)
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
