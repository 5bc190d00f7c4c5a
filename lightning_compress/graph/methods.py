"""Methods of modules as single calls.

A model's own code between its layers may read values: where the images are among the tokens, how large each is. Such
code cannot be recorded, and the module that it belongs to holds all that matters, so it cannot be one call either. But
it mostly stands in a method of its own (`get_rope_index`, `get_image_features`), which can.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from torch import nn

from lightning_compress.graph.compat import calls_replaced
from lightning_compress.graph.restore import attributes_restored


@dataclass(frozen=True)
class Method:
    """A method of a module.

    Attributes:
        module: whose.
        name: the attribute.
        calls: names of the modules that it calls, outermost only, as far as they are known.
    """

    module: nn.Module
    name: str
    calls: tuple[str, ...] = ()


def running_methods(module: nn.Module, error: BaseException) -> list[str]:
    """Names of the methods of `module`, other than `forward`, that were running when `error` was raised; innermost
    first."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_locals.get("self") is module]
    names = [frame.f_code.co_name for frame in reversed(frames)]
    own = [name for name in names if callable(getattr(type(module), name, None)) and not hasattr(nn.Module, name)]
    return list(dict.fromkeys(own))


@contextmanager
def methods_replaced(
    methods: Mapping[str, Method], wrap: Callable[[str, Method], Callable[..., Any]]
) -> Iterator[None]:
    """Within: calling a method calls `wrap(name, method)`."""
    for name, method in methods.items():
        method.module.__dict__[method.name] = wrap(name, method)
    try:
        yield
    finally:
        for method in methods.values():
            method.module.__dict__.pop(method.name, None)


def original(method: Method) -> Callable[..., Any]:
    """The method as its class has it."""
    bound: Callable[..., Any] = getattr(type(method.module), method.name).__get__(method.module)
    return bound


def called_within(root: nn.Module, methods: Mapping[str, Method], run: Callable[[], object]) -> dict[str, set[str]]:
    """Names of the modules that each method calls during `run`, outermost only."""
    called: dict[str, set[str]] = {name: set() for name in methods}
    inside: list[str] = []
    modules = {name: module for name, module in root.named_modules() if name}

    def note(name: str, module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            for method in inside:
                called[method].add(name)
            return module._call_impl(*args, **kwargs)

        return call

    def enter(name: str, method: Method) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inside.append(name)
            try:
                return original(method)(*args, **kwargs)
            finally:
                inside.remove(name)

        return call

    with attributes_restored(root), calls_replaced(modules, note), methods_replaced(methods, enter):
        run()
    return {name: _outermost(found) for name, found in called.items()}


def _outermost(names: Collection[str]) -> set[str]:
    return {name for name in names if not any(name.startswith(f"{other}.") for other in names)}
