"""How far a quantized model's linears are from what the original model computes: what error correction learns from.

With e = W (x_ref - x) + r_ref - r, what the outputs of a token lack (see `Beside`): M = mean of e xᵀ, [O, I], and the
mean of e² of every output. For any other weight V the output error is then exact, without another forward:
mean |e - (V - W) x|² = mean e² - 2 (V - W) M ᵀ + (V - W) C (V - W)ᵀ, row by row, with the Gram C.

Two forms say the same. Of outputs that are added to nothing, M = W D, D = mean of (x_ref - x) xᵀ, and e² follows from
the Gram of x_ref - x, whatever W is: I by I (`InputDrift`). Of others M is summed as it is, O by I (`OutputDrift`): it
would take D, and the residual's part beside it. In both, the difference is made before the product, so that it loses no
digits. `drift_form` says which is less work.

Where outputs are added to a residual, norms follow, which divide by how large the stream is: a token's x and e count by
1 / max(|r|, 0.1 mean |r|), the mean that of the batch, in all these sums. Without that, tokens with a large stream
decide on the correction: on a GPT-NeoX it then did harm (see docs/error_correction.md).

Batches that are held out are in all sums, and once more in sums of their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_compress.statistics.base import Beside, Reduction, Statistic
from lightning_compress.statistics.inputs import InputGram
from lightning_compress.statistics.sums import ExactSum, full_float32, row_products

_LEAST = 0.1
"""Of the mean magnitude: no token counts as if its own were smaller, or one with next to none would count alone."""


class Lack(ABC):
    """What the outputs of linears W [O, I] lack, as means over some tokens; asked row by row."""

    @abstractmethod
    def missing(self, weight: Tensor, rows: slice | Tensor) -> Tensor:
        """M, the mean of e xᵀ, float32 [R, I], of these rows of W, which are `weight` [R, I]."""

    @abstractmethod
    def squares(self, weight: Tensor, rows: slice | Tensor) -> Tensor:
        """Mean of e², float64 [R]; the arguments are those of `missing`."""


class Drift(Statistic):
    """How far the outputs of linears are from what they are to be, as far as their inputs can tell.

    Attributes:
        inputs: the Gram of the same tokens, which is gathered along with it.
    """

    def __init__(self, num_channels: int, device: torch.device | str, num_outputs: int = 0) -> None:
        self.inputs = InputGram(num_channels, device, keeps_held_out=True)

    @property
    @final
    def num_tokens(self) -> int:
        return self.inputs.num_tokens

    @property
    @abstractmethod
    def _parts(self) -> Sequence["_Twice | InputGram"]:
        """What is summed, each part on a grid of its own."""

    @final
    def largest(self) -> tuple[float, ...]:
        return tuple(entry for part in self._parts for entry in part.largest())

    @final
    @torch.no_grad()
    def settle(self, largest: Sequence[float]) -> None:
        for part, entry in zip(self._parts, largest, strict=True):
            part.settle((entry,))

    @abstractmethod
    def lack(self, held_out: bool = False) -> Lack:
        """Of all tokens, or of those of batches that were held out."""


@final
@dataclass(frozen=True)
class OutputLack(Lack):
    """M and e² as they were summed.

    Attributes:
        total: float64 [O, I].
        total_squares: float64 [O].
        num_tokens: that they were summed over.
    """

    total: Tensor
    total_squares: Tensor
    num_tokens: int

    def missing(self, weight: Tensor, rows: slice | Tensor) -> Tensor:
        return self.total[rows].float().div_(self.num_tokens)

    def squares(self, weight: Tensor, rows: slice | Tensor) -> Tensor:
        return self.total_squares[rows] / self.num_tokens


@final
@dataclass(frozen=True)
class InputLack(Lack):
    """M and e² as they follow from the inputs.

    Attributes:
        cross: D, the mean of (x_ref - x) xᵀ, float32 [I, I].
        gram: the mean of (x_ref - x) (x_ref - x)ᵀ, float32 [I, I].
    """

    cross: Tensor
    gram: Tensor

    def missing(self, weight: Tensor, rows: slice | Tensor) -> Tensor:
        with full_float32(weight.device):
            return weight.float() @ self.cross

    def squares(self, weight: Tensor, rows: slice | Tensor) -> Tensor:
        return row_products(weight, self.gram).clamp(min=0)


@final
class OutputDrift(Drift):
    """The sums of e xᵀ and e², and of x xᵀ, of weighted tokens; `Beside.difference` is e, [T, O]."""

    def __init__(self, num_channels: int, device: torch.device | str, num_outputs: int = 0) -> None:
        super().__init__(num_channels, device, num_outputs)
        self._shape = (num_outputs, num_channels)
        self._missing = _Twice(num_outputs * num_channels, device)
        self._squares = _Twice(num_outputs, device)

    @torch.no_grad()
    def update(self, x: Tensor, beside: Beside | None = None) -> None:
        assert beside is not None
        assert beside.difference.shape == (x.shape[0], self._shape[0])
        x, difference = _weighted(x, beside), _weighted(beside.difference, beside)
        if len(x):
            self._missing.add(_product(difference, x), beside.held_out)
            self._squares.add(difference.square().sum(0), beside.held_out)
        self.inputs.update(x, beside)

    @property
    def _parts(self) -> Sequence["_Twice | InputGram"]:
        return self._missing, self._squares, self.inputs

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        sums = {**self._missing.reductions("missing"), **self._squares.reductions("squares")}
        return {**sums, **self.inputs.reductions()}

    def lack(self, held_out: bool = False) -> Lack:
        count = self.inputs.num_held_out if held_out else self.inputs.num_tokens
        missing, squares = self._missing.read(held_out), self._squares.read(held_out)
        return OutputLack(missing.view(self._shape), squares, max(count, 1))


@final
class InputDrift(Drift):
    """The sums of (x_ref - x) xᵀ and of the Gram of x_ref - x; `Beside.difference` is x_ref - x, [T, I]."""

    def __init__(self, num_channels: int, device: torch.device | str, num_outputs: int = 0) -> None:
        super().__init__(num_channels, device, num_outputs)
        self._shape = (num_channels, num_channels)
        self._cross = _Twice(num_channels**2, device)
        self._differences = InputGram(num_channels, device, keeps_held_out=True)

    @torch.no_grad()
    def update(self, x: Tensor, beside: Beside | None = None) -> None:
        assert beside is not None
        assert beside.difference.shape == x.shape
        if len(x):
            self._cross.add(_product(beside.difference, x), beside.held_out)
        self._differences.update(beside.difference, beside)
        self.inputs.update(x, beside)

    @property
    def _parts(self) -> Sequence["_Twice | InputGram"]:
        return self._cross, self._differences, self.inputs

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        differences = {f"{name} of differences": of for name, of in self._differences.reductions().items()}
        return {**self._cross.reductions("cross"), **differences, **self.inputs.reductions()}

    def lack(self, held_out: bool = False) -> Lack:
        count = self.inputs.num_held_out if held_out else self.inputs.num_tokens
        cross = self._cross.read(held_out).float().div_(max(count, 1)).view(self._shape)
        gram = self._differences.matrix_held_out() if held_out else self._differences.matrix()
        return InputLack(cross, gram)


def drift_form(num_channels: int, num_outputs: int, is_alone: bool) -> type[Drift]:
    """The form that is less work for a linear [O, I], alone or with what its output is added to.

    For every token, e and e xᵀ take 4 O I operations; (x_ref - x) xᵀ and half the Gram of the first take 3 I².

    >>> [drift_form(*sizes, is_alone=True).__name__ for sizes in ((768, 2304), (2048, 768))]
    ['InputDrift', 'OutputDrift']
    >>> drift_form(768, 2304, is_alone=False).__name__
    'OutputDrift'
    """
    return InputDrift if is_alone and 4 * num_outputs >= 3 * num_channels else OutputDrift


def _weighted(x: Tensor, beside: Beside) -> Tensor:
    """Tokens [T, n], each by what it counts."""
    if beside.magnitude is None:
        return x
    least = (_LEAST * beside.magnitude.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    return x.float() / beside.magnitude.clamp(min=least)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """AᵀB of [T, n] and [T, m], float32 [n m]."""
    with full_float32(a.device):
        return (a.t() @ b.float()).view(-1)


@final
class _Twice:
    """A sum of float32 terms over all batches, and one over those held out, on one grid."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        self._sums = ExactSum(size, device), ExactSum(size, device)
        self._is_empty = True

    def add(self, terms: Tensor, held_out: bool) -> None:
        """Of one batch, float32 [n]."""
        if not self._is_empty and self._sums[0].quantum is None:
            self.settle(self.largest())
        self._is_empty = False
        for part in self._sums[: 1 + held_out]:
            part.values.add_(terms, alpha=part.begin())

    def largest(self) -> tuple[float]:
        values = self._sums[0].values
        return (float(values.abs().max()) if values.numel() else 0.0,)

    def settle(self, largest: Sequence[float]) -> None:
        for part in self._sums:
            part.settle(*largest)

    def read(self, held_out: bool) -> Tensor:
        return self._sums[int(held_out)].read()

    def reductions(self, name: str) -> dict[str, tuple[Tensor, Reduction]]:
        return {name: (self.read(False), "sum"), f"{name} held out": (self.read(True), "sum")}
