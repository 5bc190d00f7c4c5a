"""Values that cross from one step to a later one, per batch: on the device, in host memory, or in a scratch file.

They wait where there is room, in that order. A value is stored when the step that computed it ends, and dropped when
its last reader has run, so the cache holds the boundary of one cut and not the history of the graph. While one batch is
computed the next one's are read and copied to the device.

What is kept are storages: what shares one in the model shares one here, so that a write to one value in place is seen
in all its views. They are therefore loaded together, and stored together when one of them is new or was written to. Of
a value that is a small part of its storage, or its conjugate, a copy is kept instead, unless something is written there
later.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import final

import torch
from torch import Tensor, fx

from lightning_compress.graph.compat import pytree
from lightning_compress.graph.shadow import Key, node_of
from lightning_compress.graph.trees import tensors_in
from lightning_compress.memory.scratch import ScratchFile, Stored
from lightning_compress.memory.transfer import Lane, Sent

LEAST_SPILLED = 1 << 16  # bytes; smaller tensors, such as masks and positions, are not worth a transfer


@dataclass(eq=False)
class _Held:
    """A storage as it waits: bytes [n] in memory, or in the file. `readers`: how many of the cache's tensors it has;
    `counts`: it takes of the budget of host memory."""

    place: Tensor | Stored
    nbytes: int
    readers: int = 0
    counts: bool = False


@dataclass(frozen=True)
class _View:
    """A tensor of the cache."""

    held: _Held
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int

    @property
    def nbytes(self) -> int:
        """Of the numbers in it, as `Tensor.nbytes` has them."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, storage: Tensor) -> Tensor:
        """The tensor in its storage, given as bytes; tensors in one storage count each other's in-place writes."""
        whole = len(storage) // self.dtype.itemsize * self.dtype.itemsize
        return storage[:whole].view(self.dtype).as_strided(self.shape, self.stride, self.storage_offset)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as bytes [n]."""
    length = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((length,), (1,), 0).view(torch.uint8)


def _identity(tensor: Tensor) -> int:
    """Equal for tensors in one storage, fake ones too."""
    return int(tensor.untyped_storage()._cdata)


def _together(parts: Mapping[Key, Set[Hashable]], keys: Set[Key]) -> set[Key]:
    """`keys`, and all that have a part in common with one of these, directly or through others."""
    found: set[Key] = set()
    ahead = set(keys)
    while ahead:
        found |= ahead
        shared = {part for key in ahead for part in parts[key]}
        ahead = {key for key, own in parts.items() if own & shared} - found
    return found


@final
class ActivationCache:
    """For each batch a mapping from a graph's values to tensors (or trees of them, or plain numbers).

    Args:
        batches: the values known at the start, per batch: the inputs.
        rewritten: values that are written to in place after they are computed (see `graph.aliases.Memory`).
        device: where values are used.
        device_budget: bytes of stored values that may wait there, where that is not host memory; None: all.
        budget: bytes of the others that may wait in host memory; None: all. Small values, for which neither counts,
            wait there whatever the budgets.
        scratch_dir: folder of the file for the others; None: the system's temporary folder.

    Attributes:
        rewritten: as given.
        moved: bytes loaded and stored so far, by lane (see `calibration.records.SubgraphRecord`).
    """

    def __init__(
        self,
        batches: list[dict[Key, object]],
        *,
        device: torch.device,
        rewritten: frozenset[fx.Node] = frozenset(),
        device_budget: int | None = 0,
        budget: int | None = None,
        scratch_dir: Path | None = None,
    ) -> None:
        self.moved: Counter[str] = Counter()
        self.rewritten = rewritten
        self._lane = Lane(device)
        self._device_budget = 0 if device.type == "cpu" else device_budget
        self._budget = budget
        self._scratch = None if budget is None else ScratchFile(scratch_dir)
        self._on_device = self._on_host = self._of_budget = 0
        self._reading: dict[_Held, Future[Tensor]] = {}
        self._sent: dict[_Held, Sent] = {}
        self._values: list[dict[Key, object]] = []
        for batch in batches:  # inputs are small, and stay in memory whatever the budget
            self._values.append({})
            self._keep(len(self._values) - 1, batch, spill=False)

    def __len__(self) -> int:
        return len(self._values)

    def load(self, batch: int, keys: set[Key], *, copy: bool = False) -> dict[Key, object]:
        """The values `keys` (those that are cached) of a batch, and what shares memory with them, on the device.

        With `copy` they are the caller's own, also where home and device are one: what is written to them in place does
        not reach the cache.
        """
        self._lane.give_back()  # what was loaded before may have been dropped, with kernels that read it still to run
        found = self._found(batch, keys)
        self._begin(found)
        following = self._values[batch + 1] if batch + 1 < len(self._values) else {}
        with suppress(torch.OutOfMemoryError):  # the next batch's turn will come, when this one's values are gone
            self._begin({key: value for key, value in following.items() if key in keys})
        here: dict[_Held, Tensor] = {}

        def tensor(leaf: object) -> object:
            if not isinstance(leaf, _View):
                return leaf
            if leaf.held not in here:
                storage = self._arrived(leaf.held)
                is_ours = storage is leaf.held.place
                here[leaf.held] = storage.clone() if copy and is_ours else storage
            return leaf.of(here[leaf.held])

        return {key: pytree.tree_map(tensor, value) for key, value in found.items()}

    def sizes(self, batch: int, keys: Set[Key]) -> tuple[dict[Key, list[int]], list[int]]:
        """Of what `load` gives the bytes of each value's tensors, and those of all storages that they are in."""
        found = {key: self._leaves(value) for key, value in self._found(batch, keys).items()}
        held = dict.fromkeys(leaf.held for leaves in found.values() for leaf in leaves)
        return {key: [leaf.nbytes for leaf in leaves] for key, leaves in found.items()}, [each.nbytes for each in held]

    def keys(self, batch: int) -> set[Key]:
        """What is cached of a batch."""
        return set(self._values[batch])

    def store(self, batch: int, values: Mapping[Key, object], unchanged: Set[Key] = frozenset()) -> None:
        """Keep values for later steps; what is cached under the same key is replaced.

        Those of `unchanged` are as they were loaded, so they stay where they are, unless others share memory with them.
        """
        storages = {
            key: {_identity(leaf) for leaf in tensors_in(value) if not self._is_apart(key, leaf)}
            for key, value in values.items()
        }
        again = _together(storages, values.keys() - unchanged)
        self._keep(batch, {key: value for key, value in values.items() if key in again}, spill=True)

    def rename(self, batch: int, names: Mapping[Key, Key]) -> None:
        """Keep the values under other keys."""
        self._values[batch] = {names.get(key, key): value for key, value in self._values[batch].items()}

    def retain(self, batch: int, keys: set[Key]) -> None:
        """Drop everything else, in one order, as memory is given back."""
        for key in [key for key in self._values[batch] if key not in keys]:
            self._drop(self._values[batch].pop(key))

    @property
    def num_bytes(self) -> int:
        """Bytes held in memory for all batches."""
        return self._on_device + self._on_host

    def _keep(self, batch: int, values: Mapping[Key, object], *, spill: bool) -> None:
        again = self._make_room(batch, values)
        waiting = [leaf.held for leaf in [*self._leaves(self._values[batch]), *again]]
        known = {_identity(held.place): held for held in waiting if isinstance(held.place, Tensor)}

        def kept(key: Key, leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            is_apart = self._is_apart(key, leaf)
            if is_apart:
                leaf = leaf.clone(memory_format=torch.contiguous_format)
            storage = _whole(leaf)
            held = None if is_apart else known.get(_identity(storage))  # a copy may be where a dropped one was
            if held is None:
                held = known[_identity(storage)] = self._held(storage, spill)
            held.readers += 1
            return _View(held, leaf.dtype, tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset()))

        new = {key: pytree.tree_map(partial(kept, key), value) for key, value in values.items()}
        self._drop(again)
        self._values[batch].update(new)

    def _make_room(self, batch: int, values: Mapping[Key, object]) -> list[_View]:
        """Drop what `values` replace, but for what is in the same storages: that is given, to be dropped later."""
        stored = {_identity(leaf) for leaf in tensors_in(list(values.values()))}
        replaced = self._leaves([self._values[batch].pop(key, None) for key in values])
        places = (leaf.held.place for leaf in replaced)
        again = [isinstance(place, Tensor) and _identity(place) in stored for place in places]
        self._drop([leaf for leaf, stays in zip(replaced, again, strict=True) if not stays])
        return [leaf for leaf, stays in zip(replaced, again, strict=True) if stays]

    def _is_apart(self, key: Key, leaf: Tensor) -> bool:
        """Whether a copy is kept of a tensor, which is a small part of its storage, or not what that holds but what it
        holds conjugated or negated."""
        is_part = leaf.untyped_storage().nbytes() > 1.5 * leaf.nbytes
        return (is_part or leaf.is_conj() or leaf.is_neg()) and node_of(key) not in self.rewritten

    def _held(self, storage: Tensor, spill: bool) -> _Held:
        """A storage where there is room for it: on the device, else in host memory, else in the file."""
        nbytes = storage.numel()
        may_move = spill and nbytes >= LEAST_SPILLED
        if self._device_budget is None or (may_move and self._on_device + nbytes <= self._device_budget):
            self._on_device += nbytes
            return _Held(self._lane.receive(self._lane.send(storage)), nbytes)
        is_over = self._budget is not None and self._of_budget + nbytes > self._budget
        if self._scratch is not None and is_over and may_move:
            self.moved["disk_write"] += nbytes
            self._count_fetched(storage)
            return _Held(self._scratch.write(self._lane.fetch(storage, wait=True)), nbytes)
        self._on_host += nbytes
        self._of_budget += nbytes if may_move else 0
        self._count_fetched(storage)
        return _Held(self._lane.fetch(storage), nbytes, counts=may_move)

    def _count_fetched(self, storage: Tensor) -> None:
        self.moved["to_host"] += storage.numel() if storage.device.type != "cpu" else 0

    def _begin(self, values: Mapping[Key, object]) -> None:
        """Begin to read what waits in the file, and to copy what waits in host memory."""
        for leaf in self._leaves(values):
            place = leaf.held.place
            if isinstance(place, Stored):
                if leaf.held not in self._reading:
                    assert self._scratch is not None
                    self._reading[leaf.held] = self._scratch.read(place)
            elif self._lane.is_away(place) and leaf.held not in self._sent:
                self._sent[leaf.held] = self._lane.send(place)

    def _arrived(self, held: _Held) -> Tensor:
        """A storage on the device."""
        if held in self._reading or held in self._sent:
            self.moved["disk_read"] += held.nbytes if held in self._reading else 0
            self.moved["to_device"] += held.nbytes if self._lane.device.type != "cpu" else 0
        if held in self._reading:
            return self._lane.receive(self._lane.send(self._reading.pop(held).result()))
        if held in self._sent:
            return self._lane.receive(self._sent.pop(held))
        assert isinstance(held.place, Tensor)
        return held.place

    def _drop(self, value: object) -> None:
        for leaf in self._leaves(value):
            leaf.held.readers -= 1
            if leaf.held.readers:
                continue
            self._reading.pop(leaf.held, None)
            self._sent.pop(leaf.held, None)
            place = leaf.held.place
            if isinstance(place, Stored):
                assert self._scratch is not None
                self._scratch.free(place)
            elif place.device.type == "cpu":
                self._on_host -= leaf.held.nbytes
                self._of_budget -= leaf.held.nbytes if leaf.held.counts else 0
            else:
                self._on_device -= leaf.held.nbytes

    def _found(self, batch: int, keys: Set[Key]) -> dict[Key, object]:
        """Those of `keys` that are cached, and what shares memory with them."""
        waiting = self._values[batch]
        storages = {key: {leaf.held for leaf in self._leaves(value)} for key, value in waiting.items()}
        together = _together(storages, keys & waiting.keys())
        return {key: value for key, value in waiting.items() if key in together}  # in one order, as memory is taken

    def _leaves(self, value: object) -> list[_View]:
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, _View)]
