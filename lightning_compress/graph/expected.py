"""What was recorded of a call that was observed, and whether a batch keeps to it when the graph is run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from lightning_compress.errors import CalibrationDataError
from lightning_compress.graph.kept import is_plain
from lightning_compress.graph.values import SYMBOLIC_TYPES, expression, is_symbolic, items_of, map_nested

_EXPECTED = "expected"


@dataclass(frozen=True)
class _Shape:
    sizes: tuple[sympy.Expr, ...]
    dtype: torch.dtype


def expect(node: fx.Node, output: Any) -> None:
    """Note what a call that was observed returns, for `check_expected`."""
    node.meta[_EXPECTED] = _copied(output)


def _copied(value: Any) -> Any:
    """The same tensors in containers of its own: the model may put something else into those that it got."""
    return value if isinstance(value, Tensor) else map_nested(value, _copied)


def expected(node: fx.Node) -> Any:
    """What a call that was observed returns, with symbolic sizes; None where nothing was noted."""
    return node.meta.get(_EXPECTED)


def check_expected(node: fx.Node, values: Mapping[Any, object], output: Any) -> None:
    """Whether a call returns what was recorded of it: as many values, of as many dimensions, of the sizes that follow
    from those of what it reads or are constants of the graph, as numbers, flags and words are.

    Args:
        node: of the call; nothing is expected of most.
        values: of the nodes that it reads, among others.
        output: what it returned.

    Raises:
        CalibrationDataError: it does not; the graph does not serve this batch.
    """
    if _EXPECTED not in node.meta:
        return
    sizes: dict[sympy.Expr, sympy.Expr] = {}
    for read in node.all_input_nodes:
        traced, value = read.meta.get("val"), values.get(read)
        if isinstance(traced, Tensor) and isinstance(value, Tensor):
            sizes.update(zip(map(expression, traced.shape), map(expression, value.shape), strict=True))
        elif is_symbolic(traced) and isinstance(value, int):
            sizes[expression(traced)] = expression(value)
    wanted, found = described(node.meta[_EXPECTED]), described(output)
    if not _fits(wanted, found, {size: number for size, number in sizes.items() if size.is_Symbol}):
        raise CalibrationDataError(
            f"{getattr(node.target, 'name', node.name)} takes another way on a batch than on those that the model was "
            f"recorded with: it gives {text(found)}, recorded was {text(wanted)}. Bring the batches to one form: "
            "as many images in each, of one size; or, where it says how long rows are, one as long as the batch."
        )


def described(value: Any) -> Any:
    """Types, keys, sizes and plain values."""
    if isinstance(value, SYMBOLIC_TYPES):
        return sympy.sympify(value.node.expr)
    if isinstance(value, Tensor):
        return _Shape(tuple(map(expression, value.shape)), value.dtype)
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    items = items_of(value)
    return [described(item) for item in items] if items else value if is_plain(value) else type(value).__name__


def _fits(expected: Any, found: Any, sizes: Mapping[sympy.Expr, sympy.Expr]) -> bool:
    if isinstance(expected, _Shape):
        if not isinstance(found, _Shape) or (len(expected.sizes), expected.dtype) != (len(found.sizes), found.dtype):
            return False
        return all(_is_as_told(size, other, sizes) for size, other in zip(expected.sizes, found.sizes, strict=True))
    if isinstance(expected, sympy.Basic):
        return is_plain(found) and _is_as_told(expected, found, sizes)
    if isinstance(expected, dict):
        is_alike = isinstance(found, dict) and expected.keys() == found.keys()
        return is_alike and all(_fits(item, found[key], sizes) for key, item in expected.items())
    if isinstance(expected, list):
        is_alike = isinstance(found, list) and len(expected) == len(found)
        return is_alike and all(_fits(*pair, sizes) for pair in zip(expected, found, strict=True))
    return bool(expected == found)


def _is_as_told(told: sympy.Basic, found: object, sizes: Mapping[sympy.Expr, sympy.Expr]) -> bool:
    """Whether a number is what an expression of sizes says, if they are all known."""
    number = told.xreplace(sizes)
    return bool(number == found or number.free_symbols)


def text(described: Any) -> str:
    """For a message, of what `described` gives."""
    if isinstance(described, _Shape):
        return f"[{', '.join(map(str, described.sizes))}]"
    if isinstance(described, dict):
        return "{" + ", ".join(f"{key}: {text(item)}" for key, item in described.items()) + "}"
    if isinstance(described, list):
        more = ", ..." if len(described) > 3 else ""
        return f"{len(described)} values ({', '.join(map(text, described[:3]))}{more})"
    return str(described)
