"""What functions of Python, and some of torch, make of sizes that are symbols.

`len(x)` has to be a plain number, `isinstance(x.shape[0], int)` is false, `min(length, 9)` decides for one of two, and
a symbol is no key of a dict; to `math.sqrt` and `torch.tensor` it is the number that it has in the traced batch. So
while a model is recorded, code finds others under these names, which differ for symbols alone. Those of builtins are
put into Python modules, where names are looked up first: torch's and sympy's own code is left alone, which tells
symbols from numbers and calls `len` all the time. `int` and `float` are classes that code also compares with, and stay.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_compress.graph.failures import SpecializedSizeError
from lightning_compress.graph.restore import assigned
from lightning_compress.graph.values import PLAIN, SYMBOLIC_TYPES, Sizes, expression, is_symbolic, sizes_in

_NOT_OF_MODELS = frozenset(
    {*sys.stdlib_module_names, "lightning_compress", "torch", "torchgen", "functorch", "sympy", "mpmath", "numpy"}
) - {"__main__"}
"""Packages whose code is none of a model's."""
_OF_MATH = ("sqrt", "exp", "log", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan")


def line_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """File and line of the first of these frames that is of a model's code; "": none is.

    Args:
        frames: with their lines, innermost first.
    """
    for frame, line in frames:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_OF_MODELS:
            return f"{Path(frame.f_code.co_filename).name}:{line}"
    return ""


class SizeAsKeyError(SpecializedSizeError, TypeError):
    """A size is a key of a dict, or an argument of a cached function. Some code does without a cache then."""


@contextmanager
def taking_symbols(batches: Sequence[Sizes], computed: Callable[..., Any]) -> Iterator[None]:
    """Within: the functions that code of models calls take symbols for the numbers that they stand for.

    Args:
        batches: that the recorded code has to serve.
        computed: what a function of `math` makes of a symbol, as another.
    """
    own = {"len": _length, "isinstance": _is_instance}
    own |= {"min": _chosen(min, torch.sym_min, batches), "max": _chosen(max, torch.sym_max, batches)}
    found = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] not in _NOT_OF_MODELS]
    names_of = [vars(each) for each in found if isinstance(each, ModuleType)]
    put = [(names, name) for names in names_of for name in own if name not in names]
    try:
        for names, name in put:
            names[name] = own[name]
        of_math = {name: _of_symbols(getattr(math, name), computed) for name in _OF_MATH}
        of_torch = {name: _tensor_of(getattr(torch, name)) for name in ("tensor", "as_tensor")}
        like = _tensor_like(Tensor.new_tensor, of_torch["tensor"])
        attention = _with_plain_flags(functional.scaled_dot_product_attention)
        with (
            assigned(torch.SymInt, __hash__=_hash),
            assigned(math, **of_math),
            assigned(torch, **of_torch),
            assigned(Tensor, new_tensor=like),
            assigned(functional, scaled_dot_product_attention=attention),
        ):
            yield
    finally:
        for names, name in put:
            if names.get(name) is own[name]:  # and nothing that code has put there since
                del names[name]


def _length(value: Any) -> Any:
    if isinstance(value, Tensor) and value.ndim and is_symbolic(value.shape[0]):
        return value.shape[0]
    return len(value)


def _is_instance(value: object, kinds: Any) -> bool:
    """Classes have instances in ways of their own: a protocol with attributes has no subclasses that could be told."""
    if isinstance(value, SYMBOLIC_TYPES) and not isinstance(value, kinds):
        kind = PLAIN[type(value)]
        return isinstance(kind() if value.node.hint is None else kind(value.node.hint), kinds)
    return isinstance(value, kinds)


def _of_symbols(usual: Callable[..., Any], computed: Callable[..., Any]) -> Callable[..., Any]:
    def call(number: Any, *others: Any) -> Any:
        is_symbol = isinstance(number, SYMBOLIC_TYPES) and not others
        return computed(usual, number) if is_symbol else usual(number, *others)

    return call


def _tensor_of(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor`, also of symbols among nested numbers."""

    def tensor(data: Any, *args: Any, **options: Any) -> Tensor:
        if not _has_symbols(data):
            return usual(data, *args, **options)
        if isinstance(data, list | tuple):
            return torch.stack([tensor(each, *args, **options) for each in data])
        return torch.full((), bool(data) if isinstance(data, torch.SymBool) else data, *args, **options)

    return tensor


def _tensor_like(usual: Callable[..., Tensor], tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`Tensor.new_tensor`, likewise."""

    def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
        if not _has_symbols(data):
            return usual(self, data, **options)
        given = {name: option for name, option in options.items() if option is not None}
        return tensor(data, **{"dtype": self.dtype, "device": self.device, **given})

    return new_tensor


def _with_plain_flags(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A flag decides what is computed, as a branch does."""

    def call(*args: Any, **options: Any) -> Tensor:
        named = {name: bool(each) if isinstance(each, torch.SymBool) else each for name, each in options.items()}
        return usual(*args, **named)

    return call


def _has_symbols(value: Any) -> bool:
    return any(map(_has_symbols, value)) if isinstance(value, list | tuple) else isinstance(value, SYMBOLIC_TYPES)


def _chosen(
    usual: Callable[..., Any], symbolic: Callable[[Any, Any], Any], batches: Sequence[Sizes]
) -> Callable[..., Any]:
    """`min` or `max`, which is an expression of both where batches differ in which of two sizes it is."""

    def one_of(first: Any, second: Any) -> Any:
        if {type(first), type(second)} not in ({torch.SymInt}, {torch.SymInt, int}):
            return usual(first, second)
        pairs = zip(sizes_in(batches, first), sizes_in(batches, second), strict=False)  # none, of what values tell
        is_first = {ours < theirs for ours, theirs in pairs if ours != theirs}
        return symbolic(first, second) if len(is_first) > 1 else usual(first, second)

    def choose(*given: Any, **options: Any) -> Any:
        values = given if len(given) > 1 else given[0] if given else ()
        values = list(values) if isinstance(values, Iterator) else values
        if not options and isinstance(values, list | tuple) and any(map(is_symbolic, values)):
            return reduce(one_of, values)
        return usual(values, **options) if len(given) == 1 else usual(*given, **options)

    return choose


_usual_hash = torch.SymInt.__hash__


def _hash(size: torch.SymInt) -> int:
    if size.node.is_nested_int():
        return _usual_hash(size)
    found = expression(size)
    if found.is_number:  # it was taken for a constant, of which `Attempt.check_sizes` tells
        return hash(int(found))
    symbol = min(found.free_symbols, key=str)
    raise SizeAsKeyError(f"it takes a size of the batch ({size}) for a key of a dict or of a cache", symbol)
