"""Leave modules as they were."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
