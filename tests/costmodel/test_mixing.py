from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest

from costmodel.features import Regime, StepFeatures
from costmodel.fields import SnapshotError
from costmodel.mixing import MAX_RATIO, MEMORY_STEPS, MixingRatio
from costmodel.prior import flat_prior
from costmodel.recursive import RecursiveLeastSquares
from costmodel.synthetic import ACCELERATOR, TWO_CORES, SyntheticDevice, synthetic_steps


def _taught(device: SyntheticDevice, factor: float = 1.0) -> RecursiveLeastSquares:
    """A model of a device on which mixed steps take `factor` times what they should."""
    model = flat_prior()
    for step in islice(synthetic_steps(device), 1500):
        is_mixed = step.features.regime is Regime.MIXED
        model.observe(step.features, step.measured_s * (factor if is_mixed else 1.0))
    return model


def _true_ratio(device: SyntheticDevice) -> float:
    ratios = []
    for step in islice(synthetic_steps(device), 1500):
        whole = step.features
        if whole.regime is Regime.MIXED:
            decodes = StepFeatures(0.0, whole.num_decode_requests, whole.decode_context_tokens)
            prompts = whole._replace(num_decode_requests=0.0, decode_context_tokens=0.0)
            apart_s = device.latency_s(decodes) + device.latency_s(prompts)
            ratios.append(step.true_s / apart_s)
    return sum(ratios) / len(ratios)


@pytest.mark.parametrize("device", [ACCELERATOR, TWO_CORES])
def test_mixing_saves_what_the_device_says(device: SyntheticDevice) -> None:
    assert _taught(device).quality().mixing_ratio == pytest.approx(_true_ratio(device), abs=0.02)


def test_a_machine_on_which_mixing_loses_is_found_out() -> None:
    without_floors = replace(TWO_CORES, overhead_s=0.001)
    ratio = _taught(without_floors, 1.6).quality().mixing_ratio
    assert ratio is not None
    assert ratio > 1.1


def test_only_mixed_steps_count() -> None:
    model = flat_prior()
    for _ in range(20):
        model.observe(StepFeatures(0.0, 4.0, 400.0), 0.03)
        model.observe(StepFeatures(100.0, 0.0, 0.0, 0.0, 10_000.0, 1.0, 1.0), 0.05)
    assert model.quality().mixing_ratio is None


def test_the_ratio_is_a_mean_that_forgets() -> None:
    mixing = MixingRatio()
    assert mixing.ratio is None
    for latency_s in (1.0, 3.0):
        mixing.record(latency_s, 2.0)
    assert mixing.ratio == pytest.approx(1.0)
    for _ in range(10 * MEMORY_STEPS):
        mixing.record(1.0, 2.0)
    assert mixing.ratio == pytest.approx(0.5, abs=1e-3)
    mixing.record(1e300, 1e-300)
    assert mixing.ratio == pytest.approx(0.5 + MAX_RATIO / MEMORY_STEPS, rel=1e-3)


def test_a_snapshot_keeps_it_and_an_older_one_has_none() -> None:
    model = _taught(TWO_CORES)
    state = json.loads(json.dumps(model.state()))
    assert RecursiveLeastSquares.restore(state).quality() == model.quality()
    broken = {**state, "mixing": {"num_observed": 3, "ratio": -1.0}}
    with pytest.raises(SnapshotError, match=r"mixing\.ratio"):
        RecursiveLeastSquares.restore(broken)
    del state["mixing"]
    assert RecursiveLeastSquares.restore(state).quality().mixing_ratio is None
