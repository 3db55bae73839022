"""The spike in this process: the production loop and planners, no sockets in between.

Owns the rounds: every planner in turn (A B A B), all with the same scenario.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from controller.bench.gpu.rig import Rig
from controller.bench.gpu.rows import Row, TimeBox, Verdict, line_of
from controller.bench.gpu.sizes import TrialSizes
from controller.bench.scenario import Promises, PromptSource
from controller.bench.series import largest_gap, normal_gap_s, tokens_per_second
from controller.policy.baselines import StaticPlanner
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from costmodel.recursive import RecursiveLeastSquares
from engine.clock import Clock
from engine.ports import Planner

if TYPE_CHECKING:
    from engine.device.trial import TrialRunner


class Spike(NamedTuple):
    """One spike in seconds: the median gap before the long prompt, the largest one of all, the long
    one's time to first token, and output tokens per second. `num_outlasting` of the short requests
    were still decoding when the long one was computed: fewer than all flatter the gaps.
    """

    normal_gap_s: float
    largest_gap_s: float
    long_ttft_s: float
    tokens_per_s: float
    num_outlasting: float


class Contestant(NamedTuple):
    """A planner; `factor` times the normal gap is what the short requests are promised."""

    name: str
    make: Callable[[], Planner]
    factor: float | None = None


def measure_spike(
    made: TrialRunner,
    model: RecursiveLeastSquares,
    vocab_size: int,
    sizes: TrialSizes,
    box: TimeBox,
    clock: Clock,
) -> Iterator[Row]:
    """Yield one row per planner: medians over the rounds, gaps also as multiples of the normal one.

    The first run of each is not counted: it pays for what is lazy.
    """
    contestants = contestants_of(sizes, model)
    prompts = PromptSource(11, vocab_size)
    found: dict[str, list[Spike]] = {contestant.name: [] for contestant in contestants}
    failures: dict[str, str] = {}
    normal_s: float | None = None
    for round_no in range(sizes.spike_rounds + 1):
        for contestant in contestants:
            if contestant.name in failures or (round_no > 1 and box.is_over):
                continue
            target_s = None
            if contestant.factor is not None and normal_s is not None:
                target_s = contestant.factor * normal_s
            try:
                spike = run_spike(made, contestant.make(), prompts, sizes, clock, target_s)
            except Exception as error:
                failures[contestant.name] = line_of(error)
                continue
            if contestant.factor is None:
                normal_s = spike.normal_gap_s
            if round_no:
                found[contestant.name].append(spike)
    for contestant in contestants:
        spikes = found[contestant.name]
        if spikes:
            yield _row(contestant.name, spikes, sizes.spike.num_short)
        else:
            reason = failures.get(contestant.name, "no time left")
            verdict = Verdict.FAILED if contestant.name in failures else Verdict.SKIPPED
            yield Row(contestant.name, reason, verdict)


def contestants_of(sizes: TrialSizes, model: RecursiveLeastSquares) -> list[Contestant]:
    """Return the static budgets, then the SLO planner with each target.

    All SLO planners learn from nothing here: the model is as the sweep left it, for every round.
    """

    def static(budget: int | None) -> Contestant:
        name = "whole prompts" if budget is None else f"static {budget}"
        return Contestant(name, lambda: StaticPlanner(budget))

    def slo(factor: float) -> Contestant:
        planner = SloPlanner(PolicyConfig(exploration=0.0), model, OutputLengths())
        return Contestant(f"slo, TPOT {factor:g}x normal", lambda: planner, factor)

    return [*map(static, sizes.spike_budgets), *map(slo, sizes.spike_factors)]


def run_spike(
    made: TrialRunner,
    planner: Planner,
    prompts: PromptSource,
    sizes: TrialSizes,
    clock: Clock,
    target_s: float | None,
) -> Spike:
    """Run one spike. RuntimeError if a request failed, was refused or ended early."""
    scenario = sizes.spike
    rig = Rig(
        made,
        planner,
        clock,
        max_context=sizes.max_context,
        max_batched_tokens=sizes.max_batched_tokens,
        max_batch=scenario.num_short + 1,
    )
    shorts = scenario.short_requests(prompts, Promises(short_tpot_s=target_s))
    for item in shorts:
        rig.submit(item.name, item.prompt_token_ids, item.max_tokens, Slo(tpot_s=item.tpot_s))
    rig.run(lambda: min(rig.num_tokens(item.name) for item in shorts) >= scenario.warm_tokens)
    long = scenario.long_request(prompts, Promises())
    arrived_at = rig.submit(long.name, long.prompt_token_ids, long.max_tokens).arrived_at
    rig.run()
    series = [rig.series(item.name) for item in (*shorts, long)]
    for one, item in zip(series, (*shorts, long), strict=True):
        if one.num_output_tokens != item.max_tokens:
            raise RuntimeError(
                f"{one.name} got {one.num_output_tokens} of {item.max_tokens} tokens"
                f" ({one.finish_reason})"
            )
    short_series = series[:-1]
    ttft_s = series[-1].ttft_s
    normal_s = normal_gap_s(short_series, arrived_at)
    gap = largest_gap(short_series)
    speed = tokens_per_second(series)
    if ttft_s is None or normal_s is None or gap is None or speed is None:
        raise RuntimeError("the spike has no gaps to measure")
    computed_at = arrived_at + ttft_s
    num_outlasting = sum((one.last_token_at or 0.0) >= computed_at for one in short_series)
    return Spike(normal_s, gap.duration_s, ttft_s, speed, num_outlasting)


def _row(name: str, spikes: Sequence[Spike], num_short: int) -> Row:
    middle = Spike(*(statistics.median(values) for values in zip(*spikes, strict=True)))
    ratio = middle.largest_gap_s / middle.normal_gap_s
    text = (
        f"normal gap {middle.normal_gap_s * 1e3:.2f} ms, largest {middle.largest_gap_s * 1e3:.1f}"
        f" ms ({ratio:.1f}x); long TTFT {middle.long_ttft_s * 1e3:.1f} ms;"
        f" {middle.tokens_per_s:,.0f} tokens/s"
    )
    if middle.num_outlasting < num_short:
        text += f"; only {middle.num_outlasting:g} of {num_short} outlasted it"
    worst = max(spike.largest_gap_s for spike in spikes)
    numbers = {**middle._asdict(), "worst_gap_s": worst, "rounds": len(spikes)}
    return Row(name, text, numbers=numbers)
