from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from costmodel.features import NUM_FEATURES, Regime, StepFeatures
from costmodel.fields import SnapshotError
from costmodel.strata import NUM_STRATA, STRATUM_SAMPLES, StratifiedWindow, stratum_of

DECODE = StepFeatures(0.0, 1.0, 100.0)
BUSY = StepFeatures(500.0, 12.0, 9000.0, 0.0, 250_000.0, 1.0, 1.0)


def test_a_long_idle_phase_displaces_only_its_own_kind() -> None:
    window = StratifiedWindow()
    for index in range(10):
        window.add(BUSY, 1.0 + index)
    for index in range(5000):
        window.add(DECODE, 0.01 * (1 + index))
    samples = window.samples()
    is_busy = samples.features[:, 0] > 0.0
    assert samples.latency_s[is_busy].tolist() == [1.0 + index for index in range(10)]
    # The newest of the rest, in order, and their ages in steps.
    assert is_busy.sum() + STRATUM_SAMPLES == len(samples.latency_s)
    assert samples.latency_s[-1] == pytest.approx(50.0)
    assert samples.ages[-3:].tolist() == [2.0, 1.0, 0.0]
    assert samples.ages[0] == 5009.0
    assert window.num_added == 5010


def test_strata_are_regimes_and_magnitudes() -> None:
    sizes = [1.0, 2.0, 3.0, 4.0, 1000.0, 1e6, 1e9]
    strata = {
        regime: [
            stratum_of(StepFeatures(size if regime is not Regime.DECODE_ONLY else 0.0,
                                    1.0 if regime is Regime.MIXED else 0.0))
            for size in sizes
        ]
        for regime in Regime
    }  # fmt: skip
    alone = [stratum_of(StepFeatures(size)) for size in sizes]
    assert alone[1] == alone[2] != alone[3]
    assert alone[-1] == alone[-2] == max(alone)
    assert not set(alone) & set(strata[Regime.MIXED])
    decodes = [stratum_of(StepFeatures(0.0, size)) for size in sizes]
    assert not set(decodes) & set(alone)
    assert all(0 <= stratum < NUM_STRATA for stratum in [*alone, *decodes])


def test_what_is_kept_moves_with_the_speed_of_the_machine() -> None:
    window = StratifiedWindow()
    window.add(DECODE, 0.1)
    kept = window.samples()
    window.rescale(2.0)
    assert window.samples().latency_s.tolist() == [0.2]
    assert kept.latency_s.tolist() == [0.1], "samples are copies"


def test_a_window_goes_through_json_and_back() -> None:
    for count in (0, 1, 70):
        window = StratifiedWindow()
        for index in range(count):
            window.add(DECODE if index % 3 else BUSY, 0.1 + index)
        restored = StratifiedWindow.restore(json.loads(json.dumps(window.state())), "w")
        for twin in (window, restored):
            twin.add(BUSY, 7.0)
        for one, other in zip(window.samples(), restored.samples(), strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", [0, 0]),
        ("slots", [-1, 1]),
        ("slots", [0, 10**6]),
        ("seen", [-1.0] * NUM_STRATA),
        ("latency_s", [1.0, -1.0]),
        ("latency_s", [1.0]),
        ("features", [[-1.0] * NUM_FEATURES] * 2),
        ("features", [[1.0] * 5] * 2),
    ],
)
def test_a_window_that_does_not_fit_is_refused(name: str, value: Any) -> None:
    window = StratifiedWindow()
    window.add(DECODE, 0.1)
    window.add(BUSY, 0.5)
    with pytest.raises(SnapshotError):
        StratifiedWindow.restore({**window.state(), name: value}, "w")
