"""Find what a linear's output is added to: the residual stream, as far as it is there before the linear is solved.

Error-correcting calibration asks of a quantized `y = W x` not `W x_ref` but `W x_ref + (r_ref - r_q)`: where the output
is added to a residual `r`, the linear may make good for the error that came along with `r`.

Method: from the call on, the graph is read as a sum. Operations that keep the order of the elements (views, conversions
of the dtype, dropout in eval mode) and constant factors are gone through, additions give their other operand, which is
taken apart in the same way until it consists of values that are there in time. It ends where a value has several
readers (the new residual stream), or one that is nothing of the kind: behind a norm (Gemma 2, OLMo 2) the error of the
stream is no longer a sum with the linear's output, so such a linear has no residual.

Two branches of one sum (attention and MLP in parallel): the first to be solved takes the stream, the second the stream
and the first. Were both to take the stream without the second seeing the first, its error would be corrected twice; so
a linear whose sum holds something computed between its solve and its call has no residual.

Alternatives not taken: a table of module names per architecture (does not know the next one); the difference of the
layers' outputs (is not there before the layer has run, and has the linear's own error in it).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, prod
from typing import Final, final

import sympy
import torch
from torch import Tensor, fx

from lightning_compress.graph.aliases import Memory, memory_of
from lightning_compress.graph.leaf import Leaf, leaf_input, takes_a_value
from lightning_compress.graph.shared_inputs import Group
from lightning_compress.graph.values import expression

aten = torch.ops.aten

Operand = object
"""What an operation is given: a node, or a number."""
Summands = tuple[tuple[Operand, float], ...]
"""Operands and their factors."""

KEEPING_ORDER: Final = frozenset({
    aten.view.default, aten.view_as.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.flatten.using_ints, aten.unflatten.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.to.dtype, aten.to.device,
    aten.to.other, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default,
})  # fmt: skip
"""Operations whose result has the elements of the first argument, in their order. `view.dtype` reads other numbers."""
DROPOUT: Final = frozenset({aten.dropout.default, aten.dropout_.default})
ADD: Final = frozenset({aten.add.Tensor, aten.add.Scalar, aten.add_.Tensor, aten.add_.Scalar})
SUBTRACT: Final = frozenset({aten.sub.Tensor, aten.sub.Scalar, aten.sub_.Tensor, aten.sub_.Scalar})
SUBTRACT_FROM: Final = frozenset({aten.rsub.Tensor, aten.rsub.Scalar})
MULTIPLY: Final = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.mul_.Tensor, aten.mul_.Scalar})
DIVIDE: Final = frozenset({aten.div.Tensor, aten.div.Scalar, aten.div_.Tensor, aten.div_.Scalar})
NEGATE: Final = frozenset({aten.neg.default, aten.neg_.default})


@final
@dataclass(frozen=True)
class Residual:
    """What is added to a linear's output, in units of that output.

    Attributes:
        terms: values and their factors; the residual is the sum of `factor * value.reshape(output.shape)`. Each value
            is there where the group's input is observed (right before the first module that reads that), and it is
            what will be added. Later it may not be: `x += f(x)` changes it.
        into: the sum, which is `scale * (output + residual)` and whatever else is added there.
        scale: see `into`.
    """

    terms: tuple[tuple[fx.Node, float], ...]
    into: fx.Node
    scale: float


def residuals(graph: fx.Graph, groups: Iterable[Group]) -> dict[str, Residual]:
    """The residual of each member of `groups` that has one.

    A module that is called several times has none, for it is solved on all its calls together; neither has one inside
    an opaque leaf. A group counts as solved right before the first module that reads its input, which is when the
    `staged` schedule does it; no schedule does it earlier.

    Args:
        graph: a traced graph.
        groups: of this graph; some or all.
    """
    memory = memory_of(graph)
    calls: dict[str, list[fx.Node]] = {}
    first_readers: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if isinstance(node.target, Leaf):
            calls.setdefault(node.target.weights_of, []).append(node)
        if isinstance(node.target, Leaf) and takes_a_value(node):
            first_readers.setdefault(leaf_input(node), memory.position[node])
    found: dict[str, Residual] = {}
    for group in groups:
        if len(group.sources) != 1 or group.sources[0].inner is not None or group.sources[0].rows is not None:
            continue
        solved = first_readers[group.sources[0].node]
        for name in group.members:
            residual = residual_of(calls[name][0], solved, memory) if len(calls[name]) == 1 else None
            if residual is not None:
                found[name] = residual
    return found


def residual_of(call: fx.Node, solved: int, memory: Memory) -> Residual | None:
    """What the output of `call` is added to.

    Args:
        call: a call of a linear.
        solved: position in the graph before which a value is there in time.
        memory: of the graph.
    """
    terms: dict[fx.Node, float] = {}
    value, scale, found = call, 1.0, None
    while len(readers := memory.readers(value)) == 1:
        (reader,) = readers
        summands = summands_of(reader)
        own = [factor for operand, factor in summands if operand is value]
        if len(own) != 1 or num_elements(value) != num_elements(reader):
            break
        scale *= own[0]
        if scale == 0 or not isfinite(scale):
            break
        others = tuple((operand, factor / scale) for operand, factor in summands if operand is not value)
        taken = _available(reader, others, call, solved, memory)
        if taken is None:
            return None
        for node, factor in taken:
            terms[node] = terms.get(node, 0.0) + factor
        found = (reader, scale) if taken else found
        value = reader
    terms = {node: factor for node, factor in terms.items() if factor != 0}
    return None if found is None or not terms else Residual(tuple(terms.items()), *found)


def _available(
    reader: fx.Node, operands: Summands, call: fx.Node, solved: int, memory: Memory
) -> list[tuple[fx.Node, float]] | None:
    """What of the operands of `reader` is there before `solved`, taken apart; None: see the module on two branches.

    Left out is what is no part of the stream (numbers, parameters, what is broadcast) and what comes later.
    """
    found: list[tuple[fx.Node, float]] = []
    for operand, factor in operands:
        if not isinstance(operand, fx.Node) or operand.op == "get_attr":
            continue
        if num_elements(operand) != num_elements(reader) or not memory.is_unchanged(operand, reader):
            continue
        if memory.position[operand] < solved:
            found.append((operand, factor))
            continue
        summands = summands_of(operand)
        if not summands and memory.position[operand] < memory.position[call]:
            return None
        inner = tuple((part, factor * own) for part, own in summands)
        parts = _available(operand, inner, call, solved, memory)
        if parts is None:
            return None
        found += parts
    return found


def summands_of(node: fx.Node) -> Summands:
    """The sum of `factor * operand` that a node computes, element by element; empty if it is nothing of the kind."""
    target, args = node.target, node.args
    if target in KEEPING_ORDER or (target in DROPOUT and args[2:] == (False,)):
        return ((args[0], 1.0),)
    if target in NEGATE:
        return ((args[0], -1.0),)
    if target in MULTIPLY or target in DIVIDE:
        number = args[1]
        if not isinstance(number, (int, float)) or number == 0:
            return ()
        return ((args[0], 1 / number if target in DIVIDE else float(number)),)
    alpha = node.kwargs.get("alpha", args[2] if len(args) > 2 else 1)
    if not isinstance(alpha, (int, float)):
        return ()
    if target in ADD:
        return (args[0], 1.0), (args[1], float(alpha))
    if target in SUBTRACT:
        return (args[0], 1.0), (args[1], -float(alpha))
    if target in SUBTRACT_FROM:
        return (args[0], -float(alpha)), (args[1], 1.0)
    return ()


def num_elements(node: fx.Node) -> sympy.Expr | None:
    """Elements of a value in the sizes of the batch; None for what is no tensor of floating-point numbers."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    return prod((expression(size) for size in value.shape), start=sympy.Integer(1))
