"""How far a quantized model's linears are from what the original model computes: what error correction learns from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_compress.statistics.base import Beside, Reduction, Statistic
from lightning_compress.statistics.sums import ExactSum, GramSum, full_float32


@final
@dataclass(frozen=True)
class HeldOut:
    """What batches that are kept apart say, as means over their tokens.

    Attributes:
        num_tokens: of them.
        gram: float32 [I, I], of their inputs.
        missing: float32 [R, I], mean of e xᵀ of some outputs; see `Drift`.
        squares: float64 [R], mean of e².
    """

    num_tokens: int
    gram: Tensor
    missing: Tensor
    squares: Tensor


@final
class Drift(Statistic):
    """How far the outputs of linears are from what they are to be, as far as their inputs can tell.

    With e = W (x_ref - x) + r_ref - r, what the outputs of a token lack (see `Beside`): M = mean of e xᵀ, [O, I], and
    the mean of e² of every output. For any other weight V the output error is then exact, without another forward:
    mean |e - (V - W) x|² = mean e² - 2 (V - W) M ᵀ + (V - W) C (V - W)ᵀ, row by row, with the Gram C.

    M is W D + R of the sums D of (x_ref - x) xᵀ and R of (r_ref - r) xᵀ. Summed as one it takes [O, I] in place of
    [I, I] and [O, I], and the difference is made before the product, so it loses no digits.

    Batches that are held out are summed apart, with a Gram of their own.
    """

    def __init__(self, num_channels: int, device: torch.device | str, num_outputs: int = 0) -> None:
        self._shape = (num_outputs, num_channels)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # of all tokens, and of those held out
        self._is_empty = True
        self._sums = ExactSum(num_outputs * num_channels, device), ExactSum(num_outputs * num_channels, device)
        self._squares = ExactSum(num_outputs, device), ExactSum(num_outputs, device)
        self._gram = GramSum(num_channels, device)
        self._largest_square: Tensor | None = None  # of the first batch's inputs

    @property
    def num_tokens(self) -> int:
        return int(self._counts[0])

    @torch.no_grad()
    def update(self, x: Tensor, beside: Beside | None = None) -> None:
        assert beside is not None
        assert beside.missing.shape == (x.shape[0], self._shape[0])
        self._counts += torch.tensor([len(x), len(x) if beside.held_out else 0], device=self._counts.device)
        if len(x) == 0:
            return
        x = x.float()
        if self._is_empty:
            self._largest_square = x.square().sum(0).max()
        else:
            self.settle(lambda largest: largest)
        self._is_empty = False
        into = self._sums[beside.held_out]
        with full_float32(x.device):
            into.values.view(self._shape).add_(beside.missing.t() @ x, alpha=into.begin())
        squares = self._squares[beside.held_out]
        squares.values.add_(beside.missing.square().sum(0), alpha=squares.begin())
        if beside.held_out:
            self._gram.add(x)

    @torch.no_grad()
    def settle(self, agree: Callable[[float], float]) -> None:
        """See `Statistic`; the sums of batches that are held out have the grid of the others."""
        if self._gram.sum.quantum is not None:
            return
        for parts in (self._sums, self._squares):
            largest = agree(max(float(part.values.abs().max()) if part.values.numel() else 0.0 for part in parts))
            for part in parts:
                part.settle(largest)
        self._gram.sum.settle(agree(0.0 if self._largest_square is None else float(self._largest_square)))

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        parts = {"missing": self._sums, "squares": self._squares}
        sums: dict[str, tuple[Tensor, Reduction]] = {
            f"{name}{' held out' * number}": (part.read(), "sum")
            for name, pair in parts.items()
            for number, part in enumerate(pair)
        }
        sums["gram held out"] = (self._gram.sum.read(), "sum")
        return {**sums, "num_tokens": (self._counts, "sum")}

    def missing(self) -> Tensor:
        """M of all tokens, float32 [O, I]."""
        total = self._sums[0].read() + self._sums[1].read()
        return total.div_(max(self.num_tokens, 1)).float().view(self._shape)

    def squares(self) -> Tensor:
        """Mean of e² over all tokens, float64 [O]."""
        return (self._squares[0].read() + self._squares[1].read()) / max(self.num_tokens, 1)

    def held_out(self, rows: Tensor) -> HeldOut | None:
        """Of the batches that were kept apart, for these outputs (int64 [R]); None: there were none."""
        count = int(self._counts[1])
        if count == 0:
            return None
        missing = self._sums[1].read().view(self._shape)[rows].div_(count).float()
        return HeldOut(count, self._gram.mean(count), missing, self._squares[1].read()[rows] / count)
