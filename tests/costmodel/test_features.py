from __future__ import annotations

import numpy as np

from costmodel.basis import MAX_FEATURE, NUM_BASIS, SCALES, expand, expand_scaled
from costmodel.features import NUM_FEATURES, Regime, StepFeatures, regime_of
from engine.step import StepWork, WorkKind


def test_features_of_a_mixed_step() -> None:
    work = [
        StepWork("a", WorkKind.DECODE, 1, 99),
        StepWork("b", WorkKind.DECODE, 1, 9),
        StepWork("c", WorkKind.PREFILL, 16, 32),
        StepWork("d", WorkKind.PREFILL, 5, 0),
    ]
    expected = StepFeatures(21.0, 2.0, 110.0, 16.0 * 32.0, 256.0 + 25.0, 2.0, 0.0)
    assert StepFeatures.of(work) == expected
    assert StepFeatures.of(work, 1) == expected._replace(num_prompt_logits=1.0)


def test_an_empty_step_has_no_work_and_counts_as_decode_only() -> None:
    assert StepFeatures.of([]) == StepFeatures()
    assert StepFeatures().regime is Regime.DECODE_ONLY


def test_the_regime_follows_from_the_kinds_of_work() -> None:
    assert regime_of(0.0, 3.0) is Regime.DECODE_ONLY
    assert regime_of(1.0, 3.0) is Regime.MIXED
    assert regime_of(1.0, 0.0) is Regime.PREFILL_ONLY


def test_the_basis_puts_an_intercept_and_a_prefill_indicator_before_the_features() -> None:
    features = np.array([[0.0, 2.0, 3.0, 0, 0, 0, 0], [4.0, 0.0, 0.0, 5.0, 6.0, 3.0, 8.0]])
    expected = [[1.0, 0.0, 0.0, 2.0, 3.0, 0, 0, 0, 0], [1.0, 1.0, 4.0, 0, 0, 5.0, 6.0, 2.0, 8.0]]
    assert expand(features).tolist() == expected


def test_prefill_without_a_count_of_chunks_is_one_chunk() -> None:
    unknown = StepFeatures(64.0, 1.0, 20.0, 0.0, 64.0**2)
    one = unknown._replace(num_chunks=1.0)
    assert expand_scaled(unknown).tolist() == expand_scaled(one).tolist()


def test_one_step_scaled_is_the_row_of_the_bulk_expansion() -> None:
    steps = (StepFeatures(7.0, 1.0, 2.0, 3.0, 49.0, 2.0, 1.0), StepFeatures(0.0, 1.0, 2.0))
    for features in steps:
        row = expand(features.to_array()[None])[0] / SCALES
        assert expand_scaled(features).tolist() == row.tolist()


def test_absurd_features_saturate_instead_of_overflowing() -> None:
    row = expand(np.full((1, NUM_FEATURES), 1e308))[0]
    assert row.shape == (NUM_BASIS,)
    assert row.max() == MAX_FEATURE
