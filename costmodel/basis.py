"""The learners' basis: the features behind an intercept and a prefill indicator, and their
scales.

Owns the order, the scaling and the split of a step into its decode and its prefill part. Must not
learn anything.

The agreed basis is [1, features]. The indicator `1{prefill > 0}` is the per-regime intercept:
a decode-only step may run from a captured graph or a different kernel, so the first prefill token
can cost a jump. Its coefficient is non-negative like every other one, so adding prefill work still
never predicts less. The first chunk is what the indicator stands for, so chunks count from the
second one on: several short prompts cost more than one chunk of the same length.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from costmodel.features import FEATURE_NAMES, NUM_FEATURES, FloatArray, StepFeatures

BASIS_NAMES: Final = (
    "intercept",
    "has_prefill",
    *("num_extra_chunks" if name == "num_chunks" else name for name in FEATURE_NAMES),
)
NUM_BASIS: Final = len(BASIS_NAMES)
EXTRA_CHUNKS: Final = BASIS_NAMES.index("num_extra_chunks")

# One unit of a scaled basis function is a chunk of 256 tokens, 8 decodes, 4096 tokens of context, 8
# more chunks, 8 logits: numbers near one keep the information matrix well conditioned.
SCALES: Final[FloatArray] = np.array(
    [1.0, 1.0, 256.0, 8.0, 4096.0, 256.0 * 1024.0, 256.0 * 256.0, 8.0, 8.0]
)

# Features beyond this saturate in predictions and are refused as samples: no step holds 10^12 of
# anything, and products of accepted numbers stay finite.
MAX_FEATURE: Final = 1e12

# Columns: the whole step, its decode part, its prefill part. The intercept belongs to each.
PART_MASKS: Final[FloatArray] = np.array(
    [
        [1.0, 1.0, 1.0],
        [1.0, 0.0, 1.0],
        [1.0, 0.0, 1.0],
        [1.0, 1.0, 0.0],
        [1.0, 1.0, 0.0],
        [1.0, 0.0, 1.0],
        [1.0, 0.0, 1.0],
        [1.0, 0.0, 1.0],
        [1.0, 0.0, 1.0],
    ]
)
NUM_PARTS: Final = 3


def expand(features: FloatArray) -> FloatArray:
    """Return unscaled basis rows (n, NUM_BASIS) for features of shape (n, NUM_FEATURES)."""
    # One basis function after the other: each is then one stretch of memory, and a step path asks.
    basis = np.empty((NUM_BASIS, features.shape[0]))
    basis[0] = 1.0
    np.minimum(features.T, MAX_FEATURE, out=basis[NUM_BASIS - NUM_FEATURES :])
    # Features are not negative: their sign is 1 where there is work.
    np.sign(basis[2], out=basis[1])
    extra = basis[EXTRA_CHUNKS]
    np.subtract(extra, 1.0, out=extra)
    np.maximum(extra, 0.0, out=extra)
    return basis.T


def expand_scaled(features: StepFeatures) -> FloatArray:
    """Return the scaled basis of one step, shape (NUM_BASIS,)."""
    has_prefill = 1.0 if features.num_prefill_tokens > 0 else 0.0
    row: FloatArray = np.array((1.0, has_prefill, *features))
    row[EXTRA_CHUNKS] = max(0.0, features.num_chunks - 1.0)
    row /= SCALES
    return row
