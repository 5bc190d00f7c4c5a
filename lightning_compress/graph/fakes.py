"""Fake tensors: of symbolic sizes, which remember what code asks of them, or of plain ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from traceback import walk_stack
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_compress.graph.bounds import within_bounds
from lightning_compress.graph.compat import (
    ConstantSource,
    FakeTensor,
    FakeTensorMode,
    GuardOnDataDependentSymNode,
    SLoc,
)
from lightning_compress.graph.conditions import of_some, unlike_one
from lightning_compress.graph.draws import draws
from lightning_compress.graph.failures import ExchangeError, SpecializedSizeError
from lightning_compress.graph.python_functions import line_of
from lightning_compress.graph.restore import assigned
from lightning_compress.graph.values import Sizes

TRACE_DEVICE = torch.device("cpu")
"""Where fake tensors claim to be: one device, wherever the weights are, so that an offloaded model traces too."""


class Shapes(ShapeEnv):
    """Symbols, and in `decisions` every condition on a size that code took for granted, with the line of that code.

    What an operation decides inside (a convolution its algorithm by the number of rows) it decides anew when it is run,
    so only equalities among those count: they may have turned a symbolic size into a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.decisions: list[tuple[sympy.Basic, str]] = []
        self.batches: Sequence[Sizes] = ()  # that the graph has to serve
        self.inside_operation: Callable[[], bool] = lambda: False
        self.equalities_allowed = True
        self.unlike_one: set[sympy.Symbol] = set()  # of which was taken for granted what does not hold of 1
        self.asked: set[sympy.Basic] = set()  # within a leaf
        self._unlike_one = cache(unlike_one)  # kernels that are made of others ask the same again and again
        self.decide: Callable[[sympy.Basic], bool | int | None] = lambda condition: None

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> sympy.Basic:
        """As in torch; what depends on values is asked of `decide`, which may leave it undecided."""
        try:
            found = super().evaluate_expr(orig_expr, *args, **kwargs)
            if isinstance(orig_expr, sympy.Basic) and not self.equalities_allowed:
                self.asked.add(orig_expr)
            elif isinstance(orig_expr, sympy.Basic) and not self.inside_operation():
                self.unlike_one |= self._unlike_one(orig_expr, found)
            return found
        except GuardOnDataDependentSymNode:
            if (outcome := self.decide(orig_expr)) is None:
                raise
            return sympy.sympify(outcome)

    def number_from_values(self, kind: type) -> Any:
        """A size, or another number or a flag, that no size of the batch tells: the graph reads it when needed."""
        with self.ignore_fresh_unbacked_symbols():  # no operation gives it
            return getattr(self, f"create_unbacked_sym{kind.__name__}")()

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        return SLoc(framework_loc or "", None), ""  # the real one imports all of torch's compiler (0.4 s)

    def _log_guard(self, prefix: str, g: Any, forcing_spec: bool) -> None:
        g = of_some(g)
        if g.has(sympy.Eq) and not self.equalities_allowed:
            raise SpecializedSizeError(f"it fixes sizes of the batch: {g}")
        if g.has(sympy.Eq) or not self.inside_operation():
            self.decisions.append((g, line_of(walk_stack(None))))


class _FakeMode(FakeTensorMode):
    draws = False  # random numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise ExchangeError
        self.draws = self.draws or draws(func, args, kwargs or {})
        if func is torch.ops.aten._fused_sgd_.default:  # of this, torch would make real tensors of all the parameters
            return None
        if isinstance(self.shape_env, Shapes):
            args = within_bounds(func, args, self.shape_env.batches)
        return super().__torch_dispatch__(func, types, args, kwargs)


def new_fake_mode(symbolic: bool = True, cached: bool = True) -> _FakeMode:
    """A fake-tensor mode, with symbolic or with plain sizes, that takes the model's real constants.

    `cached`: operations that are done again on like inputs are looked up.
    """
    mode = _FakeMode(shape_env=Shapes() if symbolic else None, allow_non_fake_inputs=True)
    mode.cache_enabled &= cached
    return mode


def shapes_of(fake_mode: FakeTensorMode) -> Shapes:
    """The symbols and guards of a fake mode made by `new_fake_mode`."""
    assert isinstance(fake_mode.shape_env, Shapes)
    return fake_mode.shape_env


def fake_like(fake_mode: FakeTensorMode, tensor: Tensor, device: torch.device = TRACE_DEVICE) -> FakeTensor:
    """A fake tensor of the same (fixed) sizes on the given device, whatever device the tensor is on (also `meta`)."""
    layout = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(fake_mode, layout, device)


def fake_batch(fake_mode: FakeTensorMode, tensors: Sequence[Tensor], dynamic: Sequence[Sequence[bool]]) -> list[Tensor]:
    """Fake inputs; dimensions marked dynamic get a symbol, equal sizes the same one."""
    fakes: list[Tensor] = []
    for index, (tensor, dims) in enumerate(zip(tensors, dynamic, strict=True)):
        kinds = [DimDynamic.DUCK if is_dynamic else DimDynamic.STATIC for is_dynamic in dims]
        context: StatelessSymbolicContext[..., Any] = StatelessSymbolicContext(dynamic_sizes=kinds)
        base = torch.empty(tensor.shape, dtype=tensor.dtype, device=TRACE_DEVICE)
        fakes.append(fake_mode.from_tensor(base, source=ConstantSource(f"batch{index}"), symbolic_context=context))
    return fakes


@contextmanager
def deciding_nothing(shapes: Shapes) -> Iterator[set[sympy.Basic]]:
    """Within: conditions on sizes are evaluated for the traced batch and not kept, but given; an equality raises.

    For the body of a leaf: it is run for real later and decides anew.

    Raises:
        SpecializedSizeError: at the first equality that is not true for all sizes.
    """
    kept = len(shapes.decisions)
    with shapes.suppress_guards(), assigned(shapes, equalities_allowed=False, asked=set()):
        yield shapes.asked
    del shapes.decisions[kept:]


def replace_by_fakes(root: nn.Module, fake_mode: FakeTensorMode, device: torch.device = TRACE_DEVICE) -> dict[int, str]:
    """Put fake tensors in place of parameters and buffers (undone by `attributes_restored`); names by id, of both.

    Tensor subclasses (DTensor, packed weights of other libraries) stay; the fake mode converts them when they are used.
    """
    names: dict[int, str] = {}
    fakes: dict[int, Tensor] = {}
    for prefix, module in root.named_modules():
        for container in (module._parameters, module._buffers):
            for key, tensor in ((key, each) for key, each in container.items() if each is not None):
                name = f"{prefix}.{key}" if prefix else key
                names.setdefault(id(tensor), name)
                if type(tensor) in (Tensor, nn.Parameter):
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = fake_like(fake_mode, tensor, device)
                        fakes[id(tensor)]._is_param = type(tensor) is nn.Parameter  # as in a subclass, after a copy
                    container[key] = fakes[id(tensor)]
                    names.setdefault(id(container[key]), name)
    return names
