"""Is what the device computes right: kernels, whole models, graphs.

Owns the comparisons and their verdicts. The yardsticks are dense attention in float64 and
transformers' own models; no number here depends on a clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from controller.bench.gpu.rig import Rig
from controller.bench.gpu.rows import Row, TimeBox, Verdict, line_of
from controller.bench.gpu.sizes import TrialSizes
from controller.policy.baselines import StaticPlanner
from engine.clock import Clock

if TYPE_CHECKING:
    from engine.device.trial import DeviceTrial, TinyTrial, TrialRunner

# Two runs in half precision part ways at a near tie and never meet again; random weights have a few
# of those in a few hundred choices.
_MIN_SAME_PREFIX = 0.75
# Our half-precision logits may be this much worse than transformers' own, plus a rounding error.
_MAX_WORSE = 1.5
_SLACK = 0.02


def check_exactness(
    trial: DeviceTrial, sizes: TrialSizes, box: TimeBox, clock: Clock, backends: Sequence[str]
) -> Iterator[Row]:
    """Yield one row per comparison: the kernels, then tokens in float32, then half precision."""
    dtypes = trial.half_dtypes
    for backend, dtype in itertools.product(backends, (*dtypes, "float32")):
        yield _conformance(trial, backend, dtype)
    for family in trial.families:
        if box.is_over:
            yield Row(f"{family}: tokens", "no time left", Verdict.SKIPPED)
            continue
        yield from _family(trial, family, sizes, clock, backends, dtypes)


def _conformance(trial: DeviceTrial, backend: str, dtype: str) -> Row:
    what = f"{backend}, {dtype}: conformance"
    refusal = trial.refusal(backend, dtype)
    if refusal is not None:
        return Row(what, refusal, Verdict.REFUSED)
    outcomes = list(trial.conformance(backend, dtype))
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    failures = [f"{o.case}: {o.failure}" for o in outcomes if o.failure is not None]
    num_refused = sum(outcome.refusal is not None for outcome in outcomes)
    numbers = {
        "cases": len(outcomes),
        "passed": len(errors),
        "refused": num_refused,
        "failed": len(failures),
        "largest_error": max(errors, default=None),
    }
    if failures:
        return Row(what, f"{len(failures)} of {len(outcomes)} fail; {failures[0]}", Verdict.OFF,
                   numbers)  # fmt: skip
    if not errors:
        return Row(what, f"refuses all {len(outcomes)} cases", Verdict.REFUSED, numbers)
    text = f"{len(errors)} cases, {num_refused} refused, largest error {max(errors):.1e}"
    return Row(what, text, Verdict.OK, numbers)


def _family(
    trial: DeviceTrial,
    family: str,
    sizes: TrialSizes,
    clock: Clock,
    backends: Sequence[str],
    dtypes: Sequence[str],
) -> Iterator[Row]:
    tiny = trial.tiny(family)
    prompts = tiny.prompts(sizes.prompt_lengths)
    try:
        expected = tiny.expected(prompts, sizes.num_new)
        made = tiny.runner("reference", "float32")
        num_ties = sum(item.num_ties for item in expected)
        num_same = num_all = 0
        for budget in sizes.budgets:
            found = _generate(made, prompts, sizes, clock, budget)
            for tokens, item in zip(found, expected, strict=True):
                num_same += tokens == item.tokens
                num_all += 1
        text = f"{num_same} of {num_all} equal to transformers.generate, {num_ties} near ties"
        verdict = Verdict.OK if num_all - num_same <= num_ties * len(sizes.budgets) else Verdict.OFF
        numbers = {"equal": num_same, "compared": num_all, "near_ties": num_ties}
        yield Row(f"{family}, float32: greedy tokens", text, verdict, numbers)
    except Exception as error:
        yield Row(f"{family}, float32: greedy tokens", line_of(error), Verdict.FAILED)
    for backend, dtype in itertools.product(backends, dtypes):
        if trial.refusal(backend, dtype) is None:
            yield _closeness(tiny, family, backend, dtype, sizes)
    for backend in backends:
        if trial.is_cuda and trial.refusal(backend, dtypes[0]) is None:
            yield _graphs(tiny, family, backend, dtypes[0], sizes, clock)


def _closeness(tiny: TinyTrial, family: str, backend: str, dtype: str, sizes: TrialSizes) -> Row:
    what = f"{family}, {backend}, {dtype}: logits"
    try:
        found = tiny.closeness(backend, dtype, sizes.prompt_lengths)
    except ValueError as error:
        # A refusal is a ValueError of the engine: this backend lacks what the family needs.
        return Row(what, str(error), Verdict.REFUSED)
    except Exception as error:
        return Row(what, line_of(error), Verdict.FAILED)
    is_close = found.error <= _MAX_WORSE * found.peer_error + _SLACK
    text = (
        f"off by {found.error:.3f} σ, transformers' own {found.peer_error:.3f};"
        f" best token {found.agreement:.1%}, its {found.peer_agreement:.1%}"
    )
    return Row(what, text, Verdict.OK if is_close else Verdict.OFF, found._asdict())


def _graphs(
    tiny: TinyTrial, family: str, backend: str, dtype: str, sizes: TrialSizes, clock: Clock
) -> Row:
    what = f"{family}, {backend}, {dtype}: graphs"
    prompts = tiny.prompts(sizes.prompt_lengths)
    try:
        made = tiny.runner(backend, dtype, with_graphs=True)
        if not made.graph_sizes:
            return Row(what, made.graphs_off or "off", Verdict.REFUSED)
        replayed = _generate(made, prompts, sizes, clock, None)
        num_replayed = made.runner.num_graph_replays
        plain = _generate(tiny.runner(backend, dtype), prompts, sizes, clock, None)
    except ValueError as error:
        return Row(what, str(error), Verdict.REFUSED)
    except Exception as error:
        return Row(what, line_of(error), Verdict.FAILED)
    shares = [same_prefix(a, b) for a, b in zip(replayed, plain, strict=True)]
    share = sum(shares) / len(shares)
    text = (
        f"tokens equal to the plain run's for {share:.1%} of their length;"
        f" {num_replayed} steps replayed"
    )
    is_fine = share >= _MIN_SAME_PREFIX and num_replayed > 0
    numbers = {"same_prefix": share, "replays": num_replayed, "sizes": len(made.graph_sizes)}
    return Row(what, text, Verdict.OK if is_fine else Verdict.OFF, numbers)


def _generate(
    made: TrialRunner,
    prompts: Sequence[tuple[int, ...]],
    sizes: TrialSizes,
    clock: Clock,
    budget: int | None,
) -> list[tuple[int, ...]]:
    """Serve all prompts at once, arriving one step apart, and return their tokens."""
    rig = Rig(
        made,
        StaticPlanner(budget),
        clock,
        max_context=sizes.prompt_lengths[-1] + sizes.num_new + 1,
        max_batched_tokens=sizes.max_batched_tokens,
        max_batch=len(prompts),
    )
    for index, prompt in enumerate(prompts):
        rig.submit(f"r{index}", prompt, sizes.num_new)
        rig.step()
    rig.run()
    return [tuple(request.output_token_ids) for request in rig.requests.values()]


def same_prefix(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the share of the longer series that both begin with; 1 for two empty ones."""
    length = max(len(a), len(b))
    if length == 0:
        return 1.0
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in pairs) / length
