"""What the user has chosen of a command's configuration, and a plan therefore may not."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_compress.recipe.load import config_dir


def chosen_keys(config: DictConfig) -> set[str]:
    """The keys, down to single values, that the user gave: on the command line, and in files of their own, where values
    are not the shipped ones.

    Args:
        config: of `compress` or `plan`.
    """
    if not HydraConfig.initialized():
        return set()
    hydra = HydraConfig.get()
    overrides = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    typed = {key for override in overrides for key, _ in _leaves(override.value(), override.key_or_group)}
    known = dict(_leaves(_shipped("plan" if "choices" in config else "compress", hydra.runtime.choices), ""))
    found = _leaves(OmegaConf.to_container(config), "")
    return typed | {key for key, value in found if key not in known or known[key] != value}


def _shipped(command: str, choices: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of a command as it is shipped, with the user's choice of data and job; without these where they
    are the user's own."""
    groups = {group: f"{choices.get(group)}" for group in ("data", "job")}
    own = [group for group, name in groups.items() if not (config_dir() / group / f"{name}.yaml").is_file()]
    config = compose(command, overrides=[f"{group}={name}" for group, name in groups.items() if group not in own])
    found = cast(dict[str, Any], OmegaConf.to_container(config))
    return {key: value for key, value in found.items() if key not in own}


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """
    >>> list(_leaves({"schedule": "basic", "a": {"b": [1]}}, "calibration"))
    [('calibration.schedule', 'basic'), ('calibration.a.b', [1])]
    """
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, each in value.items():
        yield from _leaves(each, f"{key}.{name}" if key else str(name))
