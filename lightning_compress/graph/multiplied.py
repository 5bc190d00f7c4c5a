"""Products with a Linear's weight in code that does not call it (`F.linear(x, self.qkv.weight, bias)`), as calls."""

from collections.abc import Collection, Sequence

import torch
from torch import fx, nn

from lightning_compress.graph.leaf import Leaf
from lightning_compress.recipe.forms import has_forward_of

_aten = torch.ops.aten


Spans = Sequence[tuple[str, Sequence[fx.Node]]]
"""Names, each with some nodes of a graph."""


def as_calls(graph: fx.Graph, root: nn.Module, names: Collection[str], spans: Spans) -> Spans:
    """Let a graph call Linears where it multiplies with their weights; returns the spans with the nodes that are new.

    Args:
        graph: as recorded, changed in place.
        root: the model.
        names: of the Linears for which that may be done.
        spans: nodes that belong together.
    """
    added: dict[fx.Node, list[fx.Node]] = {}
    for node in list(graph.nodes):
        if node.target is not _aten.linear.default or node.kwargs:
            continue
        x, weight, *rest = node.args
        name, _, local = str(weight.target).rpartition(".")
        if weight.op != "get_attr" or local != "weight" or name not in names:
            continue
        linear = root.get_submodule(name)
        if not (isinstance(linear, nn.Linear) and _does_no_more(linear)):
            continue
        given = next((bias for bias in rest if bias is not None), None)
        added[node] = _called(graph, node, x, Leaf(name), given, linear.bias)
    return [(name, [each for node in nodes for each in (*added.get(node, ()), node)]) for name, nodes in spans]


def _does_no_more(linear: nn.Linear) -> bool:
    hooks = (*linear._forward_pre_hooks, *linear._forward_hooks)
    return has_forward_of(linear, nn.Linear) and not hooks


def _called(
    graph: fx.Graph, product: fx.Node, x: fx.Node, leaf: Leaf, given: fx.Node | None, own: torch.Tensor | None
) -> list[fx.Node]:
    """Make a product a call of a Linear, plus what another bias than its own differs by."""
    is_own = given is not None and given.op == "get_attr" and given.target == f"{leaf.name}.bias"
    if is_own or (given is None and own is None):
        product.target, product.args = leaf, (x,)
        return []
    with graph.inserting_before(product):
        call = graph.call_function(leaf, (x,))
        call.meta["val"] = product.meta["val"]
        if own is None:
            product.target, product.args = _aten.add.Tensor, (call, given)
            return [call]
        bias = graph.get_attr(f"{leaf.name}.bias")
        bias.meta["val"] = own
        if given is None:
            product.target, product.args = _aten.sub.Tensor, (call, bias)
            return [call, bias]
        difference = graph.call_function(_aten.sub.Tensor, (given, bias))
        difference.meta["val"] = own
        product.target, product.args = _aten.add.Tensor, (call, difference)
    return [call, bias, difference]
