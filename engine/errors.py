"""The engine's own alarms: what its modules raise where somebody's books are wrong.

Owns the exception types that callers tell apart. Must not import anything of the project.
"""

from __future__ import annotations


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free: a planner's bug, since plans must fit the pool."""


class BlockAccountingError(RuntimeError):
    """The caller's books are wrong: a block was released, shared or named that it cannot hold."""


class IllegalMoveError(RuntimeError):
    """A bug: a request was moved between phases that the table does not connect."""


class PlanError(RuntimeError):
    """A planner's bug: the plan contradicts the state that it was made from."""
