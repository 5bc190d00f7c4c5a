"""Checkpoint folders: what is in one, and whether it may be written to."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from lightning_compress.errors import CompressionError, OutputDirectoryError
from lightning_compress.memory.files import nearest_existing

MARKER = "lightning_compress.json"
INCOMPLETE = "INCOMPLETE"
PLAN = f"{INCOMPLETE}-plan.json"
"""What an unfinished run is planned to be, where it is."""
CLAIM = ".claim"
"""Whose the folder is at the moment (see `export.claim`)."""
_OF_MODELS = ("config.json", "*.safetensors", "*.bin", "*.ckpt")


class SavesPretrained(Protocol):
    """A tokenizer or processor."""

    def save_pretrained(self, save_directory: str, /) -> object: ...


def is_unfinished(folder: Path | None) -> bool:
    """Whether it holds a compression that did not get to its end."""
    return folder is not None and (folder / INCOMPLETE).is_file()


def is_ours(folder: Path) -> bool:
    """Whether it holds a compression, finished or not."""
    return (folder / MARKER).is_file() or (folder / INCOMPLETE).is_file()


def check_finished(folder: Path) -> None:
    """
    Raises:
        CompressionError: it holds a compression that did not get to its end, and is to be read.
    """
    if is_unfinished(folder):
        raise CompressionError(f"{folder} holds an unfinished compression and is no checkpoint yet: finish that first.")


def check_output_dir(output_dir: Path) -> None:
    """Raise before the work if the result could not be written.

    Raises:
        OutputDirectoryError: it exists and holds something that is not an earlier output of ours.
    """
    if output_dir.is_file():
        raise OutputDirectoryError(f"output_dir {output_dir} is a file; give a folder.")
    entries = [path.name for path in output_dir.iterdir()] if output_dir.is_dir() else []
    # what a run leaves that is killed before its first subgraph is written, and what its ranks try the folder with
    first = {name for name in entries if name in (PLAN, CLAIM) or fnmatch(name, ".*.partial")}
    if not is_ours(output_dir) and not first.issuperset(entries):
        is_model = any(fnmatch(name, pattern) for name in entries for pattern in _OF_MODELS)
        advice = "" if is_model else ", or remove this one"
        raise OutputDirectoryError(
            f"output_dir {output_dir} exists and was not written by lightning_compress (no {MARKER} in it). "
            f"Give another folder{advice}."
        )
    existing = nearest_existing(output_dir)
    probe = existing / f".{uuid4().hex}.partial"  # several ranks try at once, and look what is there
    try:
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise OutputDirectoryError(
            f"output_dir {output_dir} cannot be written to: {existing}: {error.strerror}. Give another folder."
        ) from error
