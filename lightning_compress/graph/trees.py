"""The tensors in trees of values: dataclasses, and mappings and sequences that pytree knows."""

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import cast

import torch
from torch import Tensor

from lightning_compress.graph.compat import pytree
from lightning_compress.graph.values import attributes_of_dataclass

_NO_TREES = (int, float, str, type(None), torch.dtype, torch.device)


def tensors_in(tree: object) -> list[Tensor]:
    """In order; one that occurs twice is there twice."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: object, found: list[Tensor], around: tuple[object, ...] = ()) -> None:
    """Asked of every operator's arguments; pytree, which knows all kinds of trees, takes several times as long."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for each in cast(Sequence[object], tree):
            _collect(each, found, around)
    elif kind is dict:
        for each in cast(dict[object, object], tree).values():
            _collect(each, found, around)
    elif is_dataclass(tree) and not isinstance(tree, type):
        if not any(tree is each for each in around):  # one may have what it is in
            _collect([*attributes_of_dataclass(tree).values()], found, (*around, tree))
    elif not isinstance(tree, _NO_TREES):
        found += [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def storages(tree: object) -> set[int]:
    """What tells the memory of the tensors in a tree from others'."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by `vmap` or `grad`: those have none
    tensors = (each for each in tensors_in(tree) if each.layout is torch.strided and not wrapped(each))
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def storage_bytes(tree: object) -> int:
    """Of the storages of all tensors; one that two share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(tree)]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def versions(tree: object) -> tuple[int, ...]:
    """Counts the in-place writes to every tensor in a tree, also those made through views.

    Tensors made in inference mode do not count; nothing but inference mode can write to them.
    """
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors_in(tree))
