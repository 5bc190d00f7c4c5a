"""Weights at home in host memory or on disk, of which one subgraph at a time is on the device.

A parameter's home is the module itself (host memory), or, where the module's parameter is on the meta device, a
`WeightSource`. For the time of a subgraph the module computes with what is on the device: a host parameter's `.data`
points to a copy there; in place of a meta parameter stands a real one. Meta parameters that code uses unforeseen are
read when it does (`lending`). What is solved is written to the device and to a home in host memory. When home and
device are the same (CPU runs) nothing is copied.

Alternative not taken: moving modules with `.to(device)` and back. It transfers the weights both ways, breaks ties
between parameters, and touches modules that the subgraph does not run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from torch import Tensor, nn

from lightning_compress.graph.awaited import substituted
from lightning_compress.graph.names import module_named
from lightning_compress.memory.buffers import make_writable
from lightning_compress.memory.heap import trim_heap
from lightning_compress.memory.source import Load, WeightSource
from lightning_compress.memory.transfer import Lane, Sent

_Coming = Future[dict[str, Sent]]


@final
class WeightStore:
    """The weights of a model, wherever they are.

    Args:
        root: the model.
        lane: the way to the device where subgraphs run.
        source: of the values of parameters on the meta device.

    Attributes:
        moved: bytes brought so far, by lane (see `calibration.records.SubgraphRecord`).
        has_written: values of the model in memory were replaced.
    """

    def __init__(self, root: nn.Module, lane: Lane, source: WeightSource | None = None) -> None:
        self._root = root
        self._lane = lane
        self.moved: Counter[str] = Counter()
        self.has_written = False
        self._homes: dict[int, tuple[Tensor, Tensor]] = {}
        self._present: dict[int, Tensor] = {}
        self._lent: dict[int, Tensor] = {}
        self._coming: dict[Load | int, _Coming] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weights", initializer=lane.enter_thread)
        self._loaders: dict[str, Load] = dict(source.loaders) if source is not None else {}
        self._metas: list[Tensor] = []
        self._places: dict[int, list[tuple[str, nn.Module, str]]] = {}
        self._named: dict[str, Tensor] = {}
        for path, module in root.named_modules(remove_duplicate=False):  # files have tied layers by any of their names
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    if id(parameter) not in self._places:
                        self._metas.append(parameter)
                    name = f"{path}.{key}" if path else key
                    self._places.setdefault(id(parameter), []).append((name, module, key))
                    self._named[name] = parameter

    @contextmanager
    def onload(self, modules: Iterable[str], tensors: Iterable[str] = (), *, stays: bool = False) -> Iterator[None]:
        """Parameters and buffers of `modules` (with their children), and `tensors`, are on the device inside the
        context.

        Ties survive: a tensor that several modules share is brought once. What was brought is freed on leaving, also
        when the body raises. Contexts may be nested.

        Args:
            modules: names.
            tensors: qualified names of parameters and buffers.
            stays: leave the weights on the device afterwards, until `close`.
        """
        absent, moved = self._away(modules, tensors)
        is_done = False
        try:
            self._bring(absent)
            self._move(moved)
            yield
            is_done = True
        finally:
            self._lane.give_back()
            self._lent.clear()
            if not (is_done and stays):
                self._leave(absent, moved)

    def lending(self) -> AbstractContextManager[None]:
        """Within: an operation that is given a meta parameter, whoever kept it, gets its values.

        They are read at that time, and kept until what was brought meanwhile is left.
        """
        return substituted(self._metas, self._lend)

    def prefetch(self, modules: Iterable[str], tensors: Iterable[str] = ()) -> None:
        """Begin to read from disk, and to copy to the device, what a later `onload` will bring.

        Its size is in host memory (what is read) and on the device from now on.
        """
        absent, moved = self._away(modules, tensors)
        for meta in absent:
            _, load = self._loader(meta)
            self._begin(load, load)
        for tensor in moved:
            self._begin(id(tensor), lambda home=tensor.data: {"": home})  # type: ignore[misc]

    def away_bytes(self, modules: Iterable[str], tensors: Iterable[str] = ()) -> int:
        """Bytes that `onload` would bring now."""
        return sum(tensor.nbytes for part in self._away(modules, tensors) for tensor in part)

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Replace the values of a parameter, on the device (where onloaded) and at home in host memory. Same shape and
        dtype."""
        assert tensor.shape == value.shape
        brought = (self._places[id(meta)][0] for meta in self._present.values())
        self.has_written |= all(tensor is not module._parameters[key] for _, module, key in brought)
        make_writable(tensor.data)
        tensor.data.copy_(value)
        self._coming.pop(id(tensor), None)
        if id(tensor) in self._homes:
            make_writable(self._homes[id(tensor)][1])
            self._homes[id(tensor)][1].copy_(value)

    def redirect(self, name: str, load: Callable[[], Tensor]) -> None:
        """From now on take the values of the parameter `name` from `load`, if its home is not the module."""
        if name in self._named:
            stored, before = self._loader(self._named[name])
            self._coming.pop(before, None)
            self._loaders[stored] = lambda: {stored: load()}

    def close(self) -> None:
        """Only their homes keep the weights; what is on its way is dropped."""
        self._coming.clear()
        self._lent.clear()
        self._lane.give_back()
        self._leave(list(self._present.values()), [tensor for tensor, _ in self._homes.values()])

    def _begin(self, key: Load | int, load: Load) -> None:
        if key not in self._coming:
            self._coming[key] = self._worker.submit(self._send, load)

    def _send(self, load: Load) -> dict[str, Sent]:
        # as the model has them: on the device, a conversion would still read what the next copy is written to
        return {name: self._lane.send(value.to(self._named.get(name, value).dtype)) for name, value in load().items()}

    def _arrived(self, key: Load | int, load: Load) -> dict[str, Tensor]:
        coming = self._coming.pop(key, None)
        try:
            sent = self._send(load) if coming is None else coming.result()
        except torch.OutOfMemoryError:
            self._lane.give_back()  # what ran beside a prefetch needed the room, and has left it
            sent = self._send(load)
        return {name: self._lane.receive(value) for name, value in sent.items()}

    def _lend(self, meta: Tensor) -> Tensor:
        """The values of a meta parameter, on the device; those that are in its place, if any are."""
        _, module, key = self._places[id(meta)][0]
        if id(meta) in self._present:
            return module.get_parameter(key).data
        if id(meta) not in self._lent:
            name, load = self._loader(meta)
            value = self._lane.receive(self._send(load)[name])
            self.moved["disk_read"] += value.nbytes
            self.moved["to_device"] += value.nbytes if value.device.type != "cpu" else 0
            self._lent[id(meta)] = nn.Parameter(value, requires_grad=False)
        return self._lent[id(meta)]

    def _bring(self, absent: Iterable[Tensor]) -> None:
        """Read meta parameters, each stored tensor once, and put them into their modules."""
        read: dict[Load, dict[str, Tensor]] = {}
        for meta in absent:
            name, load = self._loader(meta)
            if load not in read:
                read[load] = self._arrived(load, load)
            value = read[load].pop(name)
            self.moved["disk_read"] += value.nbytes
            self.moved["to_device"] += value.nbytes if value.device.type != "cpu" else 0
            self._present[id(meta)] = meta
            self._place(meta, nn.Parameter(value, requires_grad=False))

    def _move(self, moved: Iterable[Tensor]) -> None:
        """Let parameters and buffers in host memory point to a copy on the device."""
        for tensor in moved:
            home = tensor.data
            (copy,) = self._arrived(id(tensor), lambda home=home: {"": home}).values()  # type: ignore[misc]
            self.moved["to_device"] += home.nbytes
            self._homes[id(tensor)] = tensor, home
            tensor.data = copy

    def _leave(self, absent: Iterable[Tensor], moved: Iterable[Tensor]) -> None:
        """Undo `_bring` and `_move`, as far as they came."""
        for tensor in moved:
            if id(tensor) in self._homes:
                _, tensor.data = self._homes.pop(id(tensor))
        metas = [meta for meta in absent if id(meta) in self._present]
        for meta in metas:
            del self._present[id(meta)]
            self._place(meta, meta)
        if metas:
            trim_heap()

    def _away(self, modules: Iterable[str], tensors: Iterable[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Of the tensors that are not on the device: those at home on disk, and those in host memory."""
        found = self._found(modules, tensors)
        absent = [tensor for tensor in found if tensor.is_meta]
        moved = [
            tensor
            for tensor in found
            if not tensor.is_meta and id(tensor) not in self._homes and self._lane.is_away(tensor)
        ]
        return absent, moved

    def _found(self, modules: Iterable[str], tensors: Iterable[str]) -> list[Tensor]:
        """The tensors of the modules (with their children), and those named; each once."""
        found: dict[int, Tensor] = {}
        for name in modules:
            module = module_named(self._root, name)
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
