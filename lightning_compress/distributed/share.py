"""Who does what: a function of the work alone, so that all ranks agree without a word."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lightning_compress.distributed.collective import Collective

Item = TypeVar("Item")
Result = TypeVar("Result")


def assign(costs: Sequence[float], size: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of the items that each rank gets, ascending: the largest first, each to the rank with the least.

    >>> assign([5, 1, 1, 3], 2)
    ((0,), (1, 2, 3))
    >>> assign([4], 3)
    ((0,), (), ())
    """
    loads, shares = [0.0] * size, [list[int]() for _ in range(size)]
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        rank = loads.index(min(loads))
        loads[rank] += costs[number]
        shares[rank].append(number)
    return tuple(tuple(sorted(share)) for share in shares)


def shared(
    compute: Callable[[Sequence[Item]], list[Result]],
    items: Sequence[Item],
    costs: Sequence[float],
    collective: Collective,
    what: str,
) -> list[Result]:
    """`compute` of all items, each computed on one rank; all ranks get all."""
    shares = assign(costs, collective.size)
    mine = compute([items[number] for number in shares[collective.rank]])
    found: dict[int, Result] = {}
    for rank, share in enumerate(shares):
        if share:
            found.update(zip(share, collective.broadcast(mine, what, rank), strict=True))
    return [found[number] for number in range(len(items))]


def fill(
    compute: Callable[[slice], Tensor],
    tiles: Sequence[slice],
    to: Tensor,
    collective: Collective,
    what: str,
) -> None:
    """Let tiles of rows of a matrix be what `compute` says, each computed on one rank; all ranks get all."""
    if not tiles:
        return
    start, stop = tiles[0].start, tiles[-1].stop
    rows = to.new_zeros(stop - start, *to.shape[1:])
    shares = assign([tile.stop - tile.start for tile in tiles], collective.size)
    for tile in (tiles[number] for number in shares[collective.rank]):
        rows[tile.start - start : tile.stop - start] = compute(tile)
    collective.reduce(rows.view(torch.int32), "sum", what)  # of integers, so that with zeros no bit changes
    to[start:stop] = rows


def shares_factor(num_channels: int, size: int) -> bool:
    """Whether `size` ranks factorize a Gram [I, I] sooner together, by `benchmarks/serial_part.py`.

    Few channels are not worth what is exchanged. With many ranks it is the latency: at 60 GFLOP/s, I / 128 exchanges of
    2 (size - 1) steps of 100 us each take a quarter of what one rank's work takes at most.

    >>> shares_factor(2048, 2), shares_factor(4096, 8), shares_factor(4096, 64), shares_factor(11008, 64)
    (False, True, False, True)
    """
    return num_channels >= 3072 and num_channels**2 > (size - 1) * 2**20


def keeps_whole(costs: Sequence[tuple[float, float]], size: int) -> bool:
    """Whether `size` ranks are done earlier with whole items, each on one rank, than with all taking part in each.

    Args:
        costs: of each item what every rank that takes part has to do, and what ranks share.
        size: the number of ranks.

    >>> keeps_whole([(1.0, 9.0)] * 8, 4), keeps_whole([(1.0, 9.0)], 4), keeps_whole([(1.0, 9.0)] * 5, 4)
    (True, False, False)
    """
    totals = [sum(cost) for cost in costs]
    longest = max(sum(totals[number] for number in share) for share in assign(totals, size))
    return longest < sum(serial + shared / size for serial, shared in costs)
