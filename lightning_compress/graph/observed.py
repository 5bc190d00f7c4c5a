"""What real runs of the step tell of calls that cannot run on fake tensors."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_compress.graph.aliases import Viewed, viewed
from lightning_compress.graph.experts import GroupedLinear
from lightning_compress.graph.methods import Method, methods_replaced, original
from lightning_compress.graph.names import is_in, outermost
from lightning_compress.graph.restore import assigned, attributes_restored, calls_replaced
from lightning_compress.graph.symbolic import layouts
from lightning_compress.graph.trees import versions
from lightning_compress.recipe.forms import reader


@dataclass
class Observed:
    """The calls of a module or of a method in one run.

    Attributes:
        returned: of each call that is not within another that is observed, the output's layouts, and which arguments
            it is `viewed` of.
        calls: names of the modules that it calls, outermost only. This and what follows: of a method.
        reads: names of the parameters and buffers that it reads of modules that it does not call.
        sets: attributes of modules that it changes.
        writes: it changes tensors that it is given.
    """

    returned: list[tuple[Any, Viewed]] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    sets: set[tuple[nn.Module, str]] = field(default_factory=set)
    writes: bool = False


def observe(
    root: nn.Module, leaves: Mapping[str, nn.Module], methods: Mapping[str, Method], run: Callable[[], object]
) -> dict[str, Observed]:
    """Of `leaves` and `methods` what they do during a real `run`."""
    found = {name: Observed() for name in (*leaves, *methods)}
    names = {module: name for name, module in root.named_modules()}
    inside: list[str] = []

    def around() -> list[Observed]:
        return [found[name] for name in inside if name in methods]

    def seen(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_outermost, given = not inside, versions((args, kwargs))
            inside.append(name)
            try:
                output = function(*args, **kwargs)
            finally:
                inside.pop()
            if is_outermost:
                found[name].returned.append((layouts(output), viewed((args, kwargs), output, given)))
            return output

        return call

    def of_module(name: str, module: nn.Module) -> Callable[..., Any]:
        function = seen(name, module._call_impl) if name in leaves else module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            for method in around():
                method.calls |= {names[module]} if names.get(module) else set()
            return function(*args, **kwargs)

        return call

    def of_method(name: str, method: Method) -> Callable[..., Any]:
        function = seen(name, original(method))

        def call(*args: Any, **kwargs: Any) -> Any:
            with _noting_changes(root, (args, kwargs), found[name]):
                return function(*args, **kwargs)

        return call

    every = {name: module for module, name in names.items() if name} if methods else {}
    with (
        attributes_restored(root),
        calls_replaced({**every, **leaves}, of_module),
        methods_replaced(root, methods, of_method),
        _noting_reads(names, around),
        torch.no_grad(),
    ):
        run()
    for each in found.values():
        each.calls = set(outermost(sorted(each.calls)))
        each.reads = {read for read in each.reads if not is_in(read, each.calls)}
    return found


@contextmanager
def _noting_changes(root: nn.Module, given: object, method: Observed) -> Iterator[None]:
    before, written = {module: dict(module.__dict__) for module in root.modules()}, versions(given)
    try:
        yield
    finally:
        for module, attributes in before.items():
            now = module.__dict__.items()
            method.sets |= {(module, key) for key, value in now if attributes.get(key, before) is not value}
        method.writes |= written != versions(given)


@contextmanager
def _noting_reads(names: Mapping[nn.Module, str], methods: Callable[[], Iterable[Observed]]) -> Iterator[None]:
    usual = nn.Module.__getattr__

    def passing_on(module: nn.Module, key: str) -> object:
        if module in names and (key in module._parameters or key in module._buffers):
            for method in methods():
                method.reads.add(f"{names[module]}.{key}".lstrip("."))
        return usual(module, key)

    with assigned(nn.Module, __getattr__=passing_on):
        yield


def counted(
    root: nn.Module, leaves: Mapping[str, nn.Module], names: Collection[str], run: Callable[[], object]
) -> tuple[frozenset[str], int]:
    """The leaves that are one of the named modules, or run some, and how often a real `run` calls them."""
    targets = {id(reader(root.get_submodule(name))) for name in names}
    grouped = {name for name, module in leaves.items() if isinstance(module, GroupedLinear)}
    around = {name for name, module in leaves.items() if any(id(part) in targets for part in module.modules())}
    seen = observe(root, {name: leaves[name] for name in grouped | around}, {}, run)
    return frozenset(seen), sum(len(each.returned) for each in seen.values())
