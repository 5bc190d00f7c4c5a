"""What a batch's values tell: numbers read from tensors, and sizes that follow from values, computed on the batch alone
by the operations that were recorded.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from lightning_compress.graph.aliases import memory_of
from lightning_compress.graph.compat import pytree
from lightning_compress.graph.execute import execute
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.values import SYMBOLIC_TYPES, sizes_by_symbol


def what_computes(graph: fx.Graph, constants: Collection[str], wanted: Sequence[fx.Node]) -> fx.Graph | None:
    """A graph of the values of some nodes, from the batch; None where weights, buffers or whole modules are needed.

    Args:
        graph: that the nodes are of.
        constants: names of the tensors that it brings itself.
        wanted: its output has a node for each.
    """
    every, memory = list(graph.nodes), memory_of(graph)
    last = max((memory.position[node] for node in wanted), default=-1)
    found: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        is_weight = node.op == "get_attr" and str(node.target) not in constants
        if isinstance(node.target, Leaf) or is_weight or _is_random(node):
            return None
        found.add(node)
        waiting += node.all_input_nodes
        waiting += [every[at] for at in memory.writes.get(memory.owner[node], ()) if at < last]  # also through views
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node in found or node.op == "placeholder":
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in wanted))
    return part


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def sizes_of(graph: fx.Graph, batch: Sequence[Tensor]) -> dict[sympy.Basic, int]:
    """The symbols of a graph's sizes in a batch, whose tensors are in the order of the placeholders."""
    return sizes_by_symbol([node.meta["val"] for node in graph.nodes if node.op == "placeholder"], batch)


def computed(part: fx.Graph, constants: Mapping[str, Tensor], batch: Sequence[Tensor]) -> list[Any]:
    """What a graph of `what_computes` comes to on a batch of real tensors, which are not changed."""
    placeholders = [node for node in part.nodes if node.op == "placeholder"]
    (output,) = (node for node in part.nodes if node.op == "output")
    copies = (tensor.detach().to("cpu", copy=True) for tensor in batch)  # operations may write to them
    values: dict[fx.Node, object] = dict(zip(placeholders, copies, strict=True))
    execute(list(part.nodes), values, torch.nn.Module(), constants, torch.device("cpu"), {})
    return [values[node] for node in output.args[0]]


def values_read(value: Any) -> frozenset[sympy.Basic]:
    """The symbols in sizes and numbers of a traced value that no batch's sizes tell."""
    numbers = [number for number in _numbers(value) if isinstance(number, SYMBOLIC_TYPES) and number.node.hint is None]
    return frozenset(
        symbol
        for number in numbers
        for symbol in number.node.expr.free_symbols
        if number.node.shape_env.is_unbacked_symint(symbol)
    )


def values_told(traced: Any, real: Any) -> dict[sympy.Symbol, int | float]:
    """The symbols of a traced value, where they stand alone, by the real one."""
    found: dict[sympy.Symbol, int | float] = {}
    for number, given in zip(_numbers(traced), _numbers(real), strict=True):
        if isinstance(number, SYMBOLIC_TYPES):
            expr: sympy.Basic = number.node.expr
            if isinstance(expr, sympy.Symbol):
                found[expr] = given
            elif isinstance(expr, sympy.Eq) and isinstance(expr.lhs, sympy.Symbol) and expr.rhs == 1:
                found[expr.lhs] = int(given)  # a flag that was read
    return found


def _numbers(value: Any) -> list[Any]:
    """The sizes of tensors, and what is none."""
    leaves = pytree.tree_leaves(value)
    return [number for leaf in leaves for number in (leaf.shape if isinstance(leaf, Tensor) else (leaf,))]
