"""A device that is not there: its tensors have their values in host memory, and what mixes them with others fails.

So it tells on any machine whether a run makes every tensor where it is used, and whether its result depends on where
that is. What it cannot tell is what depends on time: copies beside computing, and how long memory is used by them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_compress.memory import activations
from lightning_compress.memory.transfer import Lane

CPU = torch.device("cpu")
DEVICE = torch.device("lazy", 0)  # of a kind that all builds of torch know, and none has operators for
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)  # indices may be in host memory


@final
class Placed(Tensor):
    """A tensor that says it is on `device`; `values` are on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor, device: torch.device = DEVICE) -> "Placed":
        layout: dict[str, Any] = {
            "strides": values.stride(),
            "storage_offset": values.storage_offset(),
            "storage_size": values.untyped_storage().nbytes(),
        }
        placed: Placed = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=DEVICE, **layout)
        placed.values, placed.place = values, device
        return placed

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        is_placed = isinstance(other, Placed)
        self.values, self.place = (other.values, other.place) if is_placed else (other.detach(), CPU)

    def cpu(self) -> Tensor:
        return self.to(CPU)

    def tolist(self) -> Any:
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


@final
class _Mode(TorchDispatchMode):
    """For what makes tensors, which has none among its arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_there = any(tensor.device == DEVICE for tensor in tensors)
    may_mix = func in _COPIES or (func in _INDEXING and args[0].device == DEVICE)
    if is_there and not may_mix and any(tensor.device != DEVICE and tensor.ndim for tensor in tensors):
        places = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(f"{func} has tensors on several devices: {places}")
    if func is torch.ops.aten.copy_.default:
        is_there = args[0].device == DEVICE
    elif kwargs.get("device") is not None:
        is_there, kwargs = torch.device(kwargs["device"]) == DEVICE, {**kwargs, "device": CPU}
    known = {id(tensor.values): tensor for tensor in tensors if isinstance(tensor, Placed)}
    args, kwargs = pytree.tree_map(lambda leaf: leaf.values if isinstance(leaf, Placed) else leaf, (args, kwargs))

    def placed(leaf: Any) -> Any:
        return known.get(id(leaf), Placed(leaf) if is_there else leaf) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(placed, func(*args, **kwargs))


def enter_thread(lane: Lane) -> None:
    """To be `Lane.enter_thread` of a run, from before it is prepared: modes are a thread's own."""
    _Mode().__enter__()


@contextmanager
def simulated(root: nn.Module) -> Iterator[None]:
    """Within: there is `DEVICE`, and the parameters and buffers of `root` that are in memory can be moved to it."""
    for module in root.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and not tensor.is_meta:
                    tensors[name] = Placed(tensor.detach(), CPU)
                    tensors[name]._is_param = isinstance(tensor, nn.Parameter)
    make, identity = torch.tensor, activations._identity

    def tensor_of(data: Any, *, device: Any = None, **options: Any) -> Tensor:  # made beside modes
        return make(data, **options) if device is None else make(data, **options).to(device)

    def values_identity(tensor: Tensor) -> int:
        return identity(tensor.values if isinstance(tensor, Placed) else tensor)

    with ExitStack() as stack:
        for target, name, value in (
            (torch, "tensor", tensor_of),
            (torch, "is_autocast_enabled", lambda *_: False),  # asked of kinds that older versions do not know
            (torch, "inference_mode", torch.no_grad),  # in which tensors of other classes cannot be made
            (activations, "_identity", values_identity),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(_Mode())
        yield
