"""How many bytes, and how much work, there are, and in what pieces: what `footprint` adds up."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf

from torch import Tensor, nn

from lightning_compress.algorithms.base import Algorithm
from lightning_compress.algorithms.tiling import Tiling
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.shadow import Key
from lightning_compress.graph.stages import Step, Subgraph
from lightning_compress.graph.trees import tensors_in
from lightning_compress.memory.work import Work
from lightning_compress.statistics import Statistic

_PER_CALL, _PER_GROUP, _PER_MODULE = 14, 55, 190  # on an H100's host (docs/gpu.md)
_LEAST_SPLIT_BYTES = 1 << 25
_MOST_SPLIT = 8


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


def num_shards(num_bytes: int, num_modules: int) -> int:
    """In how many files a subgraph of so many bytes is written, of which so many modules are quantized: one for each 32
    MiB, eight at most."""
    return max(min(num_bytes // _LEAST_SPLIT_BYTES, _MOST_SPLIT, num_modules), 1)


def work_of_writing(num_bytes: int, num_modules: int, ranks: int) -> Work:
    """What a rank does of it: one file, or several at the same time."""
    return {"writing shards" if num_shards(num_bytes, num_modules) > ranks else "writing": num_bytes / ranks}


def calls_beside_batch(step: Step) -> int:
    """How many operators take as long to call as what Python does beside those of a batch: for every node, Linear of
    experts, which are one node, and source that is observed."""
    calls = [node.target.grouped for node in step.nodes if isinstance(node.target, Leaf)]
    linears = sum(len(members) for grouped in calls if grouped is not None for members in grouped.members)
    return _PER_CALL * (len(step.nodes) + linears + len(step.observe))


def work_of_solves(
    algorithm: Algorithm, num_rows: int, num_channels: int, tiling: Tiling, number: int, num_members: int, ranks: int
) -> Work:
    """What a rank does to solve `number` groups of so many members, which have that many stacked rows, on a GPU: calls,
    those among them that stack and check each group, pack its members, put them in place and record them."""
    serial, shared = (number * cost for cost in algorithm.costs(num_rows, num_channels))
    mine, own_rows = -(-number // ranks), -(-num_rows * number // max(number, ranks))  # whole groups, or rows of one
    calls = algorithm.calls(own_rows, num_channels, tiling, mine) + number * (_PER_GROUP + _PER_MODULE * num_members)
    packing = number * num_rows * num_channels / ranks
    return {"call": calls, "product float32": serial + shared / ranks, "packing": packing}


def tensors_of(root: nn.Module, subgraph: Subgraph) -> dict[str, Tensor]:
    """The parameters and buffers that a subgraph brings, each once."""
    named: dict[str, Tensor] = {}
    for module in subgraph.modules:
        part = root.get_submodule(module)
        named.update({f"{module}.{key}": tensor for key, tensor in (*part.named_parameters(), *part.named_buffers())})
    for name in subgraph.tensors:
        owner, _, key = name.rpartition(".")
        named[name] = getattr(root.get_submodule(owner), key)
    return {name: tensor for tensor, name in {id(t): (t, n) for n, t in reversed(list(named.items()))}.values()}


def storages(values: Mapping[Key, object]) -> list[Tensor]:
    """A tensor of each storage that these values have."""
    return list({each.untyped_storage()._cdata: each for each in tensors_in(list(values.values()))}.values())


def in_pieces(num_bytes: int, piece: int) -> list[int]:
    """So many bytes in pieces of that size, and what is left.

    Solves and packing are closed forms, which say how much is alive and not in what pieces: they are taken to come in
    float32 matrices as large as the Gram, or as the rows that are solved at a time if that is more, and in tensors of
    the module's size.

    >>> in_pieces(25, 10), in_pieces(5, 10)
    ([10, 10, 5], [5])
    """
    whole, rest = divmod(num_bytes, max(piece, 1))
    return [piece] * whole + [rest] * (rest > 0)
