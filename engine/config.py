"""The engine's own settings: one small frozen dataclass, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEFAULT_MAX_NUM_SEQS: Final = 128
"""Most running requests where nobody says otherwise: in a server, a simulation, a study alike."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Hard limits of the mechanism; the planner may stay below them, never above.

    `num_blocks` blocks of `block_size` tokens form the KV pool. `max_model_len` bounds prompt plus
    output of one request, in tokens. `max_num_seqs` bounds running requests,
    `max_num_batched_tokens` the tokens of one step, `max_waiting_requests` the queue.
    `num_host_blocks` blocks of host memory take the KV of preempted requests (0 = none do).
    `is_prefix_cache_enabled` lets requests that begin alike share blocks.
    """

    block_size: int = 16
    num_blocks: int = 1024
    max_model_len: int = 4096
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = 8192
    max_waiting_requests: int = 1024
    num_host_blocks: int = 0
    is_prefix_cache_enabled: bool = True

    def __post_init__(self) -> None:
        """Check every bound; ValueError names the field."""
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "is_prefix_cache_enabled":
                continue
            least = 0 if name == "num_host_blocks" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                if least == 0:
                    raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must not exceed max_num_batched_tokens"
                f" ({self.max_num_batched_tokens}): every running decode needs a token in each step"
            )

    @property
    def num_pool_tokens(self) -> int:
        """KV capacity in tokens."""
        return self.num_blocks * self.block_size
