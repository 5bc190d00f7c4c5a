"""Products in half precision on CPUs that have no instructions for them.

There torch multiplies bfloat16 and float16 numbers one by one, which takes 6 to 100 times longer than the same in
float32. Inside `in_float32` operands become float32 tile by tile, and results are rounded once, as they are where
the CPU has such instructions: sums are in float32 both ways.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, final

import torch
import transformers.integrations.moe  # noqa: F401 (registers the operator of `_by_experts`)
from torch import Tensor

from lightning_compress.graph.compat import TorchDispatchMode

TILE = 2**24
"""Numbers of the second operand and of the result that are float32 at a time, each."""
_LEAST = 64
"""Columns in a tile."""
_aten = torch.ops.aten


def slow_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """Those that oneDNN has no kernels for, on a CPU."""
    return _slow_on_cpu() if device.type == "cpu" else frozenset()


@cache
def _slow_on_cpu() -> frozenset[torch.dtype]:
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return frozenset(dtype for dtype, name in checks.items() if not getattr(torch.ops.mkldnn, name, _without_onednn)())


def _without_onednn() -> bool:
    return False


def in_float32(dtypes: frozenset[torch.dtype]) -> AbstractContextManager[object]:
    """Within: products of numbers of these types on a CPU are computed in float32, for all operators that multiply
    matrices, or convolve. What runs inside must not be recorded, nor differentiated."""
    return _InFloat32(dtypes) if dtypes else nullcontext()


_FIRST_OPERAND = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._grouped_mm.default: 0,
    _aten.convolution.default: 0,
}
"""Where it is among the arguments; the second follows. Everything that multiplies is made of these."""


@final
class _InFloat32(TorchDispatchMode):
    supports_higher_order_operators = True  # flex attention is one: it is run as it is

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtypes = dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        at = _FIRST_OPERAND.get(func)
        if at is None or not self._takes(*args[: at + 2]):
            return func(*args, **kwargs)
        if func is _aten.convolution.default:
            return func(*map(_float, args), **kwargs).to(args[0].dtype)
        if func is _aten._grouped_mm.default:
            is_of_experts = (args[0].dim(), args[1].dim()) == (2, 3) and all(each is None for each in args[3:])
            return _tiled(_by_experts, (), *args[:3]) if is_of_experts else func(*args, **kwargs)
        return _tiled(partial(func, **kwargs), args[:at], *args[at:])

    def _takes(self, *operands: Tensor) -> bool:
        """Operands of several types are the operator's to refuse."""
        first = operands[0]
        alike = all((each.dtype, each.device) == (first.dtype, first.device) for each in operands)
        return alike and first.dtype in self._dtypes and first.device.type == "cpu"


def _tiled(
    multiply: Callable[..., Tensor], added: Sequence[Tensor], first: Tensor, second: Tensor, *rest: object
) -> Tensor:
    """The product in float32, some columns at a time."""
    num_columns = second.shape[-1]
    out = first.new_empty((*first.shape[:-1], num_columns))
    in_column = max(second.numel(), out.numel(), 1) // max(num_columns, 1)
    width = max(TILE // in_column, _LEAST)
    converted = first.float()
    for start in range(0, num_columns, width):
        columns = slice(start, min(start + width, num_columns))
        beside = [each[..., columns].float() if each.shape[-1:] == (num_columns,) else each.float() for each in added]
        out[..., columns] = multiply(*beside, converted, second[..., columns].float(), *rest)
    return out


def _by_experts(first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    """torch's own grouped product takes no fake tensors of float32."""
    product: Tensor = torch.ops.transformers.grouped_mm_fallback(first, second, ends)
    return product


def _float(argument: object) -> object:
    return argument.float() if isinstance(argument, Tensor) else argument
