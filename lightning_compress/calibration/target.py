"""What is compressed and how it is called: a LightningModule, or a transformers model, alone or wrapped.

What runs on a batch is, in this order: the module's `calibration_step(batch)` if it has one; else the transformers
model called with the batch's fields; else `forward(batch)`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from transformers import PreTrainedModel

from lightning_compress.errors import UnsupportedModelError
from lightning_compress.graph.restore import owning
from lightning_compress.recipe.parts import transformers_models

_LOGGING = ("log", "log_dict")
"""Methods of every LightningModule."""


@dataclass(frozen=True)
class Target:
    """The model to compress.

    Attributes:
        root: the module that owns every weight. A LightningModule that wraps one transformers model and owns no other
            weights is compressed as that model, so names carry no prefix.
        module: that `root` was found in, or itself.
        step: runs the model on one batch.
        step_name: what `step` calls, for messages.
        takes_fields: it calls the transformers model with fields of a batch (`fields_of`).
    """

    root: nn.Module
    module: nn.Module
    step: Callable[[Any], object]
    step_name: str
    takes_fields: bool = False


def find_target(module: nn.Module) -> Target:
    """The target in `module`.

    Raises:
        UnsupportedModelError: several transformers models and no `calibration_step` that says how they are called.
    """
    wrapped = list(transformers_models(module).values())
    root = owner(module)
    calibration_step = getattr(module, "calibration_step", None)
    if callable(calibration_step):
        step = _not_logging(module, calibration_step)
        return Target(root, module, step, f"{type(module).__name__}.calibration_step(batch)")
    if len(wrapped) > 1:
        names = ", ".join(type(model).__name__ for model in wrapped)
        raise UnsupportedModelError(
            f"{type(module).__name__} holds several transformers models ({names}), so what to run on a batch is not "
            "clear. "
            "Give it a method `calibration_step(self, batch)` that runs them."
        )
    if wrapped:
        return Target(
            root, module, _call_with_fields(wrapped[0]), f"{type(wrapped[0]).__name__}(**batch)", takes_fields=True
        )
    return Target(root, module, _not_logging(module, module), f"{type(module).__name__}.forward(batch)")


@contextmanager
def in_its_place(target: Target, other: nn.Module) -> Iterator[Callable[[Any], object]]:
    """Within: what runs a batch through `other`, a model like the target's root, as `target.step` does."""
    if target.module is target.root:
        yield find_target(other).step
        return
    holders = [
        (parent, name)
        for parent in target.module.modules()
        for name, child in parent._modules.items()
        if child is target.root
    ]
    for parent, name in holders:
        parent._modules[name] = other
    try:
        yield find_target(target.module).step
    finally:
        for parent, name in holders:
            parent._modules[name] = target.root


def owner(module: nn.Module) -> nn.Module:
    """What owns all weights of `module`: the one transformers model that it wraps, or itself."""
    wrapped = list(transformers_models(module).values())
    if len(wrapped) != 1:
        return module
    owned = {id(tensor) for tensor in wrapped[0].parameters()}
    return wrapped[0] if all(id(tensor) in owned for tensor in module.parameters()) else module


def _not_logging(module: nn.Module, step: Callable[[Any], Any]) -> Callable[[Any], object]:
    """The step, less what it logs and what it counts in metrics: a LightningModule's may be its `training_step`, and
    Lightning takes nothing outside its loops."""
    if not all(hasattr(type(module), name) for name in _LOGGING):
        return step

    def quiet(batch: Any) -> object:
        with ExitStack() as replaced:
            replaced.enter_context(owning(module, dict.fromkeys(_LOGGING, _nothing)))
            for metric in module.modules():
                if isinstance(metric, Metric):
                    replaced.enter_context(owning(metric, _OF_METRICS))
                elif isinstance(metric, MetricCollection):  # takes members whose states stay alike for one
                    replaced.enter_context(owning(metric, {"update": _nothing}))
            return step(batch)

    return quiet


def _nothing(*_: object, **__: object) -> None:
    pass


def _no_value(*_: object, **__: object) -> Tensor:
    return torch.zeros(())


_OF_METRICS = {"update": _nothing, "forward": _no_value, "compute": _no_value}


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes_any_field(model: PreTrainedModel) -> bool:
    """Whether its `forward` has `**kwargs`."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def fields_of(model: PreTrainedModel) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What of a batch the model is called with: the fields that its `forward` names, as `transformers.Trainer` does.

    Nearly every `forward` of transformers has `**kwargs`, and fails for some fields that tokenizers and data sets
    give. There, those are passed that a `forward` behind it names (of its base classes, of models inside with the same
    main input), its main input and, of token ids, the `attention_mask`; and all of a batch of which nothing is named.
    """
    named = _named(model.forward)
    if not takes_any_field(model):
        return lambda batch: {key: value for key, value in batch.items() if key in named}
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    inside = [module.forward for module in models if module.main_input_name == model.main_input_name]
    bases = [kind.forward for kind in type(model).__mro__ if issubclass(kind, nn.Module)]
    main = [model.main_input_name] if isinstance(model.main_input_name, str) else model.main_input_name
    of_text = {"attention_mask"}  # beside images it is the text's, which is not what encoders of images call so
    behind = set().union(*map(_named, (*inside, *bases)))
    named |= behind if "input_ids" in main else behind - of_text
    known = named.union(main, of_text if "input_ids" in main else ())

    def taken(batch: Mapping[str, Any]) -> dict[str, Any]:
        has_named = not named.isdisjoint(batch)
        return {key: value for key, value in batch.items() if key in known or not has_named}

    return taken


def _named(forward: Callable[..., object]) -> set[str]:
    parameters = inspect.signature(forward).parameters
    return {name for name, parameter in parameters.items() if parameter.kind in _NAMED and name != "self"}


def _call_with_fields(model: PreTrainedModel) -> Callable[[Any], object]:
    """Call the model with the fields of the batch that it takes."""
    taken = fields_of(model)

    def step(batch: Any) -> object:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
        if isinstance(ids, Tensor) and ids.ndim == 1 and not ids.is_floating_point():
            raise UnsupportedModelError(
                f"A batch of {type(model).__name__} has rows of token ids [B, L], and this has one, [L], as a sample "
                "has. Give batches of the samples, as DataLoader(dataset, batch_size=8) makes them."
            )
        if isinstance(batch, Mapping):
            return model(**taken(batch))
        if isinstance(batch, Tensor):
            return model(batch)
        raise UnsupportedModelError(
            f"A batch of type {type(batch).__name__} cannot be passed to {type(model).__name__} by name. Yield "
            "mappings such as "
            "{'input_ids': ...}, or give the LightningModule a `calibration_step(self, batch)`."
        )

    return step
