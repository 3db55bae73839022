"""Measured latencies of real accelerators (splitwise-sim, MIT licence), where there is data."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from costmodel.features import StepFeatures
from costmodel.prior import fit_prior

DATA = Path(os.environ.get("PACELINE_DATA", Path(__file__).parents[3] / "shared" / "data"))
TABLE = DATA / "splitwise-sim" / "perf_model.csv"


def _samples(model: str, hardware: str, parallel: int) -> list[tuple[StepFeatures, float]]:
    """One prefill step and one decode step (at mid-output context) per measured run."""
    samples = []
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"]) != (model, hardware):
                continue
            if int(row["tensor_parallel"]) != parallel:
                continue
            prompt, batch = float(row["prompt_size"]), float(row["batch_size"])
            context = prompt + float(row["token_size"]) / 2.0
            prefill = StepFeatures(prompt * batch, chunk_squared_tokens=batch * prompt**2)
            decode = StepFeatures(num_decode_requests=batch, decode_context_tokens=batch * context)
            samples.append((prefill, float(row["prompt_time"]) / 1e3))
            samples.append((decode, float(row["token_time"]) / 1e3))
    return samples


@pytest.mark.skipif(not TABLE.is_file(), reason=f"no {TABLE} (set PACELINE_DATA)")
@pytest.mark.parametrize("hardware", ["a100-80gb", "h100-80gb"])
@pytest.mark.parametrize("parallel", [4, 8])
def test_measured_steps_of_a_70b_model_are_fitted_and_then_followed(
    hardware: str, parallel: int
) -> None:
    samples = _samples("llama2-70b", hardware, parallel)
    by_features: dict[StepFeatures, list[float]] = defaultdict(list)
    for features, latency_s in samples:
        by_features[features].append(latency_s)
    model = fit_prior(samples)
    measured_s = np.array([np.median(values) for values in by_features.values()])
    predicted_s = model.predict(np.array(list(by_features))).mean_s
    assert np.mean(np.abs(predicted_s - measured_s) / measured_s) < 0.1

    rng = np.random.default_rng(0)
    errors = []
    for index in rng.integers(0, len(samples), 1000):
        features, latency_s = samples[index]
        predicted = float(model.predict(features.to_array()[None]).mean_s[0])
        errors.append(abs(predicted - latency_s) / latency_s)
        assert model.observe(features, latency_s)
    assert np.mean(errors[500:]) < 0.08
    assert 0.87 <= model.quality().coverage <= 0.93
