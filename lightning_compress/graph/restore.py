"""Leave modules, and what else is changed for a while, as they were."""

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
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
    inherited = [name for name in attributes if isinstance(target, type) and name not in vars(target)]
    try:
        for name, value in attributes.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
        for name in inherited:
            delattr(target, name)


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
def calls_replaced(
    modules: Mapping[str, nn.Module], wrap: Callable[[str, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Within: calling a module calls `wrap(name, module)`, which reaches the module and its hooks by `_call_impl`.

    `_compiled_call_impl` is an instance-level hook around `__call__`, made for `nn.Module.compile`. It sees a call with
    the module's own hooks inside and leaves `forward` alone, whoever else has replaced it.
    """
    for name, module in modules.items():
        module.__dict__["_compiled_call_impl"] = wrap(name, module)
    try:
        yield
    finally:
        for module in modules.values():
            module.__dict__.pop("_compiled_call_impl", None)


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


def containers_restored(module: nn.Module) -> AbstractContextManager[None]:
    """Within: what modules keep may change as `state_restored` has it (outputs kept for the epoch's end, meters)."""
    return state_restored(kept_by(module))


def kept_by(module: nn.Module) -> list[object]:
    """What modules have beside tensors and one another."""
    # torch's own, which begin so, are restored as attributes; what stands for a method may be who records
    values = [value for each in module.modules() for name, value in vars(each).items() if not name.startswith("_")]
    return [each for each in values if not isinstance(each, FunctionType | MethodType | partial | nn.Module)]


@contextmanager
def state_restored(owners: Iterable[object]) -> Iterator[None]:
    """Within: code may draw from generators, fill lists, dicts and sets, and set attributes of objects of classes that
    are not installed, wherever it reaches them from `owners`. Of objects of libraries, and what those alone have, only
    generators are looked for: a library may not expect to find itself as it was (files that it has read to their end).
    """
    saved, restore = list[tuple[_Container, list[Any]]](), list[Callable[[], object]]()
    empty: list[tuple[dict[str, Any], str]] = []  # where transformers' collators put a generator when they need it
    for value, is_own in _reached(owners):
        if is_own and isinstance(value, _CONTAINERS):
            saved.append((value, _content(value)))
        elif _is_plain(value):
            saved.append((vars(value), _content(vars(value))))
        elif (restoring := _restoring(value)) is not None:
            restore.append(restoring)
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
            empty += [(vars(value), name) for name, each in vars(value).items() if each is None]
    try:
        yield
    finally:
        for each in restore:
            each()
        for attributes, name in empty:
            if _restoring(attributes.get(name)) is not None:
                attributes[name] = None
        for container, content in saved:
            _refill(container, content)


def _refill(container: _Container, content: list[Any]) -> None:
    """Give a container what it had, where it has something else now."""
    now = _content(container)
    if len(now) != len(content) or any(map(_is_another, now, content)):
        kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
        kind.clear(container)  # not its own: a ModelOutput has none
        (kind.extend if kind in (list, deque) else kind.update)(container, content)


_PASSING = (*_CONTAINERS, tuple, frozenset, partial, MethodType, FunctionType)
_SIMPLE = {int, float, str, bool, bytes, type(None), torch.dtype, torch.device, Tensor, nn.Parameter}
_MOST_ITEMS = 10_000
"""Of a container that is looked into: more are data."""


def _reached(owners: Iterable[object]) -> Iterator[tuple[object, bool]]:
    """What code reaches from the owners through attributes, items, and what functions enclose; and whether without
    objects of libraries on the way, which may be told later."""
    ahead = deque((owner, True) for owner in owners if type(owner) not in _SIMPLE)
    seen: dict[int, tuple[object, bool]] = {}  # alive, so that no other has its id
    while ahead:
        value, is_own = ahead.popleft()
        if id(value) in seen and (seen[id(value)][1] or not is_own):
            continue
        seen[id(value)] = (value, is_own)
        yield value, is_own
        own = is_own if isinstance(value, _PASSING) else _is_plain(value)
        ahead.extend((part, own) for part in _parts(value) if type(part) not in _SIMPLE)


def _parts(value: object) -> Iterable[object]:
    match value:
        case partial():
            return (value.func, *value.args, *value.keywords.values())
        case MethodType():
            return (value.__self__, value.__func__)
        case FunctionType():
            names = [name for name in value.__code__.co_names if name in value.__globals__]
            used = [each for name in names if _restoring(each := value.__globals__[name]) is not None]
            return (*used, *_enclosed_by(value))
        case dict():
            return list(value.values()) if len(value) <= _MOST_ITEMS else ()
        case list() | tuple() | set() | frozenset() | deque():
            return list(value) if len(value) <= _MOST_ITEMS else ()
        case type() | ModuleType() | Tensor():
            return ()
    if not hasattr(value, "__dict__") or _library(value) in _CLOSED:
        return ()
    if isinstance(value, nn.Module):
        own = [each for name, each in vars(value).items() if name not in MODULE_DICTS]
        return (*own, *value._modules.values(), *_methods(value))
    return (*vars(value).values(), *_methods(value))


def _enclosed_by(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]


def _methods(value: object) -> list[FunctionType]:
    """Of the classes that are the user's own."""
    of_classes = [vars(kind).values() for kind in type(value).__mro__ if not _is_installed(kind.__module__)]
    return [each for each in chain(*of_classes) if isinstance(each, FunctionType)]


def _restoring(generator: object) -> Callable[[], object] | None:
    """What gives a generator the state that it has now; None: it is none, or has no state."""
    match generator:
        case torch.Generator():
            return partial(generator.set_state, generator.get_state())
        case np.random.RandomState():
            return partial(generator.set_state, generator.get_state())
        case np.random.Generator():
            return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
        case random.Random() if not isinstance(generator, random.SystemRandom):
            return partial(generator.setstate, generator.getstate())
    return None


def _content(container: _Container) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _is_another(now: Any, before: Any) -> bool:
    """Whether what a container holds is not the same; of a dict it is a new pair in any case."""
    if isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before) == 2:
        return now[0] is not before[0] or now[1] is not before[1]
    return now is not before


def _is_plain(value: object) -> bool:
    """An object of a class of the user's own."""
    if not hasattr(value, "__dict__") or isinstance(value, (nn.Module, Tensor, type, ModuleType, FunctionType)):
        return False
    return not _is_installed(type(value).__module__)


def _library(value: object) -> str:
    return type(value).__module__.partition(".")[0]


@cache
def _is_installed(module: str) -> bool:
    """Whether a module is of Python itself, an installed package or this one, and not the user's code beside these."""
    if module.partition(".")[0] in (*sys.stdlib_module_names, __name__.partition(".")[0]):
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


_CLOSED = (sys.stdlib_module_names | {"lightning"}) - {"builtins", "collections", "types"}
"""Libraries whose objects are not looked into: a Trainer reaches everything."""


_Cached = type(cache(lambda: None))


@contextmanager
def caches_restored(root: nn.Module) -> Iterator[None]:
    """Within: the user's own code that modules run may keep things outside of them, in globals, in attributes of
    classes and in the caches of `functools`. On fake tensors it keeps such, and whoever calls it later would find them.
    """
    found = list(_kept_outside(root))
    containers = [(each, _content(each)) for each in found if isinstance(each, _CONTAINERS)]
    cached = [(each, each.cache_info().misses) for each in found if isinstance(each, _Cached)]
    try:
        yield
    finally:
        for container, content in containers:
            _refill(container, content)
        for function, misses in cached:
            if function.cache_info().misses != misses:
                function.cache_clear()


def _kept_outside(root: nn.Module) -> Iterator[Any]:
    """Containers and cached functions, from the classes of modules, and of what those keep, through the functions and
    classes that are used there."""
    ahead: list[Any] = [kind for each in (*root.modules(), *kept_by(root)) for kind in type(each).__mro__]
    seen: dict[int, object] = {}
    while ahead:
        value = ahead.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, _CONTAINERS):
            yield value
        elif isinstance(value, _Cached):
            yield value
            ahead.append(value.__wrapped__)
        elif isinstance(value, staticmethod | classmethod):
            ahead.append(value.__func__)
        elif isinstance(value, type) and not _is_installed(value.__module__):
            ahead += [each for name, each in vars(value).items() if not name.startswith("__") or callable(each)]
        elif isinstance(value, FunctionType) and not _is_installed(value.__module__):
            ahead += [*_used_by(value), *_enclosed_by(value)]


def _used_by(function: FunctionType) -> list[Any]:
    """The globals that a function names, and what it names of modules among them."""
    names, found = function.__code__.co_names, function.__globals__
    used = [found[name] for name in names if name in found]
    modules = [each for each in used if isinstance(each, ModuleType) and not _is_installed(each.__name__)]
    return used + [vars(each)[name] for each in modules for name in names if name in vars(each)]


@contextmanager
def contents_restored(root: nn.Module) -> Iterator[None]:
    """Within: what modules keep beside their parameters may be written to in place (counters, metrics, lists)."""
    attributes = [value for module in root.modules() for value in vars(module).values()]
    found = [*root.buffers(), *attributes, *chain(*(vars(each).values() for each in attributes if _is_plain(each)))]
    tensors = [each for each in found if isinstance(each, Tensor) and not each.is_meta]
    saved = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        with containers_restored(root):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in saved:
                if tensor.layout is not torch.strided or not torch.equal(tensor, before):
                    tensor.copy_(before)
