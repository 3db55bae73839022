"""Executing a plan so that one poisoned request ends alone.

Owns the search for the request whose work makes a forward fail. Must not change a request: the loop
commits what was computed and ends who failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.ports import DeviceLostError, ModelRunner
from engine.request import Request
from engine.step import PromptScores, SampledToken, StepPlan, StepWork


@dataclass(slots=True)
class Execution:
    """What came of a plan's work.

    `done` is the work whose keys and values stand, `failures` maps the requests that fail on their
    own to the reason. Work in neither was not reached: it changes nothing and can be planned again.
    `num_retries` counts the forwards beyond the first; `first_failure` is the error of the first.
    """

    done: list[StepWork] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    num_retries: int = 0
    first_failure: str | None = None


def most_retries(num_requests: int) -> int:
    """Return how many forwards beyond the first one step may spend: 2·⌈log2 B⌉ + 2.

    A binary search for one culprit runs two halves per level; the two beyond serve a second one
    nearby.
    """
    return 2 * (num_requests - 1).bit_length() + 2


def execute(
    runner: ModelRunner, plan: StepPlan, requests: Mapping[str, Request], turn: int = 0
) -> Execution:
    """Run the plan in one forward; where that raises, run halves until the culprits stand alone.

    Depth first: every step finds at least one culprit within its budget of forwards, and whoever
    was not reached is planned again. Two halves that both succeed had no culprit (the device ran
    out of memory over the whole, say) and nobody ends. `turn` says where in the plan the search
    begins: moved on from step to step, it reaches everybody when each step fails. DeviceLostError
    passes through.
    """
    execution = Execution()
    if not plan.work:
        return execution
    left = most_retries(len(plan.work))
    stack: list[tuple[StepWork, ...]] = [plan.work]
    while stack and execution.num_retries < left:
        work = stack.pop()
        if work is not plan.work:
            execution.num_retries += 1
        failure = _run(runner, plan, work, requests, execution)
        if failure is None:
            continue
        if execution.first_failure is None:
            execution.first_failure = failure
        if len(work) == 1:
            execution.failures[work[0].request_id] = failure
        else:
            if work is plan.work:
                first = turn * (left // 2) % len(work)
                work = (*work[first:], *work[:first])
            middle = len(work) // 2
            stack += [work[middle:], work[:middle]]
    return execution


def _run(
    runner: ModelRunner,
    plan: StepPlan,
    work: Sequence[StepWork],
    requests: Mapping[str, Request],
    execution: Execution,
) -> str | None:
    """Run one part and keep its results; returns the reason if it raised."""
    part = plan if len(work) == len(plan.work) else replace(plan, work=tuple(work))
    try:
        output = runner.execute(part, {item.request_id: requests[item.request_id] for item in work})
    except DeviceLostError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    execution.done += work
    execution.tokens += output.tokens
    execution.prompt_scores += output.prompt_scores
    return None
