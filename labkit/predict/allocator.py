"""What PyTorch's CUDA caching allocator takes from the card, worked out without a card.

A request is rounded up and cut from a cached segment. Only where no free block is large enough
is the driver asked for another segment, so the bytes *reserved* depend on the order of all
requests before. *Allocated* are the blocks in use, with all that rounding added to them. The
model follows the allocator block by block and comes to the same addresses.

Not modelled: several streams, ``roundup_power2_divisions``, ``garbage_collection_threshold``.

Source: PyTorch, ``c10/cuda/CUDACachingAllocator.cpp``, and its notes "CUDA semantics: memory
management" for the settings.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.predict.segments import (
    ADDRESS_BITS,
    LARGE_SEGMENT_BYTES,
    MIB,
    SMALL_REQUEST_BYTES,
    UNLIMITED,
    Block,
    ExpandableSegments,
    Pool,
    Segments,
)

ROUND_BYTES = 512  # every block is a multiple of this
LARGE_REST_BYTES = 1 * MIB  # a rest of a large block up to here is not split off


class AllocatorError(ValueError):
    """Something no allocator can be asked for; the message says what."""


class AllocatorOutOfMemory(RuntimeError):
    """The capacity does not suffice, even with all cached segments given back."""

    def __init__(self, requested_bytes: int, allocator: "Allocator") -> None:
        reserved, capacity = allocator.reserved_bytes, allocator.segments.capacity_bytes
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved
        self.free_bytes = reserved - allocator.allocated_bytes
        super().__init__(
            f"Out of memory: {requested_bytes:,} bytes were requested, {reserved:,} of "
            f"{capacity:,} bytes are reserved already, and the {self.free_bytes:,} of those "
            "that are free are not enough in a row."
        )


class Allocator:
    """The caching allocator of one card, for one stream.

    Args:
        capacity_bytes: What the driver can give; ``None`` is no limit. It is less than the
            card's memory, of which the CUDA context takes a part.
        expandable_segments: One growing segment per pool instead of many of fixed size.
        max_split_bytes: Blocks of this size or more are not split; ``None`` is no limit.
        segment_addresses: Where the driver puts each new segment; by default after the last.

    Raises:
        AllocatorError: ``max_split_bytes`` is 20 MiB or less, which PyTorch refuses, too.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        expandable_segments: bool = False,
        max_split_bytes: int | None = None,
        segment_addresses: Iterator[int] | None = None,
    ) -> None:
        if max_split_bytes is not None and max_split_bytes <= LARGE_SEGMENT_BYTES:
            least = LARGE_SEGMENT_BYTES
            raise AllocatorError(f"max_split_bytes is {max_split_bytes:,}, not over {least:,}.")
        self.allocated_bytes = self.peak_allocated_bytes = 0
        kind = ExpandableSegments if expandable_segments else Segments
        self.segments = kind(capacity_bytes, segment_addresses)
        self.small, self.large = Pool(is_small=True), Pool(is_small=False)
        self._max_split_bytes = UNLIMITED if max_split_bytes is None else max_split_bytes
        self._is_expandable = expandable_segments
        self._takes_best_fit = not expandable_segments and max_split_bytes is None

    @property
    def reserved_bytes(self) -> int:
        """What the driver has given and not got back."""
        return self.segments.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The highest value of ``reserved_bytes`` so far."""
        return self.segments.peak_reserved_bytes

    def allocate(self, size_bytes: int) -> Block:
        """Hand out a block of ``size_bytes`` or somewhat more; for 0, one that takes nothing.

        Raises:
            AllocatorError: ``size_bytes`` is negative.
            AllocatorOutOfMemory: No free block is large enough, nor what the driver has left.
        """
        if size_bytes <= 0:
            if size_bytes < 0:
                raise AllocatorError(f"A block of {size_bytes:,} bytes was requested.")
            return Block(None, 0, 0, None, None)
        wanted = (size_bytes + ROUND_BYTES - 1) // ROUND_BYTES * ROUND_BYTES
        pool = self.small if wanted <= SMALL_REQUEST_BYTES else self.large
        index = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if not self._takes_best_fit:
            index = self._choose(pool, index, wanted)
        if index < len(pool.keys):
            block = pool.blocks.pop(pool.keys.pop(index))
        else:
            block = self._new_block(pool, wanted)
        if block.size_bytes > wanted and self._splits(pool, block, wanted):
            pool.insert(block.split(wanted))
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Take back a block, to be handed out again; it is joined with free neighbours.

        Raises:
            AllocatorError: The block is not in use. (One freed twice is noticed only as long as
                its place has not been handed out again.)
        """
        if block.is_free or not block.is_mapped:
            raise AllocatorError(f"The block at address {block.address} is freed twice.")
        self.allocated_bytes -= block.size_bytes
        if block.pool is None:  # a block of 0 bytes
            block.is_free = True
        else:
            block.pool.join(block)

    def empty_cache(self) -> None:
        """Give back to the driver the segments that are wholly free, or such pages of them."""
        for pool in (self.large, self.small):
            for block in [pool.blocks[key] for key in pool.keys]:
                self.segments.release(block)

    def _splits(self, pool: Pool, block: Block, wanted: int) -> bool:
        """Whether the rest of a block becomes a free block of its own."""
        if pool.is_small or self._is_expandable:
            return True
        return wanted < self._max_split_bytes and block.size_bytes - wanted > LARGE_REST_BYTES

    def _choose(self, pool: Pool, index: int, wanted: int) -> int:
        """The index of the free block to take where settings forbid the best fit."""
        if index == len(pool.keys):
            return index
        index = self.segments.best_fit(pool, index)
        limit = self._max_split_bytes
        too_large = limit if wanted < limit else wanted + LARGE_SEGMENT_BYTES
        size_bytes = pool.blocks[pool.keys[index]].size_bytes
        return index if size_bytes < too_large else len(pool.keys)

    def _new_block(self, pool: Pool, wanted: int) -> Block:
        """A block from the driver. Cached memory is given back only where that fails."""
        new_block = self.segments.new_block
        block = new_block(pool, wanted)
        if block is None and self._release_enough(pool, wanted):
            block = new_block(pool, wanted)
        if block is None:
            self.empty_cache()
            block = new_block(pool, wanted)
        if block is None:
            raise AllocatorOutOfMemory(wanted, self)
        return block

    def _release_enough(self, pool: Pool, wanted: int) -> bool:
        """Give back unsplittable blocks, no more than make room for ``wanted`` bytes."""
        if self._max_split_bytes == UNLIMITED or self._is_expandable:
            return False
        needed = max(wanted, self._max_split_bytes)
        index = bisect_left(pool.keys, needed << ADDRESS_BITS)
        if index < len(pool.keys):
            return self.segments.release(pool.blocks[pool.keys[index]]) > 0
        released = 0
        for key in reversed(pool.keys.copy()):
            block = pool.blocks[key]
            if released >= needed or block.size_bytes < self._max_split_bytes:
                break
            released += self.segments.release(block)
        return released >= needed


@dataclass(frozen=True)
class Replay:
    """What the allocator did in a list of events.

    ``peak_index`` is the event at which the allocated bytes were highest, and
    ``block_bytes`` what each block really got: rounded, with a rest that was not split off.
    ``out_of_memory_index`` is the event for which the capacity did not suffice; all figures are
    then those up to there.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_index: int
    reserved_at_peak_bytes: int
    block_bytes: np.ndarray
    out_of_memory_index: int | None


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    capacity_bytes: int | None = None,
    expandable_segments: bool = False,
    emptied: Iterable[int] = (),
) -> Replay:
    """Allocate and free blocks in the order given, from an empty cache.

    Args:
        events: ``i`` allocates block ``i``, ``~i`` (that is ``-i - 1``) frees it.
        sizes: The bytes requested for each block; one of 0 bytes takes nothing.
        capacity_bytes: As for ``Allocator``.
        expandable_segments: As for ``Allocator``.
        emptied: Events before which the cache is given back to the driver.

    Raises:
        AllocatorError: A block has no size or a negative one, is freed without being in use, or
            allocated while it is.
    """
    events, sizes = np.asarray(events, np.int64).tolist(), np.asarray(sizes, np.int64).tolist()
    if events and not -len(sizes) <= min(events) <= max(events) < len(sizes):
        raise AllocatorError(f"There are events of blocks beyond the {len(sizes):,} sizes.")
    allocator = Allocator(
        capacity_bytes=capacity_bytes, expandable_segments=expandable_segments
    )
    allocate, free = allocator.allocate, allocator.free
    nothing = allocate(0)  # stands for every block not in use
    free(nothing)
    blocks, block_bytes = [nothing] * len(sizes), [0] * len(sizes)
    peak = peak_index = reserved_at_peak = 0
    out_of_memory_index = None
    emptied = set(emptied)
    for index, event in enumerate(events):
        if index in emptied:
            allocator.empty_cache()
        if event < 0:
            free(blocks[~event])
            blocks[~event] = nothing
            continue
        if blocks[event] is not nothing:
            raise AllocatorError(f"Event {index} allocates block {event}, which is in use.")
        try:
            block = blocks[event] = allocate(sizes[event])
        except AllocatorOutOfMemory:
            out_of_memory_index = index
            break
        block_bytes[event] = block.size_bytes
        if allocator.allocated_bytes > peak:
            peak, peak_index = allocator.allocated_bytes, index
            reserved_at_peak = allocator.reserved_bytes
    return Replay(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_index=peak_index,
        reserved_at_peak_bytes=reserved_at_peak,
        block_bytes=np.array(block_bytes, np.int64),
        out_of_memory_index=out_of_memory_index,
    )
