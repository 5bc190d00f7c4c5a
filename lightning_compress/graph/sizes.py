"""The values of a graph for batches of other sizes than the traced one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from lightning_compress.graph.computed import computed, sizes_of, values_read, values_told, what_computes
from lightning_compress.graph.expected import expected
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.trees import tensors_in
from lightning_compress.graph.values import concrete

_READING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def traced_bytes(node: fx.Node, sizes: Mapping[sympy.Symbol, int | float] | None = None) -> int:
    """Bytes of a value of the graph for the traced batch, or for one of other sizes."""
    tensors = tensors_in(node.meta.get("val"))
    return sum(each.itemsize * prod(concrete(size, sizes) for size in each.shape) for each in tensors)


def traced_output(node: fx.Node, sizes: Mapping[sympy.Symbol, int | float]) -> object:
    """The value of a node, for a batch of these sizes.

    Raises:
        ValueError: a size depends on values that `sizes` do not tell.
    """
    value = expected(node) if node.meta.get("val") is None else node.meta["val"]
    return concrete(value, sizes)


def nodes_by_values(graph: fx.Graph) -> list[fx.Node]:
    """Operations that read a number, or whose results are as large as values make them."""

    def is_one(node: fx.Node) -> bool:
        if node.op != "call_function" or isinstance(node.target, Leaf) or node.meta.get("val") is None:
            return False
        given = frozenset().union(*(values_read(each.meta.get("val")) for each in node.all_input_nodes))
        if values_read(node.meta["val"]) - given:
            return True
        if node.target is torch.ops.aten.index.Tensor:
            return bool(_masks(node))
        return bool(_READING.intersection(getattr(node.target, "tags", ())))

    return list(filter(is_one, graph.nodes))


def binding(traced: Traced) -> Callable[[Sequence[Tensor]], dict[sympy.Symbol, int | float]]:
    """What tells the symbols of a graph in a batch of real tensors: those of its sizes, and of what follows from its
    values without weights or whole modules. Of what a mask chooses that takes these: all that it could choose."""

    def part_of(nodes: Sequence[fx.Node]) -> fx.Graph | None:
        return what_computes(traced.graph, traced.constants, nodes)

    masks = {node: _mask_of(node) for node in nodes_by_values(traced.graph) if values_read(node.meta["val"])}
    read = {node: mask or node for node, mask in masks.items()}
    read = {node: by for node, by in read.items() if part_of([by]) is not None}
    part = part_of(list(read.values())) if read else None

    def bind(batch: Sequence[Tensor]) -> dict[sympy.Symbol, int | float]:
        found: dict[sympy.Symbol, int | float] = {**sizes_of(traced.graph, batch)}
        values = [] if part is None else computed(part, traced.constants, batch)
        for (node, by), value in zip(read.items(), values, strict=True):
            if by is node:
                found.update(values_told(node.meta["val"], value))
            else:
                found.update(values_told(_read_sizes(node), [int(value.count_nonzero())]))
        for node, mask in masks.items():
            if mask is not None and node not in read and mask.meta["val"] is not None:
                with suppress(ValueError):  # of a size that nothing tells, either
                    most = prod(concrete(size, found) for size in mask.meta["val"].shape)
                    found = {**values_told(_read_sizes(node), [most]), **found}
        return found

    return bind


def _mask_of(node: fx.Node) -> fx.Node | None:
    """What alone decides how many rows an operation chooses of a tensor, if it is a mask."""
    masks = _masks(node)
    return masks[0] if len(masks) == 1 and len(_read_sizes(node)) == 1 else None


def _masks(node: fx.Node) -> list[fx.Node]:
    """What an operation chooses by."""
    aten = torch.ops.aten
    if node.target is aten.nonzero.default:
        return [each for each in node.args[:1] if isinstance(each, fx.Node)]
    if node.target is aten.masked_select.default:
        return [each for each in node.args[1:] if isinstance(each, fx.Node)]
    if node.target is not aten.index.Tensor or not isinstance(node.args[1], Sequence):
        return []
    given = [each for each in node.args[1] if isinstance(each, fx.Node)]
    return [each for each in given if each.meta["val"].dtype in (torch.bool, torch.uint8)]


def _read_sizes(node: fx.Node) -> list[Any]:
    """The sizes of a node's tensor that follow from values."""
    value = node.meta["val"]
    return [size for size in value.shape if values_read(size)] if isinstance(value, Tensor) else []
