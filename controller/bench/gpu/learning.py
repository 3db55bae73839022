"""How well steps are predicted on this device, and what planning costs.

Owns the sweep that starts the cost model, and the random traffic that teaches it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from controller.bench.gpu.rig import Rig
from controller.bench.gpu.rows import Row, TimeBox
from controller.bench.gpu.sizes import TrialSizes
from controller.policy.lengths import OutputLengths
from controller.policy.planner import PolicyConfig, SloPlanner
from controller.policy.slo import Slo
from controller.runtime.feedback import Teacher
from controller.runtime.warmup import run_sweep
from costmodel.prior import fit_prior, sweep_plan
from costmodel.recursive import RecursiveLeastSquares
from engine.clock import Clock
from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.device.trial import TrialRunner


def fit_sweep(
    made: TrialRunner, sizes: TrialSizes, clock: Clock
) -> tuple[RecursiveLeastSquares, Row]:
    """Time the warm-up sweep that a server runs at load, and fit the prior."""
    config = EngineConfig(
        block_size=made.block_size,
        num_blocks=made.num_blocks,
        max_model_len=sizes.max_context,
        max_num_seqs=sizes.max_batch,
        max_num_batched_tokens=max(sizes.max_batched_tokens, sizes.max_batch),
    )
    shapes = sweep_plan(
        min(sizes.max_batched_tokens, 512), sizes.max_batch, min(sizes.max_context, 2048)
    )
    started = TimeBox(clock, 0.0)
    samples = run_sweep(made.runner, config, clock, shapes)
    spent_s = started.spent_s
    model = fit_prior(samples)
    errors = []
    for features, latency_s in samples:
        mean_s = float(model.predict(features.to_array()[None]).mean_s[0])
        errors.append(abs(mean_s - latency_s) / latency_s)
    costs = model.marginals()
    mape = statistics.mean(errors)
    text = (
        f"{len(samples)} shapes in {spent_s:.1f} s fitted to {mape:.1%}; floor"
        f" {costs.floor_s * 1e3:.2f} ms, {costs.prefill_token_s * 1e6:.2f} µs per prompt token,"
        f" {costs.decode_request_s * 1e6:.1f} µs per decode, knee {costs.knee_tokens} tokens"
    )
    numbers = {
        "shapes": len(samples),
        "sweep_s": spent_s,
        "fit_mape": mape,
        "floor_s": costs.floor_s,
        "prefill_token_s": costs.prefill_token_s,
        "decode_request_s": costs.decode_request_s,
        "decode_context_token_s": costs.decode_context_token_s,
        "knee_tokens": costs.knee_tokens,
    }
    return model, Row("prior from the sweep", text, numbers=numbers)


def learn(
    made: TrialRunner,
    model: RecursiveLeastSquares,
    vocab_size: int,
    sizes: TrialSizes,
    box: TimeBox,
    clock: Clock,
) -> Iterator[Row]:
    """Serve random traffic under the SLO planner, which learns from every step; yield the quality
    of the predictions and the cost of planning.
    """
    lengths = OutputLengths()
    planner = SloPlanner(PolicyConfig(), model, lengths)
    rig = Rig(
        made,
        planner,
        clock,
        max_context=sizes.max_context,
        max_batched_tokens=sizes.max_batched_tokens,
        max_batch=sizes.max_batch,
        listeners=(Teacher(model, lengths),),
    )
    traffic = _Traffic(rig, vocab_size, sizes)
    num_steps = 0
    while num_steps < sizes.learning_steps and not box.is_over:
        traffic.top_up()
        rig.step()
        num_steps += 1
    rig.drain()
    quality = model.quality()
    text = (
        f"MAPE {quality.mape:.1%}, upper bound held {quality.coverage:.1%} of the time over the"
        f" last {quality.num_observed} steps"
    )
    numbers: dict[str, float | int | str | None] = {
        "steps": num_steps,
        "mape": quality.mape,
        "coverage": quality.coverage,
    }
    for regime in quality.regimes:
        if regime.num_observed:
            text += f"; {regime.regime.value} {regime.mape:.1%}/{regime.coverage:.0%}"
            numbers[f"{regime.regime.value}_mape"] = regime.mape
            numbers[f"{regime.regime.value}_coverage"] = regime.coverage
    numbers |= {f"rejected_{reason}": n for reason, n in quality.num_rejected.items() if n}
    yield Row("online", text, numbers=numbers)
    yield _planner_row(rig)


def _planner_row(rig: Rig) -> Row:
    planner_s = sorted(rig.recorder.planner_s)
    if not planner_s:
        return Row("planner", "no step was planned")
    middle, high = (planner_s[int(share * (len(planner_s) - 1))] for share in (0.5, 0.99))
    most = max(rig.recorder.num_decodes)
    text = f"median {middle * 1e6:.0f} µs, p99 {high * 1e6:.0f} µs with up to {most} decodes"
    numbers = {"median_s": middle, "p99_s": high, "most_decodes": most}
    return Row("planner", text, numbers=numbers)


class _Traffic:
    """Keeps a number of requests in flight that rises and falls; lengths are log-uniform."""

    def __init__(self, rig: Rig, vocab_size: int, sizes: TrialSizes) -> None:
        self._rig = rig
        self._ids = range(2, vocab_size)
        self._sizes = sizes
        self._random = random.Random(5)  # noqa: S311 - prompts, not secrets
        self._num_made = 0

    def top_up(self) -> None:
        """Submit what is missing; every 100 requests the wave is one eighth as high for a while."""
        is_low = self._num_made % 100 >= 70
        wanted = max(1, self._sizes.traffic_in_flight // (8 if is_low else 1))
        # One at most per step: traffic arrives, it does not refill a bucket.
        if self._rig.num_unfinished < wanted:
            prompt = tuple(
                self._random.choices(self._ids, k=self._draw(self._sizes.traffic_prompts))
            )
            outputs = self._draw(self._sizes.traffic_outputs)
            slo = self._random.choice((Slo(), Slo(tpot_s=0.05), Slo(ttft_s=2.0, tpot_s=0.1)))
            self._rig.submit(f"t{self._num_made}", prompt, outputs, slo)
            self._num_made += 1

    def _draw(self, bounds: tuple[int, int]) -> int:
        low, high = bounds
        return round(math.exp(self._random.uniform(math.log(low), math.log(high))))
