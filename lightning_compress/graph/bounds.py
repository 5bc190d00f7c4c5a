"""Sizes that an operation chooses among others: a slice ends where its tensor does, rows are padded to the longest.

What an operation decides inside it decides anew when it is run, but the size of its result would be recorded as the
traced batch has it. So where batches differ in what is chosen, it is recorded as a minimum or maximum. Where all agree
nothing changes: `cos[:length]` is of that length, not of the lesser of two. The alternative, conditions that batches
have to meet, would refuse those on both sides of `ids[:, :512]`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.nn import functional

from lightning_compress.graph.values import expression, is_symbolic

Sizes = Mapping[sympy.Basic, int]
"""Of one batch, by symbol."""
_FEW = 8
_ARITHMETIC = (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul, sympy.Rel, sympy.And, sympy.Or, sympy.Not)


def within_bounds(function: object, args: tuple[Any, ...], batches: Sequence[Sizes]) -> tuple[Any, ...]:
    """The arguments of an operation; of a slice with bounds that are within its tensor in all batches."""
    if function is not torch.ops.aten.slice.Tensor or len(args) < 3:  # bounds that it has by default are left out
        return args
    tensor, dim, *bounds = args
    return tensor, dim, *(_within(bound, tensor.shape[dim], batches) for bound in bounds[:2]), *bounds[2:]


def _within(bound: int | SymInt | None, size: int | SymInt, batches: Sequence[Sizes]) -> int | SymInt | None:
    if bound is None or not (is_symbolic(bound) or is_symbolic(size)):
        return bound
    at, ends = sizes_in(batches, bound), sizes_in(batches, size)
    if len({number < 0 for number in at}) != 1 or len(at) != len(ends):
        return bound
    pairs = list(zip(at, ends, strict=True))
    if at[0] < 0:
        return torch.sym_max(bound + size, 0) if len({place + end < 0 for place, end in pairs}) > 1 else bound
    return torch.sym_min(bound, size) if len({place > end for place, end in pairs}) > 1 else bound


def pad_sequence(
    batches: Sequence[Sizes],
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    """As `aten.pad_sequence`, of parts; `NotImplemented` where the same one is the longest in all batches."""
    sizes = [tensor.shape[0] for tensor in sequences]
    lengths = [sizes_in(batches, size) for size in sizes]
    longest = [max(numbers) for numbers in zip(*lengths, strict=False)]
    if not longest or longest in lengths:
        return NotImplemented
    length = reduce(torch.sym_max, sizes)
    padded = []
    for tensor, size in zip(sequences, sizes, strict=True):
        sides = (length - size, 0) if padding_side == "left" else (0, length - size)
        padded.append(functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1), *sides), value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)


def sizes_by_symbol(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> dict[sympy.Basic, int]:
    """What the symbolic sizes of the recorded inputs are in a batch."""
    pairs = [
        pair
        for mine, yours in zip(inputs, tensors, strict=False)
        for pair in zip(mine.shape, yours.shape, strict=False)
    ]
    return {expression(size): number for size, number in pairs if is_symbolic(size)}


def deciding_otherwise(
    conditions: Iterable[sympy.Basic], batches: Sequence[Sizes], outcomes: dict[sympy.Basic, list[object]]
) -> list[Sizes]:
    """Batches in which some of the conditions have another outcome than in the first; of those in which all have the
    same, two.

    Args:
        conditions: on sizes.
        batches: their sizes.
        outcomes: of conditions, as earlier calls with the same batches found them, which takes longer than all else.
    """
    first = dict(batches[0])
    whole = [first, *(dict(each) for each in dict.fromkeys(frozenset(each.items()) for each in batches[1:]))]
    whole = [each for each in whole if each.keys() >= first.keys()]
    known = [condition for condition in conditions if condition.free_symbols <= first.keys()]
    for condition in known:
        if condition not in outcomes:
            outcomes[condition] = _outcomes(condition, whole)
    differing = [found for found in map(outcomes.__getitem__, known) if any(each != found[0] for each in found)]
    alike: dict[tuple[object, ...], list[Sizes]] = {}
    for each, *found in zip(whole, *differing, strict=True):
        alike.setdefault(tuple(found), []).append(each)
    return [each for group in list(alike.values())[1:] for each in (group[0], *group[1:][-1:])]


def _outcomes(condition: sympy.Basic, batches: Sequence[Sizes]) -> list[object]:
    """What a condition comes to in each batch. Most are of sums and products of integers, as functions of which Python
    is a hundred times as fast as sympy."""
    symbols = sorted(condition.free_symbols, key=str)
    numbers = [tuple(each[symbol] for symbol in symbols) for each in batches]
    distinct = dict.fromkeys(numbers)
    if len(distinct) > _FEW and all(map(_is_arithmetic, sympy.preorder_traversal(condition))):
        function = sympy.lambdify(symbols, condition, "math")
        found = {each: function(*each) for each in distinct}
    else:
        found = {each: _outcome(condition, dict(zip(symbols, each, strict=True))) for each in distinct}
    return [found[each] for each in numbers]


def _is_arithmetic(part: sympy.Basic) -> bool:
    if isinstance(part, sympy.Pow):
        return bool(part.exp.is_Integer and part.exp.is_positive)
    return isinstance(part, _ARITHMETIC)


def _outcome(condition: sympy.Basic, sizes: Sizes) -> object:
    try:
        return condition.xreplace(dict(sizes))
    except ZeroDivisionError:
        return None


def sizes_in(batches: Sequence[Sizes], size: int | SymInt) -> list[int]:
    """A size in each batch; none where it depends on values."""
    found = [sympy.sympify(expression(size).xreplace(dict(batch))) for batch in batches]
    return [] if any(number.free_symbols for number in found) else [int(number) for number in found]


def of_some(condition: sympy.Basic) -> sympy.Basic:
    """A condition for sizes of at least 1: strides are of `Max(1, size)`, and where a size is 0 there are no steps.

    >>> from torch.utils._sympy.functions import Max
    >>> length = sympy.Symbol("length", integer=True, nonnegative=True)
    >>> of_some(sympy.Eq(16 * Max(1, length - 3), 16 * (length - 3)))
    True
    """

    def is_lesser(size: sympy.Basic) -> bool:
        return type(size).__name__ == "Max" and sympy.S.One in size.args

    def without_one(size: sympy.Basic) -> sympy.Basic:
        return size.func(*(each for each in size.args if each != 1))

    return condition.replace(is_lesser, without_one)
