"""Leave modules as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

MODULE_DICTS = tuple(name for name, value in nn.Module().__dict__.items() if isinstance(value, dict))
"""Parameters, buffers, submodules and all kinds of hooks."""


@contextmanager
def attributes_restored(root: nn.Module) -> Iterator[None]:
    """Whatever the body changes on modules (caches, rescaled buffers, fake parameters, hooks) is undone after it."""
    saved = [
        (module, dict(module.__dict__), [(module.__dict__[name], dict(module.__dict__[name])) for name in MODULE_DICTS])
        for module in root.modules()
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
def assigned(target: Any, name: str, value: object) -> Iterator[None]:
    """Within: an attribute has this value."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)


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
        while torch.autocast_decrement_nesting() >= depth:
            pass
        for kind, is_enabled, dtype in states:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(is_cached)
