"""Shards of a checkpoint: each is written under another name, synced, read back and compared, and renamed.

Most of that is waiting for the disk, so shards that are there together are written side by side. Alternative not taken:
writing beside the next subgraph, whose end a killed run would then lose, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_IMODE

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lightning_compress.calibration.resume import Shard, replacing
from lightning_compress.errors import OutputDirectoryError
from lightning_compress.export.verify import read_back
from lightning_compress.memory.files import free_bytes, side_by_side


def write_shards(states: Mapping[Path, Mapping[str, Tensor]]) -> list[Shard]:
    """Write the tensors of each file.

    Raises:
        OutputDirectoryError: one could not be written, or holds something else; the others are whole, or not there.
    """
    return side_by_side(lambda path: _write_shard(path, states[path]), list(states))


def _write_shard(path: Path, state: Mapping[str, Tensor]) -> Shard:
    size = sum(tensor.nbytes for tensor in state.values())
    with writing(path.parent, f"{path.name} ({size / 1e6:.1f} MB)"), replacing(path) as partial:
        partial.touch()
        mode = S_IMODE(partial.stat().st_mode)
        save_file(dict(state), partial, metadata={"format": "pt"})
        partial.chmod(mode)  # as any other file; safetensors makes one that its owner alone may read
        digest = read_back(partial, state)
    return Shard(path.name, digest, path.stat().st_size, tuple(state))


@contextmanager
def writing(folder: Path, what: str) -> Iterator[None]:
    """Say what a disk's error means.

    Raises:
        OutputDirectoryError: in place of what the operating system says.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileNotFoundError | SafetensorError) and not folder.is_dir():  # no disk that is full
            raise OutputDirectoryError(
                f"{folder} is not there any more, so {what} could not be written: {error}. What was finished is gone "
                "with it. See to it that nothing removes or moves the folder, and start again."
            ) from error
        free = free_bytes(folder) / 1e6
        raise OutputDirectoryError(
            f"{folder}: {what} could not be written, {free:.1f} MB are free there: {error}. Make room and "
            "start the same run again: it continues where this one failed."
        ) from error
