"""The caching allocator against figures worked out by hand, and against recorded traces."""

import gzip
import json
import os
import random
from collections import deque
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from labkit.predict import allocator as rules
from labkit.predict import segments
from labkit.predict.allocator import Allocator, AllocatorError, AllocatorOutOfMemory, replay
from labkit.predict.plain_replay import plain_replay
from labkit.predict.segments import MIB

SHARED = Path(__file__).resolve().parents[2] / "shared" / "groundtruth"
TRACES = Path(os.environ.get("LABKIT_GROUNDTRUTH", SHARED)) / "traces"
BASE = 2 * MIB  # where the first segment is unless the test says where


def pieces(allocator, first):
    """The block and those that follow it in its segment."""
    while first is not allocator.segments.edge:
        yield first
        first = first.next


def layout(allocator):
    """By address of a segment: the bytes of each of its blocks, and whether it is in use."""
    return {
        address: [
            (block.size_bytes, block.is_mapped and not block.is_free)
            for block in pieces(allocator, first)
        ]
        for address, first in allocator.segments.first_blocks.items()
    }


def segment_bytes(allocator):
    return {
        address: sum(size for size, _ in blocks)
        for address, blocks in layout(allocator).items()
    }


def cached(allocator, *sizes):
    """Allocate blocks in a row and free all: afterwards they are cached."""
    for block in [allocator.allocate(size) for size in sizes]:
        allocator.free(block)


# Rules, with figures worked out by hand


@pytest.mark.parametrize(
    ("requested_bytes", "block_bytes", "reserved_bytes"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # the rounded size chooses the segment
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (200_000_000, 200_000_000, 192 * MIB),
    ],
)
def test_requests_are_rounded_and_get_a_segment(requested_bytes, block_bytes, reserved_bytes):
    allocator = Allocator()
    assert allocator.allocate(requested_bytes).size_bytes == block_bytes
    assert allocator.allocated_bytes == allocator.peak_allocated_bytes == block_bytes
    assert allocator.reserved_bytes == allocator.peak_reserved_bytes == reserved_bytes
    assert segment_bytes(allocator) == {BASE: reserved_bytes}


def test_the_rest_of_a_large_block_is_split_off_if_over_1_mib():
    allocator = Allocator()
    assert allocator.allocate(11 * MIB - 512).size_bytes == 11 * MIB - 512
    assert layout(allocator)[BASE] == [(11 * MIB - 512, True), (MIB + 512, False)]


def test_a_smaller_rest_stays_with_the_block_and_counts_as_allocated():
    allocator = Allocator()
    block = allocator.allocate(11 * MIB)
    assert layout(allocator)[BASE] == [(12 * MIB, True)]
    assert allocator.allocated_bytes == block.size_bytes == 12 * MIB
    allocator.free(block)
    assert allocator.allocated_bytes == 0


def test_the_rest_of_a_small_block_is_always_split_off():
    allocator = Allocator()
    cached(allocator, MIB)
    for size in (MIB, MIB - 512, 512):
        assert allocator.allocate(size).size_bytes == size
    assert layout(allocator)[BASE] == [(MIB, True), (MIB - 512, True), (512, True)]


def test_the_smallest_sufficient_block_is_taken_then_the_lowest_address():
    allocator = Allocator(segment_addresses=iter([300 * MIB, 100 * MIB, 200 * MIB, 50 * MIB]))
    cached(allocator, 40 * MIB, 20 * MIB, 20 * MIB, 10 * MIB)
    addresses = [allocator.allocate(15 * MIB).address // MIB for _ in range(3)]
    assert addresses == [100, 200, 300]
    assert allocator.allocate(5 * MIB).address == 115 * MIB  # 5 MiB are left there, exactly


def test_small_and_large_requests_do_not_share_segments():
    allocator = Allocator()
    cached(allocator, 40 * MIB)
    assert allocator.allocate(MIB).address == BASE + 40 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (2, 0, 1)])
def test_free_neighbours_become_one_block(order):
    allocator = Allocator()
    blocks = [allocator.allocate(size) for size in (512, 1024, 1536)]
    for index in order:
        allocator.free(blocks[index])
    assert layout(allocator) == {BASE: [(2 * MIB, False)]}
    assert len(allocator.small.keys) == len(allocator.small.blocks) == 1


def test_blocks_of_different_segments_stay_apart():
    allocator = Allocator()
    cached(allocator, 20 * MIB, 20 * MIB)  # the second segment begins where the first ends
    assert allocator.allocate(40 * MIB).address == BASE + 40 * MIB


def test_cached_segments_go_back_before_memory_runs_out():
    allocator = Allocator(capacity_bytes=42 * MIB)
    cached(allocator, 20 * MIB, 20 * MIB, 1)
    assert allocator.reserved_bytes == 42 * MIB
    block = allocator.allocate(30 * MIB)
    assert layout(allocator) == {block.address: [(30 * MIB, True)]}
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (30 * MIB, 42 * MIB)


def test_running_out_of_memory_is_one_sentence_with_figures():
    allocator = Allocator(capacity_bytes=40 * MIB)
    allocator.allocate(15 * MIB)
    cached(allocator, 20 * MIB)
    message = (
        r"^Out of memory: 26,214,400 bytes were requested, 16,777,216 of 41,943,040 bytes are "
        r"reserved already, and the 0 of those that are free are not enough in a row\.$"
    )
    with pytest.raises(AllocatorOutOfMemory, match=message) as caught:
        allocator.allocate(25 * MIB)
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.requested_bytes == 25 * MIB
    assert caught.value.reserved_bytes == allocator.reserved_bytes == 16 * MIB
    assert caught.value.free_bytes == 0
    assert allocator.allocate(24 * MIB).size_bytes == 24 * MIB  # what does fit still does


def test_emptying_the_cache_gives_back_wholly_free_segments_only():
    allocator = Allocator()
    kept = allocator.allocate(512)
    cached(allocator, 512, 5 * MIB, 30 * MIB)
    assert allocator.reserved_bytes == (2 + 20 + 30) * MIB
    allocator.empty_cache()
    assert layout(allocator) == {BASE: [(512, True), (2 * MIB - 512, False)]}
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert layout(allocator) == {}


@pytest.mark.parametrize("expandable", [False, True])
def test_zero_bytes_take_nothing(expandable):
    allocator = Allocator(expandable_segments=expandable)
    cached(allocator, 0, 0)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@pytest.mark.parametrize("neighbours", [(), (0,), (2,), (0, 2)])
@pytest.mark.parametrize("expandable", [False, True])
def test_freeing_twice_is_an_error(expandable, neighbours):
    allocator = Allocator(expandable_segments=expandable)
    blocks = [allocator.allocate(2 * MIB) for _ in range(3)]
    for index in (1, *neighbours):
        allocator.free(blocks[index])
    allocator.empty_cache()
    with pytest.raises(AllocatorError, match="is freed twice"):
        allocator.free(blocks[1])


def test_freeing_a_block_of_zero_bytes_twice_is_an_error():
    allocator = Allocator()
    block = allocator.allocate(0)
    allocator.free(block)
    with pytest.raises(AllocatorError, match="is freed twice"):
        allocator.free(block)


def test_negative_bytes_are_an_error():
    with pytest.raises(AllocatorError, match="A block of -1 bytes was requested"):
        Allocator().allocate(-1)


# Blocks that are never split


def test_max_split_bytes_is_checked_as_pytorch_does():
    with pytest.raises(AllocatorError, match="is 20,971,520, not over 20,971,520"):
        Allocator(max_split_bytes=20 * MIB)


def test_oversize_blocks_serve_oversize_requests_of_nearly_their_size():
    allocator = Allocator(max_split_bytes=32 * MIB)
    cached(allocator, 64 * MIB)
    assert allocator.allocate(10 * MIB).address == BASE + 64 * MIB  # not an oversize request
    assert allocator.allocate(44 * MIB).address == BASE + 74 * MIB  # 20 MiB would be wasted
    block = allocator.allocate(44 * MIB + 512)
    assert (block.address, block.size_bytes) == (BASE, 64 * MIB)


def test_only_as_many_oversize_blocks_go_back_as_are_needed():
    allocator = Allocator(max_split_bytes=32 * MIB, capacity_bytes=170 * MIB)
    cached(allocator, 40 * MIB, 60 * MIB, 70 * MIB)
    allocator.allocate(80 * MIB)  # 70 MiB are too little, 130 MiB suffice
    assert sorted(segment_bytes(allocator).values()) == [40 * MIB, 80 * MIB]


def test_one_oversize_block_goes_back_if_it_suffices():
    allocator = Allocator(max_split_bytes=32 * MIB, capacity_bytes=170 * MIB)
    cached(allocator, 40 * MIB, 60 * MIB, 70 * MIB)
    allocator.allocate(22 * MIB)
    assert sorted(segment_bytes(allocator).values()) == [22 * MIB, 60 * MIB, 70 * MIB]


# Expandable segments


def test_an_expandable_segment_grows_by_pages():
    allocator = Allocator(expandable_segments=True)
    blocks = [allocator.allocate(size) for size in (15 * MIB, 10 * MIB + 1, MIB)]
    assert [block.size_bytes for block in blocks] == [15 * MIB, 10 * MIB + 512, MIB]
    assert blocks[1].address == blocks[0].address + 15 * MIB  # across the end of the page
    assert allocator.reserved_bytes == (2 * 20 + 2) * MIB
    assert allocator.allocate(14 * MIB).address == blocks[1].address + blocks[1].size_bytes
    assert allocator.reserved_bytes == (2 * 20 + 2) * MIB  # all but the last 512 bytes


def test_a_block_that_can_grow_is_left_for_later():
    allocator = Allocator(expandable_segments=True)
    first, _ = allocator.allocate(15 * MIB), allocator.allocate(2 * MIB)
    allocator.free(first)  # now 15 MiB are free, and 3 MiB at the end
    assert allocator.allocate(2 * MIB).address == first.address


def test_expandable_segments_give_back_the_pages_inside_free_blocks():
    allocator = Allocator(expandable_segments=True)
    blocks = [allocator.allocate(size * MIB) for size in (10, 50, 10, 30)]  # 5 pages
    allocator.free(blocks[1])  # 10 to 60 MiB: the second and the third page
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB
    assert [size // MIB for size, _ in layout(allocator)[BASE][:-1]] == [10, 10, 40, 10, 30]
    assert allocator.allocate(25 * MIB).address == BASE + 10 * MIB  # the hole has room for it
    assert allocator.reserved_bytes == 80 * MIB


def test_expandable_segments_avoid_a_fragmentation_that_the_default_has():
    sizes = [size * MIB for size in (40, 40, 20, 20, 20, 20, 40)]
    events = [0, 1, ~0, ~1, 2, 3, 4, 5, ~2, ~4, 6]  # two gaps of 20 MiB, then 40 MiB
    default = replay(events, sizes, capacity_bytes=80 * MIB)
    assert default.out_of_memory_index == 10
    assert default.block_bytes.tolist() == [*sizes[:6], 0]
    expandable = replay(events, sizes, capacity_bytes=80 * MIB, expandable_segments=True)
    assert expandable.out_of_memory_index is None
    assert expandable.peak_reserved_bytes == expandable.peak_allocated_bytes == 80 * MIB


def test_expandable_segments_run_out_of_pages():
    allocator = Allocator(expandable_segments=True, capacity_bytes=50 * MIB)
    allocator.allocate(35 * MIB)
    with pytest.raises(AllocatorOutOfMemory, match="the 5,242,880 of those that are free"):
        allocator.allocate(6 * MIB)
    assert allocator.allocate(5 * MIB).size_bytes == 5 * MIB


# Replay of a list of events


def test_replay_tells_the_peak_and_what_was_reserved_then():
    sizes = [11 * MIB, 600, 0, 30 * MIB, 12 * MIB]
    found = replay([0, 1, 2, ~1, 3, ~3, ~2, 4], sizes)
    assert found.peak_allocated_bytes == 12 * MIB + 30 * MIB  # the 1024 bytes were freed
    assert found.peak_index == 4
    assert found.reserved_at_peak_bytes == (12 + 2 + 30) * MIB
    assert found.peak_reserved_bytes == (12 + 2 + 30) * MIB  # the last one fits in the 30 MiB
    assert found.block_bytes.dtype == np.int64
    assert found.block_bytes.tolist() == [12 * MIB, 1024, 0, 30 * MIB, 12 * MIB]
    assert found.out_of_memory_index is None


def test_replay_of_nothing():
    found = replay([], [])
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (0, 0)
    assert found.block_bytes.tolist() == []


def test_replay_ends_where_memory_does():
    found = replay(np.array([0, 1, 2]), np.array([MIB, 30 * MIB, 512]), capacity_bytes=MIB * 20)
    assert found.out_of_memory_index == 1
    assert found.peak_allocated_bytes == MIB
    assert found.peak_reserved_bytes == 2 * MIB
    assert found.block_bytes.tolist() == [MIB, 0, 0]


@pytest.mark.parametrize(
    ("events", "sizes", "message"),
    [
        ([0, ~0, ~0], [8], "is freed twice"),
        ([0, ~0, 1, ~0], [8, 8], "is freed twice"),  # block 1 is where block 0 was
        ([~0], [8], "is freed twice"),
        ([0, 0], [8], "Event 1 allocates block 0, which is in use"),
        ([1], [8], "blocks beyond the 1 sizes"),
        ([0, ~1], [8], "blocks beyond the 1 sizes"),
        ([0], [-8], "A block of -8 bytes was requested"),
    ],
)
def test_replay_rejects_events_that_make_no_sense(events, sizes, message):
    with pytest.raises(AllocatorError, match=message):
        replay(events, sizes)


# What holds for any list of requests


def check_consistency(allocator):
    """Blocks tile their segments, free ones are cached and joined, and the sums agree."""
    in_use = reserved = free_blocks = 0
    for address, first in allocator.segments.first_blocks.items():
        blocks = list(pieces(allocator, first))
        assert first.previous is allocator.segments.edge
        assert first.address == address
        for block, following in pairwise(blocks):
            assert following.address == block.address + block.size_bytes
            assert following.previous is block
            assert (block.is_free, block.is_mapped) != (
                following.is_free,
                following.is_mapped,
            ) or (block.is_mapped and not block.is_free)
        mapped = [block for block in blocks if block.is_mapped]
        reserved += sum(block.size_bytes for block in mapped)
        in_use += sum(block.size_bytes for block in mapped if not block.is_free)
        for block in mapped:
            if block.is_free:
                free_blocks += 1
                key = block.size_bytes << segments.ADDRESS_BITS | block.address
                assert block.pool.blocks[key] is block
    for pool in (allocator.small, allocator.large):
        assert pool.keys == sorted(pool.blocks)
    assert free_blocks == len(allocator.small.keys) + len(allocator.large.keys)
    assert in_use == allocator.allocated_bytes <= allocator.reserved_bytes == reserved
    assert reserved <= allocator.peak_reserved_bytes <= allocator.segments.capacity_bytes


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"capacity_bytes": 150 * MIB},
        {"capacity_bytes": 150 * MIB, "max_split_bytes": 24 * MIB},
        {"expandable_segments": True},
        {"expandable_segments": True, "capacity_bytes": 150 * MIB},
        {"expandable_segments": True, "max_split_bytes": 24 * MIB},
    ],
)
def test_any_requests_leave_a_consistent_cache(settings, seed):
    draw = random.Random(seed)
    allocator, live = Allocator(**settings), []
    for _ in range(400):
        if live and draw.random() < 0.48:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            try:
                live.append(allocator.allocate(int(2 ** draw.uniform(0, 25.5))))
            except AllocatorOutOfMemory:
                assert "capacity_bytes" in settings
        if draw.random() < 0.02:
            allocator.empty_cache()
        check_consistency(allocator)
    for block in live:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    check_consistency(allocator)
    assert allocator.reserved_bytes == 0


# Recorded traces


class Playback:
    """A recorded trace, done again by the model, which has to come to every address itself.

    Only where the driver puts a new segment is taken from the recording.
    """

    def __init__(self, trace):
        self.trace = trace
        self.segments = {}  # bytes by address, as recorded
        self.addresses = deque()  # of segments recorded and not yet asked for by the model
        self.live = {}
        limit = trace["allocator_settings"]["max_split_size"]
        self.allocator = Allocator(
            max_split_bytes=None if limit < 0 else limit, segment_addresses=self.driver()
        )
        for segment in trace["init_segments"]:
            self.restore(*segment)

    def driver(self):
        while True:
            assert self.addresses, "the model asks for a segment that was not recorded"
            yield self.addresses.popleft()

    def restore(self, address, size, kind):
        """Cut a segment into the blocks that were in use when the recording began."""
        self.segments[address] = size
        self.addresses.append(address)
        pool = self.allocator.small if kind == "small" else self.allocator.large
        block, end = self.allocator.segments.new_block(pool, size), address + size
        assert block.size_bytes == size
        used = sorted(entry for entry in self.trace["init_live"] if address <= entry[0] < end)
        for (start, block_bytes, requested), (limit, *_) in pairwise([*used, (end,)]):
            if block_bytes is None:  # freed later on, so it is not part of the final state
                block_bytes = max(512, -(-requested // 512) * 512)  # noqa: PLW2901
                if kind == "large" and limit - start - block_bytes <= MIB:
                    block_bytes = limit - start  # noqa: PLW2901 - no large block is free there
            if start > block.address:
                block, gap = block.split(start - block.address), block
                pool.insert(gap)
            self.live[start] = block
            self.allocator.allocated_bytes += block_bytes
            block = block.split(block_bytes) if start + block_bytes < end else None
        if block:
            pool.insert(block)

    def run(self):
        events, changes = self.trace["events"], set()  # of segments since the last other event
        for index, (action, address, size, *_) in enumerate(events):
            where = f"event {index} of {len(events)}"
            if action == "segment_alloc":
                self.segments[address] = size
                self.addresses.append(address)
                changes.add(action)
                continue
            if action == "segment_free":
                assert self.segments.pop(address) == size, where
                changes.add(action)
                continue
            if "segment_free" in changes:  # by the program, or as the driver had no more
                self.allocator.empty_cache()
            if action == "alloc":
                self.live[address] = self.allocator.allocate(size)
                assert self.live[address].address == address, where
            elif action == "free_completed":
                self.allocator.free(self.live.pop(address))
            else:
                assert action == "free_requested", where
            if changes:
                assert segment_bytes(self.allocator) == self.segments, where
                changes.clear()
        check_consistency(self.allocator)
        assert layout(self.allocator) == {
            address: [(size, state == "active_allocated") for size, _, state in blocks]
            for address, _, _, _, blocks in self.trace["final_segments"]
        }


def load(name):
    file = TRACES / name
    if not file.is_file():
        pytest.skip(f"{name} is not in ../shared/groundtruth/traces")
    return json.loads(gzip.decompress(file.read_bytes()))


RECORDED = sorted(file.name for file in TRACES.glob("*.json.gz")) or ["linear_backward.json.gz"]


@pytest.mark.real_data
@pytest.mark.parametrize("name", RECORDED)
def test_every_address_of_a_recorded_trace_is_reproduced(name):
    Playback(load(name)).run()


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("module", "constant", "wrong"),
    [
        (rules, "ROUND_BYTES", 1024),
        (rules, "LARGE_REST_BYTES", MIB - 512),
        (rules, "LARGE_REST_BYTES", 2 * MIB),
        (rules, "SMALL_REQUEST_BYTES", MIB - 512),
        (segments, "SMALL_SEGMENT_BYTES", 4 * MIB),
        (segments, "LARGE_SEGMENT_BYTES", 22 * MIB),
        (segments, "OWN_SEGMENT_BYTES", 16 * MIB),
        (segments, "ROUND_SEGMENT_BYTES", 4 * MIB),
    ],
)
def test_a_wrong_constant_does_not_reproduce_the_traces(monkeypatch, module, constant, wrong):
    traces = [load(name) for name in RECORDED]
    monkeypatch.setattr(module, constant, wrong)

    def play_all():
        for trace in traces:
            Playback(trace).run()

    with pytest.raises(AssertionError):
        play_all()


# The flat version


def random_events(seed, count=4000):
    """Blocks of all pools made and freed at random, some of 0 bytes, some sizes often."""
    draw = random.Random(seed)
    usual = [draw.randrange(1, 60 * MIB) for _ in range(6)]
    sizes, events, alive = [], [], []
    for _ in range(count):
        if alive and draw.random() < 0.48:
            events.append(~alive.pop(draw.randrange(len(alive))))
            continue
        small, large = draw.randrange(0, MIB), draw.randrange(MIB, 30 * MIB)
        sizes.append(draw.choice([small, large, draw.choice(usual), 0]))
        alive.append(len(sizes) - 1)
        events.append(alive[-1])
    return np.array(events), np.array(sizes)


@pytest.mark.parametrize("seed", range(12))
def test_the_flat_replay_is_the_replay_with_settings(seed):
    events, sizes = random_events(seed)
    expected, found = replay(events, sizes), plain_replay(events, sizes)
    np.testing.assert_array_equal(found.block_bytes, expected.block_bytes)
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_index")
    for name in (*names, "reserved_at_peak_bytes", "out_of_memory_index"):
        assert getattr(found, name) == getattr(expected, name), name
    assert expected.peak_reserved_bytes > 100 * MIB
