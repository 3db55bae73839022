"""How large everything is that the trial runs: the full one for a GPU, a tiny one for a dry run.

Owns numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.bench.scenario import SpikeScenario


@dataclass(frozen=True, slots=True)
class TrialSizes:
    """Counts are tokens and requests; `*_box_s` are the seconds that a part may take.

    `budgets` are the fixed token budgets under which tokens must be transformers' (None = whole
    prompts). `decode_batches` × `decode_contexts` and `prefill_tokens` are the steps that are
    timed, `repeats` how often. `spike_rounds` spikes are run in turn for every planner, with
    `spike_factors` times the normal gap as the SLO planner's target. `learning_steps` steps of
    random traffic teach the cost model.
    """

    prompt_lengths: tuple[int, ...] = (1, 5, 17, 33, 70, 150, 300)
    num_new: int = 24
    budgets: tuple[int | None, ...] = (None, 64, 17)
    prefill_tokens: tuple[int, ...] = (512, 2048, 8192)
    decode_batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    decode_contexts: tuple[int, ...] = (512, 2048, 8192)
    repeats: int = 3
    max_batch: int = 256
    max_context: int = 8448
    max_batched_tokens: int = 8192
    spike: SpikeScenario = field(default_factory=lambda: SpikeScenario(short_max_tokens=96))
    spike_budgets: tuple[int | None, ...] = (None, 256, 128)
    spike_factors: tuple[float, ...] = (1.5, 2.0, 3.0)
    spike_rounds: int = 3
    traffic_prompts: tuple[int, int] = (16, 2048)
    traffic_outputs: tuple[int, int] = (8, 160)
    traffic_in_flight: int = 48
    learning_steps: int = 1500
    exactness_box_s: float = 120.0
    speed_box_s: float = 190.0
    spike_box_s: float = 60.0
    learning_box_s: float = 50.0


FULL = TrialSizes()
TINY = TrialSizes(
    prompt_lengths=(1, 17, 45),
    num_new=6,
    budgets=(None, 7),
    prefill_tokens=(16, 64),
    decode_batches=(1, 4),
    decode_contexts=(16, 64),
    repeats=1,
    max_batch=8,
    max_context=512,
    max_batched_tokens=256,
    spike=SpikeScenario(
        short_prompt_tokens=8,
        short_max_tokens=24,
        long_prompt_tokens=128,
        long_max_tokens=4,
        warm_tokens=4,
    ),
    spike_budgets=(None, 32),
    spike_factors=(3.0,),
    spike_rounds=1,
    traffic_prompts=(4, 64),
    traffic_outputs=(2, 12),
    traffic_in_flight=6,
    learning_steps=60,
    # Counts bound a dry run, however slow the machine: nothing in it may be skipped.
    exactness_box_s=600.0,
    speed_box_s=600.0,
    spike_box_s=600.0,
    learning_box_s=600.0,
)
