"""What the configurations of transformers models inside a module say."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import transformers
from torch import nn

from lightning_compress.graph.restore import assigned


def configs_of(root: nn.Module) -> list[transformers.PreTrainedConfig]:
    """Configurations of all transformers models inside `root`, nested ones included, each once."""
    found: dict[int, transformers.PreTrainedConfig] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in root.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, transformers.PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return list(found.values())


def is_encoder_decoder(root: nn.Module) -> bool:
    """Whether a transformers model inside has an encoder and a decoder, with sequences of their own."""
    return any(getattr(config, "is_encoder_decoder", False) for config in configs_of(root))


def varies(config: Any, name: str) -> bool:
    """Whether each layer has a value of its own, which newer versions of transformers refuse to read as one."""
    try:
        getattr(config, name, None)
    except RuntimeError:
        return True
    return False


def size_in(config: Any, name: str) -> int | None:
    """A size that a configuration has; None: it has none, or one per layer."""
    found = None if varies(config, name) else getattr(config, name, None)
    return found if isinstance(found, int) and found > 0 else None


@contextmanager
def without_cache(root: nn.Module) -> Iterator[None]:
    """Within: the models inside `root` keep no key/value cache."""
    with ExitStack() as stack:
        for config in configs_of(root):
            if getattr(config, "use_cache", None):
                stack.enter_context(assigned(config, use_cache=False))
        yield
