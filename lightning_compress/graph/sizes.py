"""The values of a graph for batches of other sizes than the traced one."""

import operator
from collections.abc import Mapping, Sequence
from math import prod

import sympy
from torch import Tensor, fx

from lightning_compress.graph.compat import pytree
from lightning_compress.graph.trace import Traced
from lightning_compress.graph.values import concrete, expression


def traced_bytes(node: fx.Node, sizes: Mapping[sympy.Symbol, int] | None = None) -> int:
    """Bytes of a value of the graph for the traced batch, or for one of other sizes."""
    leaves = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return sum(leaf.itemsize * prod(concrete(size, sizes) for size in leaf.shape) for leaf in leaves)


def traced_output(node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> object:
    """The value of a node; of a nested one (which only its readers know) those items that are read."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if node.meta.get("val") is not None or not items:
        return concrete(node.meta.get("val"), sizes)
    return {key: traced_output(user, sizes) for key, user in items.items()}


def bindings(traced: Traced, batch: Sequence[Tensor]) -> dict[sympy.Symbol, int]:
    """The symbols of the traced sizes in a batch of these tensors."""
    found: dict[sympy.Symbol, int] = {}
    placeholders = (node for node in traced.graph.nodes if node.op == "placeholder")
    for node, tensor in zip(placeholders, batch, strict=True):
        for symbol, size in zip(map(expression, node.meta["val"].shape), tensor.shape, strict=True):
            if symbol.is_Symbol:
                found.setdefault(symbol, size)
    return found
