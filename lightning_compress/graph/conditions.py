"""Conditions on sizes of a batch that code asks for: of which batches they hold, and what other sizes would change."""

from collections.abc import Iterable, Sequence

import sympy

from lightning_compress.graph.values import Sizes

_FEW = 8
_ARITHMETIC = (sympy.Symbol, sympy.Integer, sympy.Add, sympy.Mul, sympy.Rel, sympy.And, sympy.Or, sympy.Not)


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


def unlike_one(condition: sympy.Basic, outcome: sympy.Basic) -> set[sympy.Symbol]:
    """The sizes in a condition that has another outcome where they are 1.

    >>> size = sympy.Symbol("size")
    >>> unlike_one(size > 1, sympy.true), unlike_one(sympy.Eq(sympy.Mod(8, size - 1), 0), sympy.true)
    ({size}, set())
    """

    def at_one(size: sympy.Symbol) -> sympy.Basic | None:
        try:
            return condition.xreplace({size: sympy.Integer(1)})
        except ZeroDivisionError:
            return None

    return {size for size in condition.free_symbols if at_one(size) == sympy.Not(outcome)}


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
