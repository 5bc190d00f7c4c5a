"""Methods of modules, and functions, as single calls.

A model's own code between its layers may read values: where the images are among the tokens, how large each is. Such
code cannot be recorded, and the module that it belongs to holds all that matters, so it cannot be one call either. But
it mostly stands in a method of its own (`get_rope_index`, `get_image_features`), or is a function (a mask of lengths,
`pack_padded_sequence`, a mean over the nodes of each graph), which can.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import unwrap
from traceback import walk_tb
from types import FunctionType, ModuleType
from typing import Any, final

from torch import nn

from lightning_compress.graph.restore import owning

_RECORDING = ("lightning_compress.", "torch.fx.")
_DECORATING = ("torch._", "torch.utils.")
_DIFFERENTIATING = "torch.autograd"
"""What needs to know how its arguments were computed, which values of a graph do not."""


@dataclass(frozen=True)
class Method:
    """A method of a module, or a function.

    Attributes:
        module: whose; of a function, Python's module.
        name: the attribute.
        calls: names of the modules that it calls, outermost only, as far as they are known.
        sets: attributes of modules that it changes, likewise.
        reads: names of the parameters and buffers that it reads of modules that it does not call, likewise.
        writes: it changes tensors that it is given, likewise.
    """

    module: nn.Module | ModuleType
    name: str
    calls: tuple[str, ...] = ()
    sets: tuple[tuple[nn.Module, str], ...] = ()
    reads: tuple[str, ...] = ()
    writes: bool = False


@final
class Unrecorded:
    """Stands for what a method has left in an attribute while it was not recorded: using it is an error."""

    def __init__(self, what: str) -> None:
        self.__dict__["what"] = what

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"{self.__dict__['what']}, and code outside of it uses that")

    def __bool__(self) -> bool:
        return bool(self.used)

    def __len__(self) -> int:
        return int(self.used)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.used)

    def __getitem__(self, key: object) -> Any:
        return self.used[key]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, Unrecorded):
                return value.used
        raise TypeError("an attribute that a method sets is used outside of it")


def running_methods(module: nn.Module, error: BaseException) -> list[str]:
    """Names of the methods of `module`, other than `forward`, that were running when `error` was raised; innermost
    first."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_locals.get("self") is module]
    names = [frame.f_code.co_name for frame in reversed(frames)]
    own = [name for name in names if callable(getattr(type(module), name, None)) and not hasattr(nn.Module, name)]
    return list(dict.fromkeys(own))


def running_functions(module: nn.Module, error: BaseException) -> list[str]:
    """Names (`package.module:function`) of the functions that code of `module` had called when `error` was raised, of
    which the first is the one that it called itself."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    own = [number for number, frame in enumerate(frames) if frame.f_locals.get("self") is module]
    found = dict[str, None]()
    for frame in frames[own[-1] + 1 :] if own else ():
        place, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if f"{place}.".startswith(_RECORDING):
            break
        function = None if place.startswith((*_DECORATING, _DIFFERENTIATING)) else frame.f_globals.get(name)
        if place in sys.modules and isinstance(function, FunctionType) and _code(function) is frame.f_code:
            found[f"{place}:{name}"] = None
    return list(found)


def _code(function: FunctionType) -> object:
    """Of what decorators (`torch.no_grad`) have wrapped."""
    return getattr(unwrap(function), "__code__", None)


@contextmanager
def methods_replaced(
    root: nn.Module, methods: Mapping[str, Method], wrap: Callable[[str, Method], Callable[..., Any]]
) -> Iterator[None]:
    """Within: calling a method calls `wrap(name, method)`; a function wherever it was imported to under its name, or is
    an attribute of a module in `root`."""
    wrapped = [(method, wrap(name, method)) for name, method in methods.items()]
    replacing = [owning(place, {name: call}) for method, call in wrapped for place, name in _places(root, method)]
    with ExitStack() as stack:
        for each in replacing:
            stack.enter_context(each)
        yield


def _places(root: nn.Module, method: Method) -> list[tuple[object, str]]:
    """What has it as an attribute that is looked up where it is called, and that attribute's name."""
    if isinstance(method.module, nn.Module):
        return [(method.module, method.name)]
    modules, function = list(sys.modules.values()), original(method)
    found: list[tuple[object, str]] = [
        (each, method.name) for each in modules if getattr(each, "__dict__", {}).get(method.name) is function
    ]
    return found + [(each, name) for each in root.modules() for name, its in vars(each).items() if its is function]


def original(method: Method) -> Callable[..., Any]:
    """The method, bound; ask before it is replaced."""
    bound: Callable[..., Any] = getattr(method.module, method.name)
    return bound
