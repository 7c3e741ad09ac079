"""KV-cache pages: which sequence holds which, and which still hold a known prefix.

Full pages are keyed by a 128-bit hash of all ids up to their end, chained as in vLLM (Kwon et al.
2023), and stay findable when unused; blank pages are taken first, then least recently used ones.
Layers with a sliding window have a pool of their own: pages behind the window are released. A
prefix counts only where its last window is cached, so window pages before a point where sequences
diverged are kept longer.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from clocher_runtime.models.build import PAGE_CELLS

_KEY_BYTES = 16
NO_PAGE = -1
"""Page-table entry for no page: what is written there is dropped."""


class PagePool:
    """The pages of one group of layers, and their page table [S, B]; `window` 0: full attention."""

    def __init__(self, count: int, table: np.ndarray, window: int = 0) -> None:
        self.count, self.table, self.window = count, table, window
        table[...] = NO_PAGE
        self._touched = 0  # pages that were ever taken
        self._users: list[int] = []  # of each of them
        self._unused: OrderedDict[int, None] = OrderedDict()  # of them
        self._names: dict[int, tuple[bytes, bytes]] = {}  # page -> key, ids
        self._pages: dict[bytes, int] = {}  # key -> page

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return self.count - self._touched + len(self._unused)

    @property
    def used(self) -> int:
        """Pages in use."""
        return self._touched - len(self._unused)

    @property
    def named(self) -> int:
        """Pages that can be found, in use or not."""
        return len(self._names)

    def take(self) -> int:
        """Take an unused page and forget its key. There must be one."""
        first = next(iter(self._unused), None)
        if self._touched < self.count and (first is None or first in self._names):
            page = self._touched
            self._touched += 1
            self._users.append(1)
            return page
        page, _ = self._unused.popitem(last=False)
        self.forget(page)
        self._users[page] = 1
        return page

    def find(self, key: bytes, ids: bytes) -> int | None:
        """Return the page with this key and these ids; None if there is none."""
        page = self._pages.get(key)
        return page if page is not None and self._names[page][1] == ids else None

    def is_unused(self, page: int) -> bool:
        """Return whether no sequence uses a page."""
        return self._users[page] == 0

    def first_block(self, cell: int) -> int:
        """Return the first block that a token at a cell sees."""
        return max(0, cell - self.window + 1) // PAGE_CELLS if self.window else 0

    def share(self, page: int) -> None:
        """Add a user to a page."""
        self._users[page] += 1
        self._unused.pop(page, None)

    def release(self, page: int, soon: bool = False) -> None:
        """Remove a user from a page; with `soon` it is the next to be taken, findable or not."""
        self._users[page] -= 1
        if not self._users[page]:
            self._unused[page] = None
            if soon or page not in self._names:
                self._unused.move_to_end(page, last=False)

    def name(self, page: int, key: bytes, ids: bytes) -> None:
        """Register a full page in use, unless its content is registered already."""
        if key not in self._pages and page not in self._names:
            self._names[page], self._pages[key] = (key, ids), page

    def forget(self, page: int) -> None:
        """Make a page impossible to find."""
        named = self._names.pop(page, None)
        if named is not None:
            del self._pages[named[0]]


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence as the cache knows it: `ids`, of which the first `cells` have keys.

    `salt`: pages are shared within it; `adapter`: number of its LoRA adapter, 0 for none; `slot`:
    row of the page tables, -1 for none; `held`: block -> page by group of layers; `parts`: first
    block not found in the cache; `keys`: of its blocks.
    """

    ids: list[int]
    salt: bytes = b""
    adapter: int = 0
    slot: int = -1
    cells: int = 0
    held: tuple[dict[int, int], ...] = ()
    parts: int = 0
    keys: list[tuple[bytes, bytes]] = field(default_factory=list)


class KvPages:
    """The page tables of a Plan, and the sequences that own the pages in them.

    `table` [S, B] i32 and `pages` belong to full-attention layers (0: no KV cache), the others
    to layers with a window; `salt`: what contents depend on besides ids; `reuse`: prefix caching;
    `slots`: free rows of the tables; `changed`: a table was written to since it was sent to the
    device.
    """

    def __init__(
        self,
        table: np.ndarray,
        pages: int,
        *,
        window_table: np.ndarray | None = None,
        window_pages: int = 0,
        window: int = 0,
        salt: bytes = b"",
        reuse: bool = True,
    ) -> None:
        self._pools = [PagePool(pages, table)] if pages else []
        if window_table is not None:
            self._pools.append(PagePool(window_pages, window_table, window))
        self._count, self._salt, self._reuse = len(table), salt, reuse
        self.reset()

    @property
    def used(self) -> int:
        """Pages held by sequences."""
        return sum(pool.used for pool in self._pools)

    @property
    def total(self) -> int:
        """Pages of all pools; 0: the Plan has no KV cache."""
        return sum(pool.count for pool in self._pools)

    @property
    def named(self) -> int:
        """Pages that can be found, in use or not."""
        return sum(pool.named for pool in self._pools)

    def reset(self) -> None:
        """Forget everything, once no sequence is left: state may be half-written."""
        self._pools = [PagePool(pool.count, pool.table, pool.window) for pool in self._pools]
        self.slots = list(range(self._count))[::-1]
        self.changed = True

    def admit(self, sequence: Sequence, reuse: bool = True) -> bool:
        """Give a sequence a slot and its cached prefix; return whether the rest has room too."""
        if not self.slots:
            return False
        blocks = self._known(sequence) if reuse and self._reuse and self._pools else 0
        found = []
        for pool in self._pools:
            pages = {}
            for block in range(pool.first_block(blocks * PAGE_CELLS), blocks):
                page = pool.find(*sequence.keys[block])
                assert page is not None
                pages[block] = page
            found.append(pages)
        needed = -(-len(sequence.ids) // PAGE_CELLS) - blocks
        for pool, pages in zip(self._pools[:1], found, strict=False):
            revived = sum(pool.is_unused(page) for page in pages.values())
            if needed > pool.available - revived:
                return False
        sequence.slot = self.slots.pop()
        for pool, pages in zip(self._pools, found, strict=True):
            for block, page in pages.items():
                pool.share(page)
                pool.table[sequence.slot, block] = page
        sequence.cells, sequence.held = blocks * PAGE_CELLS, tuple(found)
        self.changed = True
        return True

    def reserve(self, sequence: Sequence, cells: int) -> bool:
        """Give a sequence pages for its first `cells` cells; return whether there were enough."""
        last = (cells - 1) // PAGE_CELLS
        for pool, held in zip(self._pools, sequence.held, strict=True):
            if last in held:
                continue
            for block in range(pool.first_block(sequence.cells), last + 1):
                if block in held:
                    continue
                if not pool.available:
                    return False
                held[block] = page = pool.take()
                pool.table[sequence.slot, block] = page
                self.changed = True
        return True

    def commit(self, sequence: Sequence, cells: int) -> None:
        """Record that the keys of a sequence are in the cache up to `cells`."""
        before, sequence.cells = sequence.cells // PAGE_CELLS, cells
        full = cells // PAGE_CELLS
        if full == before:
            return
        for block in range(before, full):
            for pool, held in zip(self._pools, sequence.held, strict=True):
                if self._reuse and block in held:
                    pool.name(held[block], *self._key(sequence, block))
        for pool, held in zip(self._pools, sequence.held, strict=True):
            first = pool.first_block(cells)
            kept = range(pool.first_block(sequence.parts * PAGE_CELLS), sequence.parts)
            for block in [each for each in held if each < first]:
                pool.release(held.pop(block), soon=block not in kept)
                pool.table[sequence.slot, block] = NO_PAGE
                self.changed = True

    def release(self, sequence: Sequence, forget: bool = False) -> None:
        """Take slot and pages from a sequence; full pages stay findable unless `forget`."""
        if sequence.slot < 0:
            return
        for pool, held in zip(self._pools, sequence.held, strict=True):
            # The end first: a prefix serves more sequences, and is kept longer.
            for block in sorted(held, reverse=True):
                if forget:
                    pool.forget(held[block])
                pool.release(held[block])
                pool.table[sequence.slot, block] = NO_PAGE
                self.changed = True
        self.slots.append(sequence.slot)
        sequence.held, sequence.slot, sequence.cells = (), -1, 0

    def _known(self, sequence: Sequence) -> int:
        """Return how many leading blocks of a sequence are cached."""
        blocks = 0
        for block in range((len(sequence.ids) - 1) // PAGE_CELLS):
            if self._pools[0].find(*self._key(sequence, block)) is None:
                break
            blocks += 1
        sequence.parts = blocks
        for pool in self._pools[1:]:
            while blocks and not all(
                pool.find(*sequence.keys[block]) is not None
                for block in range(pool.first_block(blocks * PAGE_CELLS), blocks)
            ):
                blocks -= 1
        return blocks

    def _key(self, sequence: Sequence, block: int) -> tuple[bytes, bytes]:
        """Return the key of a block, the hash of all ids up to its end, and its own ids."""
        keys = sequence.keys
        while len(keys) <= block:
            start = len(keys) * PAGE_CELLS
            ids = np.array(sequence.ids[start : start + PAGE_CELLS], np.int32).tobytes()
            first = repr((self._salt, sequence.salt, sequence.adapter)).encode()
            before = keys[-1][0] if keys else blake2b(first, digest_size=_KEY_BYTES).digest()
            keys.append((blake2b(ids, digest_size=_KEY_BYTES, key=before).digest(), ids))
        return keys[block]


def window_pages(window: int, chunk: int, slots: int, context: int, others: int) -> int:
    """Return the pages that layers with a window need, for `slots` sequences.

    `window`, `chunk`, `context`: tokens; `others`: full-attention pages. Ends of prefixes get 1/64
    of these, or one window, at most 1/4.
    """
    most = -(-context // PAGE_CELLS)
    live = min(most, -(-(window + chunk) // PAGE_CELLS) + 1)
    ends = min(others // 4, max(others // 64, -(-window // PAGE_CELLS) + 1))
    return min(slots * most, slots * live + ends)
