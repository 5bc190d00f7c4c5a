"""One attempt at recording a model: which module calls become leaves, and where an attempt failed.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from lightning_compress.graph import compat
from lightning_compress.graph.aliases import Viewed, note_viewed, viewed
from lightning_compress.graph.bounds import Sizes, deciding_otherwise
from lightning_compress.graph.expected import expect
from lightning_compress.graph.experts import GroupedLinear
from lightning_compress.graph.failures import SetFromOutsideError, SpecializedSizeError, at
from lightning_compress.graph.kept import Kept, Preset, changed, is_plain, what_is_kept
from lightning_compress.graph.leaf import Leaf, Within
from lightning_compress.graph.methods import Method, Unrecorded, original
from lightning_compress.graph.restore import attributes_restored
from lightning_compress.graph.signatures import BUT_ITS_NUMBER, call_signature
from lightning_compress.graph.symbolic import Seen, as_in_all, known_sizes, layouts, of_another_form, symbolic_like
from lightning_compress.graph.trees import tensors_in, versions
from lightning_compress.graph.values import all_symbolic_sizes, concrete, expression, items_of, symbolic_sizes
from lightning_compress.recipe.forms import Rows, has_forward_of

PASS_THROUGH = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Body(IntEnum):
    """How a leaf's output shape is found."""

    SYMBOLIC = 0
    STATIC = 1
    OBSERVED = 2


@dataclass(frozen=True)
class Cut:
    """Which modules are recorded how; all names are qualified names in the root.

    Attributes:
        leaves: single calls.
        containers: are looked into.
        boundaries: their calls are marked as spans.
        bodies: how the output shape of a leaf is found.
        observed: what real runs of two batches, and of true ones beside, told of leaves and methods, call by call.
        methods: of containers, single calls too, with bodies that are observed.
        given_up: methods that cannot be.
        decides: branches that values decide are taken as all batches take them.
        multiplied: leaves that count as called where code multiplies with their weights.
        counted: leaves behind whose last call the recording ends, and how many there are; none: it goes on to the end.
    """

    leaves: Mapping[str, nn.Module]
    containers: Mapping[str, nn.Module]
    boundaries: frozenset[str]
    bodies: Mapping[str, Body]
    observed: Mapping[str, Sequence[Sequence[Any]]]
    methods: Mapping[str, Method] = field(default_factory=dict)
    given_up: frozenset[str] = frozenset()
    decides: bool = False
    multiplied: frozenset[str] = frozenset()
    counted: tuple[frozenset[str], int] = (frozenset(), 0)


ANY_SIZE = 7
"""Stands for sizes that follow from values."""


class LastCallRecorded(BaseException):
    """Ends a recording; no code takes it for an error of its own."""


@dataclass
class Attempt:
    """State of one recording: what was seen so far.

    `sizes`: the batch's symbolic sizes, which consist of `symbols`; `other`: their values in the second batch; `true`:
    in further ones, of which real runs tell; `kept`: what modules of leaves had when it began, or after their last
    call; `presets`: what of that was set before their first; `opened`: leaves that are recorded by their operations;
    `remembering`: leaves of which one call tells another something; `outcomes`: see `deciding_otherwise`; `elsewhere`:
    what calls return on further batches.
    """

    cut: Cut
    recorder: compat.Recorder
    symbols: frozenset[sympy.Symbol]
    sizes: Sequence[torch.SymInt]
    other: Mapping[sympy.Symbol, int]
    true: Sequence[Sizes] = ()
    outcomes: dict[sympy.Basic, list[object]] = field(default_factory=dict)
    spans: list[tuple[str, list[fx.Node]]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    outputs: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    elsewhere: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    checked: int = 0
    inside_boundary: bool = False
    failure: tuple[str, BaseException] | None = None
    kept: Kept = field(default_factory=dict)
    presets: list[Preset] = field(default_factory=list)
    called: set[nn.Module] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    remembering: set[str] = field(default_factory=set)
    num_counted: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within: the step runs, and what leaves have as that begins is what they are to have."""
        for module in self.cut.leaves.values():
            self.kept |= what_is_kept(module)
        yield

    def wrap(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """What a call of `module` does while recording (see `restore.calls_replaced`)."""
        is_leaf = name in self.cut.leaves
        original: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if compat.active_recorder() is not self.recorder:
                return original(*args, **kwargs)
            self.check_sizes()  # outside the `try`: what the caller did is the caller's failure
            run = self._call_leaf if is_leaf and not self._opens(name, module) else self._call_container
            first = len(self.recorder.graph.nodes)
            is_span = name in self.cut.boundaries and not self.inside_boundary
            self.inside_boundary |= is_span
            try:
                output = run(name, module, args, kwargs)
                if is_leaf:
                    self._note_what_is_kept(name, module)
                self.check_sizes()
            except Exception as error:
                if self.failure is None or self.failure[1] is not error:
                    self.failure = (name, error)
                raise
            finally:
                self.inside_boundary &= not is_span
                if is_span:
                    self.spans.append((name, list(self.recorder.graph.nodes)[first:]))
            self.num_counted += name in self.cut.counted[0]
            if name in self.cut.counted[0] and self.num_counted == self.cut.counted[1]:
                raise LastCallRecorded
            return output

        return call

    def _call_container(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    def _call_leaf(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if passes_through(module):
            return args[0] if args else next(iter(kwargs.values()))
        try:
            with compat.not_recording():
                compat.to_argument(self.recorder, (args, kwargs))
        except NotImplementedError:  # modules, caches: no graph can hold them
            return self._call_container(name, module, args, kwargs)
        # containers of its own: what the body puts into them must not be there yet when it is recorded
        given = compat.pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        before = _contents(given)
        with compat.not_recording():
            output, views = self._leaf_output(name, module, *given)
        if before != _contents(given):  # what it wrote to others may read, which operations tell
            return self._call_container(name, module, args, kwargs)
        grouped = module.grouped(name) if isinstance(module, GroupedLinear) else None
        lender = name.rpartition(".")[0] if isinstance(module, Rows) else None
        leaf = Leaf(name, grouped, lender=lender, hooked=bool(module._forward_pre_hooks))
        node = self._add_call(leaf, args, kwargs, output, views)
        if self.cut.bodies.get(name, Body.SYMBOLIC) is not Body.SYMBOLIC:  # of which all conditions are known
            expect(node, output)
        return output

    def _add_call(self, leaf: Leaf, args: Any, kwargs: Any, output: Any, views: Viewed) -> fx.Node:
        with compat.not_recording():
            given = tensors_in((args, kwargs))
            values = [
                (compat.to_argument(self.recorder, given[number]), is_write) for number, is_write in sorted(views)
            ]
        node = compat.add_call(self.recorder, leaf, args, kwargs, output)
        note_viewed(node, values)
        return node

    def wrap_method(self, name: str, method: Method) -> Callable[..., Any]:
        """What a call of `method` does while recording (see `methods.methods_replaced`)."""

        function = original(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if compat.active_recorder() is not self.recorder:
                return function(*args, **kwargs)
            try:
                with compat.not_recording():
                    output, views = self._observed_output(name, args, kwargs)
                _check_only_tensors(output)
                if method.writes:
                    raise TypeError("it changes what it is given, which a graph would not know")
                owner = name.removesuffix(method.name)
                tensors = method.module if isinstance(method.module, nn.Module) else nn.Module()
                own = (f"{owner}{tensor}" for tensor in (*tensors._parameters, *tensors._buffers))
                leaf = Leaf(name, within=Within(method.calls, tuple(dict.fromkeys((*own, *method.reads)))))
                expect(self._add_call(leaf, args, kwargs, output, views), output)
                for module, attribute in method.sets:
                    module.__dict__[attribute] = Unrecorded(f"{name} sets {attribute}")
            except Exception as error:
                self.failure = (name, error)
                raise
            return output

        return call

    def _leaf_output(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Viewed]:
        """What a call returns, and which of its arguments that is `viewed` of."""
        body = self.cut.bodies.get(name, Body.SYMBOLIC)
        if body is Body.SYMBOLIC:
            return self._symbolic_output(module, args, kwargs)
        if body is Body.OBSERVED:
            return self._observed_output(name, args, kwargs)
        shapes = compat.shapes_of(self.recorder.fake_mode)
        sizes = (shapes.batches[0], self.other)
        ((first, _), (second, _)), views = self._static_outputs(sizes, module, args, kwargs, of_values=False)
        output = self._of_two(first, second, args, kwargs)
        seen, others = self._static_outputs(self.true, module, args, kwargs)
        return as_in_all(output, seen, shapes.number_from_values), views | others

    def _observed_output(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Viewed]:
        number, self.calls[name] = self.calls[name], self.calls[name] + 1
        (first, second, *others), views = zip(*(each[number] for each in self.cut.observed[name]), strict=True)
        from_values = compat.shapes_of(self.recorder.fake_mode).number_from_values
        output = self._of_two(first, second, args, kwargs, from_values)
        return as_in_all(output, list(zip(others, self.true, strict=True)), from_values), frozenset().union(*views)

    def _of_two(
        self, first: Any, second: Any, args: Any, kwargs: Any, other: Callable[[type], Any] | None = None
    ) -> Any:
        known = known_sizes([*symbolic_sizes((args, kwargs)), *self.sizes], self.other)
        return symbolic_like(first, second, known, other)

    def _static_outputs(
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
            if key is None or place not in self.elsewhere:
                plain_args, plain_kwargs = concrete((args, kwargs), sizes)
                given = versions((plain_args, plain_kwargs))
                with attributes_restored(module):
                    output = module._call_impl(*plain_args, **plain_kwargs)
                self.elsewhere[place] = layouts(output), viewed((plain_args, plain_kwargs), output, given)
            found, of = self.elsewhere[place]
            seen.append((found, sizes))
            views |= of
        return seen, views

    def _symbolic_output(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Viewed]:
        key = call_signature(module, args, kwargs)
        if key is not None and key in self.outputs:
            known = self.outputs[key]
            return known.new_empty_strided(known.shape, known.stride()), frozenset()  # memory of its own
        shapes = compat.shapes_of(self.recorder.fake_mode)
        before, given = versions((args, kwargs, list(module.buffers()))), versions((args, kwargs))
        with compat.deciding_nothing(shapes) as asked:
            output = module._call_impl(*args, **kwargs)
        views = viewed((args, kwargs), output, given)  # this and the next have to be seen of each such module
        writes = before != versions((args, kwargs, list(module.buffers())))
        seen, others = self._elsewhere(asked, output, module, args, kwargs)
        views |= others
        output = as_in_all(output, seen, shapes.number_from_values)
        _forget_inner_sizes(shapes, output)
        if key is not None and isinstance(output, Tensor) and not (views or writes):
            self.outputs[key] = output
        return output, views

    def _elsewhere(
        self, asked: set[sympy.Basic], output: Any, module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Seen, Viewed]:
        """What a module returns on batches for which it answers a question otherwise, less those of one row or token
        where tensors have other dimensions then: of these `ones` tells."""
        shapes = compat.shapes_of(self.recorder.fake_mode)
        others = deciding_otherwise(asked, shapes.batches, self.outcomes)
        seen, views = self._static_outputs(others, module, args, kwargs)
        unlike = of_another_form(output, seen)
        ones = [{symbol for symbol, size in sizes.items() if size == 1} for sizes in unlike]
        if not ones or not all(ones):
            return seen, views
        shapes.unlike_one.update(*ones)
        return [(found, sizes) for found, sizes in seen if sizes not in unlike], views

    def _opens(self, name: str, module: nn.Module) -> bool:
        """Whether a leaf is recorded by its operations, for code has changed what it keeps and it owns no weights.

        Raises:
            SetFromOutsideError: it does, and what was changed cannot be set before the graph runs.
        """
        found = changed(name, module, self.kept)
        if found and next(module.parameters(), None) is None:
            self.opened.add(name)
        if name in self.opened:
            return True
        for owner, (path, key, value) in found:
            if owner in self.called or not is_plain(value):
                raise SetFromOutsideError(f"`{key}` of {path} is set before it is called, which no graph can hold")
            self.presets.append((path, key, value))
        return False

    def _note_what_is_kept(self, name: str, module: nn.Module) -> None:
        """Behind a call."""
        if name not in self.opened and any(owner in self.called for owner, _ in changed(name, module, self.kept)):
            self.remembering.add(name)
        self.kept |= what_is_kept(module)
        self.called.update(module.modules())

    def check_sizes(self) -> None:
        """Raise if code tied a size of the batch to its traced value: the graph would not serve ragged batches."""
        env = compat.shapes_of(self.recorder.fake_mode)
        if len(env.decisions) == self.checked:
            return
        new, self.checked = env.decisions[self.checked :], len(env.decisions)
        fixed = [symbol for symbol in self.symbols if symbol in env.replacements and env.replacements[symbol].is_number]
        if fixed:
            size = env.replacements[fixed[0]]
            line = next((line for each, line in reversed(new) if fixed[0] in each.free_symbols), "")
            raise SpecializedSizeError(f"it takes a size of the batch ({size}) for a constant{at(line)}", fixed[0])
        equalities = [each for each, _ in new if each.has(sympy.Eq) and each.free_symbols & self.symbols]
        if equalities and self.inside_boundary:
            raise SpecializedSizeError(f"it fixes sizes of the batch: {equalities[0]}")


def _contents(value: object) -> list[Any]:
    """Which tensors are in a nested value, and how often they have been written to."""
    leaves, structure = compat.pytree.tree_flatten(value)
    return [structure, *(id(leaf) for leaf in leaves), *versions(leaves)]


def _check_only_tensors(value: Any) -> None:
    """A number or a flag that a method returns may follow from values; a graph would hold that of the traced batch.

    Raises:
        TypeError: there is one.
    """
    items = items_of(value)
    if not (isinstance(value, Tensor | dict | list | tuple) or value is None or items):
        raise TypeError(f"it returns a {type(value).__name__}, which a graph would take for a constant")
    for item in items:
        _check_only_tensors(item)


def _forget_inner_sizes(shapes: compat.Shapes, output: object) -> None:
    """Behind the body of a leaf: sizes that it got from values and that are none of its output's are its own affair;
    torch would miss them there."""
    leaving = {symbol for each in tensors_in(output) for size in each.shape for symbol in expression(size).free_symbols}
    shapes.pending_fresh_unbacked_symbols = [
        symbol for symbol in shapes.pending_fresh_unbacked_symbols if symbol in leaving
    ]


def passes_through(module: nn.Module) -> bool:
    """Whether the module returns its input: such calls are not recorded at all, unless somebody hooked on to them."""
    kind = type(module)
    if kind not in PASS_THROUGH or module._forward_hooks or module._forward_pre_hooks:
        return False
    if not has_forward_of(module, kind):
        return False
    return type(module) is nn.Identity or not module.training
