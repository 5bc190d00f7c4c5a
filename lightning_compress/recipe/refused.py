"""Models that are refused whatever the recipe: their modules are not what a checkpoint should hold."""

from collections.abc import Mapping

import torch
from torch import nn

from lightning_compress.errors import UnsupportedModelError
from lightning_compress.recipe.parts import transformers_models


def adapters(root: nn.Module) -> list[str]:
    """Names of the modules that peft has put an adapter (LoRA) on."""
    return [
        name
        for name, module in root.named_modules()
        if isinstance(getattr(module, "base_layer", None), nn.Module) and callable(getattr(module, "merge", None))
    ]


def check_merged(root: nn.Module) -> None:
    """
    Raises:
        UnsupportedModelError: peft has adapters on modules, or prompts beside them.
    """
    for name, module in root.named_modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, Mapping) and any(
            getattr(each, "is_prompt_learning", False) for each in configs.values()
        ):
            raise UnsupportedModelError(
                f"{name or 'The model'} ({type(module).__name__}) has learned prompts, which calibration would not see "
                "and a checkpoint of the model has no place for. Compress the model without them, "
                "`model.get_base_model()`, and keep the prompts apart."
            )
    found = adapters(root)
    if found:
        module = root.get_submodule(found[0])
        raise UnsupportedModelError(
            f"{len(found)} modules carry adapters that are not merged into their weights ({found[0]}, "
            f"{type(module).__module__}.{type(module).__name__}, and more): a checkpoint would hold both. Merge them "
            "first, with `model = model.merge_and_unload()`; after a training do it in `on_train_end`, which runs "
            "before the compression (but not where `ckpt_path` is of a training that had ended: merge before `fit`)."
        )


def check_compiled(root: nn.Module) -> None:
    """`torch.compile(layer)` puts a module around a layer, and its name into those of the weights.

    Raises:
        UnsupportedModelError: so it is, or TorchScript hides what is inside.
    """
    scripted = [name for name, module in root.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise UnsupportedModelError(
            f"{scripted[0] or 'The model'} is compiled by TorchScript, which hides what is inside: use the Python "
            "module that it was made from."
        )
    models = transformers_models(root).values()
    found = [name for model in models for name, _ in model.named_modules() if name.endswith("_orig_mod")]
    if found:
        raise UnsupportedModelError(
            f"{len(found)} modules are wrapped by torch.compile ({found[0].removesuffix('._orig_mod')}, and more), so "
            "their weights have names that transformers does not know. Compile them in place: `layer.compile()` for "
            "`layer = torch.compile(layer)`."
        )
