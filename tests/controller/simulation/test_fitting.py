"""Profiles from tables and from cost models that learnt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from controller.simulation.fitting import fit_profile, hardware_of, profile_of_snapshot
from controller.simulation.hardware import A100_8B, H100_70B, Device, HardwareError
from costmodel.features import StepFeatures
from costmodel.prior import fit_prior
from costmodel.snapshot import SnapshotKey, dump_model
from costmodel.synthetic import ACCELERATOR, synthetic_steps

DATA = Path(os.environ.get("PACELINE_DATA", Path(__file__).parents[4] / "shared" / "data"))
TABLE = DATA / "splitwise-sim" / "perf_model.csv"
HEADER = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
KEY = SnapshotKey("demo", "cpu", "float32", "reference", 16, "0.1.0")


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def measured(tmp_path: Path) -> Path:
    """What the accelerator of the control law would have been measured at."""
    lines = [HEADER]
    for prompt in (128, 256, 512, 1024, 2048, 4096):
        for batch in (1, 2, 4, 8):
            context = batch * (prompt + 64.0)
            prefill = StepFeatures(
                prompt * batch, chunk_squared_tokens=batch * prompt**2, num_prompt_logits=0.0
            )
            decode = StepFeatures(num_decode_requests=batch, decode_context_tokens=context)
            times = [1e3 * ACCELERATOR.latency_s(step) for step in (prefill, decode)]
            for degree in (1, 2):
                ms = ",".join(str(time / degree) for time in times)
                lines.append(f"m,chip,{prompt},{batch},128,{ms},{degree}\n")
    return table(tmp_path, "".join(lines))


def test_a_table_made_by_a_formula_gives_the_formula_back(tmp_path: Path) -> None:
    fitted = fit_profile(measured(tmp_path), "m", "chip", 1)
    assert (fitted.num_samples, fitted.num_points) == (48, 48)
    assert fitted.max_error < 0.02
    assert fitted.mape <= fitted.p90_error <= fitted.max_error
    assert fitted.profile.source.startswith("fitted to table.csv: mean error 0.")
    # What no row of the table held: a chunk behind a past, beside decodes.
    mixed = StepFeatures(512.0, 16.0, 16_000.0, 512.0 * 1024, 512.0**2, 1.0)
    assert fitted.profile.seconds(mixed) == pytest.approx(ACCELERATOR.latency_s(mixed), rel=0.05)


def test_a_row_that_contradicts_the_others_is_not_believed(tmp_path: Path) -> None:
    path = measured(tmp_path)
    with path.open("a", encoding="utf-8") as file:
        file.write("m,chip,4096,16,128,300,20,1\n")
    fitted = fit_profile(path, "m", "chip", 1)
    # Twice the prompts in an eighth of the time; its decodes are plausible.
    assert fitted.num_left_out == 1
    assert fitted.num_points == 49
    assert fitted.mape < 0.02


def test_the_largest_degree_of_parallelism_is_taken_unless_one_is_named(tmp_path: Path) -> None:
    path = measured(tmp_path)
    step = StepFeatures(1024.0, chunk_squared_tokens=1024.0**2)
    two, one = (fit_profile(path, "m", "chip", degree).profile for degree in (None, 1))
    assert two.name == "m-chip-tp2"
    assert two.seconds(step) == pytest.approx(one.seconds(step) / 2, rel=0.02)
    with pytest.raises(HardwareError, match="tensor_parallel 4 was not measured; there is 1, 2"):
        fit_profile(path, "m", "chip", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,hardware\n", "line 1: column 'tensor_parallel' is missing"),
        (HEADER, "nothing was measured of 'm' on 'chip'; there is no row"),
        (HEADER + "m,other,1,1,1,1,1,1\n", "there is m on other"),
        (HEADER + "m,chip,1,1,1,1,1,1\nm,chip,1,1,1,fast,1,1\n", "line 3: prompt_time must be a"),
        (HEADER + "m,chip,1,1,1,-1,1,1\n", "line 2: prompt_time must be positive"),
        (HEADER + "m,chip,1,1,1,1,inf,1\n", "line 2: token_time must be positive and finite"),
        (HEADER + "m,chip,1,1,1,1,1\n", "line 2: tensor_parallel must be a number, got None"),
    ],
)
def test_a_broken_table_is_refused_with_line_and_column(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(HardwareError, match=message):
        fit_profile(table(tmp_path, text), "m", "chip")


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="nowhere"):
        fit_profile(tmp_path / "nowhere", "m", "chip")


@pytest.mark.skipif(not TABLE.is_file(), reason=f"no {TABLE} (set PACELINE_DATA)")
@pytest.mark.parametrize("model", ["llama2-70b", "bloom-176b"])
@pytest.mark.parametrize("hardware", ["a100-80gb", "h100-80gb"])
def test_real_accelerators_are_fitted_closely(model: str, hardware: str) -> None:
    fitted = fit_profile(TABLE, model, hardware)
    assert fitted.num_samples > 200
    assert fitted.mape < 0.07
    assert fitted.p90_error < 0.25
    assert 0.0 < fitted.profile.noise < 0.1
    # A decode beside prompts costs something, although the table never mixes them.
    alone = StepFeatures(4096.0, chunk_squared_tokens=4096.0**2, num_chunks=1.0)
    mixed = alone._replace(num_decode_requests=64.0, decode_context_tokens=64e3)
    assert fitted.profile.seconds(mixed) > 1.02 * fitted.profile.seconds(alone)


@pytest.mark.skipif(not TABLE.is_file(), reason=f"no {TABLE} (set PACELINE_DATA)")
def test_the_built_in_profile_is_the_fit_of_the_table() -> None:
    fitted = fit_profile(TABLE, "llama2-70b", "h100-80gb", 8).profile
    for plane, expected in zip(H100_70B.planes, fitted.planes, strict=True):
        assert plane == pytest.approx(expected, rel=0.01, abs=1e-9)
    assert H100_70B.noise == pytest.approx(fitted.noise, rel=0.01)


def test_a_learnt_model_becomes_the_machine_it_learnt_from() -> None:
    learner = fit_prior([])
    for step, _ in zip(synthetic_steps(ACCELERATOR, seed=1), range(3000), strict=False):
        learner.observe(step.features, step.measured_s)
    profile = profile_of_snapshot(dump_model(learner, KEY))
    rows = np.array(
        [s.features for s, _ in zip(synthetic_steps(ACCELERATOR, 2), range(200), strict=False)]
    )
    expected = learner.predict(rows).mean_s
    assert profile.seconds_of(rows) == pytest.approx(expected)
    assert 0.01 < profile.noise < 0.1
    assert Device(profile, 0).step_s(StepFeatures(*rows[0]), 0.0) > 0
    assert profile.name == "demo-cpu"


def test_a_snapshot_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.json"
    document = dump_model(fit_prior([]), KEY)
    path.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")
    assert hardware_of(str(path)) == profile_of_snapshot(document)
    path.write_text(json.dumps(document | {"kind": "guess"}), encoding="utf-8")
    with pytest.raises(HardwareError, match=r"snapshot\.json: kind"):
        hardware_of(str(path))


def test_a_broken_snapshot_is_refused_by_the_name_of_its_field() -> None:
    document = dump_model(fit_prior([]), KEY)
    with pytest.raises(HardwareError, match=r"snapshot\.key: is missing"):
        profile_of_snapshot({name: part for name, part in document.items() if name != "key"})
    with pytest.raises(HardwareError, match="kind"):
        profile_of_snapshot(document | {"kind": "crystal ball"})
    state = document["state"] | {"planes": {}}
    with pytest.raises(HardwareError, match=r"planes\.0: is missing"):
        profile_of_snapshot(document | {"state": state})
    assert profile_of_snapshot(document).seconds(StepFeatures()) < A100_8B.seconds(
        StepFeatures(1e6)
    )
