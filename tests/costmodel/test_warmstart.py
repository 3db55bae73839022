from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest

from costmodel.features import StepFeatures
from costmodel.prior import flat_prior, sweep_plan
from costmodel.refitted import RefittedLeastSquares
from costmodel.synthetic import ACCELERATOR, TWO_CORES, SyntheticDevice, synthetic_steps
from costmodel.warmstart import fit_to_speed, judge_restored


def _model() -> RefittedLeastSquares:
    model = flat_prior(RefittedLeastSquares)
    for step in islice(synthetic_steps(TWO_CORES), 600):
        model.observe(step.features, step.measured_s)
    return model


def _sweep(device: SyntheticDevice, factor: float = 1.0) -> list[tuple[StepFeatures, float]]:
    shapes = sweep_plan(512, 16, 2048)
    return [(s.features(), device.latency_s(s.features()) * factor) for s in shapes]


def _error(model: RefittedLeastSquares, factor: float) -> float:
    steps = list(islice(synthetic_steps(TWO_CORES, 8), 200))
    predicted_s = model.predict(np.array([step.features for step in steps])).mean_s
    true_s = np.array([step.true_s for step in steps]) * factor
    return float(np.abs(predicted_s / true_s - 1.0).mean())


def test_the_same_machine_goes_on_where_it_was() -> None:
    model = _model()
    before = model.coefficients
    verdict = judge_restored(model, _sweep(TWO_CORES, 1.05))
    assert verdict.problem is None
    assert verdict.is_same_speed
    assert verdict.num_steps == len(_sweep(TWO_CORES))
    fit_to_speed(model, verdict)
    assert model.coefficients == before


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_that_is_faster_or_slower_now_is_followed_at_once(factor: float) -> None:
    model = _model()
    narrow = model.quality().regimes[0].margin
    verdict = judge_restored(model, _sweep(TWO_CORES, factor))
    assert verdict.problem is None
    assert not verdict.is_same_speed
    version = model.version
    fit_to_speed(model, verdict)
    assert _error(model, factor) < 0.1
    assert model.version == version + 1
    # Nobody knows yet how far the factor holds.
    assert model.quality().regimes[0].margin > 1.9 * narrow


def test_another_machine_is_refused_with_the_reason() -> None:
    slower = judge_restored(_model(), _sweep(TWO_CORES, 9.0))
    assert slower.problem is not None
    assert "times what the stored model says" in slower.problem
    mixed = [(f, s * (0.4 if i % 2 else 2.5)) for i, (f, s) in enumerate(_sweep(TWO_CORES))]
    assert "kinds of work" in (judge_restored(_model(), mixed).problem or "")
    assert judge_restored(_model(), _sweep(ACCELERATOR)).problem is not None


def test_nothing_to_compare_with_is_no_objection() -> None:
    unusable = [(StepFeatures(), 0.1), (StepFeatures(1.0), math.nan)]
    verdict = judge_restored(_model(), unusable)
    assert (verdict.problem, verdict.num_steps) == (None, 0)
