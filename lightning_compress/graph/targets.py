"""Which modules are onloaded one at a time: the sequential targets."""

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from lightning_compress.errors import UnsupportedModelError
from lightning_compress.graph.names import is_in, outermost
from lightning_compress.recipe.config import not_regular
from lightning_compress.recipe.resolve import matches


def as_patterns(given: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Sequential targets as a user gives them: several, or one.

    Raises:
        UnsupportedModelError: what is given is no text, or holds what is none.
    """
    if given is None or isinstance(given, str):
        return None if given is None else (given,)
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(each, str) for each in found):
        raise UnsupportedModelError(
            f"sequential_targets={given!r} is no list of class names, module names or 're:' patterns."
        )
    return found


def sequential_modules(
    root: nn.Module, patterns: Sequence[str] | None, quantizable: Collection[str]
) -> tuple[str, ...]:
    """Names of the sequential targets of `root`, outermost only, in the model's order.

    Args:
        root: the model.
        patterns: class names, module names or `re:` patterns; None takes what the model's author declared indivisible
            (transformers' `_no_split_modules`, of every submodel), else the entries of its `ModuleList`s and
            `Sequential`s that hold something to quantize, else the modules to quantize themselves.
        quantizable: names of the modules to quantize.

    Raises:
        UnsupportedModelError: a pattern was given and matches no module.
    """
    if patterns is not None:
        for pattern in patterns:
            if reason := not_regular(pattern):
                raise UnsupportedModelError(f"sequential_targets: {pattern!r} is no regular expression ({reason}).")
        found = [
            name for name, module in root.named_modules() if name and any(matches(p, [name], module) for p in patterns)
        ]
        if not found:
            classes = sorted({type(module).__name__ for module in root.modules()})
            raise UnsupportedModelError(
                f"No module matches sequential_targets {list(patterns)}. Classes in this model: {', '.join(classes)}."
            )
        return outermost(found)
    declared = {name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [name for name, module in root.named_modules() if type(module).__name__ in declared]
    if not any(_holds(name, quantizable) for name in layers):
        layers = [
            f"{name}.{child}" if name else child
            for name, module in root.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
            for child, member in module.named_children()
            if not isinstance(member, nn.ModuleList | nn.ModuleDict)  # those are never called; what is in them is
        ]
    chosen = outermost(layers)
    return chosen if any(_holds(name, quantizable) for name in chosen) else tuple(quantizable)


def with_parameters(root: nn.Module) -> tuple[str, ...]:
    """Names of the modules in `root` that have parameters of their own."""
    return tuple(name for name, module in root.named_modules() if name and list(module.parameters(recurse=False)))


def _holds(name: str, quantizable: Collection[str]) -> bool:
    return any(is_in(other, [name]) for other in quantizable)
