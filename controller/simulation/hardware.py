"""`HardwareProfile`: the truth of a simulated machine: how long each step really takes.

Owns the formula, its JSON form and the built-in machines. Must not plan, learn or read a clock: the
instant is handed in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.simulation.recorded_noise import RecordedNoise, Stretches
from costmodel.basis import BASIS_NAMES, NUM_BASIS, expand
from costmodel.features import FloatArray, StepFeatures
from costmodel.fields import SnapshotError, read_count, read_number
from costmodel.synthetic import ACCELERATOR, TWO_CORES, SyntheticDevice

PROFILE_FORMAT: Final = 1
_NOISE_BLOCK: Final = 4096
_MAX_PLANES: Final = 16


class HardwareError(ValueError):
    """A hardware profile cannot be used; the message names the field or the file."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Steps that start within [`start_s`, `end_s`) of virtual time take `factor` times as long."""

    start_s: float
    end_s: float
    factor: float

    def __post_init__(self) -> None:
        """Check the span and the factor; HardwareError names the field."""
        if not (math.isfinite(self.start_s) and self.start_s >= 0):
            raise HardwareError(f"start_s of a slowdown must not be negative, got {self.start_s}")
        if not self.end_s > self.start_s:
            raise HardwareError(f"end_s of a slowdown must be after start_s, got {self.end_s}")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise HardwareError(f"factor of a slowdown must be positive, got {self.factor}")


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """A machine as `max over planes of c · φ(step)` seconds, times noise and slowdowns.

    Each plane holds non-negative seconds per unit in the order of `costmodel.basis.BASIS_NAMES`;
    `fixed + max(floor, work) + rest` is two of them. `noise` is the σ of a log-normal factor whose
    mean is 1; where there is `recorded` noise, stretches of it are drawn instead. `swap_block_s` is
    what moving one KV block to host memory, or back, takes. `num_pool_tokens` is the KV pool that
    such a machine has room for, in tokens. `source` says where the numbers come from. HardwareError
    names the field.
    """

    name: str
    planes: tuple[tuple[float, ...], ...]
    noise: float = 0.03
    slowdowns: tuple[Slowdown, ...] = ()
    swap_block_s: float = 0.0
    num_pool_tokens: int = 262_144
    source: str = ""
    recorded: RecordedNoise | None = None

    def __post_init__(self) -> None:
        """Check every number; at least one plane must cost something for an empty step."""
        if not self.name:
            raise HardwareError("name of a hardware profile must not be empty")
        if not 1 <= len(self.planes) <= _MAX_PLANES:
            raise HardwareError(f"planes must be 1 to {_MAX_PLANES}, got {len(self.planes)}")
        for index, plane in enumerate(self.planes):
            if len(plane) != NUM_BASIS:
                raise HardwareError(f"planes[{index}] must hold {NUM_BASIS} numbers")
            for name, value in zip(BASIS_NAMES, plane, strict=True):
                if not (math.isfinite(value) and value >= 0):
                    raise HardwareError(
                        f"planes[{index}].{name} must be finite and not negative, got {value}"
                    )
        if not any(plane[0] > 0 for plane in self.planes):
            raise HardwareError("planes need an intercept above 0: no step takes no time")
        for name in ("noise", "swap_block_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise HardwareError(f"{name} must be finite and not negative, got {value}")
        if self.num_pool_tokens < 1:
            raise HardwareError(f"num_pool_tokens must be positive, got {self.num_pool_tokens}")

    @classmethod
    def of_device(
        cls,
        name: str,
        device: SyntheticDevice,
        *,
        noise: float = 0.03,
        swap_block_s: float = 0.0,
        num_pool_tokens: int = 262_144,
        source: str = "",
    ) -> HardwareProfile:
        """Return `overhead + max(floor, tokens) + context + pairs` as two planes."""
        pair_s = device.attention_pair_s
        rest = (device.context_token_s, pair_s, pair_s / 2.0)
        prompts = (device.extra_chunk_s, device.prompt_logit_s)
        tokens = (device.prefill_token_s, device.decode_request_s)
        work = (device.overhead_s, 0.0, *tokens, *rest, *prompts)
        floor = (device.overhead_s + device.floor_s, 0.0, 0.0, 0.0, *rest, *prompts)
        return cls(name, (work, floor), noise, (), swap_block_s, num_pool_tokens, source)

    def seconds(self, features: StepFeatures) -> float:
        """Return the noiseless seconds of one step."""
        prefill, decodes, context, past, squared, chunks, logits = features
        jump = prefill > 0.0
        extra = chunks - 1.0 if chunks > 1.0 else 0.0
        longest_s = 0.0
        for base, jump_s, a, b, c, d, e, f, g in self.planes:
            plane_s = base + jump * jump_s + a * prefill + b * decodes + c * context
            plane_s += d * past + e * squared + f * extra + g * logits
            if plane_s > longest_s:
                longest_s = plane_s
        return longest_s

    def seconds_of(self, features: FloatArray) -> FloatArray:
        """Return the noiseless seconds, shape (n,), of steps of shape (n, NUM_FEATURES)."""
        seconds: FloatArray = (expand(features) @ np.array(self.planes).T).max(axis=1)
        return seconds

    def factor_at(self, now: float) -> float:
        """Return the product of the slowdowns that hold at virtual second `now`."""
        factor = 1.0
        for slowdown in self.slowdowns:
            if slowdown.start_s <= now < slowdown.end_s:
                factor *= slowdown.factor
        return factor

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values; zero coefficients are left out."""
        document = {
            "format": PROFILE_FORMAT,
            "name": self.name,
            "source": self.source,
            "planes": [
                {name: value for name, value in zip(BASIS_NAMES, plane, strict=True) if value}
                for plane in self.planes
            ],
            "noise": self.noise,
            "slowdowns": [
                {"start_s": each.start_s, "end_s": each.end_s, "factor": each.factor}
                for each in self.slowdowns
            ],
            "swap_block_s": self.swap_block_s,
            "num_pool_tokens": self.num_pool_tokens,
        }
        if self.recorded is not None:
            document["recorded"] = self.recorded.to_json()
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> HardwareProfile:
        """Rebuild a profile from `to_json`; HardwareError names the field that is wrong."""
        if document.get("format") != PROFILE_FORMAT:
            raise HardwareError(f"format: must be {PROFILE_FORMAT}, got {document.get('format')!r}")
        planes, slowdowns = document.get("planes"), document.get("slowdowns", [])
        recorded = document.get("recorded")
        if not isinstance(planes, list) or not isinstance(slowdowns, list):
            raise HardwareError("planes and slowdowns must be lists")
        if not isinstance(recorded, dict | None):
            raise HardwareError("recorded must be an object")
        try:
            return cls(
                name=str(document.get("name", "")),
                planes=tuple(_plane(each, f"planes[{i}]") for i, each in enumerate(planes)),
                noise=read_number(document, "noise", "profile", low=0.0),
                slowdowns=tuple(
                    _slowdown(each, f"slowdowns[{i}]") for i, each in enumerate(slowdowns)
                ),
                swap_block_s=read_number(document, "swap_block_s", "profile", low=0.0),
                num_pool_tokens=read_count(document, "num_pool_tokens", "profile"),
                source=str(document.get("source", "")),
                recorded=None if recorded is None else RecordedNoise.from_json(recorded),
            )
        except HardwareError:
            raise
        except (SnapshotError, ValueError) as error:
            raise HardwareError(str(error)) from error


class Device:
    """A profile at work: `step_s` answers for each step in turn, with seeded noise.

    The same seed gives the same factors in the same order, in any process; those of recorded noise
    depend on the kinds of steps as well.
    """

    def __init__(self, profile: HardwareProfile, seed: int | tuple[int, int] = 0) -> None:
        self._profile = profile
        self._rng = np.random.default_rng(seed)
        self._factors: list[float] = []
        recorded = profile.recorded
        self._stretches = None if recorded is None else Stretches(recorded, self._rng)

    def step_s(self, features: StepFeatures, now: float) -> float:
        """Return the seconds that a step takes which starts at `now`."""
        seconds = self._profile.seconds(features)
        if self._profile.slowdowns:
            seconds *= self._profile.factor_at(now)
        if self._stretches is not None:
            return seconds * self._stretches.factor(features.regime)
        return seconds * self._noise()

    def _noise(self) -> float:
        sigma = self._profile.noise
        if sigma == 0.0:
            return 1.0
        if not self._factors:
            # Drawn in blocks: one draw at a time costs more than the formula.
            draws = np.exp(sigma * self._rng.standard_normal(_NOISE_BLOCK) - sigma * sigma / 2.0)
            self._factors = draws.tolist()
        return self._factors.pop()


# An 8B-class model on an A100-class chip: control.md section 9. 80 GB hold about 400,000 tokens of
# its KV beside the weights; a block of 16 of them (2 MiB) crosses PCIe at about 20 GB/s.
A100_8B: Final = HardwareProfile.of_device(
    "a100-8b",
    ACCELERATOR,
    swap_block_s=1e-4,
    num_pool_tokens=400_000,
    source="control.md section 9: 5 ms + max(9 ms, 85 µs/token) + 66 ns/context token + attention",
)
# A 70B model on eight H100: 640 GB hold about 1,400,000 tokens of its KV beside the weights.
H100_70B: Final = HardwareProfile(
    "h100-70b",
    (
        (0.02989, 0.0241, 0.0, 1.993e-4, 1.785e-7, 5.361e-9, 2.68e-9, 0.0, 0.0),
        (0.0, 0.0, 7.704e-5, 7.704e-5, 1.785e-7, 5.361e-9, 2.68e-9, 0.0, 0.0),
    ),
    noise=0.02405,
    swap_block_s=2e-4,
    num_pool_tokens=1_400_000,
    source="fitted to splitwise-sim's perf_model.csv (MIT), llama2-70b, h100-80gb, 8 ways;"
    " mean error 5.6 %",
)
# The demo model on two cores: its pool of 1 GiB holds 29,000 tokens.
CPU_DEMO: Final = HardwareProfile.of_device(
    "cpu-demo",
    TWO_CORES,
    noise=0.05,
    swap_block_s=2e-4,
    num_pool_tokens=29_000,
    source="gemma-3-270m on a two-core AVX2 machine, measured",
)

BUILT_IN: Final = {profile.name: profile for profile in (A100_8B, H100_70B, CPU_DEMO)}


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; HardwareError names the file and what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise HardwareError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise HardwareError(f"{path}: must be a JSON object")
    return document


def _plane(entry: Any, path: str) -> tuple[float, ...]:
    if not isinstance(entry, Mapping):
        raise HardwareError(f"{path} must be an object")
    unknown = sorted(set(entry) - set(BASIS_NAMES))
    if unknown:
        raise HardwareError(f"{path}.{unknown[0]}: no such coefficient")
    return tuple(read_number(entry, n, path, 0.0) if n in entry else 0.0 for n in BASIS_NAMES)


def _slowdown(entry: Any, path: str) -> Slowdown:
    if not isinstance(entry, Mapping):
        raise HardwareError(f"{path} must be an object")
    return Slowdown(*(read_number(entry, n, path) for n in ("start_s", "end_s", "factor")))
