"""What takes the memory of modules that cannot run on fake tensors (see `footprint`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import sympy
import torch
from compressed_tensors.quantization import DynamicType, QuantizationArgs, QuantizationType
from torch import Tensor, fx, nn

from lightning_compress.calibration.quantized import InputHook
from lightning_compress.graph.compat import calls_replaced
from lightning_compress.graph.leaf import Leaf, place_of
from lightning_compress.graph.methods import Method, methods_replaced, original
from lightning_compress.graph.sizes import nodes_by_values, traced_output
from lightning_compress.graph.trees import tensors_in


@final
@dataclass(frozen=True)
class LikeQuantizing(InputHook):
    """Takes what `InputQuantizer` does (which must not run on fake tensors: compressed-tensors caches some of them)."""

    scale: Tensor
    inputs: QuantizationArgs

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not args:
            return args
        torch.empty(quantizing_bytes(self.inputs, args[0]) - args[0].nbytes, dtype=torch.uint8)
        return (args[0].clone(), *args[1:])


def quantizing_bytes(inputs: QuantizationArgs, x: Tensor) -> int:
    """At most the bytes that exist while an input is quantized and dequantized, the result included.

    Beside a global scale, which is float32, that is done in float32; FP4 takes two copies more, with the values'
    signs."""
    copies = 6 if inputs.type == QuantizationType.FLOAT and inputs.num_bits == 4 else 4
    itemsize = 4 if inputs.dynamic == DynamicType.LOCAL else x.itemsize
    return copies * x.numel() * max(itemsize, x.itemsize)


@contextmanager
def failures_allowed(root: nn.Module, graph: fx.Graph, sizes: Mapping[sympy.Symbol, int | float]) -> Iterator[None]:
    """Within: calls of the graph that fail on fake tensors take their allowance and return what was traced.

    `sizes`: of the batch that is run.
    """
    leaves = {node.target.name: node for node in graph.nodes if isinstance(node.target, Leaf)}
    methods: dict[str, Method] = {}
    modules: dict[str, nn.Module] = {}
    for name, node in leaves.items():
        if node.target.within is None:
            modules[name] = root.get_submodule(name)
        else:
            methods[name] = Method(*place_of(root, name), calls=node.target.modules)

    def allowing(name: str, function: Callable[..., Any], called: Sequence[nn.Module]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:  # whatever it is: how a module fails that looks at values is its own affair
                output = traced_output(leaves[name], sizes)
                torch.empty(_allowance(called, (args, kwargs), output), dtype=torch.uint8)
                return output

        return call

    with (
        _of_values(graph, sizes),
        calls_replaced(modules, lambda name, module: allowing(name, module._call_impl, [module])),
        methods_replaced(
            methods, lambda name, method: allowing(name, original(method), [*map(root.get_submodule, method.calls)])
        ),
    ):
        yield


@contextmanager
def _of_values(graph: fx.Graph, sizes: Mapping[sympy.Symbol, int | float]) -> Iterator[None]:
    """Within: operations whose results are as large as values make them return what was traced, of these sizes."""
    found = {node: node.target for node in nodes_by_values(graph)}

    def standing_in(node: fx.Node) -> Callable[..., object]:
        return lambda *_, **__: traced_output(node, sizes)

    for node in found:
        node.target = standing_in(node)
    try:
        yield
    finally:
        for node, target in found.items():
            node.target = target


def _allowance(modules: Iterable[nn.Module], given: object, output: object) -> int:
    """Bytes for modules that read values: see `footprint`."""
    tensors = tensors_in((given, output))
    num_tokens = max((leaf.numel() // leaf.shape[-1] for leaf in tensors if leaf.ndim and leaf.shape[-1]), default=0)
    parameters = [parameter for module in modules for parameter in module.parameters()]
    widths = sum(max(parameter.shape[-2:]) for parameter in parameters if parameter.ndim > 1)
    return 4 * (sum(leaf.numel() for leaf in tensors) + 2 * num_tokens * widths)
