"""What a call that is recorded as one node returns: tensors with symbolic sizes.

A leaf's node is recorded, and its body runs on the fake tensors, unrecorded, to learn its output's shape. Some cannot:
they read values, or loop over a symbolic length. So there are three ways, the caller escalating from one to the next:

- SYMBOLIC: on the symbolic sizes;
- STATIC: on fake tensors of the traced batch's plain sizes;
- OBSERVED: not at all; the output's sizes are those of a real run of the whole step.

In the latter two, the body is run for two batches of different sizes, and for true ones beside. An output size that is
the same in both is a constant (unless a size of the batch did not change either); what the others may be, `symbolic`
says. Neither tells what the body decides by, so what it returns later is compared with that.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from lightning_compress.graph.aliases import Viewed, viewed
from lightning_compress.graph.conditions import deciding_otherwise
from lightning_compress.graph.cut import Body, Cut
from lightning_compress.graph.fakes import Shapes, deciding_nothing
from lightning_compress.graph.restore import attributes_restored
from lightning_compress.graph.signatures import BUT_ITS_NUMBER, call_signature
from lightning_compress.graph.symbolic import Seen, as_in_all, known_sizes, layouts, of_another_form, symbolic_like
from lightning_compress.graph.trees import tensors_in, versions
from lightning_compress.graph.values import Sizes, all_symbolic_sizes, concrete, expression, symbolic_sizes

ANY_SIZE = 7
"""Stands for sizes that follow from values."""


@dataclass
class Outputs:
    """What calls return, each with which of its arguments that is `viewed` of.

    Attributes:
        cut: how the output of a leaf is found.
        shapes: the symbols of the recording.
        sizes: symbolic sizes of the batch.
        other: what they are in the second batch.
        true: what they are in further ones, of which real runs tell.
    """

    cut: Cut
    shapes: Shapes
    sizes: Sequence[torch.SymInt]
    other: Mapping[sympy.Symbol, int]
    true: Sequence[Sizes]
    _num_calls: Counter[str] = field(default_factory=Counter)
    _known: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _outcomes: dict[sympy.Basic, list[object]] = field(default_factory=dict)

    def of_leaf(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Viewed]:
        """Of a call of a leaf."""
        body = self.cut.bodies.get(name, Body.SYMBOLIC)
        if body is Body.SYMBOLIC:
            return self._symbolic(module, args, kwargs)
        if body is Body.OBSERVED:
            return self.of_observed(name, args, kwargs)
        sizes = (self.shapes.batches[0], self.other)
        ((first, _), (second, _)), views = self._static(sizes, module, args, kwargs, of_values=False)
        output = self._of_two(first, second, args, kwargs)
        seen, others = self._static(self.true, module, args, kwargs)
        return as_in_all(output, seen, self.shapes.number_from_values), views | others

    def of_observed(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Viewed]:
        """Of a call of a leaf or a method that was seen in real runs."""
        number, self._num_calls[name] = self._num_calls[name], self._num_calls[name] + 1
        (first, second, *others), views = zip(*(each[number] for each in self.cut.observed[name]), strict=True)
        output = self._of_two(first, second, args, kwargs, self.shapes.number_from_values)
        output = as_in_all(output, list(zip(others, self.true, strict=True)), self.shapes.number_from_values)
        return output, frozenset().union(*views)

    def _of_two(
        self, first: Any, second: Any, args: Any, kwargs: Any, other: Callable[[type], Any] | None = None
    ) -> Any:
        known = known_sizes([*symbolic_sizes((args, kwargs)), *self.sizes], self.other)
        return symbolic_like(first, second, known, other)

    def _static(
        self, batches: Sequence[Sizes], module: nn.Module, args: Any, kwargs: Any, *, of_values: bool = True
    ) -> tuple[Seen, Viewed]:
        """What a module returns on batches of these sizes, and of what that is `viewed`. Layers that differ in their
        number alone are run once: loops over tokens take long.

        Args:
            batches: their sizes.
            module, args, kwargs: the call.
            of_values: sizes that follow from values are any.

        Raises:
            ValueError: there are such, and they may not be any.
        """
        key = call_signature(module, args, kwargs, BUT_ITS_NUMBER) if batches else None
        symbols = [symbol for size in all_symbolic_sizes((args, kwargs)) for symbol in expression(size).free_symbols]
        unknown = dict.fromkeys(symbols, ANY_SIZE) if of_values else {}
        seen, views = [], Viewed()
        for sizes in ({**unknown, **each} for each in batches):
            place = (key, frozenset(sizes.items()))
            if key is None or place not in self._seen:
                plain_args, plain_kwargs = concrete((args, kwargs), sizes)
                given = versions((plain_args, plain_kwargs))
                with attributes_restored(module):
                    output = module._call_impl(*plain_args, **plain_kwargs)
                self._seen[place] = layouts(output), viewed((plain_args, plain_kwargs), output, given)
            found, of = self._seen[place]
            seen.append((found, sizes))
            views |= of
        return seen, views

    def _symbolic(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Viewed]:
        key = call_signature(module, args, kwargs)
        if key is not None and key in self._known:
            known = self._known[key]
            return known.new_empty_strided(known.shape, known.stride()), frozenset()  # memory of its own
        before, given = versions((args, kwargs, list(module.buffers()))), versions((args, kwargs))
        with deciding_nothing(self.shapes) as asked:
            output = module._call_impl(*args, **kwargs)
        views = viewed((args, kwargs), output, given)  # this and the next have to be seen of each such module
        writes = before != versions((args, kwargs, list(module.buffers())))
        seen, others = self._elsewhere(asked, output, module, args, kwargs)
        views |= others
        output = as_in_all(output, seen, self.shapes.number_from_values)
        _forget_inner_sizes(self.shapes, output)
        if key is not None and isinstance(output, Tensor) and not (views or writes):
            self._known[key] = output
        return output, views

    def _elsewhere(
        self, asked: set[sympy.Basic], output: Any, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Seen, Viewed]:
        """What a module returns on batches for which it answers a question otherwise, less those of one row or token
        where tensors have other dimensions then: of these `ones` tells."""
        others = deciding_otherwise(asked, self.shapes.batches, self._outcomes)
        seen, views = self._static(others, module, args, kwargs)
        unlike = of_another_form(output, seen)
        ones = [{symbol for symbol, size in sizes.items() if size == 1} for sizes in unlike]
        if not ones or not all(ones):
            return seen, views
        self.shapes.unlike_one.update(*ones)
        return [(found, sizes) for found, sizes in seen if sizes not in unlike], views


def _forget_inner_sizes(shapes: Shapes, output: object) -> None:
    """Behind the body of a leaf: sizes that it got from values and that are none of its output's are its own affair;
    torch would miss them there."""
    leaving = {symbol for each in tensors_in(output) for size in each.shape for symbol in expression(size).free_symbols}
    shapes.pending_fresh_unbacked_symbols = [
        symbol for symbol in shapes.pending_fresh_unbacked_symbols if symbol in leaving
    ]
