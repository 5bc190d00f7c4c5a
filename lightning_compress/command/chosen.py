"""What the user has chosen of a command's configuration, and a plan therefore may not."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_compress.errors import CompressionError
from lightning_compress.recipe.load import config_dir

CHOICES = {
    "data.batch_size": "batch_size",
    "calibration.schedule": "schedule",
    "memory.prefetch_depth": "prefetch_depth",
    "calibration.sequential_targets": "sequential_targets",
    "calibration.expert_parts": "expert_parts",
}
"""What a plan chooses, by the keys with which a user chooses it."""


def chosen_keys(config: DictConfig) -> set[str]:
    """The keys, down to single values, that the user gave: on the command line, and in files of their own, where values
    are not the shipped ones.

    Args:
        config: of `compress`, `plan` or `estimate`.
    """
    if not HydraConfig.initialized():
        return set()
    hydra = HydraConfig.get()
    overrides = OverridesParser.create().parse_overrides(list(hydra.overrides.task))
    typed = {key for override in overrides for key, _ in _leaves(override.value(), override.key_or_group)}
    known = dict(_leaves(_shipped(config, hydra.runtime.choices), ""))
    found = _leaves(OmegaConf.to_container(config), "")
    return typed | {key for key, value in found if key not in known or known[key] != value}


def check_idle(config: DictConfig, groups: Collection[str], remedy: str, of: str = "a calibration") -> None:
    """
    Args:
        config: as of `chosen_keys`.
        groups: of keys that play no part in the job at hand.
        remedy: what does, as a sentence.
        of: what they are of.

    Raises:
        CompressionError: one of them was given.
    """
    idle = sorted(key for key in chosen_keys(config) if key.partition(".")[0] in groups)
    if idle:
        raise CompressionError(f"{', '.join(idle)}: of {of} alone. {remedy}")


def _shipped(config: DictConfig, choices: Mapping[str, str]) -> dict[str, Any]:
    """The configuration of a command as it is shipped, with the user's choice of data and job, or, where they are the
    user's own, with those of their kind."""
    own = {"data": OmegaConf.select(config, "data.source"), "job": _kind(OmegaConf.select(config, "job._target_"))}
    names = {group: [name for name in (choices.get(group), kind) if _ships(group, name)] for group, kind in own.items()}
    overrides = [f"{group}={name}" for group, found in names.items() for name in found[:1]]
    command = "plan" if "choices" in config else "estimate" if "job" in config else "compress"
    shipped = compose(command, overrides=overrides)
    return cast(dict[str, Any], OmegaConf.to_container(shipped))


def _ships(group: str, name: str | None) -> bool:
    return (config_dir() / group / f"{name}.yaml").is_file()


def _kind(target: str | None) -> str | None:
    """The shipped job that is of this class."""
    jobs = (config_dir() / "job").glob("*.yaml")
    return next((job.stem for job in jobs if OmegaConf.select(OmegaConf.load(job), "_target_") == target), None)


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
