"""How much there is to compute, counted operator by operator: what a machine's rates turn into seconds.

Products and attention count floating-point operations (the formulas are those of `torch.utils.flop_counter`), all other
operators the bytes that they read and write, and every operator a call. Nothing of it depends on the machine.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, final

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_compress.graph.compat import TorchDispatchMode
from lightning_compress.graph.trees import tensors_in
from lightning_compress.memory.heap import LARGEST_IN_HEAP
from lightning_compress.memory.tracker import DEVICE_OF

Work = Mapping[str, float]
"""Amounts by kind: FLOP of `product float32` or `attention bfloat16`, bytes of `elementwise`, a number of `call`s, on a
CPU bytes of new blocks that are too large for the C heap as `mapping`; of a solve on a CPU `solve` (see
`Algorithm.costs`), weights to be packed as `packing`, bytes of `writing`."""

_GROUPED = {
    "aten._grouped_mm": 1,
    "transformers.grouped_mm_fallback": 1,
    "transformers.grouped_mm_fallback_backward": 2,
}
"""Operators whose first argument's rows are each multiplied by one of several matrices, and how often they are."""


@final
class WorkMeter(TorchDispatchMode):
    """The work of the operators that run inside the context, on real or on fake tensors.

    Args:
        on_cpu: it is for a CPU, which has to map large blocks.

    Attributes:
        work: so far.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_cpu = on_cpu
        self.work: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return args[0].device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view:
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        read, written = tensors_in((args, kwargs)), tensors_in(out) or _changed(func, args, kwargs)
        if not written:
            return
        self.work["call"] += 1
        if self._on_cpu:
            known = {tensor.untyped_storage()._cdata for tensor in read}
            new = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in written}
            self.work["mapping"] += sum(
                size for each, size in new.items() if size >= LARGEST_IN_HEAP and each not in known
            )
        packet = func.overloadpacket
        if "scaled_dot_product" in str(packet):
            # backward: the output's gradient comes first, and there are five products (scores once more), not two
            is_backward = "backward" in str(packet)
            query, key = args[1:3] if is_backward else args[:2]
            at = [each.name for each in func._schema.arguments].index("is_causal")
            is_causal = bool(args[at] if at < len(args) else kwargs.get("is_causal", False))
            flops = (10 if is_backward else 4) * prod(query.shape) * key.shape[-2] / (2 if is_causal else 1)
            self.work[f"attention {_dtype(query)}"] += flops
        elif str(packet) == "aten.convolution_backward":  # torch's formula knows no groups
            gradient, x, weight = args[:3]
            is_transposed, needed = args[7], args[10]
            flops = 2 * (x if is_transposed else gradient).numel() * prod(weight.shape[1:])
            self.work[f"product {_dtype(x)}"] += sum(needed[:2]) * flops
        elif packet in flop_registry:
            self.work[f"product {_dtype(read[0])}"] += flop_registry[packet](*args, **kwargs, out_val=out)
        elif str(packet) in _GROUPED:  # each row by one of the matrices
            self.work[f"product {_dtype(written[0])}"] += (
                _GROUPED[str(packet)] * 2 * args[0].numel() * args[1].shape[-1]
            )
        else:
            self.work["elementwise"] += sum(tensor.nbytes for tensor in (*read, *written))


def times(work: Work, factor: float) -> dict[str, float]:
    """
    >>> times({"call": 2}, 3)
    {'call': 6}
    """
    return {kind: amount * factor for kind, amount in work.items()}


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """What an operator that returns nothing, as those of optimizers on lists of tensors, writes to."""
    arguments = [(number, each) for number, each in enumerate(func._schema.arguments) if each.is_write]
    return tensors_in([args[number] if number < len(args) else kwargs.get(each.name) for number, each in arguments])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
