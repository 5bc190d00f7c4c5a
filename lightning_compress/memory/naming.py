"""How names in a transformers checkpoint become those of the model: as `from_pretrained` renames them, but that names
of the model itself are taken as they are."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, rename_source_key

from lightning_compress.graph.experts import Experts
from lightning_compress.graph.unfold import Unfolding


def conversions_of(model: PreTrainedModel) -> list[WeightTransform]:
    """What its class does to what it loads."""
    return list(get_model_conversion_mapping(model))


def stacks_in(root: nn.Module) -> dict[str, tuple[Unfolding, str]]:
    """Names of the parameters that have another form where the model's own modules are in place (experts stacked), each
    with whose they are."""
    named = root.named_modules(remove_duplicate=False)  # a checkpoint has tied layers by any of their names
    found = ((path, module) for path, module in named if isinstance(module, Unfolding))
    return {f"{path}.{key}" if path else key: (module, key) for path, module in found for key in module.stacks}


def naming(
    model: PreTrainedModel, conversions: Sequence[WeightTransform], stacks: Collection[str]
) -> Callable[[str], tuple[str, str | None] | None]:
    """Tells of a name in the checkpoint that in the model, with the pattern of the converter that makes it of this and
    perhaps of others; None: it has no place there.

    Args:
        model: with stacks of experts taken apart, or not.
        conversions: see `conversions_of`.
        stacks: see `stacks_in`.
    """
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    own = model.state_dict()
    state = {**own, **dict.fromkeys(stacks)}

    def found(key: str) -> tuple[str, str | None] | None:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if pattern is not None and (name in stacks or name not in state):
            alone = rename_source_key(key, renamings, [], model.base_model_prefix, state)[0]
            if alone in own:  # stored one by one, as they are here
                name, pattern = alone, None
        if name not in state and key in state:
            name, pattern = key, None
        return (name, pattern) if name in state else None

    return found


@final
class WithStacks:
    """A model as conversions ask it for parameters: stacks of experts are whole, also where they are taken apart.

    Args:
        model: the model.
        stacks: see `stacks_in`.
    """

    def __init__(self, model: PreTrainedModel, stacks: Mapping[str, tuple[Unfolding, str]]) -> None:
        self._model = model
        self._stacks = stacks

    def get_parameter(self, name: str) -> nn.Parameter:
        """As `nn.Module.get_parameter`."""
        unfolding, key = self._stacks.get(name, (None, ""))
        if isinstance(unfolding, Experts):
            stack: nn.Parameter = unfolding.folded.get_parameter(key)
            return stack
        return self._model.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
