"""What calls of modules have in common, so that what one of them returns tells what others do."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightning_compress.graph.kept import NOT_IN_SIGNATURE
from lightning_compress.graph.values import expression

BUT_ITS_NUMBER = NOT_IN_SIGNATURE | {"layer_idx"}
"""What does not count where layers that differ in their number alone are taken for alike: it finds their caches."""


def call_signature(
    module: nn.Module, args: Any, kwargs: Any, ignored: frozenset[str] = NOT_IN_SIGNATURE
) -> tuple[Any, ...] | None:
    """What the output's shape of a call can depend on, so that the body runs once for like modules; None: on too much.

    Repeated layers make most calls repetitions. Attributes other than plain values count by identity.

    Args:
        module: that is called.
        args, kwargs: with which.
        ignored: attributes that do not count.
    """
    inputs = [_plain(value) for value in (*args, *sorted(kwargs.items()))]
    description = module_signature(module, ignored)
    return None if description is None or None in inputs else (description, *inputs)


def _plain(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, Tensor):
        return (value.dtype, *map(expression, value.shape), *map(expression, value.stride()))
    if isinstance(value, tuple):
        items = tuple(_plain(item) for item in value)
        return None if None in items else items
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return (type(value), value)
    if isinstance(value, PreTrainedConfig):
        return (type(value), value.to_json_string())
    if isinstance(value, partial):
        given = _plain((*value.args, *sorted(value.keywords.items())))
        return None if given is None else (value.func, *given)
    return None


def module_signature(module: nn.Module, ignored: frozenset[str] = NOT_IN_SIGNATURE) -> tuple[Any, ...] | None:
    """Equal for modules that compute the same but for the values of their tensors; None: there are hooks."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    children = [module_signature(child, ignored) for child in module.children()]
    if None in children:
        return None
    tensors = [(name, _plain(t)) for held in (module._parameters, module._buffers) for name, t in held.items()]
    own = [(key, _plain(value) or id(value)) for key, value in module.__dict__.items() if key not in ignored]
    return (type(module), *tensors, *own, *children)
