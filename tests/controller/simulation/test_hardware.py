"""Hardware profiles: the formula, its two evaluations, noise, slowdowns and the JSON round trip."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.simulation.fitting import hardware_of
from controller.simulation.hardware import (
    A100_8B,
    CPU_DEMO,
    Device,
    HardwareError,
    HardwareProfile,
    Slowdown,
)
from controller.simulation.oracle import OracleModel
from costmodel.features import NUM_FEATURES, StepFeatures
from costmodel.synthetic import ACCELERATOR

COUNTS = st.integers(0, 5000).map(float)
STEPS = st.builds(StepFeatures, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS)


def changed(**changes: Any) -> dict[str, Any]:
    return A100_8B.to_json() | changes


def test_the_machine_of_the_control_law_is_the_one_it_describes() -> None:
    # 5 ms + max(9 ms, 85 µs per token) + 66 ns per context token read.
    decode = StepFeatures(num_decode_requests=10.0, decode_context_tokens=10_000.0)
    assert A100_8B.seconds(decode) == pytest.approx(5e-3 + 9e-3 + 66e-5)
    chunk = StepFeatures(1000.0, chunk_squared_tokens=1e6, num_chunks=1.0)
    assert A100_8B.seconds(chunk) == pytest.approx(5e-3 + 85e-3 + 1e6 * 1.6e-9 / 2)


@given(STEPS)
def test_both_evaluations_and_the_device_behind_them_agree(features: StepFeatures) -> None:
    expected = ACCELERATOR.latency_s(features)
    assert A100_8B.seconds(features) == pytest.approx(expected)
    for profile in (A100_8B, CPU_DEMO):
        many = profile.seconds_of(features.to_array()[None])
        assert profile.seconds(features) == pytest.approx(float(many[0]))


def test_noise_is_seeded_has_mean_one_and_the_size_that_was_asked_for() -> None:
    step = StepFeatures(num_decode_requests=1.0)
    first, again = Device(A100_8B, 7), Device(A100_8B, 7)
    drawn = [first.step_s(step, 0.0) for _ in range(10_000)]
    assert drawn == [again.step_s(step, 0.0) for _ in range(10_000)]
    assert drawn != [Device(A100_8B, 8).step_s(step, 0.0) for _ in range(10_000)]
    ratio = np.array(drawn) / A100_8B.seconds(step)
    assert ratio.mean() == pytest.approx(1.0, abs=0.002)
    assert np.log(ratio).std() == pytest.approx(A100_8B.noise, rel=0.05)


def test_slowdowns_hold_between_their_instants_and_multiply() -> None:
    profile = HardwareProfile.from_json(
        changed(
            noise=0,
            slowdowns=[
                {"start_s": 1, "end_s": 3, "factor": 2.0},
                {"start_s": 2, "end_s": 4, "factor": 1.5},
            ],
        )
    )
    step = StepFeatures(num_decode_requests=1.0)
    device, plain_s = Device(profile), profile.seconds(step)
    factors = [device.step_s(step, now) / plain_s for now in (0.5, 1.0, 2.5, 3.0, 4.0)]
    assert factors == pytest.approx([1.0, 2.0, 3.0, 1.5, 1.0])


@pytest.mark.parametrize("profile", [A100_8B, CPU_DEMO], ids=lambda profile: profile.name)
def test_a_profile_survives_json(profile: HardwareProfile, tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    file.write_text(json.dumps(profile.to_json(), allow_nan=False), encoding="utf-8")
    assert hardware_of(str(file)) == profile


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed(format=2), "format: must be 1"),
        (changed(planes=[]), "planes must be 1 to"),
        (changed(planes=[{"intercept": 1, "weight": 1}]), r"planes\[0\].weight: no such"),
        (changed(planes=[{"intercept": -1}]), r"planes\[0\].intercept"),
        (changed(planes=[{"intercept": math.nan}]), r"planes\[0\].intercept"),
        (changed(planes=[{"num_decode_requests": 1}]), "intercept above 0"),
        (changed(noise=-1), "noise"),
        (changed(noise="much"), "noise: must be a number"),
        (changed(name=""), "name"),
        (changed(num_pool_tokens=0), "num_pool_tokens"),
        (changed(slowdowns=[{"start_s": 2, "end_s": 1, "factor": 1}]), "end_s"),
        (changed(slowdowns=[{"start_s": 0, "end_s": 1, "factor": 0}]), "factor"),
        (changed(slowdowns=[{"start_s": 0, "factor": 1}]), r"slowdowns\[0\].end_s: is missing"),
        (changed(slowdowns=3), "must be lists"),
    ],
)
def test_a_wrong_profile_is_refused_by_the_name_of_its_field(
    document: dict[str, Any], message: str
) -> None:
    with pytest.raises(HardwareError, match=message):
        HardwareProfile.from_json(document)


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "must be a JSON object"), ("{", "not JSON"), ("{}", "format")]
)
def test_a_broken_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(HardwareError, match=rf"broken\.json: .*{message}"):
        hardware_of(str(file))
    with pytest.raises(HardwareError, match="no-such-file"):
        hardware_of(str(tmp_path / "no-such-file"))


def test_hardware_has_a_name_a_file_or_a_table() -> None:
    assert hardware_of("a100-8b") is A100_8B
    with pytest.raises(HardwareError, match="choose from a100-8b, h100-70b, cpu-demo"):
        hardware_of("abacus")
    with pytest.raises(HardwareError, match=r"expected t\.csv:MODEL:HARDWARE"):
        hardware_of("t.csv:llama")
    with pytest.raises(HardwareError, match="tensor_parallel must be a number"):
        hardware_of("t.csv:llama:h100:many")


def test_a_slowdown_must_begin_at_an_instant() -> None:
    with pytest.raises(HardwareError, match="start_s"):
        Slowdown(-1.0, 1.0, 2.0)


def test_the_oracle_knows_the_machine_and_its_noise() -> None:
    oracle = OracleModel(A100_8B)
    rows = np.zeros((3, NUM_FEATURES))
    rows[:, 0] = (0.0, 256.0, 2048.0)
    estimate = oracle.predict(rows)
    assert estimate.mean_s == pytest.approx(A100_8B.seconds_of(rows))
    device = Device(A100_8B, 3)
    step = StepFeatures(*rows[1])
    share = np.mean([device.step_s(step, 0.0) <= estimate.upper_s[1] for _ in range(4000)])
    assert 0.88 <= share <= 0.92
    bold = OracleModel(A100_8B, 0.6)
    assert (bold.predict(rows).upper_s < estimate.upper_s).all()
    assert (bold.predict(rows).upper_s >= estimate.mean_s).all()
    assert bold.quality().target_coverage == 0.6
    costs = oracle.marginals()
    assert costs.prefill_token_s == ACCELERATOR.prefill_token_s
    assert costs.floor_s == pytest.approx(14e-3)
    assert 256 <= costs.knee_tokens <= 4096
    before = oracle.quality()
    assert not oracle.observe(step, 1.0)
    assert oracle.quality() == before
