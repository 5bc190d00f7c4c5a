"""What takes the memory of modules that cannot run on fake tensors (see `footprint`)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import sympy
import torch
from compressed_tensors.quantization import DynamicType, QuantizationArgs, QuantizationType
from torch import Tensor, fx, nn

from lightning_compress.calibration.quantized import InputHook
from lightning_compress.graph.leaf import Leaf, place_of
from lightning_compress.graph.methods import Method, methods_replaced, original
from lightning_compress.graph.restore import calls_replaced
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
            root,
            methods,
            lambda name, method: allowing(name, original(method), [*map(root.get_submodule, method.calls)]),
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


def _allowance(modules: Sequence[nn.Module], given: object, output: object) -> int:
    """Bytes for modules that read values: see `footprint`."""
    tensors = tensors_in((given, output))
    inside = (each for module in modules for each in module.modules())
    convolutions = [each for each in inside if isinstance(each, nn.Conv2d | nn.Conv3d)]
    num_tokens = max((_num_tokens(leaf, convolutions) for leaf in tensors if leaf.ndim and leaf.shape[-1]), default=0)
    return 4 * (sum(leaf.numel() for leaf in tensors) + 2 * num_tokens * sum(map(_width, modules)))


def _num_tokens(tensor: Tensor, convolutions: Sequence[nn.Conv2d | nn.Conv3d]) -> int:
    """How many rows it has, or of images [..., C, H, W] how many patches the convolutions make that read such."""
    reading = [each for each in convolutions if tensor.shape[-len(each.stride) - 1 :][:1] == (each.in_channels,)]
    of_patch = min((each.in_channels * math.prod(each.stride) for each in reading), default=1)
    return tensor.numel() // max(of_patch, tensor.shape[-1])


def _width(module: nn.Module) -> int:
    """Numbers per token that there may be at a time: the wide side of each matrix. Of modules in a list, which run one
    after the other, those of the widest, and what each of them may return."""
    children = [_width(child) for child in module.children()]
    if isinstance(module, nn.ModuleList | nn.Sequential):
        return max(children, default=0) + sum(map(_narrow, module.children()))
    matrices = [each.shape[-2:] for each in module.parameters(recurse=False) if each.ndim > 1]
    side = min if isinstance(module, nn.Embedding) else max
    return sum(map(side, matrices)) + sum(children)


def _narrow(module: nn.Module) -> int:
    """The narrow side of the largest matrix: a layer's hidden size."""
    return max((min(each.shape[-2:]) for each in module.parameters() if each.ndim > 1), default=0)
