"""How many bytes there are: what `footprint` adds up."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf

from lightning_compress.statistics import Statistic


def statistics_bytes(gathered: Iterable[Mapping[type[Statistic], Statistic]], below: float = inf) -> int:
    """Bytes of statistics, in tensors smaller than `below`."""
    found = (statistic for entry in gathered for statistic in entry.values())
    sizes = (tensor.nbytes for statistic in found for tensor, _ in statistic.reductions().values())
    return sum(size for size in sizes if size < below)


def worst_mixture(before: Sequence[int], after: Sequence[int]) -> int:
    """While the batches pass a step, the earlier ones have its results, the later ones what it reads: the most that all
    but the one at hand take together.

    >>> worst_mixture([1, 1, 1], [5, 5, 5]), worst_mixture([], [])
    (10, 0)
    """
    done, left = [0, *accumulate(after)], [0, *accumulate(reversed(before))][::-1]
    return max((done[number] + left[number + 1] for number in range(len(before))), default=0)
