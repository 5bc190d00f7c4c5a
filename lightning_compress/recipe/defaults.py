"""What a target that is a class leaves alone: modules that only a name has quantized, or refused."""

import re
from collections.abc import Collection, Sequence

from torch import nn
from transformers import PreTrainedModel

from lightning_compress.recipe.forms import NO_PRODUCT, Convolving, has_computed_weight, is_product, why_not
from lightning_compress.recipe.parts import transformers_models

_OTHER_MODALITIES = re.compile("vision|image|video|audio|speech|codec|protein")


def left_alone(root: nn.Module) -> dict[nn.Module, str]:
    """Modules of `root` that only a name or a pattern reaches, each with the reason."""
    routers = dict.fromkeys(_routers(root), "it chooses or weighs experts; name it in `targets` to quantize it")
    towers = dict.fromkeys(
        _beside_language_models(root), "outside the language model; name it in `targets` to quantize it"
    )
    attention = [module for module in root.modules() if isinstance(module, nn.MultiheadAttention)]
    projections: list[nn.Module] = [module.out_proj for module in attention]
    read = dict.fromkeys(projections, "nn.MultiheadAttention reads it, without calling it")
    others = (module for module in root.modules() if isinstance(module, nn.Linear) and not is_product(module))
    convolutions = [each for each in root.modules() if isinstance(each, Convolving)]
    convolutions = [each for each in convolutions if each.groups > 1 or not has_computed_weight(each)]
    apart: dict[nn.Module, str] = {each: reason for each in convolutions if (reason := why_not(each)) is not None}
    return {**dict.fromkeys(others, NO_PRODUCT), **apart, **towers, **routers, **read}


def output_embeddings(root: nn.Module) -> list[nn.Module]:
    """Those of every transformers model in `root`, itself included."""
    getters = (getattr(module, "get_output_embeddings", None) for module in root.modules())
    found = (get() for get in getters if callable(get))
    return [module for module in found if isinstance(module, nn.Module)]


def _routers(root: nn.Module) -> list[nn.Module]:
    """Linears beside experts that choose among them or weigh them: those with as many outputs as there are experts, or
    one; and all in a `router`, or in a `gate` that has such a Linear."""
    found: list[nn.Module] = []
    for parent in root.modules():
        children = dict(parent.named_children())
        sizes = {size for name, child in children.items() if (size := _num_experts(name, child)) is not None}
        if not sizes:
            continue
        for name, child in children.items():
            inside = [part for part in child.modules() if isinstance(part, nn.Linear)]
            if isinstance(child, nn.Linear):
                found += inside if child.out_features in {1, *sizes} else []
            elif "router" in name or ("gate" in name and _chooses(child, inside, sizes)):
                found += inside
    return found


def _chooses(gate: nn.Module, inside: Sequence[nn.Linear], sizes: Collection[int]) -> bool:
    return isinstance(getattr(gate, "num_experts", None), int) or any(part.out_features in sizes for part in inside)


def _num_experts(name: str, module: nn.Module) -> int | None:
    """How many a module says or shows that it holds: those that are no stack are in a list of them."""
    declared = getattr(module, "num_experts", None)
    if isinstance(declared, int):
        return declared
    is_list = "expert" in name and isinstance(module, nn.ModuleList | nn.ModuleDict)
    return len(module) if is_list and len(module) > 1 else None  # type: ignore[arg-type]


def _beside_language_models(root: nn.Module) -> list[nn.Module]:
    """What brings images and sounds into a language model: vision and audio towers, projections.

    A language model is the part with a text configuration of its own within a model that generates text; where there is
    none, all but the parts that have a configuration for images or sounds. Models that encode before they decode are
    one as a whole (T5, Whisper), and so are those without tokens to read (OmniASR for CTC).
    """
    found: list[nn.Module] = []
    for model in transformers_models(root).values():
        if model.config.is_encoder_decoder or not model.can_generate():
            continue
        text = model.config.get_text_config(decoder=True)
        language = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is text]
        if text is not model.config and language:
            inside = {*language[0].modules(), *output_embeddings(model)}
            found += [part for part in model.modules() if isinstance(part, nn.Linear) and part not in inside]
        else:
            keys = [key for key in model.config.sub_configs if _OTHER_MODALITIES.search(key)]
            others = {type(getattr(model.config, key)) for key in keys if hasattr(model.config, key)}
            towers = [part for part in model.modules() if type(getattr(part, "config", None)) in others]
            within = dict.fromkeys(part for tower in towers for part in tower.modules())
            if any(isinstance(part, nn.Embedding) and part not in within for part in model.modules()):  # of tokens
                found += [part for part in within if isinstance(part, nn.Linear)]
    return found
