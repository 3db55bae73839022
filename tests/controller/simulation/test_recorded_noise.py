"""Noise as it was recorded: slow stretches stay stretches, and each kind of work keeps its own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from controller.simulation.hardware import A100_8B, Device, HardwareError, HardwareProfile
from controller.simulation.oracle import OracleModel
from controller.simulation.recorded_noise import (
    MAX_STEPS,
    MIN_STEPS,
    STRETCH_STEPS,
    RecordedNoise,
    Stretches,
)
from costmodel.features import Regime, StepFeatures

DECODES = StepFeatures(0.0, 8.0, 4000.0)
MIXED = StepFeatures(256.0, 8.0, 4000.0, 0.0, 65536.0, 1.0, 1.0)


def _record(num: int = 2000) -> RecordedNoise:
    """Every other step is mixed and takes a tenth more; for a fifth of the time all take twice."""
    found = RecordedNoise.of(
        (Regime.MIXED if i % 2 else Regime.DECODE_ONLY, (1.1 if i % 2 else 1.0) * _slow(i), 1.0)
        for i in range(num)
    )
    assert found is not None
    return found


def _slow(index: int) -> float:
    return 2.0 if index % 500 < 100 else 1.0


def _machine(noise: RecordedNoise | None) -> HardwareProfile:
    return HardwareProfile("m", A100_8B.planes, 0.3, recorded=noise)


def _factors(steps: list[StepFeatures], seed: int = 0) -> list[float]:
    machine = _machine(_record())
    device = Device(machine, seed)
    return [device.step_s(step, 0.0) / machine.seconds(step) for step in steps]


def test_a_slow_stretch_is_drawn_as_a_stretch() -> None:
    factors = np.array(_factors([DECODES] * 40_000))
    assert set(np.unique(factors.round(6))) == {1.0, 2.0}
    assert float((factors > 1.5).mean()) == pytest.approx(0.2, abs=0.03)
    # Independent draws would change between slow and quick at a third of the steps.
    changes = int((np.diff(factors) != 0.0).sum())
    assert changes < len(factors) / 20


def test_each_kind_of_work_has_its_own_factors() -> None:
    factors = _factors([DECODES, MIXED] * 2000)
    assert {round(factor, 6) for factor in factors[::2]} == {1.0, 2.0}
    assert {round(factor, 6) for factor in factors[1::2]} == {1.1, 2.2}
    # At the same time: where decodes are slow mixed steps are, but for the steps at either end.
    apart = sum((a > 1.5) != (b > 1.5) for a, b in zip(factors[::2], factors[1::2], strict=True))
    assert apart < 2000 / 10


def test_a_kind_of_work_that_was_never_seen_has_the_factors_of_all() -> None:
    alone = StepFeatures(256.0, 0.0, 0.0, 0.0, 65536.0, 1.0, 1.0)
    assert {round(factor, 6) for factor in _factors([alone] * 3000)} == {1.0, 1.1, 2.0, 2.2}


def test_seeds_draw_other_stretches_and_the_same_seed_the_same() -> None:
    steps = [DECODES] * (4 * STRETCH_STEPS)
    assert _factors(steps, 1) == _factors(steps, 1)
    assert len({tuple(_factors(steps, seed)) for seed in range(5)}) > 1


def test_a_stretch_goes_on_round_the_end() -> None:
    noise = _record(MIN_STEPS)
    stretches = Stretches(noise, np.random.default_rng(0))
    drawn = [stretches.factor(Regime.MIXED) for _ in range(STRETCH_STEPS)]
    # As many as were recorded, each once, and then from the beginning.
    own = noise.factors[1::2]
    assert sorted(drawn[: len(own)]) == sorted(own)
    assert drawn[len(own) : 2 * len(own)] == drawn[: len(own)]


@pytest.mark.parametrize("every", [13, 64, 128])
def test_a_rare_kind_of_work_has_its_own_mean_however_rare_it_is(every: int) -> None:
    # Prompts alone come ten in a row after a hundred decodes, and the first of them takes twice.
    record = []
    for _ in range(40):
        record += [(Regime.DECODE_ONLY, 1.0, 1.0)] * 100
        record += [(Regime.PREFILL_ONLY, 2.0, 1.0)] + [(Regime.PREFILL_ONLY, 1.0, 1.0)] * 9
    noise = RecordedNoise.of(record)
    assert noise is not None
    stretches = Stretches(noise, np.random.default_rng(0))
    drawn = [
        stretches.factor(Regime.PREFILL_ONLY if i % every == 0 else Regime.DECODE_ONLY)
        for i in range(100_000)
    ][::every]
    assert float(np.mean(drawn)) == pytest.approx(1.1, abs=0.03)


def test_a_kind_that_was_seen_twice_is_not_that_slow_for_ever() -> None:
    steps = [(Regime.DECODE_ONLY, 1.0, 1.0)] * 200 + [(Regime.PREFILL_ONLY, 4.7, 1.0)] * 2
    noise = RecordedNoise.of(steps)
    assert noise is not None
    assert noise.of_regime(Regime.PREFILL_ONLY) == noise.factors
    stretches = Stretches(noise, np.random.default_rng(0))
    drawn = [stretches.factor(Regime.PREFILL_ONLY) for _ in range(20_000)]
    assert float(np.mean(drawn)) < 1.1


def test_the_oracle_knows_the_quantiles_of_each_kind() -> None:
    rng = np.random.default_rng(1)
    sigmas = {Regime.DECODE_ONLY: 0.3, Regime.MIXED: 0.05}
    noise = RecordedNoise.of(
        (regime, 1.1 * float(np.exp(sigmas[regime] * rng.standard_normal())), 1.0)
        for regime in (Regime.DECODE_ONLY, Regime.MIXED) * 4000
    )
    machine = _machine(noise)
    model, device = OracleModel(machine, 0.8), Device(machine, 0)
    upper_s = float(model.predict(DECODES.to_array()[None]).upper_s[0])
    covered = [device.step_s(DECODES, 0.0) <= upper_s for _ in range(20_000)]
    assert float(np.mean(covered)) == pytest.approx(0.8, abs=0.02)
    # Never below its parts: more work is never promised to be quicker.
    rows = np.array([StepFeatures(256.0, n, 500.0 * n, 0.0, 65536.0) for n in (0.0, 8.0)])
    alone_s, mixed_s = model.predict(rows).upper_s
    assert mixed_s >= max(alone_s, upper_s)


def test_a_few_steps_are_no_record_and_of_many_the_newest_count() -> None:
    short = [(Regime.DECODE_ONLY, 1.0, 1.0)] * (MIN_STEPS - 1)
    assert RecordedNoise.of(short) is None
    long = RecordedNoise.of(
        [(Regime.DECODE_ONLY, 2.0, 1.0)] * 5 + [(Regime.MIXED, 1e9, 1.0)] * MAX_STEPS
    )
    assert long is not None
    assert len(long.factors) == MAX_STEPS
    assert set(long.factors) == {1000.0}


def test_a_profile_with_a_record_goes_through_json() -> None:
    profile = _machine(_record(200))
    document = json.loads(json.dumps(profile.to_json()))
    assert HardwareProfile.from_json(document) == profile
    assert "recorded" not in _machine(None).to_json()


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ([], "recorded must be an object"),
        ({"regimes": "dx", "factors": [1.0, 1.0]}, "recorded.regimes must be a text"),
        ({"regimes": 3, "factors": [1.0]}, "recorded.regimes must be a text"),
        ({"regimes": "d", "factors": ["a"]}, "recorded.factors"),
        ({"regimes": "dd", "factors": [1.0]}, "a factor for each step"),
        ({"regimes": "", "factors": []}, "at least one"),
        ({"regimes": "dm", "factors": [1.0, 0.0]}, r"recorded.factors\[1\]"),
    ],
)
def test_a_record_that_is_none_is_refused(recorded: Any, message: str) -> None:
    document = _machine(None).to_json() | {"recorded": recorded}
    with pytest.raises(HardwareError, match=message):
        HardwareProfile.from_json(document)


def test_errors_of_other_fields_keep_their_words() -> None:
    document = _machine(_record(200)).to_json() | {"num_pool_tokens": 0}
    with pytest.raises(HardwareError, match="num_pool_tokens must be positive"):
        HardwareProfile.from_json(document)
