"""`ContextStore`: token ids and block tables of the requests as arrays that grow with them.

Owns what is cached per request between steps, and when it is stale. Must not be trusted blindly: a
request is the truth, and everything here is rebuilt from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.device.transfer import IntArray
from engine.request import Request


class RequestContext:
    """One request's known tokens, and its row in the store's matrix of block tables.

    Valid for the very request object that it was made from: an id that comes back with another
    request starts anew.
    """

    __slots__ = ("_num_blocks", "_num_known", "_num_preemptions", "_tokens", "request", "row")

    def __init__(self, request: Request, row: int) -> None:
        self.request = request
        self.row = row
        num_prompt = request.num_prompt_tokens
        self._tokens = np.empty(request.num_known_tokens + 64, dtype=np.int64)
        self._tokens[:num_prompt] = request.prompt_token_ids
        self._num_known = num_prompt
        self._num_blocks = 0
        self._num_preemptions = request.num_preemptions

    @property
    def token_ids(self) -> IntArray:
        """Known tokens, prompt first, shape (num_known_tokens,)."""
        return self._tokens[: self._num_known]

    @property
    def num_known_tokens(self) -> int:
        """Prompt plus output."""
        return self._num_known

    @property
    def num_blocks(self) -> int:
        """Blocks in the row."""
        return self._num_blocks

    def take_tokens(self) -> None:
        """Append the output tokens that came since the last call."""
        request = self.request
        num_known = request.num_known_tokens
        if num_known == self._num_known:
            return
        num_prompt = request.num_prompt_tokens
        start = self._num_known if num_known > self._num_known else num_prompt
        if num_known > len(self._tokens):
            grown = np.empty(2 * num_known, dtype=np.int64)
            grown[:start] = self._tokens[:start]
            self._tokens = grown
        self._tokens[start:num_known] = request.output_token_ids[start - num_prompt :]
        self._num_known = num_known

    def take_blocks(self, row: IntArray) -> None:
        """Write the blocks that came since the last call to `row`, which has room for them.

        A running request's table only grows. Whoever lost its blocks was preempted; that, a table
        that shrank, or one whose ends changed, is written anew.
        """
        table = self.request.block_table
        known = self._num_blocks
        if known and (
            self._num_preemptions != self.request.num_preemptions
            or len(table) < known
            or table[0] != row[0]
            or table[known - 1] != row[known - 1]
        ):
            known = 0
        self._num_preemptions = self.request.num_preemptions
        if len(table) > known:
            row[known : len(table)] = table[known:]
        self._num_blocks = len(table)


class ContextStore:
    """The contexts of the requests that were seen and not forgotten."""

    def __init__(self) -> None:
        self._contexts: dict[str, RequestContext] = {}
        self._free_rows: list[int] = []
        self._tables = np.zeros((0, 0), dtype=np.int64)

    def forget(self, request_id: str) -> None:
        """Drop a request's context; unknown ids are ignored."""
        context = self._contexts.pop(request_id, None)
        if context is not None:
            self._free_rows.append(context.row)

    def update(self, request: Request) -> RequestContext:
        """Return the request's context, brought up to what the request holds now."""
        context = self._contexts.get(request.request_id)
        if context is None or context.request is not request:
            self.forget(request.request_id)
            context = RequestContext(request, self._take_row())
            self._contexts[request.request_id] = context
        context.take_tokens()
        if len(request.block_table) > self._tables.shape[1]:
            self._grow(columns=2 * len(request.block_table))
        context.take_blocks(self._tables[context.row])
        return context

    def block_tables(self, contexts: Sequence[RequestContext]) -> IntArray:
        """Return a copy of the block tables, (num_contexts, longest), padded with 0."""
        counts = np.array([context.num_blocks for context in contexts], dtype=np.int64)
        width = int(counts.max())
        tables = self._tables[[context.row for context in contexts], :width]
        # Rows hold what longer tables left behind: it must not look like somebody's block.
        tables[np.arange(width) >= counts[:, None]] = 0
        return tables

    def _take_row(self) -> int:
        if not self._free_rows:
            num_rows = self._tables.shape[0]
            self._grow(rows=max(16, 2 * num_rows))
            self._free_rows.extend(range(self._tables.shape[0] - 1, num_rows - 1, -1))
        return self._free_rows.pop()

    def _grow(self, rows: int = 0, columns: int = 0) -> None:
        old = self._tables
        self._tables = np.zeros((max(rows, old.shape[0]), max(columns, old.shape[1])), np.int64)
        self._tables[: old.shape[0], : old.shape[1]] = old
