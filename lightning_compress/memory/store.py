"""Weights at home in host memory or on disk, of which one subgraph at a time is on the device.

A parameter's home is the module itself (host memory), or, where the module's parameter is on the meta device, a
`WeightSource`. For the time of a subgraph the module computes with what is on the device: a host parameter's `.data`
points to a copy there; in place of a meta parameter stands a real one. What is solved is written to the device and to a
host home. When home and device are the same (CPU runs) nothing is copied.

Alternative not taken: moving modules with `.to(device)` and back. It transfers the weights both ways, breaks ties
between parameters, and touches modules that the subgraph does not run.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from lightning_compress.memory.buffers import trim_heap
from lightning_compress.memory.source import Load, WeightSource


@final
class WeightStore:
    """The weights of a model, wherever they are.

    Args:
        root: the model.
        device: where subgraphs run.
        source: of the values of parameters on the meta device.
    """

    def __init__(self, root: nn.Module, device: torch.device, source: WeightSource | None = None) -> None:
        self._root = root
        self._device = device
        self._home: dict[int, Tensor] = {}
        self._coming: dict[Load, Future[Mapping[str, Tensor]]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights") if source is not None else None
        self._loaders: dict[str, Load] = dict(source.loaders) if source is not None else {}
        self._places: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for path, module in root.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    name = f"{path}.{key}" if path else key
                    self._places.setdefault(id(parameter), []).append((name, module, key))

    @contextmanager
    def onload(self, modules: Iterable[str], tensors: Iterable[str] = ()) -> Iterator[None]:
        """Parameters and buffers of `modules` (with their children), and `tensors`, are on the device inside the
        context.

        Ties survive: a tensor that several modules share is brought once. What was brought is freed on leaving, also
        when the body raises.
        """
        found = self._found(modules, tensors)
        absent = [tensor for tensor in found if tensor.is_meta]
        moved = [tensor for tensor in found if not tensor.is_meta and self._is_away(tensor)]
        self._home = {id(tensor): tensor.data for tensor in moved}
        try:
            self._bring(absent)
            for tensor in moved:
                tensor.data = self._copy(tensor.data)
            yield
        finally:
            for tensor in moved:
                tensor.data = self._home[id(tensor)]
            for tensor in absent:
                self._place(tensor, tensor)
            self._home = {}
            if absent:
                trim_heap()

    def prefetch(self, modules: Iterable[str], tensors: Iterable[str] = ()) -> None:
        """Begin to read from disk what the next `onload` will bring; its size is in host memory from now on."""
        for tensor in self._found(modules, tensors):
            if tensor.is_meta:
                _, load = self._loader(tensor)
                if self._reader is not None and load not in self._coming:
                    self._coming[load] = self._reader.submit(load)

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Replace the values of a parameter, on the device (where onloaded) and at home in host memory. Same shape and
        dtype."""
        assert tensor.shape == value.shape
        tensor.data.copy_(value)
        home = self._home.get(id(tensor))
        if home is not None:
            home.copy_(value)

    def redirect(self, name: str, load: Callable[[], Tensor]) -> None:
        """From now on take the values of the parameter `name` from `load`, if its home is not the module."""
        if name in self._loaders:
            self._coming.pop(self._loaders[name], None)
            self._loaders[name] = lambda: {name: load()}

    def _bring(self, absent: Iterable[Tensor]) -> None:
        """Read meta parameters, each stored tensor once, and put them into their modules."""
        read: dict[Load, dict[str, Tensor]] = {}
        for meta in absent:
            name, load = self._loader(meta)
            if load not in read:
                coming = self._coming.pop(load, None)
                read[load] = dict(load() if coming is None else coming.result())
            value = read[load].pop(name).to(dtype=meta.dtype).to(self._device)
            self._place(meta, nn.Parameter(value, requires_grad=False))

    def _found(self, modules: Iterable[str], tensors: Iterable[str]) -> list[Tensor]:
        """The tensors of the modules (with their children), and those named; each once."""
        found: dict[int, Tensor] = {}
        for name in modules:
            module = self._root.get_submodule(name)
            found.update({id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
        for name in tensors:
            owner, _, key = name.rpartition(".")
            tensor = getattr(self._root.get_submodule(owner), key)
            found[id(tensor)] = tensor
        return list(found.values())

    def _loader(self, meta: Tensor) -> tuple[str, Load]:
        """What reads a parameter, and the name by which it gives it."""
        name = next(name for name, _, _ in self._places[id(meta)] if name in self._loaders)
        return name, self._loaders[name]

    def _place(self, meta: Tensor, parameter: Tensor) -> None:
        for _, module, key in self._places[id(meta)]:
            module._parameters[key] = parameter  # type: ignore[assignment]

    def _is_away(self, tensor: Tensor) -> bool:
        return tensor.device != self._device

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)
