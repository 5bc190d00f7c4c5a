"""Batches of one row, or of one token, for which a model computes something else.

A graph is recorded with sizes of at least two, and what code asks about sizes of one is then answered once for all:
`if x.shape[0] == 1` leaves no trace in it, while recorded operations serve any size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_compress.graph.fallback import Fixed
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.values import expression

_ATEN = torch.ops.aten
_VIEWS_OR_COPIES = (_ATEN.reshape.default, _ATEN.contiguous.default, _ATEN.clone.default, _ATEN._to_copy.default)


def sizes_of_one(traced: Traced, batch: Any) -> Fixed:
    """(Tensor, dimension) of sizes that are one here, of which the recorded code took for granted that they are not."""
    inputs = [node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder"]
    return frozenset(
        (index, dim)
        for index, (tensor, recorded) in enumerate(zip(flatten_batch(batch)[0], inputs, strict=False))
        for dim, (size, symbol) in enumerate(zip(tensor.shape, recorded.shape, strict=False))
        if size == 1 and expression(symbol) in traced.unlike_one
    )


def first_of_one(traced: Traced, batches: Sequence[Any]) -> tuple[int, Fixed] | None:
    """The first batch with such a size, and which they are; None: there is none."""
    found = ((number, sizes_of_one(traced, batch)) for number, batch in enumerate(batches))
    return next(((number, ones) for number, ones in found if ones), None)


def same_operations(one: Traced, other: Traced) -> bool:
    """Whether the same floats are computed in the same order; sizes, constants, masks and views aside."""
    return _computing(one) == _computing(other)


def _computing(traced: Traced) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_function" and _computes(node)]


def _computes(node: fx.Node) -> bool:
    if isinstance(node.target, Leaf):
        return True
    value = node.meta.get("val")
    is_view = getattr(node.target, "is_view", True) or node.target in _VIEWS_OR_COPIES
    return isinstance(value, Tensor) and value.is_floating_point() and not is_view
