"""What is compressed and how it is called: a LightningModule, or a transformers model, alone or wrapped.

What runs on a batch is, in this order: the module's `calibration_step(batch)` if it has one; else the transformers
model called with the batch's fields; else `forward(batch)`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_compress.errors import UnsupportedModelError


@dataclass(frozen=True)
class Target:
    """The model to compress.

    Attributes:
        root: the module that owns every weight. A LightningModule that wraps one transformers model and owns no other
            weights is compressed as that model, so names carry no prefix.
        step: runs the model on one batch.
        step_name: what `step` calls, for messages.
    """

    root: nn.Module
    step: Callable[[Any], object]
    step_name: str

    @property
    def is_transformers(self) -> bool:
        """Whether `root` is saved and loaded by transformers."""
        return isinstance(self.root, PreTrainedModel)


def find_target(module: nn.Module) -> Target:
    """The target in `module`.

    Raises:
        UnsupportedModelError: several transformers models and no `calibration_step` that says how they are called.
    """
    wrapped = _wrapped_models(module)
    root = owner(module)
    calibration_step = getattr(module, "calibration_step", None)
    if callable(calibration_step):
        return Target(root, calibration_step, f"{type(module).__name__}.calibration_step(batch)")
    if len(wrapped) > 1:
        names = ", ".join(type(model).__name__ for model in wrapped)
        raise UnsupportedModelError(
            f"{type(module).__name__} holds several transformers models ({names}), so what to run on a batch is not "
            "clear. "
            "Give it a method `calibration_step(self, batch)` that runs them."
        )
    if wrapped:
        return Target(root, _call_with_fields(wrapped[0]), f"{type(wrapped[0]).__name__}(**batch)")
    return Target(root, module, f"{type(module).__name__}.forward(batch)")


def _wrapped_models(module: nn.Module) -> list[PreTrainedModel]:
    """The outermost transformers models in `module`, itself included."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in _wrapped_models(child)]


def owner(module: nn.Module) -> nn.Module:
    """What owns all weights of `module`: the one transformers model that it wraps, or itself."""
    wrapped = _wrapped_models(module)
    if len(wrapped) != 1:
        return module
    owned = {id(tensor) for tensor in wrapped[0].parameters()}
    return wrapped[0] if all(id(tensor) in owned for tensor in module.parameters()) else module


def _call_with_fields(model: PreTrainedModel) -> Callable[[Any], object]:
    """Call the model as `transformers.Trainer` does: with the fields of the batch that its `forward` names."""
    parameters = inspect.signature(model.forward).parameters

    def step(batch: Any) -> object:
        if isinstance(batch, Mapping):
            return model(**{key: value for key, value in batch.items() if key in parameters})
        if isinstance(batch, Tensor):
            return model(batch)
        raise UnsupportedModelError(
            f"A batch of type {type(batch).__name__} cannot be passed to {type(model).__name__} by name. Yield "
            "mappings such as "
            "{'input_ids': ...}, or give the LightningModule a `calibration_step(self, batch)`."
        )

    return step
