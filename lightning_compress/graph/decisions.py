"""Branches that values decide, where all batches take the same: `if mask.any()`, `assert lengths.max() <= n`.

What is asked is computed on every batch by the graph's own operations, as far as they were recorded, from the batch
alone. If the answer is one for all, it is taken, and the graph serves batches that give it; `holds` tells of others.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import final

import sympy
import torch
from torch import Tensor, fx

from lightning_compress.graph.aliases import memory_of
from lightning_compress.graph.compat import Recorder, on_real_tensors
from lightning_compress.graph.execute import execute
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.values import SYMBOLIC_TYPES, expression, is_symbolic


class DifferentBranchesError(RuntimeError):
    """The batches take different branches, of which a graph has one."""


@final
@dataclass(frozen=True)
class Decision:
    """A condition on values, and what it comes to.

    Attributes:
        condition: of symbols that stand for numbers read from tensors, and for sizes of the batch.
        outcome: true or false for every batch that the graph serves.
        graph: computes the numbers from a batch's tensors; its output has a node for each.
        constants: tensors that it names.
    """

    condition: sympy.Basic
    outcome: bool
    graph: fx.Graph
    constants: Mapping[str, Tensor]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a batch gives the outcome.

        Args:
            tensors: of the batch, in the order of the graph's placeholders.
        """
        return _answer(self.condition, self.graph, self.constants, tensors) is self.outcome


def decide(
    recorder: Recorder,
    batches: Sequence[Sequence[Tensor]],
    decisions: MutableMapping[sympy.Basic, Decision],
    condition: sympy.Basic,
) -> bool | None:
    """What a condition comes to on every batch that the graph fits; None where that takes more than their tensors.

    Args:
        recorder: that has recorded what the numbers in the condition are computed by.
        batches: the tensors of each, in the order of the graph's placeholders.
        decisions: those that were made, by condition; gets the new one.
        condition: of numbers that were read from tensors.

    Raises:
        DifferentBranchesError: it does not come to the same on all.
    """
    if condition not in decisions:
        graph = _what_computes(recorder, condition)
        if graph is None:
            return None
        fitting = {number: tensors for number, tensors in enumerate(batches) if _fits(graph, tensors)}
        with on_real_tensors():
            answers = {
                number: _answer(condition, graph, recorder.constants, tensors) for number, tensors in fitting.items()
            }
        if None in answers.values() or not answers:
            return None
        first, outcome = next(iter(answers.items()))
        if other := [number for number, answer in answers.items() if answer is not outcome]:
            raise DifferentBranchesError(f"it takes one branch for batch {first} and another for batch {other[0]}")
        decisions[condition] = Decision(condition, bool(outcome), graph, recorder.constants)
    return decisions[condition].outcome


def _what_computes(recorder: Recorder, condition: sympy.Basic) -> fx.Graph | None:
    """A graph of the numbers in a condition, from the batch; None where weights or buffers are needed."""
    every, memory = list(recorder.graph.nodes), memory_of(recorder.graph)
    nodes = [node for node in every if _numbers(node) & condition.free_symbols]
    last = max((memory.position[node] for node in nodes), default=-1)
    wanted: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in wanted:
            continue
        is_weight = node.op == "get_attr" and str(node.target) not in recorder.constants
        if isinstance(node.target, Leaf) or is_weight or _is_random(node):
            return None
        wanted.add(node)
        waiting += node.all_input_nodes
        waiting += [every[at] for at in memory.writes.get(memory.owner[node], ()) if at < last]  # also through views
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in recorder.graph.nodes:
        if node in wanted or node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in nodes))
    return graph


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _fits(graph: fx.Graph, tensors: Sequence[Tensor]) -> bool:
    """Whether a batch has the tensors, dimensions and fixed sizes that the graph is of."""
    fakes = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return len(fakes) == len(tensors) and all(
        fake.ndim == tensor.ndim
        and fake.dtype == tensor.dtype
        and all(is_symbolic(size) or size == given for size, given in zip(fake.shape, tensor.shape, strict=True))
        for fake, tensor in zip(fakes, tensors, strict=True)
    )


def _numbers(node: fx.Node) -> set[sympy.Symbol]:
    """The symbols of what was read from a tensor by this node: a number, or whether it is one."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, SYMBOLIC_TYPES) or value.node.hint is not None:
        return set()
    expr = value.node.expr
    is_read = expr.is_Symbol or (isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and expr.rhs == 1)
    return set(expr.free_symbols) if is_read else set()


def _answer(
    condition: sympy.Basic, graph: fx.Graph, constants: Mapping[str, Tensor], tensors: Sequence[Tensor]
) -> bool | None:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    known: dict[sympy.Basic, sympy.Basic] = {}
    for node, tensor in zip(placeholders, tensors, strict=True):
        sizes = zip(node.meta["val"].shape, tensor.shape, strict=True)
        known.update({expression(size): sympy.Integer(given) for size, given in sizes if is_symbolic(size)})
    copies = (tensor.detach().to("cpu", copy=True) for tensor in tensors)  # operations may write to them
    values: dict[fx.Node, object] = dict(zip(placeholders, copies, strict=True))
    execute(list(graph.nodes), values, torch.nn.Module(), constants, torch.device("cpu"), {})
    for node in output.all_input_nodes:
        (symbol,) = _numbers(node)
        number = values[node]
        known[symbol] = sympy.sympify(int(number) if isinstance(number, bool) else number)
    if any(isinstance(number, float) and isnan(number) for number in values.values()):
        return None
    answer = condition.xreplace(known)
    return None if answer not in (sympy.true, sympy.false) else bool(answer)
