"""Operations that draw random numbers, as models do that have noise or dropout in eval mode too."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an ATen operation draws any; one that may drop out does not without a probability.

    >>> aten, x = torch.ops.aten, torch.ones(2)
    >>> draws(aten.randn_like.default, (x,), {}), draws(aten.native_dropout.default, (x, 0.5, False), {})
    (True, False)
    """
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    arguments = function._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= {**{each.name: value for each, value in zip(arguments, args, strict=False)}, **kwargs}
    return given.get("dropout_p", 1.0) != 0 and given.get("train", True) is not False
