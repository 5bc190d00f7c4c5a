"""What the ranks of a run say to one another.

The loop, the writer and the solvers know a `Collective` only; on one process it is a null object, so there is one code
path whatever the number of ranks. Every operation is entered by all ranks, in the same order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TypeVar, cast, final

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_compress.errors import CommunicationError
from lightning_compress.statistics import Reduction

Value = TypeVar("Value")
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
        """What rank `source` has; it can be pickled."""

    def gather(self, value: Value, what: str) -> list[Value]:
        """What every rank has, by rank; it can be pickled, and is small."""

    def close(self) -> None:
        """The last call: its threads and connections end."""


@final
class SingleProcess:
    """A run of one rank."""

    rank = 0
    size = 1

    def reduce(self, tensor: Tensor, reduction: Reduction, what: str) -> None:
        """Nothing to combine with."""

    def broadcast(self, value: Value, what: str, source: int = 0) -> Value:
        return value

    def gather(self, value: Value, what: str) -> list[Value]:
        return [value]

    def close(self) -> None:
        """Nothing is open."""


@final
class ProcessGroup:
    """The ranks of `torch.distributed`'s initialized process group, by gloo: sums are float64, in host memory.

    Args:
        timeout: after which an operation that not all ranks have entered fails.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._timeout = timeout

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def reduce(self, tensor: Tensor, reduction: Reduction, what: str) -> None:
        with self._doing(what):
            host = tensor.cpu()
            dist.all_reduce(host, _OPERATIONS[reduction], self._group)
            if host is not tensor:
                tensor.copy_(host)

    def broadcast(self, value: Value, what: str, source: int = 0) -> Value:
        with self._doing(what):
            values = [value if self.rank == source else None]
            dist.broadcast_object_list(values, source, self._group, device=torch.device("cpu"))
            return cast(Value, values[0])

    def gather(self, value: Value, what: str) -> list[Value]:
        with self._doing(what):
            values: list[Value | None] = [None] * self.size
            dist.all_gather_object(values, value, self._group)
            return cast(list[Value], values)

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Say what failed.

        Raises:
            CommunicationError: another rank has ended, or did not come within the timeout.
        """
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(
                f"Rank {self.rank} of {self.size} could not go on with {what}: another rank has ended, or did not come "
                f"within {self._timeout.total_seconds():.0f} s ({error}). Its own messages say why. A run with an "
                "output_dir can be started again, on any number of ranks, and continues."
            ) from error
