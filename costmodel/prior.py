"""Where a model starts: from a warm-up sweep, or from nothing.

Owns the shapes of the sweep and the batch fit of its samples. Must not run a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar, overload

import numpy as np

from costmodel.basis import SCALES, expand
from costmodel.envelope import DECODE_PLANE, NUM_PLANES, PREFILL_PLANE, WORK_PLANE
from costmodel.features import FloatArray, Regime, StepFeatures
from costmodel.hygiene import check_sample
from costmodel.judged import JudgedPlanes
from costmodel.margin import PRIOR_MARGIN
from costmodel.plane import NonNegativePlane
from costmodel.recursive import RecursiveLeastSquares

# Seconds per scaled unit (order of `basis.BASIS_NAMES`) when nothing is known: a step of 20 ms, 0.2
# ms per token. Wrong on any real device, but every kind of work costs something, so a planner is
# cautious until the first steps set the scale.
_FLAT_FLOOR: Final = (0.02, 0.0, 0.0, 0.0016, 0.0004, 0.0, 0.0, 0.0, 0.0)
_FLAT_WORK: Final = (0.018, 0.0, 0.0512, 0.0016, 0.0004, 0.0026, 0.0013, 0.0016, 0.0016)
_FLAT: Final = (_FLAT_FLOOR, _FLAT_WORK, _FLAT_WORK)
_MAX_ROUNDS: Final = 8
_LEAST_MARGIN: Final = 0.1
# Prompts of the sweep's step that holds several.
_CHUNKS: Final = 8


Model = TypeVar("Model", bound=JudgedPlanes)
Sample = tuple[StepFeatures, float]


class SweepShape(NamedTuple):
    """One step of a warm-up: `num_chunk_tokens` after `num_past_tokens`, beside decodes that each
    read `num_context_tokens`.

    The tokens are those of `num_chunks` prompts (at most one per token, as even as can be), which
    end in this step if `is_end`.
    """

    num_chunk_tokens: int
    num_past_tokens: int
    num_decodes: int
    num_context_tokens: int
    num_chunks: int = 1
    is_end: bool = True

    def chunks(self) -> list[int]:
        """Return the length of each prompt's chunk, longest first; their sum is the whole."""
        size, rest = divmod(self.num_chunk_tokens, self.num_chunks)
        chunks = [size + 1] * rest + [size] * (self.num_chunks - rest)
        return [chunk for chunk in chunks if chunk > 0]

    def features(self) -> StepFeatures:
        """Return the features of this step."""
        chunks = self.chunks()
        return StepFeatures(
            num_prefill_tokens=float(self.num_chunk_tokens),
            num_decode_requests=float(self.num_decodes),
            decode_context_tokens=float(self.num_decodes * self.num_context_tokens),
            chunk_past_tokens=float(self.num_chunk_tokens * self.num_past_tokens),
            chunk_squared_tokens=float(sum(chunk * chunk for chunk in chunks)),
            num_chunks=float(len(chunks)),
            num_prompt_logits=float(len(chunks) if self.is_end else 0),
        )


def sweep_plan(
    max_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> tuple[SweepShape, ...]:
    """Return at most 13 distinct shapes that tell the coefficients apart, smallest first.

    Every shape respects the three limits (tokens of a step, running requests, tokens of one
    request). Decodes few and many, short and long; chunks small and large, at the start of a prompt
    and behind a long past, of one prompt and of several; both together.
    """
    if min(max_batched_tokens, max_num_seqs, max_model_len) < 1:
        raise ValueError("max_batched_tokens, max_num_seqs and max_model_len must be positive")
    many = min(max_num_seqs, max_batched_tokens, 16)
    few = max(1, many // 4)
    # The token computed by a decode is part of its context.
    short, long = min(16, max_model_len), max(1, max_model_len // 2)
    chunk = min(max_batched_tokens, max_model_len, 256)
    large = min(max_batched_tokens, max_model_len, 1024)
    past = max(0, min(max_model_len - chunk, max_model_len // 2))
    beside = min(many, max_batched_tokens - 1, max_num_seqs - 1)
    shapes = [
        SweepShape(0, 0, 1, short),
        SweepShape(0, 0, few, short),
        SweepShape(0, 0, many, short),
        SweepShape(0, 0, 1, long),
        SweepShape(0, 0, many, long),
        SweepShape(max(1, chunk // 16), 0, 0, 0),
        SweepShape(max(1, chunk // 4), 0, 0, 0),
        SweepShape(chunk, 0, 0, 0),
        # Prompts go on behind this one, and several end in the next: chunks and logits tell apart.
        SweepShape(chunk, past, 0, 0, is_end=False),
        SweepShape(chunk, 0, 0, 0, num_chunks=min(_CHUNKS, chunk, max_num_seqs)),
        SweepShape(large, 0, 0, 0),
    ]
    if beside > 0:
        mixed = max(1, min(chunk // 2, max_batched_tokens - beside))
        shapes += [
            SweepShape(mixed, 0, beside, short),
            SweepShape(mixed, past, beside, long, is_end=False),
        ]
    return tuple(sorted(set(shapes), key=_size))


@overload
def flat_prior() -> RecursiveLeastSquares: ...
@overload
def flat_prior(learner: type[Model]) -> Model: ...
def flat_prior(learner: type[JudgedPlanes] = RecursiveLeastSquares) -> JudgedPlanes:
    """Return a model for an unknown device: the first few steps set its scale."""
    return learner([NonNegativePlane(np.array(c)) for c in _FLAT])


@overload
def fit_prior(samples: Sequence[Sample]) -> RecursiveLeastSquares: ...
@overload
def fit_prior(samples: Sequence[Sample], learner: type[Model]) -> Model: ...
def fit_prior(
    samples: Sequence[Sample], learner: type[JudgedPlanes] = RecursiveLeastSquares
) -> JudgedPlanes:
    """Return a model fitted to (features, seconds) of a warm-up; unusable samples are left out.

    Repeats of the same features are replaced by their median. Then the samples are shared among the
    planes and each plane is fitted, in turns, until the shares settle (Magnani and Boyd, "Convex
    piecewise-linear fitting", 2009); the round with the smallest error is kept, one plane for all
    prefill work being the first. What the samples do not tell comes from the flat prior, brought to
    their scale. None usable: the flat prior.
    """
    repeats: dict[StepFeatures, list[float]] = {}
    for features, latency_s in samples:
        if check_sample(features, latency_s) is None:
            repeats.setdefault(features, []).append(latency_s)
    if not repeats:
        return flat_prior(learner)
    raw = np.array(list(repeats), dtype=np.float64)
    rows = expand(raw) / SCALES
    latencies_s = np.array([statistics.median(values) for values in repeats.values()])
    start = np.array(_FLAT)
    start *= float(np.median(latencies_s / (rows @ start.T).max(axis=1)))

    has_prefill = np.array([features.regime is not Regime.DECODE_ONLY for features in repeats])
    owners = np.where(has_prefill, WORK_PLANE, DECODE_PLANE)
    # One plane for all prefill work is the first candidate, and where both of its planes start.
    planes = _fit(rows, latencies_s, start, owners)
    start[PREFILL_PLANE] = start[WORK_PLANE] = planes[WORK_PLANE].coefficients
    candidates = [_fit(rows, latencies_s, start, owners)]
    if has_prefill.any():
        usual_s = np.median(latencies_s[has_prefill])
        owners[has_prefill & (latencies_s <= usual_s)] = PREFILL_PLANE
    for _ in range(_MAX_ROUNDS):
        planes = _fit(rows, latencies_s, start, owners)
        candidates.append(planes)
        renewed = _predict(planes, rows).argmax(axis=1)
        if (renewed == owners).all():
            break
        owners = renewed
    best = min(candidates, key=lambda planes: _error(planes, rows, latencies_s))
    return learner(best, _margin_of(best, rows, latencies_s))


def _margin_of(
    planes: Sequence[NonNegativePlane], rows: FloatArray, latencies_s: FloatArray
) -> float:
    """Return the margin to start with: twice the fit's own error, which is too kind to it.

    At least 10 %, since a dozen steps do not tell how noisy a machine is; at most what is assumed
    of a machine nobody has seen.
    """
    ratio = latencies_s / _predict(planes, rows).max(axis=1) - 1.0
    return float(np.clip(2.0 * np.sqrt(np.mean(ratio * ratio)), _LEAST_MARGIN, PRIOR_MARGIN))


def _fit(
    rows: FloatArray, latencies_s: FloatArray, start: FloatArray, owners: FloatArray
) -> list[NonNegativePlane]:
    planes = []
    for index in range(NUM_PLANES):
        plane = NonNegativePlane(start[index])
        is_own = owners == index
        if is_own.any():
            plane.believe(rows[is_own], latencies_s[is_own])
        planes.append(plane)
    return planes


def _predict(planes: Sequence[NonNegativePlane], rows: FloatArray) -> FloatArray:
    return rows @ np.stack([plane.coefficients for plane in planes], axis=1)


def _error(planes: Sequence[NonNegativePlane], rows: FloatArray, latencies_s: FloatArray) -> float:
    predicted_s = _predict(planes, rows).max(axis=1)
    return float((np.abs(predicted_s - latencies_s) / latencies_s).mean())


def _size(shape: SweepShape) -> tuple[int, int]:
    tokens = shape.num_chunk_tokens + shape.num_decodes
    return tokens, shape.num_past_tokens + shape.num_decodes * shape.num_context_tokens
