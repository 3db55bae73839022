from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.features import NUM_FEATURES, StepFeatures
from costmodel.prior import SweepShape, fit_prior, flat_prior, sweep_plan
from costmodel.synthetic import ACCELERATOR, DEVICES, SyntheticDevice


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(1, 20_000), st.integers(1, 512), st.integers(1, 100_000))
def test_every_shape_of_the_sweep_respects_the_limits(
    max_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> None:
    shapes = sweep_plan(max_batched_tokens, max_num_seqs, max_model_len)
    assert 1 <= len(shapes) <= 13
    assert len(set(shapes)) == len(shapes)
    tokens = [shape.num_chunk_tokens + shape.num_decodes for shape in shapes]
    assert tokens == sorted(tokens)
    for shape, total in zip(shapes, tokens, strict=True):
        assert 1 <= total <= max_batched_tokens
        assert shape.num_decodes + len(shape.chunks()) <= max_num_seqs
        assert sum(shape.chunks()) == shape.num_chunk_tokens
        assert shape.num_past_tokens + shape.num_chunk_tokens <= max_model_len
        assert shape.num_context_tokens <= max_model_len
        assert min(shape) >= 0


def test_a_sweep_holds_every_regime_where_there_is_room() -> None:
    assert max(shape.num_chunk_tokens for shape in sweep_plan(8192, 64, 8192)) == 1024
    regimes = {shape.features().regime for shape in sweep_plan(2048, 64, 4096)}
    assert len(regimes) == 3


@pytest.mark.parametrize("limits", [(0, 1, 1), (1, 0, 1), (1, 1, -5)])
def test_limits_must_be_positive(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        sweep_plan(*limits)


def test_features_of_a_shape() -> None:
    shape = SweepShape(8, 100, 3, 20)
    assert shape.features() == StepFeatures(8.0, 3.0, 60.0, 800.0, 64.0, 1.0, 1.0)
    several = SweepShape(8, 0, 0, 0, num_chunks=3)
    assert several.chunks() == [3, 3, 2]
    assert several.features() == StepFeatures(8.0, 0.0, 0.0, 0.0, 22.0, 3.0, 3.0)
    assert shape._replace(is_end=False).features().num_prompt_logits == 0.0
    assert SweepShape(0, 0, 2, 5).features() == StepFeatures(0.0, 2.0, 10.0)


def test_the_sweep_tells_chunks_from_logits() -> None:
    counts = {
        (features.num_chunks, features.num_prompt_logits)
        for features in (shape.features() for shape in sweep_plan(2048, 64, 4096))
    }
    assert {(1.0, 1.0), (1.0, 0.0), (8.0, 8.0)} <= counts


def _sweep(device: SyntheticDevice, repeats: int = 2) -> list[tuple[StepFeatures, float]]:
    rng = np.random.default_rng(5)
    return [
        (shape.features(), device.latency_s(shape.features()) * math.exp(0.03 * noise))
        for shape in sweep_plan(2048, 64, 4096)
        for noise in rng.normal(size=repeats)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_a_sweep_predicts_steps_that_it_did_not_hold(device: SyntheticDevice) -> None:
    model = fit_prior(_sweep(device))
    for features in (
        StepFeatures(0.0, 6.0, 6.0 * 300.0),
        StepFeatures(100.0, 0.0, 0.0, 100.0 * 500.0, 100.0**2),
        StepFeatures(400.0, 12.0, 12.0 * 700.0, 0.0, 400.0**2),
    ):
        predicted_s = float(model.predict(features.to_array()[None]).mean_s[0])
        assert predicted_s == pytest.approx(device.latency_s(features), rel=0.2)


def test_a_repeat_that_went_wrong_does_not_matter() -> None:
    good = _sweep(ACCELERATOR, repeats=3)
    bad = [*good]
    bad[4] = (bad[4][0], bad[4][1] * 50.0)
    bad += [(bad[0][0], math.nan), (StepFeatures(), 1.0), (bad[1][0], -1.0)]
    candidates = np.array([features for features, _ in good])
    clean_s = fit_prior(good).predict(candidates).mean_s
    assert np.allclose(fit_prior(bad).predict(candidates).mean_s, clean_s, rtol=0.06)


def test_nothing_usable_gives_the_flat_prior() -> None:
    flat = flat_prior()
    for samples in ([], [(StepFeatures(), 0.1)], [(StepFeatures(1.0), math.inf)]):
        assert fit_prior(samples).coefficients == flat.coefficients


def test_one_sample_sets_the_scale_of_everything() -> None:
    decode = StepFeatures(0.0, 1.0, 16.0)
    model = fit_prior([(decode, 0.2)])
    assert model.predict(decode.to_array()[None]).mean_s[0] == pytest.approx(0.2, rel=0.02)
    assert model.marginals().prefill_token_s > 5.0 * flat_prior().marginals().prefill_token_s


def test_the_flat_prior_lets_every_kind_of_work_cost_something() -> None:
    model = flat_prior()
    base_s = model.predict(np.zeros((1, NUM_FEATURES))).mean_s[0]
    grown = model.predict(np.eye(NUM_FEATURES)[[*range(5), 6]] * 1e6).mean_s
    assert (grown > base_s).all()
