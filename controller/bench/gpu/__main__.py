"""`python -m controller.bench.gpu`: put a device on trial and say what it is worth.

Owns the order of the parts, their time boxes and what happens when one fails: it is shown, and the
others run all the same. Needs torch, transformers and NumPy; downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.bench.gpu.exactness import check_exactness
from controller.bench.gpu.learning import fit_sweep, learn
from controller.bench.gpu.rows import Row, TimeBox, Verdict, line_of, table
from controller.bench.gpu.sizes import FULL, TINY, TrialSizes
from controller.bench.gpu.speed import measure_speed
from controller.bench.gpu.spike import measure_spike
from engine.clock import Clock, MonotonicClock

if TYPE_CHECKING:
    from engine.device.trial import DeviceTrial, LargeTrial, TrialRunner

PARTS = ("exactness", "speed", "spike", "learning")


class Trial:
    """The results so far, written to a file after every part: a killed run leaves what it knew."""

    def __init__(self, out: Path, facts: dict[str, Any], clock: Clock) -> None:
        self._out = out
        self._facts = facts
        self._clock = clock
        self._box = TimeBox(clock, 0.0)
        self.rows: dict[str, list[Row]] = {}
        self._seconds: dict[str, float] = {}

    def run(self, part: str, rows: Callable[[], Iterator[Row]]) -> None:
        """Collect a part's rows; an exception becomes its last row."""
        box = TimeBox(self._clock, 0.0)
        kept = self.rows.setdefault(part, [])
        try:
            for row in rows():
                kept.append(row)
                say(f"[{self._box.spent_s:5.0f} s] {part}: {row.what}: {row.text}")
        except Exception as error:
            kept.append(Row(part, line_of(error), Verdict.FAILED))
            say(f"[{self._box.spent_s:5.0f} s] {part}: {line_of(error)}")
        self._seconds[part] = self._seconds.get(part, 0.0) + box.spent_s
        self.save()

    @property
    def is_passed(self) -> bool:
        """Whether no row is bad."""
        return not any(row.verdict.is_bad for rows in self.rows.values() for row in rows)

    def save(self) -> None:
        """Write everything as JSON."""
        parts = {
            name: {"seconds": self._seconds.get(name), "rows": [row.to_json() for row in rows]}
            for name, rows in self.rows.items()
        }
        result = {
            "facts": self._facts,
            "passed": self.is_passed,
            "seconds": self._box.spent_s,
            "parts": parts,
        }
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trial; returns 0 if every check passed, 1 if one did not, 2 without the device."""
    options = _parse(arguments)
    # Imported here: a typo in a flag should not cost the seconds that torch takes.
    from engine.device.trial import BACKENDS, DeviceTrial, is_there

    if not is_there(options.device):
        say(f"--device {options.device}: not here; --device cpu --tiny tries the command itself")
        return 2
    clock = MonotonicClock()
    device = DeviceTrial(options.device, is_tiny=options.tiny)
    sizes = TINY if options.tiny else FULL
    facts = device.describe()
    say(", ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
    trial = Trial(options.out, {**facts, "tiny": options.tiny}, clock)
    backends = tuple(BACKENDS)
    if "exactness" in options.parts:
        box = TimeBox(clock, sizes.exactness_box_s)
        trial.run("exactness", lambda: check_exactness(device, sizes, box, clock, backends))
    if set(options.parts) - {"exactness"}:
        _measure(trial, device, sizes, clock, backends, options.parts)
    say("", table(trial.rows), "", f"written to {options.out}")
    return 0 if trial.is_passed else 1


def _measure(
    trial: Trial,
    device: DeviceTrial,
    sizes: TrialSizes,
    clock: Clock,
    backends: Sequence[str],
    parts: Sequence[str],
) -> None:
    """Run the parts that need the large model; without it they all fail with one reason."""
    made: list[LargeTrial] = []

    def make() -> Iterator[Row]:
        box = TimeBox(clock, 0.0)
        made.append(device.large())
        yield Row("the large model", f"random weights made in {box.spent_s:.1f} s")

    trial.run("speed", make)
    if not made:
        return
    large = made[0]
    if "speed" in parts:
        box = TimeBox(clock, sizes.speed_box_s)
        trial.run("speed", lambda: measure_speed(device, large, sizes, box, clock, backends))
    if {"spike", "learning"} & set(parts):
        trial.run("learning", lambda: _serve(trial, device, large, sizes, clock, backends, parts))


def _serve(
    trial: Trial,
    device: DeviceTrial,
    large: LargeTrial,
    sizes: TrialSizes,
    clock: Clock,
    backends: Sequence[str],
    parts: Sequence[str],
) -> Iterator[Row]:
    """Sweep, spike and learn with the first backend that runs, as a server would choose it."""
    made = _first_runner(device, large, sizes, backends)
    model, row = fit_sweep(made, sizes, clock)
    yield row
    if "spike" in parts:
        box = TimeBox(clock, sizes.spike_box_s)
        trial.run("spike", lambda: measure_spike(made, model, large.vocab_size, sizes, box, clock))
    if "learning" in parts:
        box = TimeBox(clock, sizes.learning_box_s)
        yield from learn(made, model, large.vocab_size, sizes, box, clock)


def _first_runner(
    device: DeviceTrial, large: LargeTrial, sizes: TrialSizes, backends: Sequence[str]
) -> TrialRunner:
    refusal: ValueError | None = None
    for backend in backends:
        if device.refusal(backend, large.dtype) is None:
            try:
                return large.runner(
                    backend, sizes.max_batch, sizes.max_context, with_graphs=device.is_cuda
                )
            except ValueError as error:
                refusal = error
    raise RuntimeError(f"no attention backend serves the large model: {refusal}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: tries the command itself")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="run only these parts"
    )
    folder = Path(os.environ.get("OUT") or ".")
    parser.add_argument("--out", type=Path, default=folder / "gpu.json", help="the JSON file")
    return parser.parse_args(arguments)


def say(*lines: str) -> None:
    """Print lines at once: progress must be seen through a pipe too."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
