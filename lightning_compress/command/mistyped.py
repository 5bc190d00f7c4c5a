"""What a user has mistyped or left out on the command line, as one line in place of Hydra's several.

Hydra answers an unknown key with the advice to append it, which is wrong for a typing error; but its exceptions carry
the node and the options that there are.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import cast

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

from lightning_compress.algorithms.catalog import ALGORITHMS
from lightning_compress.command.chosen import CHOICES
from lightning_compress.errors import CompressionError, nearest
from lightning_compress.recipe.load import config_dir

_NO_NAME = re.compile(r"null|true|false|[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
"""What Hydra's grammar does not take for a string."""
_OVERRIDE = re.compile(r"Could not override '([^']+)'")
_TWICE = re.compile(r"Multiple values for ([^.]+)\. To override a value use 'override [^:]+: ([^']*)'")
_OF_PLANS = {
    **{key: f"choices.{name}=[...]" for key, name in CHOICES.items()},
    "calibration.verify": "verify=...",
    "memory.device_budget": "device=...",
    "memory.host_budget": "host=...",
    "trainer.devices": "ranks=... (of all nodes together)",
    "trainer.num_nodes": "nodes=...",
}
"""What is given to a compression in one way, and to `plan` in another."""
_NAMED_MODIFIER = re.compile(r"[+~]*recipe\.modifiers\.([A-Za-z_]\w*)")


def mistyped(error: HydraException | OmegaConfBaseException, command: str = "") -> str:
    """What is wrong, with the nearest known name.

    Args:
        error: of composing a configuration, of making what it describes, or of reading it.
        command: that the configuration is of, where it is composed.
    """
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _unknown_option(error.missing_cfg_file, error.options or ())
    if isinstance(error, InstantiationException) and cause is not None:
        why = re.sub(", set env var HYDRA_FULL_ERROR=1.*", "", str(cause))  # which the command has set
        return f"{str(error).rpartition('full_key: ')[2]}: {why}"
    if isinstance(cause, OmegaConfBaseException):
        as_typed = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))
        if isinstance(cause.parent_node, DictConfig) and "." not in as_typed:
            override = _OVERRIDE.match(str(error))
            return _unknown_at_the_top(as_typed, override[1] if override else as_typed, cause.parent_node, command)
        if isinstance(cause.parent_node, DictConfig):
            return _unknown_key(str(cause.key), as_typed, cause.parent_node)
        if isinstance(cause.parent_node, ListConfig):
            parent, number = as_typed.rpartition(".")[0], len(cause.parent_node)
            return f"{as_typed} is not there: {parent} has {number}, counted from 0. Give all: '{parent}=[...]'"
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return f"{error.full_key} is missing, and there has to be one."
    if isinstance(error, InterpolationResolutionError):
        said = str(error).splitlines()[0]
        said = said.partition("interpolation: ")[2].strip('"') or said
        return f"{error.full_key}: {said}."
    if (given_twice := _TWICE.match(str(error))) is not None:
        group, option = given_twice.groups()
        return f"+{group}={option}: {group} is a group that the command has, and is given once, without +: {group}=..."
    if command and (override := _OVERRIDE.match(str(error))) is not None:  # a group of other commands
        own = cast(DictConfig, OmegaConf.load(config_dir() / f"{command}.yaml"))
        return _unknown_at_the_top(override[1], override[1], own, command)
    given = f"{error.override}: " if isinstance(error, OverrideParseException) else ""
    remedy = "--help behind the command lists groups and keys."
    if isinstance(error, OverrideParseException) and "missing EQUAL" in str(error):
        return f"{error.override} is no KEY=VALUE, such as model.path=DIR."
    if given:
        remedy = "What holds spaces, brackets or other letters is quoted twice: 'KEY=\"VALUE\"', 'KEY=[\"VALUE\"]'."
    lines = [line for line in str(error).splitlines() if not line.startswith((" ", "See http", "To append"))]
    return f"{given}{' '.join(lines)} ({remedy})"


def check_groups(overrides: Iterable[str]) -> None:
    """
    Raises:
        CompressionError: a group is given as null or a number, of which Hydra says that it got a NoneType or an int; or
            a modifier by a name, of which it says nothing.
    """
    groups = {folder.name for folder in config_dir().iterdir() if folder.is_dir()}
    for override in overrides:
        key, _, value = override.partition("=")
        if named := _NAMED_MODIFIER.match(key):
            raise CompressionError(f"{override}: modifiers have no names ({named[1]}), but numbers from 0.")
        group = key.partition("@")[0].lstrip("+")
        if group in groups and any(_NO_NAME.fullmatch(each) for each in value.split(",")):
            options = sorted(file.stem for file in (config_dir() / group).glob("*.yaml"))
            raise CompressionError(f"{override}: give one of {', '.join(options)}, or leave {key} out.")


def complete(config: DictConfig) -> DictConfig:
    """A command's configuration as it is, if all is given; of the data, a command says itself what it needs.

    Raises:
        CompressionError: names all that is missing, or null or empty where there is no such choice.
    """
    null = [f"{key}=null" for key in ("output_dir", "calibration", "memory") if key in config and config[key] is None]
    if null:
        raise CompressionError(f"{' '.join(null)}: there has to be one.")
    empty = [f"{key}=" for key in ("model.path", "output_dir") if OmegaConf.select(config, key) == ""]
    if empty:  # a path that is empty is the folder one is in
        raise CompressionError(f"{' '.join(empty)} is empty, as of a variable that is not set: give a folder.")
    missing = [f"{key}=..." for key in _missing(config, "") if not key.startswith("data.")]
    if missing:
        raise CompressionError(f"{' '.join(missing)} has to be given.")
    return config


def _missing(node: DictConfig, path: str) -> Iterator[str]:
    for key in map(str, node):
        if OmegaConf.is_missing(node, key):
            yield f"{path}{key}"
        elif not OmegaConf.is_interpolation(node, key) and isinstance(node[key], DictConfig):
            yield from _missing(node[key], f"{path}{key}.")


def _defaults(command: str) -> set[str]:
    """The groups of a command, as they are given: {"model", "data@held_out"}."""
    defaults = cast(DictConfig, OmegaConf.load(config_dir() / f"{command}.yaml")).get("defaults", [])
    return {str(key) for entry in defaults if isinstance(entry, DictConfig) for key in entry if " " not in str(key)}


def _unknown_option(file: str, options: Iterable[str]) -> str:
    group, slash, option = file.partition("/")
    if not slash:  # a command's own, or what --config-name says
        return (
            f"There is no configuration {file!r} in the folders that are looked through. One of yours is added to "
            "ours by --config-dir DIR; --config-path takes their place."
        )
    remedy = ""
    if option.endswith((".yaml", ".yml")) or "/" in option:
        remedy = (
            f" A file of yours is named, not given by its path: DIR/{group}/mine.yaml is {group}=mine --config-dir DIR"
        )
    return f"{group}={option} is not known{nearest(option, options)}{remedy}"


def _unknown_key(key: str, full_key: str, node: DictConfig) -> str:
    group, _, rest = full_key.partition(".")
    if rest == key:
        files = sorted((config_dir() / group).glob("*.yaml"))
        options = [file.stem for file in files if key in list(OmegaConf.load(file))]
        if options:
            return f"{full_key} is not known here, but with {group}={' or '.join(options)}."
    known = sorted({*map(str, node)} - {"_target_"})
    if not known:
        parent = full_key.rpartition(".")[0]
        return f"{full_key} is not known: {parent} is a single value, with nothing in it. Give all: '{parent}={{...}}'"
    options = _options(group, node)
    if key in options:
        return f"{full_key} is not there yet, and is added with +, as +{full_key}=..."
    said = nearest(key, sorted({*known, *options}))
    return f"{full_key} is not known{said} What is not there yet is added with +, as +{full_key}=..."


def _options(group: str, node: DictConfig) -> list[str]:
    """Of a modifier, those of its algorithm."""
    algorithm = ALGORITHMS.get(str(node.get("algorithm"))) if group == "recipe" else None
    return [] if algorithm is None else [option.name for option in fields(algorithm)]


def _unknown_at_the_top(key: str, override: str, node: DictConfig, command: str) -> str:
    """What nothing would read, were it added.

    Args:
        key: that is not in `node`, the configuration.
        override: all of what was typed, but for its value.
    """
    groups = _defaults(command) if command else set()
    placed = next((each for each in groups if each == key or each.endswith(f"@{key}")), None)
    if placed is not None:
        return f"{key} is not known without the group, which is given as {placed}=..."
    if command == "plan" and override in _OF_PLANS:
        return f"{override} is of `compress`; `plan` has {_OF_PLANS[override]} for it."
    known = sorted({*map(str, node), *(each for each in groups if "@" not in each)} - {"hydra", "defaults"})
    others = {group.name for group in config_dir().iterdir()} | {
        str(each) for file in config_dir().glob("*.yaml") for each in cast(DictConfig, OmegaConf.load(file))
    }
    if key in others:
        return f"{key} is nothing that this command has; it has {', '.join(known)}."
    return f"{key} is not known{nearest(key, known)}"
