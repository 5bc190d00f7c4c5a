"""Weights in host memory, of which one subgraph at a time has a copy on the device.

The module's parameters and buffers stay in host memory as their home. For the time of a subgraph their `.data` points
to a copy on the device; what is solved is written to both. When home and device are the same (CPU runs) nothing is
copied.

Alternative not taken: moving modules with `.to(device)` and back. It transfers the weights both ways, breaks ties
between parameters, and touches modules that the subgraph does not run.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn


@final
class HostWeights:
    """The tier of weights that live in the module itself, in host memory.

    Args:
        root: the model; its parameters and buffers are the home copies.
        device: where subgraphs run.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root = root
        self._device = device
        self._home: dict[int, Tensor] = {}

    @contextmanager
    def onload(self, modules: Iterable[str], tensors: Iterable[str] = ()) -> Iterator[None]:
        """Parameters and buffers of `modules` (with their children), and `tensors`, are on the device inside the
        context.

        Ties survive: a tensor that several modules share is copied once. The device copies are freed on leaving, also
        when the body raises.
        """
        found: dict[int, Tensor] = {}
        for name in modules:
            module = self._root.get_submodule(name)
            for tensor in (*module.parameters(), *module.buffers()):
                found[id(tensor)] = tensor
        for name in tensors:
            owner, _, key = name.rpartition(".")
            tensor = getattr(self._root.get_submodule(owner), key)
            found[id(tensor)] = tensor
        moved = [tensor for tensor in found.values() if self._is_away(tensor)]
        self._home = {id(tensor): tensor.data for tensor in moved}
        try:
            for tensor in moved:
                tensor.data = self._copy(tensor.data)
            yield
        finally:
            for tensor in moved:
                tensor.data = self._home[id(tensor)]
            self._home = {}

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Replace the values of a parameter, on the device (where onloaded) and at home. Same shape and dtype."""
        assert tensor.shape == value.shape
        tensor.data.copy_(value)
        home = self._home.get(id(tensor))
        if home is not None:
            home.copy_(value)

    def _is_away(self, tensor: Tensor) -> bool:
        return tensor.device != self._device

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)
