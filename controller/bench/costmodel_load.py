"""Mixed load for recording steps: bursts of short prompts, long prompts, decodes of every number.

Owns what is sent and when. Must not read what was stored of it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable

from controller.bench.client import StreamClient
from controller.bench.scenario import PromptSource, ScenarioRequest
from engine.clock import Clock

Sleep = Callable[[float], Awaitable[None]]
ProgressListener = Callable[[str, int, int], None]

# Sizes are log-uniform: a step of 20 tokens is as likely as one of 200.
_PROMPT_TOKENS = (8, 700)
_SHORT_TOKENS = (4, 32)
_OUTPUT_TOKENS = (2, 48)
_BURST = (3, 8)
_BURST_SHARE = 0.25
# Mean seconds between arrivals, busy and idle by turns: the wave makes the number of decodes vary.
_BUSY_GAP_S, _IDLE_GAP_S = 0.6, 2.5
_WAVE_S = 20.0


class MixedLoad:
    """Arrivals of a mixed load, reproducible by seed; open loop."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._prompts = PromptSource(seed)
        self._num_made = 0

    def next_arrivals(self) -> list[ScenarioRequest]:
        """Return the requests of one arrival: usually one, sometimes a burst of short prompts."""
        if self._random.random() < _BURST_SHARE:
            count = self._random.randint(*_BURST)
            return [self._request(_SHORT_TOKENS) for _ in range(count)]
        return [self._request(_PROMPT_TOKENS)]

    def gap_s(self, elapsed_s: float) -> float:
        """Return the seconds to the next arrival, `elapsed_s` after the start."""
        is_busy = int(elapsed_s / _WAVE_S) % 2 == 0
        mean_s = _BUSY_GAP_S if is_busy else _IDLE_GAP_S
        return self._random.expovariate(1.0 / mean_s)

    def _request(self, prompt_tokens: tuple[int, int]) -> ScenarioRequest:
        self._num_made += 1
        prompt = self._prompts.draw(self._draw(prompt_tokens))
        return ScenarioRequest(f"mixed-{self._num_made}", prompt, self._draw(_OUTPUT_TOKENS))

    def _draw(self, bounds: tuple[int, int]) -> int:
        low, high = bounds
        return round(math.exp(self._random.uniform(math.log(low), math.log(high))))


async def send_mixed(
    client: StreamClient,
    clock: Clock,
    duration_s: float,
    seed: int,
    on_stage: ProgressListener,
    sleep: Sleep = asyncio.sleep,
) -> tuple[int, int]:
    """Send a mixed load for `duration_s` seconds, wait for every answer; return how many requests
    were sent, and how many of them failed or were refused.
    """
    load = MixedLoad(seed)
    started_at = clock.now()
    tasks = []
    async with asyncio.TaskGroup() as group:
        while (elapsed_s := clock.now() - started_at) < duration_s:
            tasks += [group.create_task(client.stream(each)) for each in load.next_arrivals()]
            on_stage(f"{len(tasks)} requests sent", round(elapsed_s), round(duration_s))
            await sleep(load.gap_s(elapsed_s))
    return len(tasks), sum(task.result().error is not None for task in tasks)
