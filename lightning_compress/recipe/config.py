"""The recipe: a list of modifiers, each an algorithm, a quantization scheme and the modules they apply to.

A recipe is data. It is frozen, holds no run state, and means nothing until `resolve` matches it against a model. The
schemes are `compressed_tensors.quantization.QuantizationScheme`s: presets and fields are that library's, so whatever a
recipe says is what the checkpoint's `quantization_config` says.

A module that several modifiers match belongs to the last of them, so a recipe reads from the general to the particular:

    modifiers:
      - {algorithm: gptq, scheme: W4A16, targets: [Linear], ignore: [lm_head]}
      - {algorithm: gptq, scheme: W8A16, targets: ["re:.*down_proj"]}
"""

import re
from dataclasses import dataclass, fields

from compressed_tensors.quantization import QuantizationScheme

from lightning_compress.algorithms.base import Algorithm
from lightning_compress.algorithms.catalog import ALGORITHMS
from lightning_compress.errors import RecipeError

DEFAULT_TARGETS = ("Linear",)
DEFAULT_IGNORE = ("lm_head",)


@dataclass(frozen=True)
class Modifier:
    """One algorithm with one scheme for a set of modules.

    Attributes:
        algorithm: the solver with its options, e.g. `Gptq(damping=0.05)`.
        scheme: how weights (and input activations) are represented; `targets` inside it are not used.
        targets: class names (`Linear`), module names, or regular expressions (`re:.*q_proj`) of the modules to
            quantize. Expressions reach Linears alone; `Embedding` and `Conv2d` have to be named, one or their class.
        ignore: the same kinds of pattern, for modules left as they are. `lm_head` stands for the model's output
            embedding whatever its name is in this architecture.
    """

    algorithm: Algorithm
    scheme: QuantizationScheme
    targets: tuple[str, ...] = DEFAULT_TARGETS
    ignore: tuple[str, ...] = DEFAULT_IGNORE


@dataclass(frozen=True)
class Recipe:
    """An ordered list of modifiers; later ones override earlier ones for the modules both match."""

    modifiers: tuple[Modifier, ...]

    def __post_init__(self) -> None:
        """
        Raises:
            RecipeError: a modifier is something else, as Hydra makes of a `_target_` inside of a list.
        """
        others = [type(modifier).__name__ for modifier in self.modifiers if not isinstance(modifier, Modifier)]
        if others:
            raise RecipeError(
                f"A Recipe has a {others[0]} among its modifiers, where Modifiers belong. In configuration files write "
                "the recipe as plain mappings, without `_target_`."
            )

    def to_dict(self) -> dict[str, object]:
        """Plain containers and scalars only: what goes into the report, the manifest and a checkpoint."""
        return {"modifiers": [_modifier_to_dict(modifier) for modifier in self.modifiers]}


def _modifier_to_dict(modifier: Modifier) -> dict[str, object]:
    name = next(name for name, algorithm in ALGORITHMS.items() if type(modifier.algorithm) is algorithm)
    options = {field.name: getattr(modifier.algorithm, field.name) for field in fields(type(modifier.algorithm))}
    scheme = modifier.scheme.model_dump(mode="json", exclude_none=True, exclude={"targets"})
    return {
        "algorithm": name,
        "scheme": scheme,
        "targets": list(modifier.targets),
        "ignore": list(modifier.ignore),
        **options,
    }


def not_regular(pattern: str) -> str:
    """Why a `re:` pattern is no regular expression; empty if it is one, or no such pattern."""
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        return str(error)
    return ""
