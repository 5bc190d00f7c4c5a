"""What modules keep in attributes, and what the code around them, which a graph does not have, changes of it."""

from typing import Any

from torch import nn

NOT_IN_SIGNATURE = frozenset({*nn.Module().__dict__, "_compiled_call_impl"}) - {"training"}
"""What every module has: its containers, compared by their contents, and its hooks, of which there must be none."""

Kept = list[tuple[str, nn.Module, dict[str, Any]]]
Preset = tuple[str, str, bool | int | float | str | None]
"""The name of a module, of an attribute, and what that is when the module is called."""
_NOTHING = object()


def what_is_kept(name: str, module: nn.Module) -> Kept:
    """By the module of this name and by those in it: attributes, parameters, buffers and children, but no hooks."""
    return [(path, each, _own(each)) for path, each in module.named_modules(prefix=name)]


def changed(kept: Kept) -> list[tuple[str, str, Any]]:
    """Names of modules and of attributes that are not what they were, and what they are."""
    found = []
    for name, module, before in kept:
        now = _own(module)
        keys = (key for key in {**before, **now} if not _is_same(before.get(key, _NOTHING), now.get(key, _NOTHING)))
        found += [(name, key, now.get(key, _NOTHING)) for key in keys]
    return found


def is_plain(value: object) -> bool:
    """Whether it can be set again for every batch."""
    return value is None or isinstance(value, bool | int | float | str)


def _own(module: nn.Module) -> dict[str, Any]:
    attributes = {key: value for key, value in vars(module).items() if key not in NOT_IN_SIGNATURE}
    return {**attributes, **module._parameters, **module._buffers, **module._modules}


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and is_plain(one) and one == other
