from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.basis import NUM_BASIS
from costmodel.envelope import MAX_KNEE_TOKENS, Envelope
from costmodel.features import NUM_FEATURES, Regime, StepFeatures

PROFILE = settings(derandomize=True, deadline=None, max_examples=200)
AMOUNTS = st.one_of(st.just(0.0), st.floats(0.0, 1e6), st.floats(1e6, 1e18))
FEATURES = st.builds(StepFeatures, *([AMOUNTS] * NUM_FEATURES))
COEFFICIENTS = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-12, 1.0)), min_size=NUM_BASIS, max_size=NUM_BASIS
).map(lambda values: np.array([values[0] + 1e-6, *values[1:]]))
ENVELOPES = st.builds(lambda floor, work: Envelope([floor, work]), COEFFICIENTS, COEFFICIENTS)
MARGINS = st.fixed_dictionaries(dict.fromkeys(Regime, st.floats(0.0, 3.0)))


@PROFILE
@given(ENVELOPES, MARGINS, FEATURES, st.integers(0, NUM_FEATURES - 1), AMOUNTS)
def test_more_work_of_any_kind_never_costs_less(
    envelope: Envelope,
    margins: dict[Regime, float],
    features: StepFeatures,
    column: int,
    more: float,
) -> None:
    candidates = np.array([features, features])
    candidates[1, column] += more
    mean_s, upper_s = envelope.estimate(candidates, margins)
    assert np.isfinite(upper_s).all()
    assert (mean_s > 0.0).all()
    assert (upper_s >= mean_s).all()
    assert mean_s[1] >= mean_s[0] * (1.0 - 1e-12)
    assert upper_s[1] >= upper_s[0] * (1.0 - 1e-12)


@PROFILE
@given(ENVELOPES, MARGINS, FEATURES.filter(lambda features: max(features) <= 1e12))
def test_one_step_is_predicted_as_in_bulk(
    envelope: Envelope, margins: dict[Regime, float], features: StepFeatures
) -> None:
    mean_s, upper_s = envelope.estimate(features.to_array()[None], margins)
    step = envelope.predict_step(features, margins)
    assert step.mean_s == pytest.approx(mean_s[0], rel=1e-9)
    assert step.upper_s == pytest.approx(upper_s[0], rel=1e-9)
    assert step.mean_s == max(step.plane_s)


def test_a_mixed_step_is_never_promised_to_be_quicker_than_its_decodes() -> None:
    envelope = Envelope([np.array([0.01, 0, 0, 0.001, *[0] * 5]), np.full(NUM_BASIS, 1e-6)])
    margins = {Regime.DECODE_ONLY: 0.5, Regime.MIXED: 0.0, Regime.PREFILL_ONLY: 0.1}
    decode = StepFeatures(0.0, 4.0, 100.0)
    upper_s = envelope.estimate(
        np.array([decode, decode._replace(num_prefill_tokens=1.0)]), margins
    ).upper_s
    assert upper_s[0] == pytest.approx(1.5 * 0.014)
    assert upper_s[1] == upper_s[0]


def test_no_candidate_gives_no_estimate() -> None:
    envelope = Envelope([np.full(NUM_BASIS, 1e-3)] * 2)
    estimate = envelope.estimate(np.zeros((0, NUM_FEATURES)), dict.fromkeys(Regime, 0.1))
    assert estimate.mean_s.shape == estimate.upper_s.shape == (0,)


def _knee_by_search(envelope: Envelope, share: float = 0.9) -> int:
    tokens = np.arange(1.0, 60_001.0)
    features = np.zeros((len(tokens), NUM_FEATURES))
    features[:, 0] = tokens
    features[:, 4] = tokens**2
    rates = tokens / envelope.estimate(features, dict.fromkeys(Regime, 0.0)).mean_s
    return int(tokens[rates >= share * rates.max()][0])


@pytest.mark.parametrize(
    ("floor", "work"),
    [
        # A plain line: 9·c/a = 9 · (5 + 1) / 0.1 = 540 tokens.
        ([1e-6, 0, 0, 0, 0, 0, 0], [5e-3, 1e-3, 1e-4, 0, 0, 0, 0]),
        # A floor that costs no tokens reaches 90 % of the work plane's best rate first.
        ([14e-3, 0, 0, 0, 0, 0, 0], [1e-6, 0, 85e-6, 0, 0, 0, 0]),
        # Attention within the chunk: the rate has a maximum and falls again.
        ([1e-6, 0, 0, 0, 0, 0, 0], [90e-3, 0, 2.3e-3, 0, 0, 0, 7.5e-7]),
        ([14e-3, 0, 1e-5, 0, 0, 0, 1e-10], [5e-3, 0, 85e-6, 0, 0, 0, 1e-9]),
    ],
)
def test_the_knee_is_where_a_search_finds_it(floor: list[float], work: list[float]) -> None:
    envelope = Envelope([np.array([*floor, 0, 0]), np.array([*work, 0, 0])])
    found = _knee_by_search(envelope)
    assert envelope.marginals().knee_tokens == pytest.approx(found, rel=0.02, abs=2)


def test_the_knee_of_planes_that_cross_is_never_below_that_of_a_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        planes = np.zeros((3, NUM_BASIS))
        planes[:, 0] = 10.0 ** rng.uniform(-3.0, -1.0, 3)
        planes[:, 2] = 10.0 ** rng.uniform(-5.0, -3.0, 3)
        planes[:, 6] = 10.0 ** rng.uniform(-10.0, -7.0, 3)
        envelope = Envelope(list(planes))
        assert envelope.marginals().knee_tokens >= 0.98 * _knee_by_search(envelope) - 2


def test_without_a_cost_per_prefill_token_there_is_no_knee() -> None:
    envelope = Envelope([np.array([0.01, 0, 0, 0.001, *[0] * 5])] * 2)
    costs = envelope.marginals()
    assert costs.knee_tokens == MAX_KNEE_TOKENS
    assert costs.prefill_token_s == 0.0
    assert costs.floor_s == 0.01


def test_marginal_costs_are_those_of_the_busy_plane() -> None:
    floor = np.array([14e-3, 0, 1e-6, 2e-6, 3e-6, 0, 0, 0, 0])
    work = np.array([5e-3, 0, 4e-5, 5e-5, 6e-6, 0, 0, 7e-4, 8e-4])
    costs = Envelope([floor, work]).marginals()
    assert costs.prefill_token_s == 4e-5
    assert costs.decode_request_s == 5e-5
    assert costs.decode_context_token_s == 6e-6
    assert costs.floor_s == 14e-3
    assert (costs.extra_chunk_s, costs.prompt_logit_s) == (7e-4, 8e-4)
