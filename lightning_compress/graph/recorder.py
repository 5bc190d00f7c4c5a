"""Operations on fake tensors, and calls of modules and functions, as nodes of a graph.

Made of parts of `make_fx`, which itself names parameters `_param_constant0`, keeps `no_grad` and autocast switches as
nodes and builds a GraphModule nobody runs.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    decompose,
    disable_autocast_cache,
    get_proxy_mode,
    track_tensor_tree,
)

from lightning_compress.graph.bounds import pad_sequence
from lightning_compress.graph.compat import (
    FakeTensor,
    FakeTensorMode,
    enable_python_dispatcher,
    not_recording,
    sympy_functions,
)
from lightning_compress.graph.failures import AutocastError, ExchangeError, UnrecordedTensorError
from lightning_compress.graph.fakes import fake_like, shapes_of
from lightning_compress.graph.python_functions import taking_symbols
from lightning_compress.graph.restore import assigned, autocast_restored
from lightning_compress.graph.values import SYMBOLIC_TYPES, Made, attributes_of_dataclass, is_symbolic, map_nested


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

    def add_placeholder(self, name: str, value: Tensor) -> fx.Node:
        """An input of the graph."""
        with not_recording():
            proxy = self.create_proxy("placeholder", name, (), {})
            track_tensor_tree(value, proxy, constant=None, tracer=self)
        return proxy.node

    def to_argument(self, value: object) -> Any:
        """Tensors and symbolic sizes of a (nested) value replaced by the nodes that compute them."""
        return self.create_arg(self._proxies(value))

    def _proxies(self, value: Any) -> Any:
        if isinstance(value, (Tensor, *SYMBOLIC_TYPES)):
            return self.unwrap_proxy(value)
        if is_dataclass(value) and not isinstance(value, type):
            given = {name: self._proxies(item) for name, item in attributes_of_dataclass(value).items()}
            return self.create_proxy("call_function", Made(type(value)), (), given)
        return map_nested(value, lambda item: self._proxies(item))

    def add_call(self, target: Callable[..., Any], args: Any, kwargs: Any, output: object) -> fx.Node:
        """Record `output = target(*args, **kwargs)` as one node, with one more per tensor of a nested output."""
        with not_recording():
            arguments = self._proxies(tuple(args)), self._proxies(dict(kwargs))
            proxy = self.create_proxy("call_function", target, *arguments)
            self._track(proxy, output)
        return proxy.node

    def _track(self, proxy: fx.Proxy, value: Any) -> None:
        if isinstance(value, (Tensor, *SYMBOLIC_TYPES)):
            track_tensor_tree(value, proxy, constant=None, tracer=self)
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
                self._track(self.create_proxy("call_function", access, (proxy, key), {}), item)


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
        stack.enter_context(assigned(torch, linspace=partial(_linspace, recorder, torch.linspace)))
        stack.enter_context(autocast_restored())
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder.fake_mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(_GradAndAutocast(recorder))
        stack.enter_context(proxy_mode)
        stack.enter_context(decompose(decompositions))
        stack.enter_context(disable_autocast_cache())
        yield


def active_recorder() -> Recorder | None:
    """The recorder at work, or None outside `recording` and inside `not_recording`."""
    mode = get_proxy_mode()
    return mode.tracer if mode is not None and isinstance(mode.tracer, Recorder) else None


def _number(recorder: Recorder, function: Callable[[float], float], size: torch.SymInt | torch.SymFloat) -> Any:
    """What a function of `math` makes of a symbol."""
    expr = getattr(sympy_functions, f"OpaqueUnaryFn_{function.__name__}")(size.node.expr)
    hint = None if size.node.hint is None else function(size.node.hint)
    number = shapes_of(recorder.fake_mode).create_symfloatnode(expr, hint=hint)
    if active_recorder() is recorder:
        recorder.add_call(function, (size,), {}, number)
    return number


def _linspace(
    recorder: Recorder, usual: Callable[..., Tensor], start: Any, end: Any, steps: Any, **options: Any
) -> Tensor:
    """`torch.linspace`, whose kernel takes plain numbers, also of as many steps as a symbol says."""
    numbers = (start, end, steps)
    if not is_symbolic(steps) or any(isinstance(each, Tensor) for each in numbers) or "out" in options:
        return usual(*numbers, **options)
    with not_recording():
        made = torch.empty(steps, **options)
    if active_recorder() is recorder:
        how = {"dtype": made.dtype, "device": made.device}
        recorder.add_call(torch.ops.aten.linspace.default, numbers, how, made)
    return made
