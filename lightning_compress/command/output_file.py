"""Where a command's figures or picture go to: a file that is known to be writable before the work that they are of, and
the terminal, or whoever reads in its place."""

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_compress.errors import CompressionError
from lightning_compress.report.graph import check_picture

Result = TypeVar("Result")


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


@contextmanager
def saved(key: str, file: str | None, save: Callable[[Result, Path], None], found: Result, said: str) -> Iterator[None]:
    """Within: what is printed of what was found, whose reader may have seen enough (`| head`) when it is in the file
    that the user wants it in, if any."""
    failed: OSError | None = None
    try:
        if file is not None:
            save(found, Path(file))
    except OSError as error:
        failed = error
    yield
    if failed is not None:
        sys.exit(f"lightning-compress: {key}={file} cannot be written: {failed}")
    if file is not None:
        print(f"{said}{file}")


@contextmanager
def until_unread() -> Iterator[None]:
    """Within: a command that ends without a word when the reader of what it prints has seen enough (`| head`)."""
    try:
        yield
    except BrokenPipeError:
        if _is_read():  # it was another pipe
            raise
        sys.exit(1)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # https://docs.python.org/3/library/signal.html#note-on-sigpipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_read() -> bool:
    found = select.poll()
    found.register(sys.stdout.fileno(), 0)
    return not found.poll(0)  # of an end whose other one is closed: POLLERR
