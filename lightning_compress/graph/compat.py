"""Every private import of torch and transformers, and everything of theirs that is patched while tracing.

Written against torch 2.11-2.15 and transformers 5.15-5.24. What is used and why:

- `ProxyTorchDispatchMode`, `PythonKeyTracer`, `FakeTensorMode`, `ShapeEnv`: parts of `make_fx`, which itself names
  parameters `_param_constant0`, keeps `no_grad` and autocast switches as nodes and builds a GraphModule nobody runs.
- `masking_utils.find_packed_sequence_indices` reads values; on fake tensors it assumes packing (no fast path).
- `config._experts_implementation`: mixture-of-experts modules loop over the experts that were hit, which fake tensors
  cannot tell; `batched_mm` has the same result shape and no such loop. `grouped_mm` takes fakes of bfloat16 alone.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import cache, partial
from traceback import walk_stack
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._functorch import pyfunctorch
from torch._guards import SLoc
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _temp_remove_pre_dispatch_torch_function_mode,
    decompose,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from torch.utils import _python_dispatch, _pytree
from torch.utils._sympy import functions as sympy_functions
from transformers import masking_utils
from transformers.integrations import moe

from lightning_compress.graph.bounds import Sizes, of_some, pad_sequence, within_bounds
from lightning_compress.graph.configs import configs_of
from lightning_compress.graph.draws import draws
from lightning_compress.graph.failures import AutocastError, ExchangeError, SpecializedSizeError, UnrecordedTensorError
from lightning_compress.graph.python_functions import line_of, taking_symbols
from lightning_compress.graph.restore import assigned, autocast_restored
from lightning_compress.graph.values import SYMBOLIC_TYPES, Made, attributes_of_dataclass, map_nested, unlike_one

pytree = _pytree
TorchDispatchMode = _python_dispatch.TorchDispatchMode
outside_modes = _python_dispatch._disable_current_modes

TRACE_DEVICE = torch.device("cpu")
"""Where fake tensors claim to be: one device, wherever the weights are, so that an offloaded model traces too."""


class Recorder(PythonKeyTracer):
    """Builds the graph; tensors that nobody computed become `get_attr` nodes with qualified names."""

    def __init__(self, names: Mapping[int, str], fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.root = nn.Module()
        self.graph = fx.Graph(tracer_cls=PythonKeyTracer)
        self.names = names
        self.fake_mode = fake_mode
        self.constants: dict[str, Tensor] = {}
        self.before_node: Callable[[], None] = lambda: None

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """As in fx; `before_node` may object."""
        self.before_node()
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """As in fx, but a bare tensor is looked up by identity."""
        if isinstance(a, torch.ScriptObject):  # a process group
            raise ExchangeError
        if isinstance(a, torch.Generator):
            raise TypeError("an operation draws from a generator of the model's own")
        if isinstance(a, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(a):
            raise TypeError("an operation is inside of a transformation of torch.func (vmap, grad, jvp)")
        return self._attribute(a) if isinstance(a, Tensor) else super().create_arg(a)

    def _attribute(self, tensor: Tensor) -> fx.Node:
        name = self.names.get(id(tensor))
        if name is None:
            if isinstance(tensor, FakeTensor):
                raise UnrecordedTensorError(
                    f"a tensor of shape {tuple(tensor.shape)} was kept on a module by one call and used by another"
                )
            name = next((k for k, v in self.constants.items() if v is tensor), f"constant_{len(self.constants)}")
            self.constants[name] = tensor
        node = fx.proxy.TracerBase.create_node(self, "get_attr", name, (), {})
        node.meta["val"] = tensor if isinstance(tensor, FakeTensor) else fake_like(self.fake_mode, tensor)
        return node


class _GradAndAutocast(PreDispatchTorchFunctionMode):
    """Carries out switches of gradient and autocast without recording them: the executor runs under `no_grad`. Whether
    `contiguous` has something to do is its own affair."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is torch._C._set_grad_enabled:
            func(*args)
            return None
        if func is torch.amp.autocast_mode._enter_autocast:
            if args[2]:
                raise AutocastError(f"autocast to {args[1]} is switched on between two modules")
            return None
        if func is Tensor.contiguous and isinstance(self.tracer, Recorder):
            with assigned(shapes_of(self.tracer.fake_mode), inside_operation=lambda: True):
                return super().__torch_function__(func, types, args, kwargs)
        is_exit = func is torch.amp.autocast_mode._exit_autocast
        return None if is_exit else super().__torch_function__(func, types, args, kwargs)


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
def recording(recorder: Recorder) -> Iterator[None]:
    """Within: operations on fake tensors are recorded, before they are taken apart (`aten.linear` stays one node)."""
    shapes = shapes_of(recorder.fake_mode)
    decompositions: dict[Any, Any] = {torch.ops.aten.sym_numel.default: torch._decomp.decompositions.sym_numel}
    decompositions[torch.ops.aten.pad_sequence.default] = partial(pad_sequence, shapes.batches)
    proxy_mode = ProxyTorchDispatchMode(recorder, "symbolic", pre_dispatch=True, _error_on_data_dependent_ops=True)
    with ExitStack() as stack:
        for logger in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
            # they log a failure at length before raising it, and failing is how fallbacks are found
            stack.enter_context(assigned(logging.getLogger(logger), disabled=True))
        stack.enter_context(assigned(torch.distributions.Distribution, _validate_args=False))  # which reads values
        # a proxy mode defers sizes exactly while it runs an operation; torch's caches keep the shapes for good
        stack.enter_context(assigned(shapes, inside_operation=lambda: recorder.enable_thunkify))
        stack.enter_context(taking_symbols(shapes.batches, partial(_number, recorder)))
        stack.enter_context(autocast_restored())
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder.fake_mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(_GradAndAutocast(recorder))
        stack.enter_context(proxy_mode)
        stack.enter_context(decompose(decompositions))
        stack.enter_context(disable_autocast_cache())
        yield


@contextmanager
def not_recording() -> Iterator[None]:
    """Within: operations run on fake tensors, but leave no trace."""
    with disable_proxy_modes_tracing(), _temp_remove_pre_dispatch_torch_function_mode():
        yield


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Within `recording`: operations run on real tensors, and leave no trace."""
    with not_recording(), unset_fake_temporarily():
        yield


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


def active_recorder() -> Recorder | None:
    """The recorder at work, or None outside `recording` and inside `not_recording`."""
    mode = get_proxy_mode()
    return mode.tracer if mode is not None and isinstance(mode.tracer, Recorder) else None


def add_placeholder(recorder: Recorder, name: str, value: Tensor) -> fx.Node:
    """An input of the graph."""
    with not_recording():
        proxy = recorder.create_proxy("placeholder", name, (), {})
        track_tensor_tree(value, proxy, constant=None, tracer=recorder)
    return proxy.node


def to_argument(recorder: Recorder, value: object) -> Any:
    """Tensors and symbolic sizes of a (nested) value replaced by the nodes that compute them."""
    return recorder.create_arg(_proxies(recorder, value))


def _proxies(recorder: Recorder, value: Any) -> Any:
    if isinstance(value, (Tensor, *SYMBOLIC_TYPES)):
        return recorder.unwrap_proxy(value)
    if is_dataclass(value) and not isinstance(value, type):
        given = {name: _proxies(recorder, item) for name, item in attributes_of_dataclass(value).items()}
        return recorder.create_proxy("call_function", Made(type(value)), (), given)
    return map_nested(value, lambda item: _proxies(recorder, item))


def add_call(recorder: Recorder, target: Callable[..., Any], args: Any, kwargs: Any, output: object) -> fx.Node:
    """Record `output = target(*args, **kwargs)` as one node, with one more per tensor of a nested output."""
    with not_recording():
        arguments = _proxies(recorder, tuple(args)), _proxies(recorder, dict(kwargs))
        proxy = recorder.create_proxy("call_function", target, *arguments)
        _track(recorder, proxy, output)
    return proxy.node


def _number(recorder: Recorder, function: Callable[[float], float], size: torch.SymInt | torch.SymFloat) -> Any:
    """What a function of `math` makes of a symbol."""
    expr = getattr(sympy_functions, f"OpaqueUnaryFn_{function.__name__}")(size.node.expr)
    hint = None if size.node.hint is None else function(size.node.hint)
    number = shapes_of(recorder.fake_mode).create_symfloatnode(expr, hint=hint)
    if active_recorder() is recorder:
        add_call(recorder, function, (size,), {}, number)
    return number


def _track(recorder: Recorder, proxy: fx.Proxy, value: Any) -> None:
    if isinstance(value, (Tensor, *SYMBOLIC_TYPES)):
        track_tensor_tree(value, proxy, constant=None, tracer=recorder)
        return
    parts: Iterable[tuple[Callable[..., Any], Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = [(operator.getitem, key, item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(operator.getitem, index, item) for index, item in enumerate(value)]
    elif is_dataclass(value):
        parts = [(getattr, f.name, getattr(value, f.name)) for f in fields(value)]
    for access, key, item in parts:
        if isinstance(item, (Tensor, *SYMBOLIC_TYPES, Mapping, list, tuple)) or is_dataclass(item):
            _track(recorder, recorder.create_proxy("call_function", access, (proxy, key), {}), item)


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


def _mask_by_broadcast(mask_function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def expand(*indices: Tensor) -> Tensor:
        sizes = [index.shape[0] for index in indices]
        return mask_function(*masking_utils._non_vmap_expansion_sdpa(*indices)).expand(sizes)

    return expand


@contextmanager
def traceable_transformers(root: nn.Module, *, packed_sequences: bool, experts: str = "grouped_mm") -> Iterator[None]:
    """Within: transformers takes the branches it takes on real, unpacked data, and runs experts without a loop."""
    with ExitStack() as stack:
        # as broadcast over index tensors, not as vmap: its indexing operator cannot be recorded before dispatch
        stack.enter_context(assigned(masking_utils, _vmap_expansion_sdpa=_mask_by_broadcast))
        stack.enter_context(assigned(masking_utils, TransformGetItemToIndex=nullcontext))
        stack.enter_context(assigned(moe, _can_use_grouped_mm=lambda _, weight, offs: weight.dtype == torch.bfloat16))
        if not packed_sequences:
            stack.enter_context(assigned(masking_utils, find_packed_sequence_indices=lambda position_ids: None))
        for config in configs_of(root):
            if hasattr(config, "_experts_implementation_internal"):
                stack.enter_context(assigned(config, _experts_implementation_internal=experts))
        yield


@contextmanager
def outside_transforms(tensor: Tensor) -> Iterator[Tensor]:
    """Within, code that `vmap` or `grad` transforms sees a tensor as it is: with what `vmap` does at once in front."""
    with pyfunctorch.temporarily_clear_interpreter_stack():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            dim = torch._C._functorch.maybe_get_bdim(tensor)
            tensor = torch._C._functorch.get_unwrapped(tensor)
            tensor = tensor if dim < 0 else tensor.movedim(dim, 0)
        yield tensor


def message_board(name: str) -> Store:
    """Keys and values that all ranks of the default process group see, kept where they met."""
    return PrefixStore(name, dist.distributed_c10d._get_default_store())
