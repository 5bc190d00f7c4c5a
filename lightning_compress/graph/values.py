"""Nested values and symbolic sizes: what fx and pytree have no one function for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeGuard, final

import sympy
import torch
from torch import Tensor

SYMBOLIC_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)
SIZE_READERS = (
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
)
"""Targets of nodes that ask a tensor for a number and do not need its data."""
Sizes = Mapping[sympy.Basic, int]
"""Of one batch, by symbol."""
PLAIN = dict(zip(SYMBOLIC_TYPES, (int, float, bool), strict=True))


def is_symbolic(size: object) -> TypeGuard[torch.SymInt]:
    """Whether a size of a fake tensor is a symbol or an expression of symbols."""
    return isinstance(size, torch.SymInt)


def depends_on_values(size: torch.SymInt) -> bool:
    """Whether it was read from a tensor, so that no batch's sizes tell it."""
    return size.node.hint is None


def expression(size: int | torch.SymInt) -> sympy.Expr:
    """A size as a sympy expression, so that sizes can be compared without adding a guard."""
    return size.node.expr if is_symbolic(size) else sympy.Integer(size)


def map_nested(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply to the items of a container (a mapping, sequence or dataclass); anything else is returned as it is. Shapes
    become plain tuples, for what they then hold may be no sizes.

    >>> map_nested({"a": 1, "b": 2}, lambda item: item + 1)
    {'a': 2, 'b': 3}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return with_fields(value, {f.name: function(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return as_named_tuple(value, (function(item) for item in value))
    if isinstance(value, torch.Size):
        return tuple(function(item) for item in value)
    if isinstance(value, (list, tuple)):
        return type(value)(function(item) for item in value)
    return value


def with_fields(value: Any, new: Mapping[str, Any]) -> Any:
    """A dataclass like `value` with these fields, which are all."""
    return Made(type(value))(**{**attributes_of_dataclass(value), **new})


def attributes_of_dataclass(value: Any) -> dict[str, Any]:
    """Its fields, and what else `__post_init__` has set."""
    own = {} if isinstance(value, dict) else getattr(value, "__dict__", {})
    return {**{f.name: getattr(value, f.name) for f in fields(value)}, **own}


@final
@dataclass(frozen=True)
class Made:
    """Makes a dataclass of what `attributes_of_dataclass` gives, as it is: `__post_init__` has run.

    Attributes:
        kind: its class.
    """

    kind: type

    @property
    def __name__(self) -> str:
        """What fx names the node after whose target this is."""
        return self.kind.__name__

    def __call__(self, **attributes: object) -> Any:
        if issubclass(self.kind, dict):  # transformers' ModelOutput, whose fields are its items
            return self.kind(**attributes)
        made = object.__new__(self.kind)
        for name, item in attributes.items():
            object.__setattr__(made, name, item)  # it may be frozen
        return made


def as_named_tuple(value: Any, items: Iterable[Any]) -> Any:
    """One like `value` with these items, whatever they are: a PackedSequence looks at the tensors that it is given."""
    return tuple.__new__(type(value), items)


def items_of(value: Any) -> list[Any]:
    """What `map_nested` visits, in the same order."""
    found: list[Any] = []
    map_nested(value, found.append)
    return found


def concrete(value: Any, sizes: Mapping[sympy.Symbol, int | float] | None = None) -> Any:
    """A (nested) value with symbolic sizes replaced by their numbers in the traced batch, or by those of `sizes`.

    Raises:
        ValueError: a size depends on values, and `sizes` do not tell it.
    """
    if isinstance(value, Tensor):
        shape = [concrete(size, sizes) for size in value.shape]
        strides = [concrete(stride, sizes) for stride in value.stride()]
        return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    if isinstance(value, SYMBOLIC_TYPES):
        known = value.node.hint if sizes is None else sympy.sympify(value.node.expr).xreplace(dict(sizes))
        if known is None or (isinstance(known, sympy.Basic) and known.free_symbols):
            raise ValueError(f"the size {value} depends on values")
        return PLAIN[type(value)](known)
    return map_nested(value, lambda item: concrete(item, sizes))


def symbolic_sizes(value: Any) -> list[torch.SymInt]:
    """All symbolic sizes of the tensors in a nested value that sizes of a batch tell."""
    return [size for size in all_symbolic_sizes(value) if not depends_on_values(size)]


def all_symbolic_sizes(value: Any) -> list[torch.SymInt]:
    """All symbolic sizes of the tensors in a nested value, and the sizes in it."""
    if is_symbolic(value):
        return [value]
    if isinstance(value, Tensor):
        return [size for size in value.shape if is_symbolic(size)]
    return [size for item in items_of(value) for size in all_symbolic_sizes(item)]


def sizes_by_symbol(inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> dict[sympy.Basic, int]:
    """What the symbolic sizes of the recorded inputs are in a batch."""
    both = zip(inputs, tensors, strict=False)
    pairs = [pair for mine, yours in both for pair in zip(mine.shape, yours.shape, strict=False)]
    return {expression(size): number for size, number in pairs if expression(size).is_Symbol}


def sizes_in(batches: Sequence[Sizes], size: int | torch.SymInt) -> list[int]:
    """A size in each batch; none where it depends on values."""
    found = [sympy.sympify(expression(size).xreplace(dict(batch))) for batch in batches]
    return [] if any(number.free_symbols for number in found) else [int(number) for number in found]
