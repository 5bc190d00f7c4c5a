"""What a call returns on all batches, with symbolic sizes, from what it returned on some with plain ones.

A size that is the same in two batches is a constant (unless a size of the batch did not change either); others are a
size of the batch or of the call's inputs, a product of two of them, or one of those plus, times or divided by a
constant; or, for a call that was observed, any number that is read when it is needed. So it is with numbers and flags
that a module returns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from typing import Any, cast

import sympy
import torch
from torch import Tensor

from lightning_compress.graph.expected import described, text
from lightning_compress.graph.failures import SpecializedSizeError
from lightning_compress.graph.fakes import TRACE_DEVICE
from lightning_compress.graph.kept import is_plain
from lightning_compress.graph.values import (
    SYMBOLIC_TYPES,
    concrete,
    depends_on_values,
    expression,
    is_symbolic,
    items_of,
    map_nested,
)

_FEW_MORE = 4
"""So many tokens more or fewer than a size are taken for a rule (a class token, a label less), not for chance."""


@dataclass(frozen=True)
class Layout:
    """What a real run tells about a tensor: enough to make a fake one."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


Known = tuple[torch.SymInt, int, int]
"""A symbolic size, its value in the traced batch and its value in the second batch."""


def known_sizes(symbols: Sequence[torch.SymInt], other: Mapping[sympy.Symbol, int]) -> list[Known]:
    """Each size and each product of two, without repetition."""
    known: dict[sympy.Expr, Known] = {}
    singles = {expression(symbol): symbol for symbol in symbols}
    for symbol in [*singles.values(), *(left * right for left, right in combinations(singles.values(), 2))]:
        known.setdefault(expression(symbol), (symbol, concrete(symbol), concrete(symbol, other)))
    return list(known.values())


def layouts(value: Any) -> Any:
    """A nested value with each tensor replaced by its `Layout`."""
    if isinstance(value, Tensor):
        return Layout(tuple(value.shape), value.stride(), value.dtype)
    return map_nested(value, layouts)


def symbolic_like(first: Any, second: Any, known: Sequence[Known], other: Callable[[type], Any] | None = None) -> Any:
    """A nested value with each `Layout` (seen in both batches) replaced by a tensor with symbolic sizes, and numbers
    that are not the same in both by symbols; a mean is the same in two that repeat the same rows.

    Args:
        first, second: what two batches gave.
        known: sizes of them.
        other: makes a number of a type that none of these tell; None: there must be none.

    Raises:
        SpecializedSizeError: the values differ by more than sizes that can be told.
    """
    is_one = is_plain(first) and not isinstance(first, tuple)
    if is_one and (first != second or (type(first) is float and other is not None)):
        return _symbolic_number(first, second, known, other)
    if not isinstance(first, Layout):
        if type(first) is not type(second) or (isinstance(first, dict) and first.keys() != second.keys()):
            raise SpecializedSizeError(
                f"it returns a {type(first).__name__}, in another batch a {type(second).__name__} or other keys"
            )
        ours, theirs = len(list(items_of(first))), len(list(items_of(second)))
        if ours != theirs:
            size = next((expression(symbol) for symbol, a, b in known if (a, b) == (ours, theirs)), None)
            symbol = size if isinstance(size, sympy.Symbol) else None
            raise SpecializedSizeError(f"it returns {ours} values, {theirs} in another batch", symbol)
        seconds = iter(items_of(second))
        return map_nested(first, lambda item: symbolic_like(item, next(seconds), known, other))
    if not isinstance(second, Layout) or len(first.sizes) != len(second.sizes):
        raise SpecializedSizeError("it returns a tensor, in another batch none or one of other dimensions")
    sizes = [_symbolic_size(a, b, known, other) for a, b in zip(first.sizes, second.sizes, strict=True)]
    return _fake(sizes, first.strides, first.dtype)


def _fake(sizes: Sequence[int | torch.SymInt], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor with symbolic sizes, dense, with its dimensions in the order of these strides."""
    for size in sizes:
        if is_symbolic(size) and depends_on_values(size):
            torch._check(size >= 0)
    order = sorted(range(len(sizes)), key=lambda dim: -strides[dim])
    stored = torch.empty([sizes[dim] for dim in order], dtype=dtype, device=TRACE_DEVICE)
    return stored.permute([order.index(dim) for dim in range(len(sizes))])


Seen = Sequence[tuple[Any, Mapping[sympy.Basic, int]]]
"""What was returned for batches with these sizes, with each tensor replaced by its `Layout`."""


def as_in_all(value: Any, seen: Seen, other: Callable[[type], Any]) -> Any:
    """What a module returns on the traced batch, with symbolic sizes; those that are not what they say in other
    batches, and numbers and flags that are not the same there, replaced by what is read when it is needed.

    Args:
        value: what it returns on the traced batch.
        seen: what it returns on others, in which it decides otherwise.
        other: makes a number of a type.

    Raises:
        SpecializedSizeError: it returns something else there.
    """
    if not seen:
        return value
    if isinstance(value, Tensor):
        return _tensor_as_in_all(value, seen, other)
    if isinstance(value, SYMBOLIC_TYPES) or (is_plain(value) and not isinstance(value, tuple)):
        if all(_is_told(value, found, sizes) for found, sizes in seen):
            return value
        kind = type(concrete(value))
        unlike = next(found for found, sizes in seen if not _is_told(value, found, sizes))
        if kind not in (int, float, bool) or any(type(found) is not kind for found, _ in seen):
            another = "a tensor" if isinstance(unlike, Layout) else text(unlike)
            raise SpecializedSizeError(f"it returns {text(described(value))}, in another batch {another}")
        return other(kind)
    items = items_of(value)
    for found, _ in seen:
        is_alike = type(found) is type(value) and len(items_of(found)) == len(items)
        if not is_alike or (isinstance(value, dict) and found.keys() != value.keys()):
            raise SpecializedSizeError(
                f"it returns a {type(value).__name__}, in another batch a {type(found).__name__} or other items"
            )
    parts = iter(list(zip(*(items_of(found) for found, _ in seen), strict=True)))
    given = [sizes for _, sizes in seen]
    return map_nested(value, lambda item: as_in_all(item, list(zip(next(parts), given, strict=True)), other))


def of_another_form(value: Any, seen: Seen) -> list[Mapping[sympy.Basic, int]]:
    """The sizes of batches on which a module returns tensors of other dimensions, as `squeeze` makes them of sizes of
    one."""
    return [sizes for found, sizes in seen if not _has_form(value, found)]


def _has_form(value: Any, found: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(found, Layout) and len(found.sizes) == value.ndim
    pairs = zip(items_of(value), items_of(found), strict=False)
    return all(_has_form(ours, theirs) for ours, theirs in pairs)


def _tensor_as_in_all(value: Tensor, seen: Seen, other: Callable[[type], Any]) -> Tensor:
    for found, _ in seen:
        if not isinstance(found, Layout) or (len(found.sizes), found.dtype) != (value.ndim, value.dtype):
            raise SpecializedSizeError("it returns a tensor, in another batch none or one of other dimensions")
    given = [sizes for _, sizes in seen]
    found_sizes = zip(*(found.sizes for found, _ in seen), strict=True)
    is_told = [
        all(map(_is_told, repeat(size), found, given)) for size, found in zip(value.shape, found_sizes, strict=True)
    ]
    if all(is_told):
        return value
    new = [size if told else other(int) for size, told in zip(value.shape, is_told, strict=True)]
    return _fake(new, concrete(value.stride()), value.dtype)


def _is_told(value: Any, found: Any, sizes: Mapping[sympy.Basic, int]) -> bool:
    """Whether a size or number of the traced batch comes to what was found where the batch has these sizes; those that
    depend on values do: they are read."""
    if isinstance(value, SYMBOLIC_TYPES) and not value.node.expr.free_symbols <= sizes.keys():
        return True
    return bool(concrete(value, sizes) == found)


def _symbolic_number(first: Any, second: Any, known: Sequence[Known], other: Callable[[type], Any] | None) -> Any:
    """What is `first` in one batch and `second` in the other: a size, or something that can be read.

    Raises:
        SpecializedSizeError: it is neither.
    """
    kind = type(first)
    if kind is not type(second) or kind not in (int, float, bool):
        raise SpecializedSizeError(f"it returns {first!r}, in another batch {second!r}")
    is_size = kind is int and (other is None or any((a, b) == (first, second) for _, a, b in known))
    if is_size:
        return _symbolic_size(first, second, known, other)
    if other is None:
        raise SpecializedSizeError(f"it returns {first}, in another batch {second}, which is no size")
    return other(kind)


def _symbolic_size(
    first: int, second: int, known: Sequence[Known], other: Callable[[type], Any] | None
) -> int | torch.SymInt:
    """The size that is `first` in one batch and `second` in the other.

    Raises:
        SpecializedSizeError: no rule fits.
    """
    exact = next((symbol for symbol, a, b in known if (a, b) == (first, second)), None)
    if exact is not None:
        return exact
    if first == second:
        return first
    changed = ((symbol, a, b) for symbol, a, b in known if a != b)
    for symbol, a, b in changed:
        if first - a == second - b and (other is None or abs(first - a) <= _FEW_MORE):
            return symbol + (first - a)
        if first % a == 0 and first * b == second * a:
            return symbol * (first // a)
        if first and a % first == 0 and first * b == second * a:
            return cast(torch.SymInt, symbol // (a // first))
    if other is not None:
        return cast(torch.SymInt, other(int))
    raise SpecializedSizeError(
        f"its output has a size of {first}, {second} in another batch, which follows no simple rule"
    )
