"""Values that cross from one step to a later one, per batch: on the device, in host memory, or in a scratch file.

A value is stored when the step that computed it ends, and dropped when its last reader has run, so the cache holds the
boundary of one cut and not the history of the graph. Tensors that find no room in the budget go to the file; while one
batch is computed the next one's are read.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import final

import torch
from torch import Tensor, fx

from lightning_compress.graph.compat import pytree
from lightning_compress.memory.scratch import ScratchFile, Stored

_LEAST_SPILLED = 1 << 16  # bytes; smaller tensors, such as masks and positions, are not worth a transfer


def nbytes(value: object) -> int:
    """Bytes in memory of all tensors in a tree of values."""
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
        budget: bytes of stored values that may wait at home; None: all.
        scratch_dir: folder of the file for the others; None: the system's temporary folder.
    """

    def __init__(
        self,
        batches: list[dict[fx.Node, object]],
        *,
        home: torch.device,
        device: torch.device,
        budget: int | None = None,
        scratch_dir: Path | None = None,
    ) -> None:
        self._home = home
        self._device = device
        self._budget = budget
        self._scratch = None if budget is None else ScratchFile(scratch_dir)
        self._values = [{key: self._moved(value, home) for key, value in batch.items()} for batch in batches]
        self._num_bytes = sum(nbytes(value) for batch in self._values for value in batch.values())
        self._coming: dict[Stored, Future[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def load(self, batch: int, keys: set[fx.Node], *, copy: bool = False) -> dict[fx.Node, object]:
        """The values `keys` (those that are cached) of a batch, on the device.

        With `copy` they are the caller's own, also where home and device are one: what is written to them in place does
        not reach the cache.
        """
        copy = copy and self._home == self._device
        found = {key: value for key, value in self._values[batch].items() if key in keys}
        self._fetch(found)
        self._fetch({key: value for key, value in self._after(batch).items() if key in keys})

        def here(leaf: object) -> object:
            if isinstance(leaf, Stored):
                return self._coming.pop(leaf).result()
            return leaf.clone() if copy and isinstance(leaf, Tensor) else leaf

        return {key: self._moved(pytree.tree_map(here, value), self._device) for key, value in found.items()}

    def store(self, batch: int, values: Mapping[fx.Node, object]) -> None:
        """Keep values for later steps; what is cached under the same key is replaced."""
        for key, value in values.items():
            self._drop(self._values[batch].pop(key, None))
            self._values[batch][key] = pytree.tree_map(self._kept, value)

    def retain(self, batch: int, keys: set[fx.Node]) -> None:
        """Drop everything else."""
        for key in self._values[batch].keys() - keys:
            self._drop(self._values[batch].pop(key))

    @property
    def num_bytes(self) -> int:
        """Bytes held at home for all batches."""
        return self._num_bytes

    def _after(self, batch: int) -> dict[fx.Node, object]:
        return self._values[batch + 1] if batch + 1 < len(self._values) else {}

    def _fetch(self, values: Mapping[fx.Node, object]) -> None:
        """Begin to read what waits in the file."""
        for leaf in pytree.tree_leaves(list(values.values())):
            if isinstance(leaf, Stored) and leaf not in self._coming:
                assert self._scratch is not None
                self._coming[leaf] = self._scratch.read(leaf)

    def _kept(self, leaf: object) -> object:
        """A leaf as it waits: at home, or in the file."""
        if not isinstance(leaf, Tensor):
            return leaf
        moved = self._moved(leaf, self._home)
        assert isinstance(moved, Tensor)
        is_over = self._budget is not None and self._num_bytes + moved.nbytes > self._budget
        if self._scratch is not None and is_over and moved.nbytes >= _LEAST_SPILLED:
            return self._scratch.write(moved.cpu())
        self._num_bytes += moved.nbytes
        return moved

    def _drop(self, value: object) -> None:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Stored):
                assert self._scratch is not None
                self._coming.pop(leaf, None)
                self._scratch.free(leaf)
            elif isinstance(leaf, Tensor):
                self._num_bytes -= leaf.nbytes

    def _moved(self, value: object, target: torch.device) -> object:
        def move(leaf: object) -> object:
            if not isinstance(leaf, Tensor) or leaf.device == target:
                return leaf
            if target.type == "cpu" and leaf.device.type == "cuda":
                host = torch.empty_like(leaf, device=target, pin_memory=True)
                return host.copy_(leaf)
            return leaf.to(target, non_blocking=leaf.is_pinned())

        return pytree.tree_map(move, value)
