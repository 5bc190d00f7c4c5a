"""Recipes that the command line names by file, for Hydra, which chooses by name among the options of a group."""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_compress.recipe.load import load_recipe, shipped_recipes

_CHOICE, _SEARCHED = "recipe=", "hydra.searchpath="
_SUFFIXES = (".yaml", ".yml", ".json")


@contextmanager
def named_recipes(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Arguments of Hydra in which `recipe=mine.yaml` is `recipe=mine`, an option that there is as long as this lasts.

    Of several, as a multirun has them, each that ends like a file is one. A name that is a shipped one, or another
    file's, has a number behind it.

    Raises:
        RecipeError: there is no such file, or it holds no recipe.
    """
    files: dict[str, Path] = {}
    named = [_named(argument, files) if argument.startswith(_CHOICE) else argument for argument in arguments]
    if not files:
        yield named
        return
    with tempfile.TemporaryDirectory() as folder:
        group = Path(folder) / "recipe"
        group.mkdir()
        for name, file in files.items():
            shutil.copyfile(file, group / f"{name}.yaml")
        searched = [each.removeprefix(_SEARCHED).strip("[]") for each in named if each.startswith(_SEARCHED)]
        everywhere = ",".join([*filter(None, searched), f"file://{folder}"])
        # in front, as flags come last
        yield [f"{_SEARCHED}[{everywhere}]", *(each for each in named if not each.startswith(_SEARCHED))]


def _named(argument: str, files: dict[str, Path]) -> str:
    value = argument.removeprefix(_CHOICE)
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    choices = [value[1:-1]] if quoted else value.split(",")
    return _CHOICE + ",".join(_name(each, files) if each.endswith(_SUFFIXES) else each for each in choices)


def _name(file: str, files: dict[str, Path]) -> str:
    """An option's name for a file, which it is kept under: one that Hydra's grammar takes for a string."""
    load_recipe(Path(file))
    stem = re.sub(r"\W", "_", Path(file).stem, flags=re.ASCII)
    if not isinstance(OverridesParser.create().parse_override(f"{_CHOICE}{stem}").value(), str):
        stem = f"recipe_{stem}"
    taken = {*shipped_recipes(), *files}
    name = next(each for each in (stem, *(f"{stem}_{number}" for number in range(2, 99))) if each not in taken)
    files[name] = Path(file)
    return name
