"""Values that cross from one step to a later one, per batch, on the device or in host memory.

A value is stored when the step that computed it ends, and dropped when its last reader has run, so the cache holds the
boundary of one cut and not the history of the graph.
"""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, fx

from lightning_compress.graph.compat import pytree


def nbytes(value: object) -> int:
    """Bytes of all tensors in a tree of values."""
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def versions(value: object) -> tuple[int, ...]:
    """Counts the in-place writes to every tensor in a tree of values, also those made through views.

    Tensors made in inference mode do not count; nothing but inference mode can write to them.
    """
    return tuple(
        0 if leaf.is_inference() else leaf._version for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)
    )


@final
class ActivationCache:
    """For each batch a mapping from a graph's values to tensors (or trees of them, or plain numbers).

    Args:
        batches: the values known at the start, per batch: the inputs.
        home: where values wait. Host memory is pinned when `device` is CUDA, so that copies overlap.
        device: where values are used.
    """

    def __init__(self, batches: list[dict[fx.Node, object]], *, home: torch.device, device: torch.device) -> None:
        self._home = home
        self._device = device
        self._values = [{key: self._moved(value, home) for key, value in batch.items()} for batch in batches]

    def __len__(self) -> int:
        return len(self._values)

    def load(self, batch: int, keys: set[fx.Node], *, copy: bool = False) -> dict[fx.Node, object]:
        """The values `keys` (those that are cached) of a batch, on the device.

        With `copy` they are the caller's own, also where home and device are one: what is written to them in place does
        not reach the cache.
        """
        found = {key: self._moved(value, self._device) for key, value in self._values[batch].items() if key in keys}
        return pytree.tree_map_only(Tensor, Tensor.clone, found) if copy and self._home == self._device else found

    def store(self, batch: int, values: Mapping[fx.Node, object]) -> None:
        """Keep values for later steps; what is cached under the same key is replaced."""
        self._values[batch].update({key: self._moved(value, self._home) for key, value in values.items()})

    def retain(self, batch: int, keys: set[fx.Node]) -> None:
        """Drop everything else."""
        self._values[batch] = {key: value for key, value in self._values[batch].items() if key in keys}

    @property
    def num_bytes(self) -> int:
        """Bytes held for all batches."""
        return sum(nbytes(value) for batch in self._values for value in batch.values())

    def _moved(self, value: object, target: torch.device) -> object:
        def move(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.device == target:
                return leaf
            if target.type == "cpu" and leaf.device.type == "cuda":
                host = torch.empty_like(leaf, device=target, pin_memory=True)
                return host.copy_(leaf)
            return leaf.to(target, non_blocking=leaf.is_pinned())

        return pytree.tree_map(move, value)
