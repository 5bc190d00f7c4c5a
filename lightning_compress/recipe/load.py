"""Read a recipe from where users keep it: a shipped name, a YAML or JSON file, a mapping, or a `Recipe` itself.

Options are checked against the typed dataclass of their algorithm through OmegaConf's structured configs: a wrong type
is an error, and an unknown key is an error that names the nearest known one.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from lightning_compress.algorithms.base import Algorithm
from lightning_compress.algorithms.catalog import ALGORITHMS
from lightning_compress.errors import RecipeError, RunWarning, nearest
from lightning_compress.recipe.config import DEFAULT_IGNORE, DEFAULT_TARGETS, NO_MODIFIERS, Modifier, Recipe, patterns

RecipeLike = Recipe | Mapping[str, object] | str | Path
"""In this order: behind `str` jsonargparse saves a mapping as the text of a Python dictionary."""

_MODIFIER_KEYS = ("algorithm", "scheme", "group_size", "targets", "ignore")
_REPOSITORY_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_PACKAGED_CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def config_dir() -> Path:
    """The folder of the shipped Hydra groups: inside the installed package, or beside it in a source checkout."""
    return _PACKAGED_CONFIGS if _PACKAGED_CONFIGS.is_dir() else _REPOSITORY_CONFIGS


def shipped_recipes() -> tuple[str, ...]:
    """Names that `load_recipe` accepts without a path."""
    return tuple(sorted(path.stem for path in (config_dir() / "recipe").glob("*.yaml")))


def load_recipe(recipe: RecipeLike) -> Recipe:
    """A `Recipe` from a shipped name, a path to YAML/JSON, a mapping, or a `Recipe`.

    Raises:
        RecipeError: unknown name, key, algorithm or preset (with the nearest known one), wrong type, or no modifiers.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | Path):
        recipe = _read(recipe)
    if OmegaConf.is_config(recipe):
        recipe = cast(Mapping[str, object], OmegaConf.to_container(cast(DictConfig, recipe), resolve=True))
    if not isinstance(recipe, Mapping):
        raise RecipeError(
            f"A recipe is a name, a path, a mapping or a Recipe, but this is a {type(recipe).__name__}."
            f"{' A list of modifiers is given as {modifiers: [...]}.' if isinstance(recipe, list) else ''}"
        )
    _check_keys(recipe, ("modifiers",), "the recipe")
    modifiers = recipe.get("modifiers")
    if not isinstance(modifiers, Sequence) or isinstance(modifiers, str) or not modifiers:
        raise RecipeError(NO_MODIFIERS)
    return Recipe(tuple(_modifier(entry, position) for position, entry in enumerate(modifiers)))


def _read(recipe: str | Path) -> Mapping[str, object]:
    path = Path(recipe)
    if not path.suffix:
        path = config_dir() / "recipe" / f"{recipe}.yaml"
        if not path.is_file():
            raise RecipeError(f"There is no recipe named {str(recipe)!r}{nearest(str(recipe), shipped_recipes())}")
    if not path.is_file():
        raise RecipeError(
            f"There is no recipe file {path}. Give an existing .yaml/.json, or one of {', '.join(shipped_recipes())}."
        )
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (YAMLError, OSError, OmegaConfBaseException) as error:
        raise RecipeError(f"The recipe file {path} cannot be read: {error}") from error
    if not isinstance(loaded, Mapping):
        raise RecipeError(f"{path} does not hold a mapping with `modifiers`.")
    return cast(Mapping[str, object], loaded)


def _modifier(entry: object, position: int) -> Modifier:
    if isinstance(entry, Modifier):
        return entry
    where = f"modifier {position}"
    if not isinstance(entry, Mapping):
        raise RecipeError(
            f"{where} is a {type(entry).__name__}; it has to be a mapping such as {{algorithm: gptq, scheme: W4A16}}."
        )
    name = str(entry.get("algorithm", ""))
    if name not in ALGORITHMS:
        raise RecipeError(f"{where} has the unknown algorithm {name!r}{nearest(name, ALGORITHMS)}")
    option_names = tuple(field.name for field in fields(ALGORITHMS[name]))
    _check_keys(entry, _MODIFIER_KEYS + option_names, f"{where} ({name})")
    options = {key: value for key, value in entry.items() if key not in _MODIFIER_KEYS}
    return Modifier(
        algorithm=_algorithm(name, options, where),
        scheme=_in_groups(_scheme(entry.get("scheme"), where), entry.get("group_size"), where),
        targets=patterns(entry.get("targets", DEFAULT_TARGETS), where, "targets"),
        ignore=patterns(entry.get("ignore", DEFAULT_IGNORE), where, "ignore"),
    )


def _algorithm(name: str, options: Mapping[str, object], where: str) -> Algorithm:
    try:
        typed = OmegaConf.merge(OmegaConf.structured(ALGORITHMS[name]), dict(options))
        return cast(Algorithm, OmegaConf.to_object(typed))
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{where} ({name}) has a bad option: {error}") from error


def _scheme(scheme: object, where: str) -> QuantizationScheme:
    """A `QuantizationScheme` from a preset's name or from its fields."""
    if isinstance(scheme, QuantizationScheme):
        return scheme
    if isinstance(scheme, str):
        if scheme.upper() not in PRESET_SCHEMES:
            raise RecipeError(
                f"{where} has the unknown preset scheme {scheme!r}{nearest(scheme.upper(), PRESET_SCHEMES)}"
            )
        preset = preset_name_to_scheme(scheme, targets=[])  # read as if typed: some name dtypes of no zero points
        return QuantizationScheme.model_validate(preset.model_dump(mode="json", exclude_none=True))
    if not isinstance(scheme, Mapping):
        raise RecipeError(
            f"{where} needs a `scheme`: a preset such as W4A16, or fields such as "
            f"{{weights: {{num_bits: 4, group_size: 128}}}}."
        )
    _check_keys(
        scheme, tuple(name for name in QuantizationScheme.model_fields if name != "targets"), f"the scheme of {where}"
    )
    weights = scheme.get("weights")
    if isinstance(weights, Mapping) and not {"strategy", "group_size"} & weights.keys():
        warnings.warn(
            f"The weights of {where} name neither strategy nor group_size, so one scale serves a whole matrix. More "
            "exact are `strategy: channel` and `strategy: group, group_size: 128`; `strategy: tensor` means it.",
            RunWarning,
            stacklevel=2,
        )
    try:
        return QuantizationScheme.model_validate({**scheme, "targets": []})
    except ValidationError as error:
        wrong = "; ".join(map(_told, error.errors()))
        raise RecipeError(f"the scheme of {where} is not valid: {wrong}") from error
    except NotImplementedError as error:
        raise RecipeError(f"the scheme of {where} is not valid: {error}") from error


def _in_groups(scheme: QuantizationScheme, size: object, where: str) -> QuantizationScheme:
    """The scheme with weights in groups of another size; None: its own."""
    if size is None:
        return scheme
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise RecipeError(f"{where} has group_size {size!r}; it is a number of weights from 1 on, such as 64.")
    strategy = None if scheme.weights is None else scheme.weights.strategy
    if scheme.weights is None or strategy != QuantizationStrategy.GROUP:
        what = "no weights" if strategy is None else f"weights of strategy {QuantizationStrategy(strategy).value}"
        raise RecipeError(f"{where} has group_size {size}, but a scheme with {what}: leave one of them out.")
    return scheme.model_copy(update={"weights": scheme.weights.model_copy(update={"group_size": size})})


def _told(wrong: Mapping[str, Any]) -> str:
    place = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "extra_forbidden":
        return f"{place} is not known{nearest(str(wrong['loc'][-1]), QuantizationArgs.model_fields)}"
    return f"{place}: {wrong['msg']}"


def _check_keys(mapping: Mapping[str, object], known: Sequence[str], where: str) -> None:
    for key in mapping:
        if key not in known:
            raise RecipeError(f"Unknown key {key!r} in {where}{nearest(str(key), known)}")
