"""An output folder is one run's while that writes to it."""

import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EAGAIN, ENOENT, ESTALE
from pathlib import Path

from lightning_compress.distributed.collective import Collective
from lightning_compress.distributed.folder import shared_folder
from lightning_compress.errors import OutputDirectoryError, RunWarning, reason
from lightning_compress.export.checkpoint import CLAIM, check_output_dir

_PATIENCE = 120.0  # seconds; after 90 a server of NFS takes a lock from a node that has died
_BETWEEN = 0.5


@contextmanager
def claimed(folder: Path, collective: Collective, patience: float = _PATIENCE) -> Iterator[None]:
    """Within: no other process that asks for it writes to a folder, or to any of the copies that nodes have.

    It is a lock of the file `.claim` there, which holds for all nodes where the file system has such locks (NFS and
    Lustre mostly do); elsewhere nothing is kept from anyone. It goes with the process, however that ends. Within one
    process it keeps nothing from anyone.

    Args:
        folder: which is created.
        collective: all ranks of the run.
        patience: seconds to wait for another process.

    Raises:
        OutputDirectoryError: another process had it all that time; or the folder is not ours, or cannot be written to.
    """
    check_output_dir(folder)
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    descriptor = None
    try:
        if shared_folder(folder, collective).is_first:
            descriptor = _claim(folder, patience)
        collective.meet(f"waiting for {folder} to be nobody else's")
        yield
    finally:
        if descriptor is not None:
            (folder / CLAIM).unlink(missing_ok=True)  # while it is ours
            os.close(descriptor)
        for path in made:
            with suppress(OSError):  # there is something in it
                path.rmdir()


def _claim(folder: Path, patience: float) -> int | None:
    """The file that is locked, open; None where there are no locks."""
    path, until = folder / CLAIM, time.monotonic() + patience
    has_said = False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputDirectoryError(f"output_dir {folder} cannot be written to: {reason(error)}.") from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                with suppress(OSError):  # no room, of which others will speak
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
                return descriptor
        except OSError as error:
            if error.errno in (EACCES, EAGAIN):
                owner = os.pread(descriptor, 1000, 0).decode(errors="replace")
                said = f"Another run is writing to output_dir {folder} ({owner or 'it has not said which'})."
                if time.monotonic() > until:
                    os.close(descriptor)
                    raise OutputDirectoryError(f"{said} Wait for it, end it, or give another output_dir.") from error
                if not has_said:
                    warnings.warn(f"{said} Waiting {patience:.0f} s for its end.", RunWarning, stacklevel=2)
                has_said = True
            elif error.errno not in (ENOENT, ESTALE):  # those: whoever had it has removed it meanwhile
                path.unlink(missing_ok=True)
                os.close(descriptor)
                return None
        os.close(descriptor)
        time.sleep(_BETWEEN)
