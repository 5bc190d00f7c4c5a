"""What modules keep in attributes, and what the code around them, which a graph does not have, changes of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from lightning_compress.graph.failures import SetFromOutsideError

NOT_IN_SIGNATURE = frozenset({*nn.Module().__dict__, "_compiled_call_impl"}) - {"training"}
"""What every module has: its containers, compared by their contents, and its hooks, of which there must be none."""

Preset = tuple[str, str, Any]
"""The name of a module, of an attribute, and what that is when the module is called."""
_NOTHING = object()


@final
@dataclass
class KeptByLeaves:
    """What leaves keep while a step is recorded.

    Attributes:
        presets: what code set on them before their first call.
        remembering: those of which one call tells another something.
        opened: those that are recorded by their operations.
    """

    presets: list[Preset] = field(default_factory=list)
    remembering: set[str] = field(default_factory=set)
    opened: set[str] = field(default_factory=set)
    _before: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)  # the step, or behind the last call
    _called: set[nn.Module] = field(default_factory=set)

    def begin(self, leaves: Iterable[nn.Module]) -> None:
        """What leaves have now is what they are to have when they are called."""
        for module in leaves:
            self._before |= _what_is_kept(module)

    def opens(self, name: str, module: nn.Module) -> bool:
        """Whether a leaf is recorded by its operations, for code has changed what it keeps and it owns no weights.

        Raises:
            SetFromOutsideError: it does, and what was changed cannot be set before the graph runs.
        """
        found = _changed(name, module, self._before)
        if found and next(module.parameters(), None) is None:
            self.opened.add(name)
        if name in self.opened:
            return True
        for owner, (path, key, value) in found:
            if owner in self._called or not is_plain(value):
                raise SetFromOutsideError(f"`{key}` of {path} is set before it is called, which no graph can hold")
            self.presets.append((path, key, value))
        return False

    def behind(self, name: str, module: nn.Module) -> None:
        """Note what a leaf has behind a call."""
        if name not in self.opened and any(owner in self._called for owner, _ in _changed(name, module, self._before)):
            self.remembering.add(name)
        self._before |= _what_is_kept(module)
        self._called.update(module.modules())


def _what_is_kept(module: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """By a module and by those in it: attributes, parameters, buffers and children, but no hooks."""
    return {each: _own(each) for each in module.modules()}


def _changed(name: str, module: nn.Module, kept: Mapping[nn.Module, dict[str, Any]]) -> list[tuple[nn.Module, Preset]]:
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
