"""What Python's own functions make of sizes that are symbols.

`len(x)` has to be a plain number, `isinstance(x.shape[0], int)` is false, `min(length, 9)` decides for one of two, and
a symbol is no key of a dict. So while a model is recorded, code finds others under these names, which differ for
symbols alone. They are put into Python modules, where names are looked up before the builtins: torch's and sympy's own
code is left alone, which tells symbols from numbers and calls `len` all the time.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_compress.graph.bounds import Sizes, sizes_in
from lightning_compress.graph.failures import SpecializedSizeError
from lightning_compress.graph.restore import assigned
from lightning_compress.graph.values import PLAIN, SYMBOLIC_TYPES, expression, is_symbolic

_NOT_OF_MODELS = frozenset(
    {*sys.stdlib_module_names, "lightning_compress", "torch", "torchgen", "functorch", "sympy", "mpmath", "numpy"}
) - {"__main__"}


class SizeAsKeyError(SpecializedSizeError, TypeError):
    """A size is a key of a dict, or an argument of a cached function. Some code does without a cache then."""


@contextmanager
def taking_symbols(batches: Sequence[Sizes]) -> Iterator[None]:
    """Within: the functions that code of models calls take symbols for the numbers that they stand for.

    Args:
        batches: that the recorded code has to serve.
    """
    own = {"len": _length, "isinstance": _is_instance}
    own |= {"min": _chosen(min, torch.sym_min, batches), "max": _chosen(max, torch.sym_max, batches)}
    found = [each for name, each in list(sys.modules.items()) if name.partition(".")[0] not in _NOT_OF_MODELS]
    names_of = [vars(each) for each in found if isinstance(each, ModuleType)]
    put = [(names, name) for names in names_of for name in own if name not in names]
    try:
        for names, name in put:
            names[name] = own[name]
        with assigned(torch.SymInt, __hash__=_hash):
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
