"""What the ranks of a run say to one another.

The loop, the writer and the solvers know a `Collective` only; on one process it is a null object, so there is one code
path whatever the number of ranks. Every operation is entered by all ranks, in the same order.
"""

import hashlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol, TypeVar, cast, final

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_compress.distributed.message import from_bytes, to_bytes
from lightning_compress.errors import CommunicationError
from lightning_compress.graph.compat import message_board
from lightning_compress.statistics import Reduction

Value = TypeVar("Value")
_ROLL_CALL_S = 5.0
_MOST_REDUCED = 1 << 23  # elements at a time, which are copied from a device
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Collective(Protocol):
    """The ranks of a run. `what` says, for an error's message, what is being done."""

    @property
    def rank(self) -> int:
        """Of this process, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def reduce(self, tensor: Tensor, reduction: Reduction, what: str) -> None:
        """Combine a tensor of all ranks, in place, on all of them. Same shape and dtype everywhere."""

    def broadcast(self, value: Value, what: str, source: int = 0) -> Value:
        """What rank `source` has, the only one that is waited for; it can be pickled. On the others its tensors are in
        host memory."""

    def gather(self, value: Value, what: str) -> list[Value]:
        """What every rank has, by rank; it can be pickled, and is small."""

    def meet(self, what: str) -> None:
        """Go on when all ranks are here: what they did before it is done."""

    def failed(self, error: BaseException) -> None:
        """Let the other ranks end, and know why: this one does."""

    def close(self) -> None:
        """The last call: its threads and connections end."""


@contextmanager
def closing_all(collective: Collective) -> Iterator[Collective]:
    """Closes it at the end; an error inside ends the other ranks too, which will say it."""
    try:
        yield collective
    except BaseException as error:
        collective.failed(error)
        raise
    finally:
        collective.close()


class SingleProcess:
    """A run of one rank."""

    rank: int = 0
    size: int = 1

    def reduce(self, tensor: Tensor, reduction: Reduction, what: str) -> None:
        """Nothing to combine with."""

    def broadcast(self, value: Value, what: str, source: int = 0) -> Value:
        return value

    def gather(self, value: Value, what: str) -> list[Value]:
        return [value]

    def meet(self, what: str) -> None:
        """Nobody to wait for."""

    def failed(self, error: BaseException) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing is open."""


@final
class ProcessGroup:
    """The ranks of `torch.distributed`'s initialized process group, by gloo: sums are float64, in host memory.

    Args:
        timeout: after which an operation that not all ranks have entered fails.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        self._timeout = timeout
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._board = message_board(f"lightning_compress/{self._group.group_name}")

    def reduce(self, tensor: Tensor, reduction: Reduction, what: str) -> None:
        for part in tensor.view(-1).split(_MOST_REDUCED):
            host = part.cpu()
            with self._doing(what):
                dist.all_reduce(host, _OPERATIONS[reduction], self._group)
            if host is not part:
                part.copy_(host)

    def broadcast(self, value: Value, what: str, source: int = 0) -> Value:
        message = to_bytes(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor(len(message))
        with self._doing(what):
            dist.broadcast(size, source, self._group)
        message = message if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
        with self._doing(what):
            dist.broadcast(message, source, self._group)
        return value if self.rank == source else cast(Value, from_bytes(message))

    def gather(self, value: Value, what: str) -> list[Value]:
        with self._doing(what):
            values: list[Value | None] = [None] * self.size
            dist.all_gather_object(values, value, self._group)
            return cast(list[Value], values)

    def meet(self, what: str) -> None:
        self.gather(None, what)

    def failed(self, error: BaseException) -> None:
        if isinstance(error, CommunicationError):  # of another's making, whom this one has heard
            return
        told = "".join(traceback.format_exception(error))

        def tell() -> None:
            self._board.set(f"failed/{self.rank}", told)
            self._board.set(f"heard/{self.rank}", "")  # so that another that fails does not wait for this one

        if _within(_ROLL_CALL_S, tell):
            others = [f"heard/{rank}" for rank in range(self.size) if rank != self.rank]
            self.close()  # which wakes the others
            _within(_ROLL_CALL_S, lambda: self._board.wait(others, timedelta(seconds=_ROLL_CALL_S / 2)))

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None  # the last reference, with which its connections end

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Say what failed.

        Raises:
            CommunicationError: another rank has ended, or did not come within the timeout.
        """
        try:
            yield
        except RuntimeError as error:
            reasons: list[str] = []
            if not _within(2 * _ROLL_CALL_S, lambda: self._call_roll(what, reasons)):
                reasons.append(
                    "The ranks' meeting place cannot be reached. Either the process that holds it has ended (rank 0, "
                    "where no launcher has it: see what that says), or this node, or that one, is cut off."
                )
            raise CommunicationError(
                f"Rank {self.rank} of {self.size} could not go on with {what} (an operation that a rank does not come "
                f"to within {self._timeout.total_seconds():.0f} s ends all): {error}\n"
                + "\n".join(reasons)
                + "\nA run with an output_dir can be started again, on any number of ranks, and continues."
            ) from error

    def _call_roll(self, what: str, reasons: list[str]) -> None:
        """Find out who is missing, and why, from what each rank leaves at the place where they met."""
        self._board.set(f"waiting/{self.rank}", what)
        elsewhere: list[str] = []
        missing = set(range(self.size)) - {self.rank}
        end = time.monotonic() + _ROLL_CALL_S
        while missing and time.monotonic() < end:
            for rank in sorted(missing):
                if self._board.check([f"failed/{rank}"]):
                    reasons.append(f"Rank {rank} failed:\n{self._board.get(f'failed/{rank}').decode()}")
                    missing.discard(rank)
                elif self._board.check([f"waiting/{rank}"]):
                    missing.discard(rank)
                    theirs = self._board.get(f"waiting/{rank}").decode()
                    elsewhere += [f"Rank {rank} waits in {theirs}."] if theirs != what else []
            time.sleep(0.05)
        self._board.set(f"heard/{self.rank}", "")  # the board may end with who has failed
        if missing:
            reasons.append(f"Nothing is heard from ranks {', '.join(map(str, sorted(missing)))}.")
        elif elsewhere:
            reasons += [*elsewhere, "They were given different things to do."]
        elif not reasons:
            reasons.append("All ranks are there, so it is the connection between them that broke.")


def is_first_to_say(text: str) -> bool:
    """Whether no other rank has said the same before; so also where ranks cannot ask one another, or have not met."""
    if not dist.is_initialized():
        return True
    counts: list[int] = []

    def ask() -> None:
        board = message_board(f"lightning_compress/said/{hashlib.sha256(text.encode()).hexdigest()}")
        counts.append(board.add("count", 1))
        board.set(str(dist.get_rank()), "")
        # rank 0's process holds the board, and may end after this
        board.wait([str(rank) for rank in range(dist.get_world_size())], timedelta(seconds=_ROLL_CALL_S / 2))

    _within(_ROLL_CALL_S, ask)
    return not counts or counts[0] == 1


def _within(seconds: float, task: Callable[[], object]) -> bool:
    """Whether a task ended in time, and without an error of the network; it may wait for a machine that is gone."""
    is_done = threading.Event()

    def work() -> None:
        with suppress(RuntimeError):
            task()
            is_done.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return is_done.is_set()
