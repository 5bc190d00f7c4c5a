"""What modules keep in attributes, and what the code around them, which a graph does not have, changes of it."""

from typing import Any

import torch
from torch import nn

NOT_IN_SIGNATURE = frozenset({*nn.Module().__dict__, "_compiled_call_impl"}) - {"training"}
"""What every module has: its containers, compared by their contents, and its hooks, of which there must be none."""

Kept = dict[nn.Module, dict[str, Any]]
Preset = tuple[str, str, Any]
"""The name of a module, of an attribute, and what that is when the module is called."""
_NOTHING = object()


def what_is_kept(module: nn.Module) -> Kept:
    """By a module and by those in it: attributes, parameters, buffers and children, but no hooks."""
    return {each: _own(each) for each in module.modules()}


def changed(name: str, module: nn.Module, kept: Kept) -> list[tuple[nn.Module, Preset]]:
    """What a module of this name, and those in it, have that is not what it was."""
    found = []
    for path, each in module.named_modules(prefix=name):
        now, before = _own(each), kept.get(each, {})
        keys = (key for key in {**before, **now} if not _is_same(before.get(key, _NOTHING), now.get(key, _NOTHING)))
        found += [(each, (path, key, now.get(key, _NOTHING))) for key in keys]
    return found


def is_plain(value: object) -> bool:
    """Whether it can be set again for every batch."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def _own(module: nn.Module) -> dict[str, Any]:
    attributes = {key: value for key, value in vars(module).items() if key not in NOT_IN_SIGNATURE}
    return {**attributes, **module._parameters, **module._buffers, **module._modules}


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and is_plain(one) and is_plain(other) and one == other)
