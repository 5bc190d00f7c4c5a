"""Branches that values decide, where all batches take the same: `if mask.any()`, `assert lengths.max() <= n`; and
numbers that code makes plain ones, where all batches have the same: `int(lengths.max())`.

What is asked is computed on every batch by the graph's own operations, as far as they were recorded, from the batch
alone. If the answer is one for all, it is taken, and the graph serves batches that give it; `holds` tells of others.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import final

import sympy
from torch import Tensor, fx

from lightning_compress.graph.compat import on_real_tensors
from lightning_compress.graph.computed import computed, sizes_of, values_told, what_computes
from lightning_compress.graph.recorder import Recorder
from lightning_compress.graph.values import SYMBOLIC_TYPES, is_symbolic


class DifferentBranchesError(RuntimeError):
    """The batches take different branches, or have different numbers, of which a graph has one."""


@final
@dataclass(frozen=True)
class Decision:
    """A condition on values, or a number, and what it comes to.

    Attributes:
        condition: of symbols that stand for numbers read from tensors, and for sizes of the batch.
        outcome: true or false, or the number, for every batch that the graph serves.
        graph: computes the numbers from a batch's tensors; its output has a node for each.
        constants: tensors that it names.
    """

    condition: sympy.Basic
    outcome: bool | int
    graph: fx.Graph
    constants: Mapping[str, Tensor]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a batch gives the outcome.

        Args:
            tensors: of the batch, in the order of the graph's placeholders.
        """
        return _answer(self.condition, self.graph, self.constants, tensors) == self.outcome


def decide(
    recorder: Recorder,
    batches: Sequence[Sequence[Tensor]],
    decisions: MutableMapping[sympy.Basic, Decision],
    condition: sympy.Basic,
) -> bool | int | None:
    """What a condition, or a number, comes to on every batch that the graph fits; None where that takes more than their
    tensors.

    Args:
        recorder: that has recorded what the numbers in the condition are computed by.
        batches: the tensors of each, in the order of the graph's placeholders.
        decisions: those that were made, by condition; gets the new one.
        condition: of numbers that were read from tensors, or one made of these.

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
        first, outcome = next(iter(answers.items()), (0, None))
        if outcome is None or None in answers.values():
            return None
        if other := [number for number, answer in answers.items() if answer != outcome]:
            taken = ("one branch", "another") if isinstance(outcome, bool) else (outcome, answers[other[0]])
            raise DifferentBranchesError(f"it takes {taken[0]} for batch {first} and {taken[1]} for batch {other[0]}")
        decisions[condition] = Decision(condition, outcome, graph, recorder.constants)
    return decisions[condition].outcome


def _what_computes(recorder: Recorder, condition: sympy.Basic) -> fx.Graph | None:
    """A graph of the numbers in a condition, from the batch; None where weights or buffers are needed."""
    nodes = [node for node in recorder.graph.nodes if _read_by(node) & condition.free_symbols]
    return what_computes(recorder.graph, recorder.constants, nodes)


def _fits(graph: fx.Graph, tensors: Sequence[Tensor]) -> bool:
    """Whether a batch has the tensors, dimensions and fixed sizes that the graph is of."""
    fakes = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    return len(fakes) == len(tensors) and all(
        fake.ndim == tensor.ndim
        and fake.dtype == tensor.dtype
        and all(is_symbolic(size) or size == given for size, given in zip(fake.shape, tensor.shape, strict=True))
        for fake, tensor in zip(fakes, tensors, strict=True)
    )


def _read_by(node: fx.Node) -> set[sympy.Symbol]:
    """The symbols of what was read from a tensor by this node: a number, or whether it is one."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, SYMBOLIC_TYPES) or value.node.hint is not None:
        return set()
    expr = value.node.expr
    is_read = expr.is_Symbol or (isinstance(expr, sympy.Eq) and expr.lhs.is_Symbol and expr.rhs == 1)
    return set(expr.free_symbols) if is_read else set()


def _answer(
    condition: sympy.Basic, graph: fx.Graph, constants: Mapping[str, Tensor], tensors: Sequence[Tensor]
) -> bool | int | None:
    (output,) = (node for node in graph.nodes if node.op == "output")
    known: dict[sympy.Symbol, int | float] = {**sizes_of(graph, tensors)}
    numbers = computed(graph, constants, tensors)
    for node, number in zip(output.all_input_nodes, numbers, strict=True):
        known |= values_told(node.meta["val"], number)
    if any(isinstance(number, float) and isnan(number) for number in numbers):
        return None
    answer = condition.xreplace({symbol: sympy.sympify(number) for symbol, number in known.items()})
    if isinstance(answer, sympy.Integer):
        return int(answer)
    return None if answer not in (sympy.true, sympy.false) else bool(answer)
