"""The engine's own settings: one small frozen dataclass, checked once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Hard limits of the mechanism; the planner may stay below them, never above.

    `num_blocks` blocks of `block_size` tokens form the KV pool. `max_model_len` bounds prompt plus
    output of one request, in tokens. `max_num_seqs` bounds running requests,
    `max_num_batched_tokens` the tokens of one step, `max_waiting_requests` the queue.
    """

    block_size: int = 16
    num_blocks: int = 1024
    max_model_len: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_waiting_requests: int = 1024

    def __post_init__(self) -> None:
        """Check every bound; ValueError names the field."""
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
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
