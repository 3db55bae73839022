"""`BlockPool`: pages of KV as pure arithmetic.

Owns which block is free, how many hold it, and which name its content goes by. Must not touch a
tensor, know whose block it is or what a name is made of.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from engine.errors import BlockAccountingError, OutOfBlocksError

EvictionListener = Callable[[bytes, int], None]


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens: ⌈num_tokens / block_size⌉."""
    return -(-num_tokens // block_size)


class BlockPool:
    """A fixed set of `num_total` blocks of `block_size` tokens; free + held = total, always.

    A block is held as long as it has references. A free block may be named: its content is still
    that of a known prefix, and it can be held again by that content until somebody else needs the
    space. A name belongs to one block at a time. Every operation costs O(1) per block.

    `on_evict` hears of each name that is lost, as `(name, block)`, once the pool's books are done:
    the name leads nowhere by then.
    """

    def __init__(
        self, num_total: int, block_size: int, on_evict: EvictionListener | None = None
    ) -> None:
        if num_total < 1 or block_size < 1:
            raise ValueError(
                f"num_total and block_size must be positive, got {num_total} and {block_size}"
            )
        self.num_total = num_total
        self.block_size = block_size
        self.on_evict = on_evict
        # First in, first out: a block rests as long as possible before its content is overwritten.
        self._free: deque[int] = deque(range(num_total))
        # Free blocks with their names, least recently used first.
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._references = [0] * num_total
        self._names: list[bytes | None] = [None] * num_total
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, named ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that are held, each counted once however many hold it."""
        return self.num_total - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks that are named."""
        return len(self._cached)

    def num_missing(self, num_tokens: int, block_table: Sequence[int]) -> int:
        """Return how many more blocks `block_table` needs to hold `num_tokens` tokens."""
        return max(0, num_blocks_for(num_tokens, self.block_size) - len(block_table))

    def num_references(self, block: int) -> int:
        """Return how many hold `block`, 0 for a free one."""
        return self._references[block]

    def count_unheld(self, blocks: Iterable[int]) -> int:
        """Return how many distinct blocks of `blocks` nobody holds."""
        references = self._references
        return len({block for block in blocks if not references[block]})

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` free blocks without a name, one reference each.

        Those that have none go first; then named ones lose theirs, least recently used first.
        OutOfBlocksError (nothing taken) if there are fewer.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocksError(
                f"{num_blocks} blocks asked for, {self.num_free} of {self.num_total} free"
            )
        num_unnamed = min(num_blocks, len(self._free))
        blocks = [self._free.popleft() for _ in range(num_unnamed)]
        evicted: list[tuple[bytes, int]] = []
        for _ in range(num_blocks - num_unnamed):
            block, name = self._cached.popitem(last=False)
            self._drop_name(name, block)
            evicted.append((name, block))
            blocks.append(block)
        for block in blocks:
            self._references[block] = 1
        self._announce(evicted)
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; a free one comes back with its content.

        BlockAccountingError (nothing changed) on a free block without a name: its content is
        unknown.
        """
        for block in blocks:
            if not self._is_known(block):
                raise BlockAccountingError(f"block {block} is free and nothing names its content")
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give one reference of each block back, in the order of `blocks`.

        A block that nobody holds any more is free: behind all other free ones, or, if it has a
        name, as the most recently used. A prefix is of no use without its beginning, so hand in the
        last block of a table first: it is then evicted first. BlockAccountingError on a block that
        is not held (a double release); those before it stay released.
        """
        references = self._references
        for block in blocks:
            if not (0 <= block < self.num_total and references[block]):
                raise BlockAccountingError(f"block {block} is not held")
            references[block] -= 1
            if references[block]:
                continue
            name = self._names[block]
            if name is None:
                self._free.append(block)
            else:
                self._cached[block] = name

    def name(self, block: int, name: bytes) -> bool:
        """Name the content of a held block; False (nothing changed) if another block has the name.

        BlockAccountingError on a block that is free or goes by another name.
        """
        if not (0 <= block < self.num_total and self._references[block]):
            raise BlockAccountingError(f"block {block} is not held and cannot be named")
        if self._names[block] not in (None, name):
            raise BlockAccountingError(f"block {block} has another name")
        if self._block_of.setdefault(name, block) != block:
            return False
        self._names[block] = name
        return True

    def name_of(self, block: int) -> bytes | None:
        """Return the name of `block`, None if it has none."""
        return self._names[block]

    def find(self, name: bytes) -> int | None:
        """Return the block that goes by `name`, free or held; None if there is none."""
        return self._block_of.get(name)

    def touch(self, blocks: Iterable[int]) -> None:
        """Make the free named ones of `blocks` the most recently used, the last one the most."""
        for block in blocks:
            if block in self._cached:
                self._cached.move_to_end(block)

    def forget_names(self) -> None:
        """Drop every name, of free and of held blocks. Holders keep their blocks."""
        evicted = list(self._block_of.items())
        for name, block in evicted:
            self._drop_name(name, block)
        self._free.extend(self._cached)
        self._cached.clear()
        self._announce(evicted)

    def _is_known(self, block: int) -> bool:
        return 0 <= block < self.num_total and (
            self._references[block] > 0 or self._names[block] is not None
        )

    def _drop_name(self, name: bytes, block: int) -> None:
        self._names[block] = None
        del self._block_of[name]

    def _announce(self, evicted: Iterable[tuple[bytes, int]]) -> None:
        # Last of all, so that whoever listens finds books that balance.
        if self.on_evict is not None:
            for name, block in evicted:
                self.on_evict(name, block)
