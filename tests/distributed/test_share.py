"""Who gets what: everything once, evenly, and the same whoever asks."""

import random

import pytest
import torch
from torch import Tensor

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.distributed.share import assign, fill, keeps_whole, shared
from lightning_compress.statistics import Reduction


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 3, 8, 13, 61])
def test_every_item_has_one_rank(size: int, count: int) -> None:
    """Uneven costs, and fewer items than ranks."""
    costs = [random.Random(count).randint(1, 100) for _ in range(count)]
    shares = assign(costs, size)
    assert shares == assign(list(costs), size)
    assert len(shares) == size
    assert sorted(number for share in shares for number in share) == list(range(count))
    assert all(list(share) == sorted(share) for share in shares)
    loads = [sum(costs[number] for number in share) for share in shares]
    if count:
        falling = sorted(costs, reverse=True)  # of the k * size + 1 largest, k + 1 are on one rank
        least = max(sum(costs) / size, *((k + 1) * falling[k * size] for k in range(-(-count // size))))
        assert max(loads) <= 4 / 3 * least, "Graham's bound for largest-first"
        assert sum(not load for load in loads) == max(size - count, 0)


def test_large_and_small_in_turn_are_mixed() -> None:
    """Seen to fail: with items dealt out in turn."""
    assert assign([10, 1, 10, 1], 2) == ((0, 1), (2, 3))


def test_alone_everything_is_done_here_in_order() -> None:
    done: list[int] = []
    results = shared(
        lambda items: [done.append(item) or -item for item in items], [3, 1, 2], [1, 1, 1], SingleProcess(), "numbers"
    )
    assert results == [-3, -1, -2]
    assert done == [3, 1, 2]


def test_rows_are_filled_to_the_last_bit() -> None:
    """Of two ranks, of which the other has the second tile. Seen to fail: with a sum of floats, -0 becomes 0."""

    class First(SingleProcess):
        size = 2

        def reduce(self, tensor: Tensor, reduction: Reduction, what: str) -> None:
            assert not tensor[2:].any()
            tensor[2:].view(torch.float32).sub_(2)

    to = torch.full((6, 2), torch.nan)
    fill(lambda rows: torch.full((2, 2), -0.0), [slice(1, 3), slice(3, 5)], to, First(), "rows")
    assert torch.equal(to[1:3].view(torch.int32), torch.full((2, 2), -0.0).view(torch.int32))
    assert (to[3:5] == -2).all()
    assert to[[0, 5]].isnan().all()


def test_whole_where_the_serial_part_weighs_and_loads_are_even() -> None:
    many = [(1.0, 2.0)] * 64
    assert keeps_whole(many, 4)
    assert not keeps_whole([(1.0, 100.0), *many[:3]], 4), "one is most of the work"
    assert not keeps_whole([(0.0, 1.0)] * 5, 4), "nothing is serial, and the fifth would wait"
    assert not keeps_whole([(1.0, 9.0)], 2)


def test_groups_of_a_layer_that_are_ready_together_stay_whole() -> None:
    """As measured on a core for each of two ranks: 0.34 s whole and 0.36 s shared out, for a Llama's layer 768 wide."""
    layer = [Gptq().costs(*shape) for shape in ((2304, 768), (768, 768), (4096, 768), (768, 2048))]
    assert keeps_whole(layer, 2)
    assert not any(keeps_whole([group], size) for group in layer for size in (2, 4, 8))
    assert not keeps_whole(layer, 8)
    experts = [Gptq().costs(*shape) for shape in [(1536, 2048), (2048, 768)] * 128]
    assert all(keeps_whole(experts, size) for size in (2, 8, 64))
