"""What a user has mistyped or left out on the command line, as one line in place of Hydra's several.

Hydra answers an unknown key with the advice to append it, which is wrong for a typing error; but its exceptions carry
the node and the options that there are.
"""

import re
from collections.abc import Iterable, Iterator

from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from lightning_compress.errors import CompressionError, nearest
from lightning_compress.recipe.load import config_dir


def mistyped(error: HydraException | InterpolationToMissingValueError) -> str:
    """What is wrong, with the nearest known name.

    Args:
        error: of composing a configuration, or of making what it describes.
    """
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _unknown_option(error.missing_cfg_file, error.options or ())
    if isinstance(error, InstantiationException) and cause is not None:
        return f"{str(error).rpartition('full_key: ')[2]}: {cause}"
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        as_typed = re.sub(r"\[(\d+)\]", r".\1", str(cause.full_key))
        return _unknown_key(str(cause.key), as_typed, cause.parent_node)
    given = f"{error.override}: " if isinstance(error, OverrideParseException) else ""
    lines = [line for line in str(error).splitlines() if not line.startswith((" ", "See http", "To append"))]
    return f"{given}{' '.join(lines)} (--help behind the command lists groups and keys.)"


def complete(config: DictConfig) -> DictConfig:
    """A command's configuration as it is, if all is given; of the data, a command says itself what it needs.

    Raises:
        CompressionError: names all that is missing.
    """
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


def _unknown_option(file: str, options: Iterable[str]) -> str:
    group, _, option = file.partition("/")
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
    groups = set() if rest else {folder.name for folder in config_dir().iterdir() if folder.is_dir()}
    here = {*map(str, node)} - {"hydra", "_target_"}
    if key in groups - here:
        return f"{full_key} is nothing that this command has; it has {', '.join(sorted(here))}."
    known = sorted(here | groups)
    if not known:
        parent = full_key.rpartition(".")[0]
        return f"{full_key} is not known: {parent} is a single value, with nothing in it. Give all: '{parent}={{...}}'"
    # what were added beside the groups, nothing would read
    remedy = f" What is not there yet is added with +, as +{full_key}=..." if rest else ""
    return f"{full_key} is not known{nearest(key, known)}{remedy}"
