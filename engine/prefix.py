"""`PrefixCache`: requests that begin alike share the blocks of their beginning.

Owns what a block's content is called, which waiting requests hope for which blocks, and the match
that each of them finds. Must not touch a tensor, choose who runs or change a request's phase.

A full block of known tokens is named by a chain of digests over the salt and all tokens up to its
end, so a name promises keys and values that depend on nothing else. A running request names its
blocks as they are computed; a waiting or preempted one watches: its `block_table` and
`num_computed_tokens` tell how much of its beginning the pool still has, without owning any of it.
Matches follow events (a block gets a name, a block loses it), never a scan over those who wait.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.blocks import BlockPool
from engine.errors import BlockAccountingError
from engine.request import Request

# 128 bits: nobody finds two prefixes with one name, by accident or on purpose. Python's own hash
# would let a client guess a collision and read another one's prompt.
NAME_SIZE_BYTES = 16


def root_name(cache_salt: str | None) -> bytes:
    """Return the digest that stands before a request's first block; no salt is unlike any salt."""
    # A salt comes from a client and may hold lone surrogates, which strict UTF-8 refuses.
    root = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(root, digest_size=NAME_SIZE_BYTES).digest()


def extend_names(request: Request, num_blocks: int, block_size: int) -> None:
    """Extend `request.block_hashes` to its first `num_blocks` blocks of `block_size` tokens.

    name_i = H(name_{i-1} ‖ tokens of block i as 64-bit integers), name_{-1} the root of the salt.
    What is already named is never hashed again.
    """
    names = request.block_hashes
    first = len(names)
    if num_blocks <= first:
        return
    token_ids = array("q", request.known_token_ids(first * block_size, num_blocks * block_size))
    packed = token_ids.tobytes()
    num_bytes = block_size * token_ids.itemsize
    name = names[-1] if names else root_name(request.cache_salt)
    for start in range(0, len(packed), num_bytes):
        # One call per block: to feed a digest piece by piece costs as much again.
        block = name + packed[start : start + num_bytes]
        name = blake2b(block, digest_size=NAME_SIZE_BYTES).digest()
        names.append(name)


@dataclass(slots=True, eq=False)
class _Node:
    """A matched block: the requests whose match ends here, and the blocks that matches go on to."""

    ending: dict[Request, None] = field(default_factory=dict)
    following: dict[int, None] = field(default_factory=dict)


class _MatchForest:
    """Which matches contain a block: each is a path from a root, and those that begin alike share
    it, so a long common prefix is kept once however many requests wait for it.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, request: Request, length: int) -> None:
        """Let the request's match be the first `length` blocks of its table."""
        child = None
        for index in range(length - 1, -1, -1):
            block = request.block_table[index]
            node = self._nodes.get(block)
            is_new = node is None
            if node is None:
                node = self._nodes[block] = _Node()
            if child is None:
                node.ending[request] = None
            else:
                node.following[child] = None
            if not is_new:
                # Its own path to the root is there already.
                return
            child = block

    def remove(self, request: Request, length: int) -> None:
        """Take back what `add` did; the table must still hold these blocks."""
        child = None
        for index in range(length - 1, -1, -1):
            block = request.block_table[index]
            node = self._nodes[block]
            if child is None:
                del node.ending[request]
            else:
                del node.following[child]
            if node.ending or node.following:
                return
            del self._nodes[block]
            child = block

    def cut(self, block: int) -> list[Request]:
        """Let every match that contains `block` end before it, and return whose they are."""
        cut: list[Request] = []
        pending = [block] if block in self._nodes else []
        while pending:
            node = self._nodes.pop(pending.pop())
            cut.extend(node.ending)
            pending.extend(node.following)
        if cut:
            table = cut[0].block_table
            depth = table.index(block)
            if depth > 0:
                parent = self._nodes[table[depth - 1]]
                del parent.following[block]
                parent.ending.update(dict.fromkeys(cut))
        return cut


class PrefixCache:
    """Finds, shares and names the blocks of requests over one pool.

    The life of a request: `watch` while it waits, `start` when it is given work, `commit` after
    each step that computed tokens of it, `release` when it ends or is preempted (then `watch`
    again), or `unwatch` if it ends while it waits. Start everybody of a step before allocating for
    anyone: allocating may evict what a match counts on.

    A cache that is not enabled matches and names nothing; the calls are the same.
    """

    def __init__(self, pool: BlockPool, is_enabled: bool = True) -> None:
        self._pool = pool
        self._is_enabled = is_enabled
        # How many blocks each watcher may match at most.
        self._limits: dict[Request, int] = {}
        # Watchers by the name that would lengthen their match.
        self._expecting: dict[bytes, dict[Request, None]] = {}
        self._matches = _MatchForest()
        # How many leading blocks of each running request have been through `commit` (0 on the
        # host); no number reaches the one of a request that must not name any more.
        self._num_committed: dict[Request, int] = {}
        if is_enabled:
            pool.on_evict = self._on_evict

    @property
    def num_watchers(self) -> int:
        """Requests whose match is kept current."""
        return len(self._limits)

    @property
    def is_idle(self) -> bool:
        """Whether nobody watches, runs or is on the host, and nothing is kept of those who did."""
        return not (self._limits or self._expecting or self._matches or self._num_committed)

    def watch(self, request: Request) -> None:
        """Match a waiting or preempted request, now and until `start` or `unwatch`.

        Sets `block_table` to the longest run of known blocks from its beginning and
        `num_computed_tokens` to the tokens in them. At least one known token is left to compute; a
        request whose prompt is still to be scored matches nothing, because scores need the forward
        pass. The blocks become the most recently used but stay free for whoever needs them.
        Watching again starts afresh. BlockAccountingError on a request that holds blocks, here or
        on the host.
        """
        self._end_watch(request)
        if request.host_block_table or request.block_table:
            raise BlockAccountingError(f"{request.request_id} holds blocks and cannot watch")
        request.num_computed_tokens = 0
        if not self._is_enabled:
            return
        block_size = self._pool.block_size
        extend_names(request, request.num_known_tokens // block_size, block_size)
        limit = (request.num_known_tokens - 1) // block_size
        self._limits[request] = 0 if _must_score_prompt(request) else limit
        self._grow(request, 0)
        self._touch(request)

    def start(self, request: Request) -> int:
        """End the watch and acquire the matched blocks; return the tokens that they spare.

        0 for a request that does not watch (one that was swapped out, say).
        """
        if request not in self._limits:
            return 0
        self._leave(request)
        self._pool.acquire(request.block_table)
        self._num_committed[request] = len(request.block_table)
        return request.num_computed_tokens

    def unwatch(self, request: Request) -> None:
        """End the watch and forget the match, or what is known of a request on the host."""
        self._end_watch(request)
        self._num_committed.pop(request, None)

    def commit(self, request: Request) -> None:
        """Name the blocks of a running request that its computed tokens have filled since the last
        commit, and lengthen the matches that wait for them.

        Where another block has the name already, the request keeps its own, unnamed.
        """
        if not self._is_enabled:
            return
        first = self._num_committed.setdefault(request, 0)
        num_full = request.num_computed_tokens // self._pool.block_size
        if num_full <= first:
            return
        extend_names(request, num_full, self._pool.block_size)
        names = [
            name
            for block, name in zip(
                request.block_table[first:num_full],
                request.block_hashes[first:num_full],
                strict=True,
            )
            if self._pool.name(block, name)
        ]
        self._num_committed[request] = num_full
        # Only now, so that a match grows over all of them at once.
        for name in names:
            self._wake(name)

    def forget_names(self) -> None:
        """Drop every name because what stands in the blocks is not to be trusted any more.

        Whoever runs now, or was moved to the host, keeps what it has and names nothing until that
        is dropped: what it computes from here on depends on it.
        """
        self._num_committed = dict.fromkeys(self._num_committed, sys.maxsize)
        self._pool.forget_names()

    def release(self, request: Request) -> None:
        """Give back the blocks of a running request and clear its table.

        The last block goes first, so that it is evicted first. What is on the host already will
        come back with its content, and with the doubts about it. BlockAccountingError on a request
        that watches: it holds none.
        """
        if request in self._limits:
            raise BlockAccountingError(f"{request.request_id} watches and holds no blocks")
        num_committed = self._num_committed.pop(request, 0)
        if request.host_block_table and self._is_enabled:
            # It comes back to other blocks, which have no names yet.
            self._num_committed[request] = num_committed if num_committed == sys.maxsize else 0
        self._pool.release(reversed(request.block_table))
        request.block_table.clear()

    def _grow(self, request: Request, length: int) -> None:
        """Lengthen a table as far as names are known and expect the next; the match was `length`
        blocks until now.
        """
        table, names = request.block_table, request.block_hashes
        limit = self._limits[request]
        while len(table) < limit and (block := self._pool.find(names[len(table)])) is not None:
            table.append(block)
        if len(table) > length:
            # The new end first: the common part of the path is then never taken down.
            self._matches.add(request, len(table))
            self._matches.remove(request, length)
            request.num_computed_tokens = len(table) * self._pool.block_size
        if len(table) < limit:
            self._expecting.setdefault(names[len(table)], {})[request] = None

    def _wake(self, name: bytes) -> None:
        """Lengthen the matches that wait for `name`: many at once, mostly by the same blocks."""
        run: list[int] = []
        end = b""
        for request in self._expecting.pop(name, ()):
            table, names = request.block_table, request.block_hashes
            length = len(table)
            stop = length + len(run)
            # A name tells all tokens before it: with the same end, everything between is the same.
            is_alike = bool(run) and stop <= self._limits[request] and names[stop - 1] == end
            if is_alike:
                table.extend(run)
            self._grow(request, length)
            if not is_alike or len(table) > stop:
                run, end = table[length:], names[len(table) - 1]
                if self._pool.count_unheld(run):
                    # Beyond what was just named, free blocks have become useful again.
                    self._touch(request)

    def _on_evict(self, name: bytes, block: int) -> None:
        """Cut the matches that contain `block` before it: they wait for its name now."""
        watchers = self._matches.cut(block)
        if not watchers:
            return
        # A name tells all tokens before it, so the block stands at the same depth in every match.
        depth = watchers[0].block_table.index(block)
        for request in watchers:
            self._stop_expecting(request)
            del request.block_table[depth:]
            request.num_computed_tokens = depth * self._pool.block_size
        # Nobody waited for the name of a block that was there.
        self._expecting[name] = dict.fromkeys(watchers)

    def _touch(self, request: Request) -> None:
        self._pool.touch(reversed(request.block_table))

    def _end_watch(self, request: Request) -> None:
        if request in self._limits:
            self._leave(request)
            request.block_table.clear()
            request.num_computed_tokens = 0

    def _leave(self, request: Request) -> None:
        self._stop_expecting(request)
        self._matches.remove(request, len(request.block_table))
        del self._limits[request]

    def _stop_expecting(self, request: Request) -> None:
        length = len(request.block_table)
        if length < self._limits[request]:
            name = request.block_hashes[length]
            expecting = self._expecting[name]
            del expecting[request]
            if not expecting:
                del self._expecting[name]


def _must_score_prompt(request: Request) -> bool:
    """Whether scores of prompt tokens are still owed; the token at position 0 has none."""
    return (
        request.sampling.num_prompt_logprobs is not None
        and request.num_scored_tokens < request.num_prompt_tokens - 1
    )
