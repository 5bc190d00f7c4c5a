"""Activations kept on disk between subgraphs, so that an interrupted run need not compute them again.

After a subgraph the caches of all ranks hold what later ones read. They write it, a file per batch of the calibration
set, into a folder that gets its name, the subgraph's number, when all of it is there; then the folder of the subgraph
before is removed. Any number of ranks can read it, each the files of its own batches; where nodes have folders of their
own and other batches come to them, they are not found, and the activations are computed anew.
"""

import pickle
import re
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch

from lightning_compress.calibration.flow import Flow
from lightning_compress.calibration.resume import replacing, sync
from lightning_compress.distributed.collective import Collective
from lightning_compress.distributed.folder import SharedFolder
from lightning_compress.errors import CommunicationError, OutputDirectoryError
from lightning_compress.graph.shadow import Key, Shadow
from lightning_compress.memory.files import free_bytes

FOLDER = "activations"


def save_boundary(shared: SharedFolder, index: int, flow: Flow, collective: Collective) -> None:
    """Write what the cache holds after subgraph `index`.

    Args:
        shared: where.
        index: of the subgraph.
        flow: of this rank.
        collective: the ranks.

    Raises:
        OutputDirectoryError: no room.
    """
    folder = shared.path
    partial, final = folder / f".{index:05d}.partial", folder / f"{index:05d}"
    what = f"keeping the activations behind {flow.subgraphs[index].name}"
    try:
        if shared.is_first:
            folder.mkdir(exist_ok=True)
            for leftover in (*folder.glob(".*.partial"), *folder.glob(final.name)):
                shutil.rmtree(leftover)
            partial.mkdir()
        collective.meet(what)
        for batch, number in enumerate(flow.share):
            values = {key.name: value for key, value in flow.cache.load(batch, flow.cache.keys(batch)).items()}
            with replacing(partial / _file_name(number)) as file:
                torch.save(values, file)
        collective.meet(what)
        if shared.is_first:
            partial.rename(final)
            sync(folder)
    except (CommunicationError, torch.OutOfMemoryError):
        raise
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        for number in flow.share:  # the others may still write theirs; the folder is removed by the next one
            (partial / _file_name(number)).unlink(missing_ok=True)
        raise OutputDirectoryError(
            f"The activations behind {flow.subgraphs[index].name} could not be kept in {folder}, where "
            f"{free_bytes(folder) / 1e6:.1f} MB are free: {error}. Make room, or do without "
            "(keep_activations=false), and start the same run again: the subgraph itself is finished."
        ) from error
    for older in _boundaries(folder) if shared.is_first else ():
        if older != final:
            shutil.rmtree(older)


def forget_boundaries(folder: Path) -> None:
    """Remove all that was kept there, and the folder, unless there is something else in it."""
    for kept in _boundaries(folder):
        shutil.rmtree(kept, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


def _boundaries(folder: Path) -> list[Path]:
    """What this module has made there, finished or not."""
    made = re.compile(r"\d{5,}|\.\d{5,}\.partial")
    return [path for path in folder.glob("*") if made.fullmatch(path.name)]


def restore_boundary(shared: SharedFolder, flow: Flow, num_finished: int, collective: Collective) -> int:
    """Fill the cache with what was kept last, if that is of one of the first `num_finished` subgraphs; for the other
    arguments see `save_boundary`.

    Returns:
        The number of the subgraph after which that was; -1: nothing was kept, or not all batches of some rank where it
        looks, and the cache is as before.

    Raises:
        OutputDirectoryError: it cannot be read.
    """
    folder = shared.path
    kept = {int(path.name): path for path in _boundaries(folder) if path.name.isdigit()}
    usable = {
        index
        for index, path in kept.items()
        if index < num_finished and all((path / _file_name(number)).is_file() for number in flow.share)
    }
    of_ranks = collective.gather(usable, "finding the activations that were kept")
    index = max(set.intersection(*of_ranks), default=-1)
    if index < 0 or flow.traced is None:
        return -1
    keys: dict[str, Key] = {node.name: node for node in flow.traced.graph.nodes}
    keys.update({shadow.name: shadow for shadow in map(Shadow, flow.reference.diverging)})
    for batch, number in enumerate(flow.share):
        file = folder / f"{index:05d}" / _file_name(number)
        try:
            found = {keys[name]: value for name, value in _read(file).items()}
        except (
            *(OSError, RuntimeError, LookupError, ValueError, EOFError),
            *(pickle.UnpicklingError, BadZipFile, zlib.error),
        ) as error:
            raise OutputDirectoryError(
                f"The activations in {file} cannot be read: {type(error).__name__}: {error}. Delete the folder "
                f"{folder} and start the same run again: it computes them anew."
            ) from error
        flow.cache.store(batch, found)
        flow.cache.retain(batch, set(found))
    return index


def _read(file: Path) -> dict[str, object]:
    """The values by their names; torch writes sums of them, and compares none."""
    with ZipFile(file) as archive:
        if (damaged := archive.testzip()) is not None:
            raise BadZipFile(f"{damaged} is not what was written")
    values: dict[str, object] = torch.load(file, map_location="cpu", weights_only=True)
    return values


def _file_name(number: int) -> str:
    return f"{number:06d}.pt"
