"""The caching allocator without settings, written out flat.

The rules are those of ``labkit.predict.allocator``, which explains them and knows every
setting; here is what they come to for one stream, segments of fixed size, and a card that never
runs out. Without calls and objects it takes less of the time
(``bench/replay_cost.py``), and a slider waits for it at every tick. A test compares both.

Sizes and addresses are counted in units of 512 bytes, so that a size and an address make one
number that is quick to compare.
"""

from bisect import bisect_left

import numpy as np

from labkit.predict.allocator import LARGE_REST_BYTES, ROUND_BYTES, Replay
from labkit.predict.segments import (
    LARGE_SEGMENT_BYTES,
    OWN_SEGMENT_BYTES,
    ROUND_SEGMENT_BYTES,
    SMALL_REQUEST_BYTES,
    SMALL_SEGMENT_BYTES,
)

ADDRESS_BITS = 34  # 8 TiB in units
SMALL_REQUEST = SMALL_REQUEST_BYTES // ROUND_BYTES
SMALL_SEGMENT = SMALL_SEGMENT_BYTES // ROUND_BYTES
LARGE_SEGMENT = LARGE_SEGMENT_BYTES // ROUND_BYTES
OWN_SEGMENT = OWN_SEGMENT_BYTES // ROUND_BYTES
ROUND_SEGMENT = ROUND_SEGMENT_BYTES // ROUND_BYTES
LARGE_REST = LARGE_REST_BYTES // ROUND_BYTES


def plain_replay(events: np.ndarray, sizes: np.ndarray) -> Replay:
    """``allocator.replay`` of a sound list of events, without any setting."""
    wanted_of = (-(-sizes // ROUND_BYTES)).tolist()
    got = [0] * len(wanted_of)
    handed = [0] * len(wanted_of)  # the stretch that each block of the events has, 0 for none
    # Stretches of memory by number, in lists: objects would keep the garbage collector busy.
    # Number 0 is the neighbour of both ends of a segment.
    address, size, before, after, is_free, pool_of = [0], [0], [0], [0], [False], [None]
    small, large = ([], []), ([], [])  # of free stretches: size and address as one key; number
    reserved = allocated = peak = peak_index = reserved_at_peak = 0
    for index, event in enumerate(events.tolist()):
        if event >= 0:
            wanted = wanted_of[event]
            if not wanted:
                continue
            is_small = wanted <= SMALL_REQUEST
            pool = keys, free = small if is_small else large
            place = bisect_left(keys, wanted << ADDRESS_BITS)
            if place < len(keys):
                del keys[place]
                stretch = free.pop(place)
                is_free[stretch] = False
            else:
                if is_small:
                    segment = SMALL_SEGMENT
                elif wanted < OWN_SEGMENT:
                    segment = LARGE_SEGMENT
                else:
                    segment = -(-wanted // ROUND_SEGMENT) * ROUND_SEGMENT
                stretch = len(address)
                address.append(reserved)
                size.append(segment)
                before.append(0)
                after.append(0)
                is_free.append(False)
                pool_of.append(pool)
                reserved += segment
            left = size[stretch] - wanted
            if left > 0 and (is_small or left > LARGE_REST):
                rest, beyond = len(address), after[stretch]
                address.append(address[stretch] + wanted)
                size.append(left)
                before.append(stretch)
                after.append(beyond)
                is_free.append(True)
                pool_of.append(pool)
                size[stretch], after[stretch], before[beyond] = wanted, rest, rest
                key = left << ADDRESS_BITS | address[rest]
                place = bisect_left(keys, key)
                keys.insert(place, key)
                free.insert(place, rest)
            handed[event] = stretch
            got[event] = wanted = size[stretch]
            allocated += wanted
            if allocated > peak:
                peak, peak_index, reserved_at_peak = allocated, index, reserved
        elif stretch := handed[~event]:
            handed[~event] = 0
            keys, free = pool_of[stretch]
            allocated -= size[stretch]
            left, right = before[stretch], after[stretch]
            if is_free[right]:
                place = bisect_left(keys, size[right] << ADDRESS_BITS | address[right])
                del keys[place], free[place]
                size[stretch] += size[right]
                after[stretch] = right = after[right]
                before[right] = stretch
            if is_free[left]:
                place = bisect_left(keys, size[left] << ADDRESS_BITS | address[left])
                del keys[place], free[place]
                size[left] += size[stretch]
                after[left], before[right] = right, left
                stretch = left
            is_free[stretch] = True
            key = size[stretch] << ADDRESS_BITS | address[stretch]
            place = bisect_left(keys, key)
            keys.insert(place, key)
            free.insert(place, stretch)
    return Replay(
        peak_allocated_bytes=peak * ROUND_BYTES,
        peak_reserved_bytes=reserved * ROUND_BYTES,
        peak_index=peak_index,
        reserved_at_peak_bytes=reserved_at_peak * ROUND_BYTES,
        block_bytes=np.array(got, np.int64) * ROUND_BYTES,
        out_of_memory_index=None,
    )
