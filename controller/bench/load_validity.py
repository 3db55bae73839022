"""Was it the load that was asked for? Every way in which a run may have measured something else.

Owns the checks between a run and its quotation. Must not measure. A refusal is a result, and so is
a request that was still waiting at the end; a failure is neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from controller.bench.load_measures import REFUSED_STATUS
from controller.bench.load_run import LoadRun, OfferedRequest
from controller.bench.validity import Violation, ViolationKind, check_request

MAX_LATE_STEPS: Final = 0.5
"""The client's P99 lateness may be this share of a normal step: more would be counted as TTFT."""
MAX_STEP_RATIO: Final = 1.5
"""By which factor a server's normal step may differ from the one that the targets were made of."""
MAX_SHOWN: Final = 5


def load_violations(run: LoadRun, normal_s: float) -> tuple[Violation, ...]:
    """Return reasons not to quote `run`, empty for a valid one.

    `normal_s` is the normal step in seconds. At most `MAX_SHOWN` requests are named.
    """
    found = [v for each in run.requests for v in _check(each)]
    if len(found) > MAX_SHOWN:
        last = found[MAX_SHOWN - 1]
        more = f"{last.message} (and {len(found) - MAX_SHOWN} more)"
        found = [*found[: MAX_SHOWN - 1], Violation(last.kind, more)]
    return (*found, *_check_lateness(run, normal_s))


def check_machine(
    measured_s: float, normal_s: float, max_ratio: float = MAX_STEP_RATIO
) -> tuple[Violation, ...]:
    """Check that a server's own normal step is the one that the targets were made of (seconds)."""
    ratio = measured_s / normal_s
    if 1.0 / max_ratio <= ratio <= max_ratio:
        return ()
    return (
        Violation(
            ViolationKind.MACHINE_CHANGED,
            f"the normal step took {ratio:.2f} times as long as when the targets were made"
            f" (1/{max_ratio:g} to {max_ratio:g} is accepted): something else is running",
        ),
    )


def _check(offered: OfferedRequest) -> Iterator[Violation]:
    series = offered.series
    if offered.is_cut or series.status == REFUSED_STATUS:
        return
    # To be degraded is an answer of the policy: the promise that is judged stays the same.
    asked = replace(series, decision=None)
    yield from check_request(asked, offered.num_prompt_tokens, offered.num_wanted_tokens)


def _check_lateness(run: LoadRun, normal_s: float) -> Iterator[Violation]:
    late_s = [each.late_s for each in run.requests]
    p99_s = float(np.percentile(late_s, 99)) if late_s else 0.0
    if p99_s > MAX_LATE_STEPS * normal_s:
        yield Violation(
            ViolationKind.LATE_CLIENT,
            f"the client sent its requests up to {p99_s * 1000:.0f} ms late (P99), more than"
            f" {MAX_LATE_STEPS:g} of a normal step: give it a core of its own",
        )
