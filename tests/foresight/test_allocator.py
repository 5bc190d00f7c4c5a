"""The allocator's rules, one by one."""

import torch

from lightning_compress.foresight.allocator import DeviceMemory, replay
from lightning_compress.memory.tracker import LiveMemory

MIB = 1 << 20


def test_small_requests_share_a_segment() -> None:
    assert replay([(0, 1), (1, 513), (2, MIB)]) == DeviceMemory(512 + 1024 + MIB, 2 * MIB)
    assert replay([(0, MIB), (1, MIB), (2, 1)]).reserved == 4 * MIB


def test_large_requests() -> None:
    """Seen to fail: with 10 MiB counted as below 10 MiB."""
    assert replay([(0, 2 * MIB), (1, 9 * MIB)]).reserved == 20 * MIB
    assert replay([(0, 10 * MIB)]).reserved == 10 * MIB
    assert replay([(0, 11 * MIB - 512)]) == DeviceMemory(11 * MIB - 512, 12 * MIB)


def test_what_is_freed_is_used_again() -> None:
    assert replay([(0, 30 * MIB), (0, -30 * MIB), (1, 30 * MIB)]) == DeviceMemory(30 * MIB, 30 * MIB)
    assert replay([(0, 30 * MIB), (0, -30 * MIB), (1, 12 * MIB), (2, 18 * MIB)]).reserved == 30 * MIB
    assert replay([(0, 30 * MIB), (0, -30 * MIB), (1, 31 * MIB)]).reserved == 62 * MIB, "nothing is given back"


def test_free_neighbours_join() -> None:
    """Three cut from one segment; freed in any order, it holds a large one again. Seen to fail: without joining."""
    made = [(0, 30 * MIB), (0, -30 * MIB), (1, 10 * MIB), (2, 10 * MIB), (3, 10 * MIB)]
    for order in ((1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3)):
        freed = [(storage, -10 * MIB) for storage in order]
        assert replay([*made, *freed, (4, 30 * MIB)]) == DeviceMemory(30 * MIB, 30 * MIB)


def test_a_rest_below_a_mebibyte_stays_with_a_large_block() -> None:
    """Seen to fail: with rests cut off whatever their size."""
    assert replay([(0, 11 * MIB)]) == DeviceMemory(12 * MIB, 12 * MIB)
    assert replay([(0, 11 * MIB - 512), (1, MIB + 512)]) == DeviceMemory(12 * MIB, 12 * MIB)


def test_the_best_block_is_taken() -> None:
    """Of two free ones the smaller. Seen to fail: with the first."""
    events = [(0, 40 * MIB), (1, 20 * MIB), (0, -40 * MIB), (1, -20 * MIB), (2, 20 * MIB), (3, 40 * MIB)]
    assert replay(events).reserved == 60 * MIB


def test_events_of_a_run() -> None:
    with LiveMemory() as memory:
        x = torch.zeros(100)
        y = x + 1
        del x
        z = y * 2
        del y, z
    assert [size for _, size in memory.events] == [400, 400, -400, 400, -400, -400]
    assert replay(memory.events) == DeviceMemory(1024, 2 * MIB)
