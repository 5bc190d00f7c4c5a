"""What calibration remembers of a layer's inputs: sums, maxima and minima over tokens.

Method: every statistic is a set of accumulators that combine by sum, max or min, so that any split of the batches over
ranks, and any order, gives the same answer, and a rank that saw no token changes nothing (`reductions` names the
tensors and how each combines). `InputGram` is the sum of x xᵀ that GPTQ needs (Frantar et al., arXiv 2210.17323):
a float32 product per batch, summed in float64, so that the order of the batches all but never reaches the float32
result (with a `quantum`: never). It is symmetric, so only blocks on and below the diagonal are computed and stored.

Alternative not taken: running means (`gram = n/(n+m) gram + ...`, as in IST-DASLab/gptq). They need one more pass per
batch, depend on the order of the batches, and have to be undone before ranks can be combined. Multiplying in float64
would make the products exact too, at twice to four times the time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, final

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min"]

_BLOCK = 256  # columns per block of a Gram: narrow enough to skip most of the upper half, wide enough for fast products


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

    Args:
        num_channels: I.
        device: where the tokens arrive.
        quantum: a power of two. If given, every batch's product is rounded to a multiple of it before it is added,
            which makes the sum exact and so independent of its order to the last bit. Every rank must use the same
            value; 2⁻³⁶ of the largest diagonal entry of a batch leaves room for 2¹⁶ batches of that size. Without it
            the order reaches the float64 sum in its last bits, and one entry in 10⁸ of the float32 result.
    """

    def __init__(self, num_channels: int, device: torch.device | str, quantum: float | None = None) -> None:
        self.num_channels = num_channels
        self._num_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._rounder = None if quantum is None else 1.5 * 2**52 * quantum
        # Row block b holds the columns up to its own end: the lower triangle, and each diagonal block in full.
        self._blocks = [
            torch.zeros(end - start, end, dtype=torch.float64, device=device) for start, end in _spans(num_channels)
        ]

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
        x = x.float()
        with _full_float32(x.device):
            for (start, end), block in zip(_spans(self.num_channels), self._blocks, strict=True):
                self._add(block, x[:, start:end].t() @ x[:, :end])

    def _add(self, block: Tensor, product: Tensor) -> None:
        if self._rounder is None:
            block.add_(product)
        else:
            block.add_(product.double().add_(self._rounder).sub_(self._rounder))

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        blocks = {f"gram.{index}": block for index, block in enumerate(self._blocks)}
        return {name: (tensor, "sum") for name, tensor in {**blocks, "num_tokens": self._num_tokens}.items()}

    def matrix(self) -> Tensor:
        """The mean Gram, float32 [I, I], exactly symmetric; all zeros when no token was seen."""
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
        starts = [start for start, _ in _spans(self.num_channels)]
        corners = [block[:, start:].diagonal() for start, block in zip(starts, self._blocks, strict=True)]
        return torch.cat(corners).div(max(self.num_tokens, 1)).float()


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
