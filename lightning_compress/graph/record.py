"""One attempt at recording a model: which module calls become leaves, and where an attempt failed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import Tensor, fx, nn

from lightning_compress.graph import compat
from lightning_compress.graph.aliases import Viewed, note_viewed
from lightning_compress.graph.cut import Body, Cut
from lightning_compress.graph.expected import expect
from lightning_compress.graph.experts import GroupedLinear
from lightning_compress.graph.failures import SpecializedSizeError, at
from lightning_compress.graph.kept import KeptByLeaves
from lightning_compress.graph.leaf import Leaf, Within
from lightning_compress.graph.methods import Method, Unrecorded, original
from lightning_compress.graph.outputs import Outputs
from lightning_compress.graph.recorder import Recorder, active_recorder
from lightning_compress.graph.trees import tensors_in, versions
from lightning_compress.graph.values import items_of
from lightning_compress.recipe.forms import Rows, has_forward_of

PASS_THROUGH = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class LastCallRecorded(BaseException):
    """Ends a recording; no code takes it for an error of its own."""


@dataclass
class Attempt:
    """One recording.

    Attributes:
        cut: which modules are single calls.
        recorder: makes the nodes.
        outputs: tells what single calls return.
        spans: nodes of the calls of boundary modules, so far.
        failure: the innermost module that failed, and how.
        kept: what leaves keep.
    """

    cut: Cut
    recorder: Recorder
    outputs: Outputs
    spans: list[tuple[str, list[fx.Node]]] = field(default_factory=list)
    failure: tuple[str, BaseException] | None = None
    kept: KeptByLeaves = field(default_factory=KeptByLeaves)
    _inside_boundary: bool = False
    _num_checked: int = 0
    _num_counted: int = 0

    def wrap(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """What a call of `module` does while recording (see `restore.calls_replaced`)."""
        is_leaf = name in self.cut.leaves
        original: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if active_recorder() is not self.recorder:
                return original(*args, **kwargs)
            self.check_sizes()  # outside the `try`: what the caller did is the caller's failure
            is_call = is_leaf and not self.kept.opens(name, module)
            first = len(self.recorder.graph.nodes)
            is_span = name in self.cut.boundaries and not self._inside_boundary
            self._inside_boundary |= is_span
            try:
                output = self._call_leaf(name, module, args, kwargs) if is_call else original(*args, **kwargs)
                if is_leaf:
                    self.kept.behind(name, module)
                self.check_sizes()
            except Exception as error:
                if self.failure is None or self.failure[1] is not error:
                    self.failure = (name, error)
                raise
            finally:
                self._inside_boundary &= not is_span
                if is_span:
                    self.spans.append((name, list(self.recorder.graph.nodes)[first:]))
            self._num_counted += name in self.cut.counted[0]
            if name in self.cut.counted[0] and self._num_counted == self.cut.counted[1]:
                raise LastCallRecorded
            return output

        return call

    def _call_leaf(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if passes_through(module):
            return args[0] if args else next(iter(kwargs.values()))
        try:
            with compat.not_recording():
                self.recorder.to_argument((args, kwargs))
        except NotImplementedError:  # modules, caches: no graph can hold them
            return module._call_impl(*args, **kwargs)
        # containers of its own: what the body puts into them must not be there yet when it is recorded
        given = compat.pytree.tree_map(lambda leaf: leaf, (args, kwargs))
        before = _contents(given)
        with compat.not_recording():
            output, views = self.outputs.of_leaf(name, module, *given)
        if before != _contents(given):  # what it wrote to others may read, which operations tell
            return module._call_impl(*args, **kwargs)
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
            values = [(self.recorder.to_argument(given[number]), is_write) for number, is_write in sorted(views)]
        node = self.recorder.add_call(leaf, args, kwargs, output)
        note_viewed(node, values)
        return node

    def wrap_method(self, name: str, method: Method) -> Callable[..., Any]:
        """What a call of `method` does while recording (see `methods.methods_replaced`)."""

        function = original(method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if active_recorder() is not self.recorder:
                return function(*args, **kwargs)
            try:
                with compat.not_recording():
                    output, views = self.outputs.of_observed(name, args, kwargs)
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

    def check_sizes(self) -> None:
        """Raise if code tied a size of the batch to its traced value: the graph would not serve ragged batches."""
        shapes, symbols = self.outputs.shapes, self.outputs.other.keys()
        if len(shapes.decisions) == self._num_checked:
            return
        new, self._num_checked = shapes.decisions[self._num_checked :], len(shapes.decisions)
        fixed = [
            symbol for symbol in symbols if symbol in shapes.replacements and shapes.replacements[symbol].is_number
        ]
        if fixed:
            size = shapes.replacements[fixed[0]]
            line = next((line for each, line in reversed(new) if fixed[0] in each.free_symbols), "")
            raise SpecializedSizeError(f"it takes a size of the batch ({size}) for a constant{at(line)}", fixed[0])
        equalities = [each for each, _ in new if each.has(sympy.Eq) and each.free_symbols & symbols]
        if equalities and self._inside_boundary:
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


def passes_through(module: nn.Module) -> bool:
    """Whether the module returns its input: such calls are not recorded at all, unless somebody hooked on to them."""
    kind = type(module)
    if kind not in PASS_THROUGH or module._forward_hooks or module._forward_pre_hooks:
        return False
    if not has_forward_of(module, kind):
        return False
    return type(module) is nn.Identity or not module.training
