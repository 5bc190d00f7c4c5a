"""How many bytes, and calls, there are: what `footprint` adds up."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf

from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.stages import Step
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


def calls_by_python(step: Step) -> int:
    """What Python goes through for a batch of a step: nodes, the Linears of those that are experts, and what is
    observed."""
    calls = [node.target.grouped for node in step.nodes if isinstance(node.target, Leaf)]
    linears = sum(len(members) for grouped in calls if grouped is not None for members in grouped.members)
    return len(step.nodes) + linears + len(step.observe)
