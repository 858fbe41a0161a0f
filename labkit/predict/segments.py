"""Blocks, the pools that keep the free ones, and the segments of memory they are cut from.

The parts of the allocator in ``labkit.predict.allocator``, which says where the rules are from.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

MIB = 2**20
SMALL_REQUEST_BYTES = 1 * MIB  # up to here a request is served by the small pool
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # from here on a request gets a segment of its own
ROUND_SEGMENT_BYTES = 2 * MIB

ADDRESS_BITS = 64
EXPANDABLE_BYTES = 2**62  # addresses of an expandable segment: more than it can ever use
UNLIMITED = 2**63


class Block:
    """A stretch of a segment: free, in use, or (if expandable) addresses without memory."""

    __slots__ = ("address", "is_free", "is_mapped", "next", "pool", "previous", "size_bytes")

    def __init__(self, pool, address, size_bytes, previous, next, is_mapped=True) -> None:
        self.pool = pool
        self.address = address
        self.size_bytes = size_bytes
        self.previous = previous
        self.next = next
        self.is_mapped = is_mapped
        self.is_free = False

    def split(self, size_bytes: int) -> "Block":
        """Shorten the block to ``size_bytes`` and return the rest, which is in no pool."""
        rest = Block(
            self.pool,
            self.address + size_bytes,
            self.size_bytes - size_bytes,
            self,
            self.next,
            self.is_mapped,
        )
        self.size_bytes = size_bytes
        self.next.previous = rest
        self.next = rest
        return rest

    def absorb_next(self) -> None:
        """Grow over the block that follows, which is no longer one."""
        gone = self.next
        self.size_bytes += gone.size_bytes
        self.next = gone.next
        gone.next.previous = self


class Pool:
    """The free blocks for small or for large requests, smallest first, then lowest address."""

    __slots__ = ("blocks", "is_small", "keys")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.keys: list[int] = []  # size and address in one number: quick to compare
        self.blocks: dict[int, Block] = {}

    def insert(self, block: Block) -> None:
        """Add a block none of whose neighbours is free."""
        key = block.size_bytes << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block
        block.is_free = True

    def remove(self, block: Block) -> None:
        """Take out a block, which stays marked as free until somebody uses it."""
        key = block.size_bytes << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def join(self, block: Block) -> Block:
        """Add a block, joined with free neighbours; return the joined one."""
        if block.next.is_free:
            self.remove(block.next)
            block.absorb_next()
        before = block.previous
        if before.is_free:
            self.remove(before)
            before.absorb_next()
            block.is_free = True  # whoever still holds it holds nothing
            block = before
        self.insert(block)
        return block


class Segments:
    """What the allocator holds from the driver: segments of fixed size."""

    def __init__(self, capacity_bytes: int | None, addresses: Iterator[int] | None) -> None:
        self.capacity_bytes = UNLIMITED if capacity_bytes is None else capacity_bytes
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.first_blocks: dict[int, Block] = {}  # by the address of the segment
        self.edge = Block(None, 0, 0, None, None)  # the neighbour of both ends of a segment
        self._addresses = addresses
        self._next_address = ROUND_SEGMENT_BYTES

    def new_block(self, pool: Pool, wanted_bytes: int) -> Block | None:
        """A new segment as one block, in no pool; ``None`` where the capacity is too small."""
        if pool.is_small:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif wanted_bytes < OWN_SEGMENT_BYTES:
            segment_bytes = LARGE_SEGMENT_BYTES
        else:
            segment_bytes = -(-wanted_bytes // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES
        if not self._reserve(segment_bytes):
            return None
        return self._add(pool, segment_bytes)

    def release(self, block: Block) -> int:
        """Give a free block back if it is a whole segment; return its bytes, or 0."""
        if block.previous is not self.edge or block.next is not self.edge:
            return 0
        block.pool.remove(block)
        del self.first_blocks[block.address]
        self.reserved_bytes -= block.size_bytes
        return block.size_bytes

    def best_fit(self, pool: Pool, index: int) -> int:
        """Which free block to take if the one at ``index`` is the smallest that suffices."""
        return index

    def _reserve(self, size_bytes: int) -> bool:
        """Ask the driver for memory; false where it has no more."""
        reserved_bytes = self.reserved_bytes + size_bytes
        if reserved_bytes > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, reserved_bytes)
        return True

    def _add(self, pool: Pool, size_bytes: int, is_mapped: bool = True) -> Block:
        """A segment of one block, at the next address."""
        address = self._next_address if self._addresses is None else next(self._addresses)
        self._next_address = address + size_bytes
        block = Block(pool, address, size_bytes, self.edge, self.edge, is_mapped)
        self.first_blocks[address] = block
        return block


class ExpandableSegments(Segments):
    """One segment per pool, which grows by pages of memory mapped to its addresses."""

    def __init__(self, capacity_bytes: int | None, addresses: Iterator[int] | None) -> None:
        super().__init__(capacity_bytes, addresses)
        self._bases: dict[Pool, int] = {}  # where the first page is
        self._unmapped: dict[Pool, list[Block]] = {}  # by address

    def new_block(self, pool: Pool, wanted_bytes: int) -> Block | None:
        """Map pages at the lowest address with room; ``None`` where the capacity is too small.

        Pages that were mapped before the capacity was reached stay, as free memory.
        """
        block = self._find_room(pool, wanted_bytes)
        if not block.is_mapped:
            block = self._map(block, wanted_bytes)
        while block and block.size_bytes < wanted_bytes:
            block = self._map(block.next, wanted_bytes - block.size_bytes)
        if block:
            pool.remove(block)
        return block

    def release(self, block: Block) -> int:
        """Give back the pages that lie wholly inside a free block; return their bytes."""
        pool, page_bytes = block.pool, _page_bytes(block.pool)
        before_bytes = (self._bases[pool] - block.address) % page_bytes
        pages_bytes = (block.size_bytes - before_bytes) // page_bytes * page_bytes
        if pages_bytes <= 0:
            return 0
        pool.remove(block)
        if before_bytes:
            before, block = block, block.split(before_bytes)
            pool.insert(before)
        if pages_bytes < block.size_bytes:
            pool.insert(block.split(pages_bytes))
        block.is_free = block.is_mapped = False
        unmapped = self._unmapped[pool]
        if not block.next.is_mapped:
            unmapped.remove(block.next)
            block.absorb_next()
        if not block.previous.is_mapped:
            block = block.previous
            unmapped.remove(block)
            block.absorb_next()
        insort(unmapped, block, key=attrgetter("address"))
        self.reserved_bytes -= pages_bytes
        return pages_bytes

    def best_fit(self, pool: Pool, index: int) -> int:
        """Leave a block that can grow to one that cannot, where that one suffices, too."""
        block = pool.blocks[pool.keys[index]]
        for larger_index in range(index + 1, len(pool.keys)):
            larger = pool.blocks[pool.keys[larger_index]]
            if _room_bytes(larger) >= _room_bytes(block):
                break
            block, index = larger, larger_index
        return index

    def _find_room(self, pool: Pool, wanted_bytes: int) -> Block:
        """The first of the free and unmapped blocks in a row that have room together."""
        if pool not in self._unmapped:
            whole = self._add(pool, EXPANDABLE_BYTES, is_mapped=False)
            self._bases[pool], self._unmapped[pool] = whole.address, [whole]
        for hole in self._unmapped[pool]:
            first = block = hole.previous if hole.previous.is_free else hole
            room_bytes = 0
            while block.is_free or not block.is_mapped:
                room_bytes += block.size_bytes
                block = block.next
            if room_bytes >= wanted_bytes:
                break
        return first  # at the latest, the one before the addresses never used

    def _map(self, hole: Block, wanted_bytes: int) -> Block | None:
        """Map the pages at the start of a hole; return the free block that they are in."""
        page_bytes = _page_bytes(hole.pool)
        pages_bytes = -(-min(wanted_bytes, hole.size_bytes) // page_bytes) * page_bytes
        if not self._reserve(pages_bytes):
            return None
        unmapped = self._unmapped[hole.pool]
        index = unmapped.index(hole)
        unmapped[index : index + 1] = (
            [hole.split(pages_bytes)] if pages_bytes < hole.size_bytes else []
        )
        hole.is_mapped = True
        return hole.pool.join(hole)


def _room_bytes(block: Block) -> int:
    """The bytes of a free block, and those it can grow by."""
    return block.size_bytes + (0 if block.next.is_mapped else block.next.size_bytes)


def _page_bytes(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
