"""Which families there are: transformers' own auto-mappings, a row per model type within each kind."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LEAST_SHARE = 0.7
"""Of the weights in matrices that are meant to be quantized: with less, a model does not work."""
MOST_HIDDEN = 0.75
"""Of the quantized modules: where a single call holds more, a model is not traced."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "causal LM": ("CAUSAL_LM",),
    "vision-language": ("IMAGE_TEXT_TO_TEXT",),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "speech": ("SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION", "MULTIMODAL_LM"),
    "text encoder": ("MASKED_LM",),
    "vision encoder": ("IMAGE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
}
"""Kind -> the auto-mappings it is made of, the first that has a model type first."""


@dataclass(frozen=True)
class Family:
    """A row of the table: a model type, and the class of its kind's auto-mapping."""

    kind: str
    model_type: str
    class_name: str

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.model_type}"

    def model_class(self) -> type[PreTrainedModel]:
        found: type[PreTrainedModel] = getattr(transformers, self.class_name)
        return found


@cache
def _names(mapping: str) -> dict[str, str]:
    found = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
    return {key: value if isinstance(value, str) else value[0] for key, value in found.items()}


def _hears(class_name: str) -> bool:
    """Whether the model takes sound: a sequence-to-sequence mapping holds translators and listeners."""
    parameters = inspect.signature(getattr(transformers, class_name).forward).parameters
    return not {"input_features", "input_values"}.isdisjoint(parameters)


def _belongs(kind: str, mapping: str, model_type: str, class_name: str) -> bool:
    if model_type not in CONFIG_MAPPING:
        return False
    if kind == "speech" and mapping == "MULTIMODAL_LM":
        return model_type not in _names("IMAGE_TEXT_TO_TEXT")
    return not (kind == "encoder-decoder" and _hears(class_name))


def families() -> list[Family]:
    """All of them, kind by kind."""
    found: dict[tuple[str, str], Family] = {}
    for kind, mappings in KINDS.items():
        for mapping in mappings:
            for model_type, class_name in sorted(_names(mapping).items()):
                if _belongs(kind, mapping, model_type, class_name):
                    found.setdefault((kind, model_type), Family(kind, model_type, class_name))
    for model_type, class_name in sorted(_names("SEQ_TO_SEQ_CAUSAL_LM").items()):
        if _hears(class_name):
            found.setdefault(("speech", model_type), Family("speech", model_type, class_name))
    order = list(KINDS)
    return sorted(found.values(), key=lambda family: (order.index(family.kind), family.model_type))
