"""The conformance suite: what every `CostModel` must pass, whatever it learns with.

Owns the promises of `base.CostModel` as executable checks on a factory of fresh models; a broken
promise raises `ConformanceError` with numbers. Must not know a learner, and must not measure time.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import FunctionType, ModuleType
from typing import Final

import numpy as np

from costmodel.base import CostModel
from costmodel.features import NUM_FEATURES, FloatArray, Regime, StepFeatures
from costmodel.snapshot import SnapshotKey, StoredModel, dump_model, load_model
from costmodel.synthetic import DEVICES, SyntheticStep, synthetic_steps

MakeModel = Callable[[], CostModel]
MakeStoredModel = Callable[[], StoredModel]

_MAX_MAPE: Final = 0.05
_COVERAGE: Final = (0.87, 0.93)
_MIN_REGIME_STEPS: Final = 200
_MAX_RECOVERED_MAPE: Final = 0.08
_MAX_OUTLIER_COST: Final = 0.10
_POISON: Final = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, 1e-300, sys.float_info.max)


class ConformanceError(AssertionError):
    """A model broke a promise of the seam."""


def check_estimates(make_model: MakeModel) -> None:
    """Shapes, finite, positive, `upper >= mean`; fresh and learnt; none, one and many candidates;
    extremes.
    """
    for model in (make_model(), *_learnt_models(make_model)):
        for features in (np.zeros((0, NUM_FEATURES)), np.zeros((1, NUM_FEATURES)), _grid()):
            mean_s, upper_s = model.predict(features)
            _require(mean_s.shape == upper_s.shape == (len(features),), "shape")
            _require(bool(np.isfinite(upper_s).all() and np.isfinite(mean_s).all()), "not finite")
            _require(bool((mean_s > 0.0).all()), "not positive")
            _require(bool((upper_s >= mean_s).all()), "upper below mean")


def check_monotone(make_model: MakeModel) -> None:
    """More of any kind of work never predicts less, mean and upper, within a regime and across
    regimes.
    """
    for model in (make_model(), *_learnt_models(make_model)):
        features = _grid()
        mean_s, upper_s = model.predict(features)
        for column in range(NUM_FEATURES):
            for more in (1.0, 300.0, 1e6):
                grown = features.copy()
                grown[:, column] += more
                grown_mean_s, grown_upper_s = model.predict(grown)
                # A sum in another order may differ in its last bits.
                slack = 1.0 - 1e-12
                _require(bool((grown_mean_s >= mean_s * slack).all()), f"mean, column {column}")
                _require(bool((grown_upper_s >= upper_s * slack).all()), f"upper, column {column}")


def check_marginals(make_model: MakeModel) -> None:
    """Costs are finite and not negative, the floor positive, the knee at least one token; all known
    when learnt.
    """
    for model in (make_model(), *_learnt_models(make_model)):
        costs = model.marginals()
        parts = (costs.prefill_token_s, costs.decode_request_s, costs.decode_context_token_s)
        _require(all(0.0 <= part < math.inf for part in parts), f"marginal cost in {costs}")
        _require(0.0 < costs.floor_s < math.inf and costs.knee_tokens >= 1, f"floor in {costs}")
    for device in DEVICES:
        costs = _teach(make_model(), synthetic_steps(device), 500).marginals()
        # A chunk's tokens and their square are nearly collinear: the split is known to a factor.
        ratio = costs.prefill_token_s / device.prefill_token_s
        _require(0.5 < ratio < 2.0, f"a prefill token costs {device.prefill_token_s}, got {costs}")


def check_deterministic(make_model: MakeModel) -> None:
    """The same samples give the same model, to the last bit."""
    first, second = (_teach(make_model(), synthetic_steps(DEVICES[0]), 300) for _ in range(2))
    _require(_same(first, second), "two models differ after the same samples")
    _require(first.quality() == second.quality(), "two qualities differ after the same samples")


def check_bounded_memory(make_model: MakeModel) -> None:
    """A model does not grow with the steps it has seen."""
    steps = synthetic_steps(DEVICES[0], outlier_share=0.01)
    model = _teach(make_model(), steps, 2500)
    before = _deep_bytes(model)
    after = _deep_bytes(_teach(model, steps, 2500))
    _require(after <= before * 1.1, f"{before} bytes after 2500 steps, {after} after 5000")


def check_refusals(make_model: MakeModel) -> None:
    """What is no sample is refused, counted by reason, and changes no prediction."""
    model = _teach(make_model(), synthetic_steps(DEVICES[0]), 100)
    untouched = model.predict(_grid())
    good = StepFeatures(num_decode_requests=1.0, decode_context_tokens=16.0)
    cases = [
        ("not_finite", good, math.nan),
        ("not_finite", good, math.inf),
        ("not_finite", StepFeatures(num_prefill_tokens=math.nan), 0.01),
        ("not_positive", good, 0.0),
        ("not_positive", good, -0.01),
        ("no_work", StepFeatures(), 0.01),
    ]
    for reason, features, latency_s in cases:
        before = model.quality().num_rejected.get(reason, 0)
        _require(not model.observe(features, latency_s), f"{reason} was accepted")
        after = model.quality().num_rejected.get(reason, 0)
        _require(after == before + 1, f"{reason} was not counted")
    _require(np.array_equal(model.predict(_grid()), untouched), "a refused sample taught")


def check_survives_poison(make_model: MakeModel) -> None:
    """Poison among good samples, in latency and in features, first thing and later: never a broken
    number.
    """
    for device in DEVICES:
        model = make_model()
        for index, step in enumerate(islice(synthetic_steps(device), 400)):
            poison = _POISON[index % len(_POISON)]
            if index % 3 == 0:
                model.observe(step.features, poison)
            elif index % 3 == 1:
                column = index % NUM_FEATURES
                values = [poison if i == column else v for i, v in enumerate(step.features)]
                model.observe(StepFeatures(*values), step.measured_s)
            model.observe(step.features, step.measured_s)
        estimate = model.predict(_grid())
        _require(bool(np.isfinite(estimate).all()), "poison broke a prediction")
        _require(math.isfinite(model.quality().mape), "poison broke the quality")
        error = _mape(model, islice(synthetic_steps(device, seed=1), 200))
        _require(error < 2.0 * _MAX_MAPE, f"MAPE {error:.3f} among poison")


def check_learns(make_model: MakeModel) -> None:
    """MAPE <= 5 % at 3 % noise over the steps that follow the first 500, and the model says so
    itself.
    """
    for device in DEVICES:
        steps = synthetic_steps(device)
        model = _teach(make_model(), steps, 500)
        error = _mape(model, islice(steps, 500), is_measured=True)
        _require(error <= _MAX_MAPE, f"MAPE {error:.3f} after 500 steps on {device}")
        reported = _teach(model, steps, 500).quality().mape
        _require(reported <= _MAX_MAPE, f"reports MAPE {reported:.3f} on {device}")


def check_coverage(make_model: MakeModel) -> None:
    """The upper bound holds for 87–93 % of the last 500 steps, and in every regime with at least
    200.
    """
    for device in DEVICES:
        for noise in (0.03, 0.1):
            model = make_model()
            covered: list[bool] = []
            regimes: list[Regime] = []
            for step in islice(synthetic_steps(device, noise=noise, outlier_share=0.005), 1500):
                upper_s = float(model.predict(step.features.to_array()[None]).upper_s[0])
                covered.append(step.measured_s <= upper_s)
                regimes.append(step.features.regime)
                model.observe(step.features, step.measured_s)
            share = float(np.mean(covered[-500:]))
            _require(_is_covered(share), f"coverage {share:.3f} on {device} at noise {noise}")
            quality = model.quality()
            _require(abs(quality.coverage - share) < 0.01, f"reports coverage {quality.coverage}")
            for part in quality.regimes:
                own = [c for c, r in zip(covered, regimes, strict=True) if r is part.regime]
                share = float(np.mean(own[-500:]))
                is_many = len(own) >= _MIN_REGIME_STEPS
                _require(not is_many or _is_covered(share), f"coverage {share:.3f} in {part}")


def check_recovers(make_model: MakeModel) -> None:
    """After a lasting change of speed (×1.5, ×2, back to a half), error < 8 % again within 200
    steps.
    """
    for device in DEVICES:
        for factor in (1.5, 2.0, 0.5):
            steps = synthetic_steps(device)
            changed = _slowed(steps, factor)
            model = _teach(_teach(make_model(), steps, 1000), changed, 200)
            error = _mape(model, islice(changed, 200))
            _require(error < _MAX_RECOVERED_MAPE, f"MAPE {error:.3f} after ×{factor} on {device}")


def check_robust(make_model: MakeModel) -> None:
    """1 % outliers of ×1000 (and of ×1/1000) cost less than 10 points of MAPE against the truth."""
    for device in DEVICES:
        clean = _mape(
            _teach(make_model(), synthetic_steps(device), 1000),
            islice(synthetic_steps(device, seed=1), 300),
        )
        for factor in (1000.0, 0.001):
            dirty = synthetic_steps(device, outlier_share=0.01, outlier_factor=factor)
            model = _teach(make_model(), dirty, 1000)
            error = _mape(model, islice(synthetic_steps(device, seed=1), 300))
            cost = error - clean
            _require(cost < _MAX_OUTLIER_COST, f"outliers ×{factor} cost {cost:.3f} on {device}")


def check_snapshot(make_model: MakeStoredModel) -> None:
    """Through JSON and back: the same predictions, quality and future."""
    key = SnapshotKey("model", "cpu", "float32", "reference", 16, "0.1.0")
    steps = list(islice(synthetic_steps(DEVICES[0], outlier_share=0.02), 900))
    for num_seen in (0, 5, 700):
        model = make_model()
        _teach(model, iter(steps), num_seen)
        text = json.dumps(dump_model(model, key), allow_nan=False)
        restored = load_model(json.loads(text), key)
        _require(_same(model, restored), f"another prediction after {num_seen} steps")
        _require(model.quality() == restored.quality(), "another quality")
        for twin in (model, restored):
            _teach(twin, iter(steps[num_seen:]), 200)
        _require(_same(model, restored), "another future")
        _require(model.quality() == restored.quality(), "another future quality")


CHECKS: Final[tuple[Callable[[MakeModel], None], ...]] = (
    check_estimates,
    check_monotone,
    check_marginals,
    check_deterministic,
    check_bounded_memory,
    check_refusals,
    check_survives_poison,
    check_learns,
    check_coverage,
    check_recovers,
    check_robust,
)


def _require(is_kept: bool, problem: str) -> None:
    if not is_kept:
        raise ConformanceError(problem)


def _learnt_models(make_model: MakeModel) -> Iterator[CostModel]:
    for device in DEVICES:
        yield _teach(make_model(), synthetic_steps(device), 300)


def _teach(model: CostModel, steps: Iterator[SyntheticStep], count: int) -> CostModel:
    for step in islice(steps, count):
        model.observe(step.features, step.measured_s)
    return model


def _slowed(steps: Iterator[SyntheticStep], factor: float) -> Iterator[SyntheticStep]:
    return (SyntheticStep(s.features, s.measured_s * factor, s.true_s * factor) for s in steps)


def _mape(model: CostModel, steps: Iterator[SyntheticStep], *, is_measured: bool = False) -> float:
    """Mean of |actual − predicted| / actual while the model keeps learning; against the truth
    unless `is_measured`.
    """
    errors = []
    for features, measured_s, true_s in steps:
        actual_s = measured_s if is_measured else true_s
        predicted_s = float(model.predict(features.to_array()[None]).mean_s[0])
        errors.append(abs(actual_s - predicted_s) / actual_s)
        model.observe(features, measured_s)
    return float(np.mean(errors))


def _is_covered(share: float) -> bool:
    return _COVERAGE[0] <= share <= _COVERAGE[1]


def _same(first: CostModel, second: CostModel) -> bool:
    return np.array_equal(first.predict(_grid()), second.predict(_grid()))


def _grid() -> FloatArray:
    """Candidates of every regime, from an empty step to an absurd one."""
    rng = np.random.default_rng(7)
    steps = synthetic_steps(DEVICES[0], seed=7)
    real = np.array([step.features for step in islice(steps, 60)])
    wild = 10.0 ** rng.uniform(-3.0, 15.0, (30, NUM_FEATURES)) * rng.integers(
        0, 2, (30, NUM_FEATURES)
    )
    return np.vstack([np.zeros((1, NUM_FEATURES)), real, wild])


def _deep_bytes(root: object) -> int:
    """Bytes of everything that is reachable from `root`, code excluded."""
    seen: set[int] = set()
    pending = [root]
    total = 0
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        pending.extend(gc.get_referents(item))
    return total
