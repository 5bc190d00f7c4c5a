"""The transformers models in a module."""

from torch import nn
from transformers import PreTrainedModel


def transformers_models(root: nn.Module, prefix: str = "") -> dict[str, PreTrainedModel]:
    """The outermost ones, by what the names of their parts begin with: "", or "model." for an attribute `model`."""
    if isinstance(root, PreTrainedModel):
        return {prefix: root}
    found: dict[str, PreTrainedModel] = {}
    for name, child in root.named_children():
        found.update(transformers_models(child, f"{prefix}{name}."))
    return found
