"""What a run asks of a device's allocator, for `foresight.allocator`: the storages behind the sums of `footprint`.

Batches and statistics are followed on fake tensors, storage by storage. Solves and packing are closed forms, which say
how much is alive and not in what pieces: they are taken to come in float32 matrices as large as the Gram, or as the
rows that are solved at a time if that is more, and in tensors of the module's size.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from lightning_compress.graph.shadow import Key
from lightning_compress.graph.stages import Subgraph
from lightning_compress.graph.trees import tensors_in


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

    >>> in_pieces(25, 10), in_pieces(5, 10)
    ([10, 10, 5], [5])
    """
    whole, rest = divmod(num_bytes, max(piece, 1))
    return [piece] * whole + [rest] * (rest > 0)
