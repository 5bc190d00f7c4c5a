"""A folder that all ranks of a run write to, be it one for all or one on each node's own disk."""

from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from lightning_compress.distributed.collective import Collective
from lightning_compress.errors import OutputDirectoryError


@dataclass(frozen=True)
class SharedFolder:
    """A folder as a rank finds it.

    Attributes:
        path: the same on all ranks.
        ranks: those that find the same files there as this one, and this one, ascending.
        is_first: this rank is the first of them, and writes what one of them has to.
        num_copies: how many different folders the ranks find there.
    """

    path: Path
    ranks: tuple[int, ...] = (0,)
    is_first: bool = True
    num_copies: int = 1

    def child(self, name: str) -> "SharedFolder":
        """A folder in it."""
        return replace(self, path=self.path / name)


def shared_folder(path: Path, collective: Collective) -> SharedFolder:
    """Find out who shares a folder, which is created: each rank puts a file there, and all look for all.

    Raises:
        OutputDirectoryError: some ranks see what others write, but not the other way round.
    """
    if collective.size == 1:
        return SharedFolder(path)
    what = f"looking for {path}"
    collective.meet(what)  # all have looked at what was there before
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f".{uuid4().hex}.partial"
    probe.touch()
    try:
        names = collective.gather(probe.name, what)
        ranks = tuple(rank for rank, name in enumerate(names) if (path / name).is_file())
        found = collective.gather(ranks, what)
    finally:
        probe.unlink(missing_ok=True)  # the first rank may have begun to clean up already
    for rank in range(collective.size):
        if any(found[other] != found[rank] for other in found[rank]):
            raise OutputDirectoryError(
                f"{path.absolute()} is neither one folder for all ranks nor one on each node: rank {rank} finds there "
                f"what ranks {', '.join(map(str, found[rank]))} write, and not all of them find the same. Give an "
                "output_dir on a file system that all nodes share, or on a disk that each has to itself."
            )
    return SharedFolder(path, ranks, collective.rank == ranks[0], len(set(found)))
