"""The file that a command's figures or picture go to: known to be writable before the work that they are of."""

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_compress.errors import CompressionError
from lightning_compress.report.graph import check_picture


def with_own_files(config: DictConfig) -> DictConfig:
    """A command's configuration whose `json` and `graph` can be written, in a multirun one for each run; it is changed.

    Raises:
        CompressionError: they cannot.
    """
    for key in ("json", "graph"):
        if config.get(key) is not None:
            config[key] = str(_own(Path(str(config[key]))))
            _check_writable(key, Path(config[key]))
    if config.get("graph") is not None:
        check_picture(Path(config.graph))
    return config


def _own(file: Path) -> Path:
    hydra = HydraConfig.get()
    return file.with_name(f"{hydra.job.num}_{file.name}") if hydra.mode == RunMode.MULTIRUN else file


def _check_writable(key: str, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not os.path.lexists(file)
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise CompressionError(f"{key}={file} cannot be written: {error}") from error
