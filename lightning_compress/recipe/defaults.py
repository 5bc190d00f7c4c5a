"""What a target that is a class leaves alone: modules that are quantized only where a target names them."""

from torch import nn
from transformers import PreTrainedModel

from lightning_compress.recipe.parts import transformers_models


def left_alone(root: nn.Module) -> dict[nn.Module, str]:
    """Linears of `root` that only a name or a pattern reaches, each with the reason."""
    routers = dict.fromkeys(_routers(root), "it chooses or weighs experts; name it in `targets` to quantize it")
    towers = dict.fromkeys(
        _beside_language_models(root), "outside the language model; name it in `targets` to quantize it"
    )
    attention = [module for module in root.modules() if isinstance(module, nn.MultiheadAttention)]
    projections: list[nn.Module] = [module.out_proj for module in attention]
    read = dict.fromkeys(projections, "nn.MultiheadAttention reads it, without calling it")
    return {**towers, **routers, **read}


def output_embeddings(root: nn.Module) -> list[nn.Module]:
    """Those of every transformers model in `root`, itself included."""
    getters = (getattr(module, "get_output_embeddings", None) for module in root.modules())
    found = (get() for get in getters if callable(get))
    return [module for module in found if isinstance(module, nn.Module)]


def _routers(root: nn.Module) -> list[nn.Module]:
    """Linears beside experts that choose among them or weigh them: as many outputs as there are experts, or one."""
    found: list[nn.Module] = []
    for parent in root.modules():
        declared = (getattr(child, "num_experts", None) for child in parent.children())
        sizes = {size for size in declared if isinstance(size, int)}
        linears = (child for child in parent.children() if isinstance(child, nn.Linear))
        found += [linear for linear in linears if sizes and linear.out_features in {1, *sizes}]
    return found


def _beside_language_models(root: nn.Module) -> list[nn.Module]:
    """What brings images and sounds into a language model: vision and audio towers, projections.

    A language model is the part with a text configuration of its own within a model that generates text. Models that
    encode before they decode are one as a whole (T5, Whisper).
    """
    found: list[nn.Module] = []
    for model in transformers_models(root).values():
        text = model.config.get_text_config(decoder=True)
        language = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is text]
        if text is model.config or not language or model.config.is_encoder_decoder or not model.can_generate():
            continue
        inside = {*language[0].modules(), *output_embeddings(model)}
        found += [part for part in model.modules() if isinstance(part, nn.Linear) and part not in inside]
    return found
