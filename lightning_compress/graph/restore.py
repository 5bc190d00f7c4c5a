"""Leave modules, and what else is changed for a while, as they were."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

MODULE_DICTS = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict))
"""Parameters, buffers, submodules and all kinds of hooks."""


def attributes_restored(root: nn.Module) -> AbstractContextManager[None]:
    """Whatever the body changes on modules (caches, rescaled buffers, fake parameters, hooks) is undone after it."""
    return attributes_of(root.modules())


@contextmanager
def attributes_of(modules: Iterable[nn.Module]) -> Iterator[None]:
    """As `attributes_restored`, of these modules alone."""
    nothing: dict[str, Any] = {}  # as most are: of 25,000 modules of a mixture, 300,000 copies less
    saved = [
        (
            module,
            dict(module.__dict__),
            [(found, dict(found) if found else nothing) for found in map(module.__dict__.__getitem__, MODULE_DICTS)],
        )
        for module in modules
    ]
    try:
        yield
    finally:
        for module, attributes, contents in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in contents:
                container.clear()
                container.update(content)


@contextmanager
def assigned(target: Any, **attributes: object) -> Iterator[None]:
    """Within: attributes have these values."""
    before = {name: getattr(target, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextmanager
def owning(target: object, attributes: Mapping[str, object]) -> Iterator[None]:
    """Within: an object has these attributes itself, which go before those of its class."""
    own = vars(target)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            own.pop(name, None)
        own.update(before)


@contextmanager
def autocast_restored() -> Iterator[None]:
    """Within: code may enter autocast and be stopped there, before it would leave it."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    is_cached = torch.is_autocast_cache_enabled()
    depth = torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if depth == 1:
            torch.clear_autocast_cache()
        while torch.autocast_decrement_nesting() >= depth:
            pass
        for kind, is_enabled, dtype in states:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(is_cached)


_CONTAINERS = (OrderedDict, dict, list, set, deque)
_Container = OrderedDict[Any, Any] | dict[Any, Any] | list[Any] | set[Any] | deque[Any]


@contextmanager
def containers_restored(module: nn.Module) -> Iterator[None]:
    """Within: lists, dicts and sets that modules keep may be filled (outputs kept for the epoch's end), and attributes
    set of other objects there (meters)."""
    saved: dict[int, tuple[_Container, list[Any]]] = {}

    def save(value: object, depth: float = inf) -> None:
        if isinstance(value, _CONTAINERS) and id(value) not in saved:
            saved[id(value)] = (value, _content(value))
            for item in (value.values() if isinstance(value, dict) else value) if depth else ():
                save(item, depth - 1)

    for each in module.modules():
        for name, value in vars(each).items():
            if not name.startswith("_"):  # torch's own are restored as attributes
                save(vars(value), depth=1) if _is_plain(value) else save(value)  # which may be a dataset
    try:
        yield
    finally:
        for container, content in saved.values():
            now = _content(container)
            if len(now) != len(content) or any(map(_is_another, now, content)):
                kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
                kind.clear(container)  # not its own: a ModelOutput has none
                (kind.extend if kind in (list, deque) else kind.update)(container, content)


def _content(container: _Container) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _is_another(now: Any, before: Any) -> bool:
    """Whether what a container holds is not the same; of a dict it is a new pair in any case."""
    if isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before) == 2:
        return now[0] is not before[0] or now[1] is not before[1]
    return now is not before


def _is_plain(value: object) -> bool:
    """An object of a class of the user's own."""
    library = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type)) and library not in _LIBRARIES


_LIBRARIES = {"builtins", "functools", "lightning", "torch", "transformers", "torchmetrics", "types"}


@contextmanager
def contents_restored(root: nn.Module) -> Iterator[None]:
    """Within: what modules keep beside their parameters may be written to in place (counters, metrics, lists)."""
    attributes = [value for module in root.modules() for value in vars(module).values()]
    kept = [*root.buffers(), *attributes, *chain(*(vars(each).values() for each in attributes if _is_plain(each)))]
    saved = [(tensor, tensor.detach().clone()) for tensor in kept if isinstance(tensor, Tensor) and not tensor.is_meta]
    try:
        with containers_restored(root):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in saved:
                if tensor.layout is not torch.strided or not torch.equal(tensor, before):
                    tensor.copy_(before)
