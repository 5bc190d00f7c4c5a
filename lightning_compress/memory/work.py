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

from lightning_compress.graph.compat import TorchDispatchMode, pytree

Work = Mapping[str, float]
"""Amounts by kind: FLOP of `product float32` or `attention bfloat16`, bytes of `elementwise`, a number of `call`s; of a
solve `solve` (see `Algorithm.costs`), weights to be packed as `packing`, bytes of `writing`."""


@final
class WorkMeter(TorchDispatchMode):
    """The work of the operators that run inside the context, on real or on fake tensors.

    Attributes:
        work: so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self.work["call"] += 1
        packet = func.overloadpacket
        if "scaled_dot_product" in str(packet):
            query, key = args[0], args[1]
            is_causal = bool(kwargs.get("is_causal", next((arg for arg in args[3:] if isinstance(arg, bool)), False)))
            flops = 4 * prod(query.shape) * key.shape[-2] / (2 if is_causal else 1)
            self.work[f"attention {_dtype(query)}"] += flops
        elif packet in flop_registry:
            self.work[f"product {_dtype(written[0])}"] += flop_registry[packet](*args, **kwargs, out_val=out)
        else:
            self.work["elementwise"] += sum(tensor.nbytes for tensor in (*read, *written))


def times(work: Work, factor: float) -> dict[str, float]:
    """
    >>> times({"call": 2}, 3)
    {'call': 6}
    """
    return {kind: amount * factor for kind, amount in work.items()}


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
