"""The spike as data: which requests are sent, with which prompts and promises.

Owns the numbers of the scenario and the making of prompts that no prefix cache can know. Must not
send anything or know a time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

DEFAULT_VOCAB_SIZE = 8192
"""Prompt ids stay below this: real vocabularies are larger, and none has to be looked up."""


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    """One request of the scenario; targets in seconds, None = no promise is asked for.

    `slo_class` names a class of the server's settings, None = whatever is its default.
    """

    name: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    slo_class: str | None = None

    def payload(self, model: str) -> dict[str, Any]:
        """Return the body of a streamed, greedy `/v1/completions` call that runs to `max_tokens`.

        Usage in every chunk is asked for, so that a chunk that carries two tokens, or none, is
        counted as such.
        """
        return {
            "model": model,
            "prompt": list(self.prompt_token_ids),
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    def headers(self) -> dict[str, str]:
        """Return the SLO headers, in milliseconds, and the class; empty without either."""
        targets = {"x-slo-ttft-ms": self.ttft_s, "x-slo-tpot-ms": self.tpot_s}
        headers = {name: f"{s * 1000:.3f}" for name, s in targets.items() if s is not None}
        if self.slo_class is not None:
            headers["x-llm-d-inference-objective"] = self.slo_class
        return headers


@dataclass(frozen=True, slots=True)
class Promises:
    """What the spike asks for, in seconds: TPOT of the short requests, TTFT of the long one."""

    short_tpot_s: float | None = None
    long_ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class SpikeScenario:
    """Sizes of the spike (`docs/measuring.md`); all counts are tokens except `num_short`.

    `num_short` requests decode; once each of them has received `warm_tokens` tokens, one prompt of
    `long_prompt_tokens` arrives. `short_max_tokens` must outlast the long prefill: whether it did
    is checked on every run, and `outlasting()` gives the next size to try. `calibration_tokens` is
    the output of each request of the calm phase that measures the normal step beforehand.
    """

    num_short: int = 7
    short_prompt_tokens: int = 32
    short_max_tokens: int = 64
    long_prompt_tokens: int = 1024
    long_max_tokens: int = 16
    warm_tokens: int = 12
    calibration_tokens: int = 24

    def __post_init__(self) -> None:
        """Check the sizes; ValueError names the field."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.short_max_tokens <= self.warm_tokens:
            raise ValueError(
                f"short_max_tokens ({self.short_max_tokens}) must exceed warm_tokens"
                f" ({self.warm_tokens}): the short requests have to be decoding"
                " when the long prompt arrives"
            )

    def outlasting(self) -> SpikeScenario:
        """Return the same scenario with short requests twice as long."""
        return replace(self, short_max_tokens=2 * self.short_max_tokens)

    def calibration_requests(self, prompts: PromptSource) -> tuple[ScenarioRequest, ...]:
        """Return the short requests of the calm phase, without promises."""
        return tuple(
            ScenarioRequest(
                f"calm-{i}", prompts.draw(self.short_prompt_tokens), self.calibration_tokens
            )
            for i in range(self.num_short)
        )

    def short_requests(
        self, prompts: PromptSource, promises: Promises
    ) -> tuple[ScenarioRequest, ...]:
        """Return the short requests that are decoding when the spike comes."""
        return tuple(
            ScenarioRequest(
                f"short-{i}",
                prompts.draw(self.short_prompt_tokens),
                self.short_max_tokens,
                tpot_s=promises.short_tpot_s,
            )
            for i in range(self.num_short)
        )

    def long_request(self, prompts: PromptSource, promises: Promises) -> ScenarioRequest:
        """Return the request whose prompt is the spike."""
        return ScenarioRequest(
            "long",
            prompts.draw(self.long_prompt_tokens),
            self.long_max_tokens,
            ttft_s=promises.long_ttft_s,
        )


class PromptSource:
    """Draws prompts of random token ids, no two beginning with the same token.

    Ids lie in `[vocab_size // 8, vocab_size)`: the lowest eighth is left out because special tokens
    live there.

    A prompt whose beginning the server has met before may come out of its prefix cache, and the
    spike would measure the cache.
    """

    def __init__(self, seed: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> None:
        if vocab_size < 256:
            raise ValueError(f"vocab_size must be at least 256, got {vocab_size}")
        self._random = random.Random(seed)  # noqa: S311 - prompts, not secrets
        self._ids = range(vocab_size // 8, vocab_size)
        self._unused_first_ids = self._random.sample(self._ids, len(self._ids))

    def draw(self, num_tokens: int) -> tuple[int, ...]:
        """Return a prompt of `num_tokens` ids; RuntimeError when every first token is used up."""
        if not self._unused_first_ids:
            raise RuntimeError("no unused first token is left: use a larger vocabulary")
        first = self._unused_first_ids.pop()
        return (first, *self._random.choices(self._ids, k=num_tokens - 1))
