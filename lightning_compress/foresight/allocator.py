"""What PyTorch's CUDA allocator makes of a job's tensors: how much it hands out, and how much it takes of the device.

It rounds every request to 512 bytes and cuts it from a segment: of 2 MiB for requests up to 1 MiB, of 20 MiB below
10 MiB, else of its own size rounded to 2 MiB. A freed block joins free neighbours and waits for a request that it can
hold; nothing is given back to the device. After `c10/cuda/CUDACachingAllocator.cpp` for one stream and its default
settings (no expandable segments).
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import final

from lightning_compress.memory.needs import Needs

_ROUND = 512
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
_MEDIUM, _MEDIUM_SEGMENT = 10 << 20, 20 << 20
_LARGE_ROUND = 2 << 20


@final
@dataclass(frozen=True)
class DeviceMemory:
    """Peaks in bytes.

    Attributes:
        allocated: handed out, rounding included (`torch.cuda.max_memory_allocated`).
        reserved: taken of the device (`torch.cuda.max_memory_reserved`), without the context's own.
    """

    allocated: int
    reserved: int


@dataclass(eq=False)
class _Block:
    size: int
    is_small: bool
    order: tuple[int, int]  # the segment, and the address in it
    is_free: bool = False
    before: "_Block | None" = None
    after: "_Block | None" = None

    @property
    def key(self) -> tuple[int, tuple[int, int]]:
        return self.size, self.order


def replay(events: Iterable[tuple[int, int]]) -> DeviceMemory:
    """The peaks after these events, in order.

    Args:
        events: (storage, bytes) where one is made, (storage, -bytes) where it is freed.
    """
    pools: dict[bool, list[_Block]] = {True: [], False: []}  # free blocks by size, then place
    blocks: dict[int, _Block] = {}
    allocated = reserved = most = 0
    for number, (storage, size) in enumerate(events):
        if size > 0:
            block = _take(pools, size)
            if block is None:
                block = _Block(_segment(size), _rounded(size) <= _SMALL, (number, 0))
                reserved += block.size
            blocks[storage] = block = _cut(pools, block, _rounded(size))
            allocated += block.size
            most = max(most, allocated)
        elif storage in blocks:
            block = blocks.pop(storage)
            allocated -= block.size
            _free(pools, block)
    return DeviceMemory(most, reserved)


def reserved_by_calibration(table: Sequence[Needs], depth: int) -> int:
    """Bytes that a calibration takes of a device on which no activations wait.

    What is copied there is allocated on the stream of the copies, which has segments of its own: the weights of
    `depth` following subgraphs, and what two batches read, the one that runs and the next.
    """
    computed = replay(event for row in table for event in row.requests.computed)
    return computed.reserved + replay(_copied(table, depth)).reserved


def _copied(table: Sequence[Needs], depth: int) -> Iterator[tuple[int, int]]:
    numbers = count()
    there: dict[int, list[tuple[int, int]]] = {}
    for index, row in enumerate(table):
        for near, later in enumerate(table[index : index + 1 + depth], index):
            if near not in there:
                there[near] = [(next(numbers), size) for size in later.requests.weights]
                yield from there[near]
        for loaded in row.requests.loaded:
            values = [(next(numbers), size) for size in (*loaded, *loaded)]
            yield from values
            yield from _freed(values)
        yield from _freed(there.pop(index))


def _freed(made: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(number, -size) for number, size in made]


def _rounded(size: int) -> int:
    """
    >>> _rounded(1), _rounded(513)
    (512, 1024)
    """
    return -(-size // _ROUND) * _ROUND


def _segment(size: int) -> int:
    """
    >>> [_segment(size) >> 20 for size in (100, 5 << 20, 11 << 20, (11 << 20) + 1)]
    [2, 20, 12, 12]
    """
    size = _rounded(size)
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _LARGE_ROUND) * _LARGE_ROUND


def _take(pools: dict[bool, list[_Block]], size: int) -> _Block | None:
    """The smallest free block that holds it."""
    size = _rounded(size)
    pool = pools[size <= _SMALL]
    place = bisect.bisect_left(pool, (size, (-1, -1)), key=lambda block: block.key)
    return pool.pop(place) if place < len(pool) else None


def _cut(pools: dict[bool, list[_Block]], block: _Block, size: int) -> _Block:
    """The front of a block, if the rest is worth keeping."""
    block.is_free = False
    rest = block.size - size
    if rest >= (_ROUND if block.is_small else _SMALL + 1):
        back = _Block(rest, block.is_small, (block.order[0], block.order[1] + size), before=block, after=block.after)
        if block.after is not None:
            block.after.before = back
        block.after, block.size = back, size
        _put(pools, back)
    return block


def _free(pools: dict[bool, list[_Block]], block: _Block) -> None:
    """Join it with its free neighbours."""
    for other in (block.before, block.after):
        if other is None or not other.is_free:
            continue
        pool = pools[other.is_small]
        del pool[bisect.bisect_left(pool, other.key, key=lambda each: each.key)]
        block.size += other.size
        if other is block.before:
            block.order, block.before = other.order, other.before
            if other.before is not None:
                other.before.after = block
        else:
            block.after = other.after
            if other.after is not None:
                other.after.before = block
    _put(pools, block)


def _put(pools: dict[bool, list[_Block]], block: _Block) -> None:
    block.is_free = True
    bisect.insort(pools[block.is_small], block, key=lambda each: each.key)
