"""What calibration remembers of a layer's inputs: sums, maxima and minima over tokens.

Method: every statistic is a set of accumulators that combine by sum, max or min, so that any split of the batches over
ranks, and any order, gives the same answer, and a rank that saw no token changes nothing (`reductions` names the
tensors and how each combines). `InputGram` is the sum of x xᵀ that GPTQ needs (Frantar et al., arXiv 2210.17323):
a float32 product per batch, rounded to a fixed grid and summed in float64 without any error, so that neither the order
of the batches nor their split over ranks reaches a single bit. It is symmetric, so only blocks on and below the
diagonal are computed and stored.

How the rounding comes for free: with the accumulator starting at 1.5 * 2^52 quanta, the spacing of float64 there is one
quantum, so the very addition rounds. Only a product that lies halfway between two multiples would be rounded by what is
in the accumulator (to the even one); products are made 2^-47 larger while they are added, which lifts every such one
above the middle, and none that is below over it (a float32 has 24 bits). The sum is exact up to 2^17 batches of the
size that the quantum was chosen for, and an ordinary float64 sum beyond that.

Alternative not taken: running means (`gram = n/(n+m) gram + ...`, as in IST-DASLab/gptq). They need one more pass per
batch, depend on the order of the batches, and have to be undone before ranks can be combined. Multiplying in float64
would make the products exact too, at twice to four times the time. Rounding each product before it is added: 2.6 times
the cost of the addition.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, final

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min"]

_BLOCK = 256  # columns per block of a Gram: narrow enough to skip most of the upper half, wide enough for fast products
_LIFT = 1 + 2.0**-47
_QUANTUM_BITS = 34  # the largest entry of the first batch is at most so many bits above the quantum


class Statistic(ABC):
    """An accumulator over the input tokens of one group of linear layers."""

    @abstractmethod
    def __init__(self, num_channels: int, device: torch.device | str) -> None:
        """Start empty for inputs of `num_channels` channels (I)."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens seen so far (on all ranks, once reduced). Reading it waits for the device."""

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Add the tokens `x` [T, I], padding already removed; T may be 0, the dtype may be any float."""

    @abstractmethod
    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """The accumulators by name, each with how ranks combine it. Reduce the tensors in place."""

    def settle(self, agree: Callable[[float], float]) -> None:  # noqa: B027 (most have nothing to settle)
        """Called once on every rank, when each has seen its first batch, or none if it has none.

        Args:
            agree: given this rank's value, returns that of the rank with the first batch of all.
        """

    def merge(self, other: "Statistic") -> None:
        """Add what `other`, of the same class and width, has seen; exactly what a reduction over two ranks does."""
        theirs = other.reductions()
        for name, (mine, reduction) in self.reductions().items():
            yours = theirs[name][0].to(mine.device)
            if reduction == "sum":
                mine.add_(yours)
            elif reduction == "max":
                torch.maximum(mine, yours, out=mine)
            else:
                torch.minimum(mine, yours, out=mine)


@final
class InputGram(Statistic):
    """The Gram matrix of the inputs, C = mean over tokens of x xᵀ, shape [I, I].

    Every `update` is one product and one term of the sum; ranks have to form the same ones. Without `settle`, the
    second update settles by what the first has brought, which is what a run on one rank does.

    Args:
        num_channels: I.
        device: where the tokens arrive.
    """

    def __init__(self, num_channels: int, device: torch.device | str) -> None:
        self.num_channels = num_channels
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._is_empty = True
        self._quantum: float | None = None  # 0: whatever comes is added as it is
        self._offset = 0.0  # what the accumulators hold beside the sum
        # Row block b holds the columns up to its own end: the lower triangle, and each diagonal block in full.
        spans = _spans(num_channels)
        sizes = [(end - start) * end for start, end in spans]
        self._sums = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self._blocks = [part.view(-1, end) for part, (_, end) in zip(self._sums.split(sizes), spans, strict=True)]

    @property
    def num_tokens(self) -> int:
        return int(self._num_tokens)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"An InputGram of {self.num_channels} channels was given an input of shape {tuple(x.shape)}, "
                "but needs [tokens, channels]."
            )
        self._num_tokens += x.shape[0]
        if x.shape[0] == 0:
            return
        if self._quantum is None and not self._is_empty:
            self.settle(lambda largest: largest)
        self._is_empty = False
        self._set_offset(1.5 * 2**52 * (self._quantum or 0.0))  # where reading has taken it away
        x = x.float()
        with _full_float32(x.device):
            for (start, end), block in zip(_spans(self.num_channels), self._blocks, strict=True):
                block.add_(x[:, start:end].t() @ x[:, :end], alpha=_LIFT if self._quantum else 1)

    @torch.no_grad()
    def settle(self, agree: Callable[[float], float]) -> None:
        """Fix the grid by the largest entry of the first batch; where that is zero (an expert that the first batch does
        not reach), products are added as they are."""
        if self._quantum is not None:
            return
        largest = agree(max(float(corner.max()) for corner in self._corners()))
        if not 0 < largest < math.inf:  # NaN too: those are found and said elsewhere
            self._quantum = 0.0
            return
        self._quantum = 2.0 ** (math.frexp(largest)[1] - _QUANTUM_BITS)
        self._sums.mul_(_LIFT)
        self._set_offset(1.5 * 2**52 * self._quantum)

    def _set_offset(self, offset: float) -> None:
        """Adding it rounds what is there to multiples of the quantum; taking it away again changes nothing."""
        if offset != self._offset:
            self._sums.add_(offset - self._offset)
            self._offset = offset

    def _corners(self) -> list[Tensor]:
        starts = [start for start, _ in _spans(self.num_channels)]
        return [block[:, start:].diagonal() for start, block in zip(starts, self._blocks, strict=True)]

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        self._set_offset(0.0)
        return {"gram": (self._sums, "sum"), "num_tokens": (self._num_tokens, "sum")}

    def matrix(self) -> Tensor:
        """The mean Gram, float32 [I, I], exactly symmetric; all zeros when no token was seen."""
        self._set_offset(0.0)
        gram = torch.empty(self.num_channels, self.num_channels, device=self._num_tokens.device)
        count = max(self.num_tokens, 1)
        for (start, end), block in zip(_spans(self.num_channels), self._blocks, strict=True):
            rows = block.div(count).float()
            gram[start:end, :start] = rows[:, :start]
            gram[:start, start:end] = rows[:, :start].t()
            corner = rows[:, start:].tril()
            gram[start:end, start:end] = corner + corner.tril(-1).t()
        return gram

    def diagonal(self) -> Tensor:
        """The mean square of every input channel, float32 [I]."""
        self._set_offset(0.0)
        return torch.cat(self._corners()).div(max(self.num_tokens, 1)).float()


@final
class AbsMax(Statistic):
    """The largest magnitude of every input channel, float32 [I]; zeros before the first token."""

    def __init__(self, num_channels: int, device: torch.device | str) -> None:
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.values = torch.zeros(num_channels, device=device)

    @property
    def num_tokens(self) -> int:
        return int(self._num_tokens)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        self._num_tokens += x.shape[0]
        if x.shape[0]:
            torch.maximum(self.values, x.abs().amax(0).float(), out=self.values)

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        return {"values": (self.values, "max"), "num_tokens": (self._num_tokens, "sum")}


@final
class MinMax(Statistic):
    """The smallest and the largest input value of the whole tensor, float32 [1] each: a static activation range.

    Before the first token `minimum` is +inf and `maximum` -inf, the neutral elements of their reductions.
    """

    def __init__(self, num_channels: int, device: torch.device | str) -> None:
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.minimum = torch.full((1,), float("inf"), device=device)
        self.maximum = torch.full((1,), float("-inf"), device=device)

    @property
    def num_tokens(self) -> int:
        return int(self._num_tokens)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        self._num_tokens += x.shape[0]
        if x.numel():
            low, high = x.aminmax()
            torch.minimum(self.minimum, low.float(), out=self.minimum)
            torch.maximum(self.maximum, high.float(), out=self.maximum)

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        return {
            "minimum": (self.minimum, "min"),
            "maximum": (self.maximum, "max"),
            "num_tokens": (self._num_tokens, "sum"),
        }


def matrix_bytes(num_channels: int) -> int:
    """At most alive inside `InputGram.matrix`, with its result: a block of rows in both precisions beside it."""
    return 4 * num_channels**2 + 24 * _BLOCK * num_channels


def _spans(num_channels: int) -> list[tuple[int, int]]:
    """Start and end of every column block.

    >>> _spans(600)
    [(0, 256), (256, 512), (512, 600)]
    """
    return [(start, min(start + _BLOCK, num_channels)) for start in range(0, num_channels, _BLOCK)]


@contextmanager
def _full_float32(device: torch.device) -> Iterator[None]:
    """Products in true float32: TF32 keeps 10 bits of mantissa, too few for a Gram that will be factorized."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
