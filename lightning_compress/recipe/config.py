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
from collections.abc import Sequence
from dataclasses import dataclass, fields

from compressed_tensors.quantization import QuantizationScheme

from lightning_compress.algorithms.base import Algorithm
from lightning_compress.algorithms.catalog import ALGORITHMS
from lightning_compress.errors import RecipeError

DEFAULT_TARGETS = ("Linear",)
DEFAULT_IGNORE = ("lm_head",)
NO_MODIFIERS = "A recipe needs `modifiers`, a list with at least one entry such as {algorithm: gptq, scheme: W4A16}."


@dataclass(frozen=True)
class Modifier:
    """One algorithm with one scheme for a set of modules.

    Attributes:
        algorithm: the solver with its options, e.g. `Gptq(damping=0.05)`.
        scheme: how weights (and input activations) are represented; `targets` inside it are not used.
        targets: class names (`Linear`), module names, or regular expressions (`re:.*q_proj`) of the modules to
            quantize. Expressions reach Linears alone; `Embedding`, `Conv1d` and `Conv2d` have to be named, one or their
            class.
        ignore: the same kinds of pattern, for modules left as they are. `lm_head` stands for the model's output
            embedding whatever its name is in this architecture.
    """

    algorithm: Algorithm
    scheme: QuantizationScheme
    targets: tuple[str, ...] = DEFAULT_TARGETS
    ignore: tuple[str, ...] = DEFAULT_IGNORE

    def __post_init__(self) -> None:
        """
        Raises:
            RecipeError: a part is of another kind, or a pattern no regular expression.
        """
        if type(self.algorithm) not in ALGORITHMS.values():
            known = " or ".join(f"{algorithm.__name__}()" for algorithm in ALGORITHMS.values())
            raise RecipeError(f"A Modifier's algorithm is an object such as {known}, not {self.algorithm!r}.{_NAMED}")
        if not isinstance(self.scheme, QuantizationScheme):
            raise RecipeError(f"A Modifier's scheme is a QuantizationScheme, not {self.scheme!r}.{_NAMED}")
        for key in ("targets", "ignore"):
            object.__setattr__(self, key, patterns(getattr(self, key), "a Modifier", key))
        # else two that differ in these alone would be two schemes, whose modules are not solved together
        object.__setattr__(self, "scheme", self.scheme.model_copy(update={"targets": []}))


_NAMED = " By their names the two are given in mappings: {'modifiers': [{'algorithm': 'gptq', 'scheme': 'W4A16'}]}."


@dataclass(frozen=True)
class Recipe:
    """An ordered list of modifiers; later ones override earlier ones for the modules both match."""

    modifiers: tuple[Modifier, ...]

    def __post_init__(self) -> None:
        """
        Raises:
            RecipeError: they are no list or none, or a modifier is something else, as Hydra makes of a `_target_`
                inside of a list.
        """
        if not isinstance(self.modifiers, Sequence):
            raise RecipeError(f"A Recipe has a list of modifiers, not a {type(self.modifiers).__name__} alone.")
        if not self.modifiers:
            raise RecipeError(NO_MODIFIERS)
        others = [type(modifier).__name__ for modifier in self.modifiers if not isinstance(modifier, Modifier)]
        if others:
            raise RecipeError(
                f"A Recipe has a {others[0]} among its modifiers, where Modifiers belong. In configuration files write "
                "the recipe as plain mappings, without `_target_`."
            )
        object.__setattr__(self, "modifiers", tuple(self.modifiers))

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


def patterns(value: object, where: str, key: str) -> tuple[str, ...]:
    """The patterns in a list, checked.

    Raises:
        RecipeError: it is no list of them.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise RecipeError(
            f"`{key}` of {where} has to be a list of class names, module names or 're:' patterns, not {value!r}."
        )
    for pattern in value:
        if reason := not_regular(pattern):
            raise RecipeError(f"`{key}` of {where}: {pattern!r} is no regular expression ({reason}).")
    return tuple(value)
