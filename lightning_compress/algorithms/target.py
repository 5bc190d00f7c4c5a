"""What is quantized in a weight's place, and what the result is measured by: the outputs of the original model.

Of a weight W whose outputs lack e, any Q can be judged by sums alone: mean |W x + e - Q x|² = mean e² - 2 (Q - W) Mᵀ +
(Q - W) C (Q - W)ᵀ, row by row, with M the mean of e xᵀ and C the Gram.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lightning_compress.statistics import Lack, row_products


@final
@dataclass(frozen=True)
class Judge:
    """What some tokens say of any weight in the place of W.

    Attributes:
        gram: C of their inputs, float32 [I, I].
        lack: what the outputs of W lack on them.
    """

    gram: Tensor
    lack: Lack


class Change(ABC):
    """What a correction quantizes in a weight's place."""

    @abstractmethod
    def of(self, weight: Tensor, missing: Tensor) -> Tensor:
        """Of some rows W [R, I], given their M, float32 [R, I]."""


@final
@dataclass(frozen=True)
class Ridge(Change):
    """V = W + strength * M (C + ridge mean(diag C) I)⁻¹.

    Attributes:
        strength: a fraction.
        lower: float32 [I, I], the Cholesky factor of what is inverted.
    """

    strength: float
    lower: Tensor

    def of(self, weight: Tensor, missing: Tensor) -> Tensor:
        change = torch.cholesky_solve(missing.t(), self.lower).t()
        return change.mul_(self.strength).add_(weight)


@final
@dataclass(frozen=True)
class Mapped(Change):
    """V = W + W X.

    Attributes:
        by: X, float32 [I, I].
    """

    by: Tensor

    def of(self, weight: Tensor, missing: Tensor) -> Tensor:
        return torch.addmm(weight.float(), weight.float(), self.by)


@final
@dataclass(frozen=True)
class Correction:
    """What is quantized in a weight's place, and what its result is measured by.

    Attributes:
        lack: what the outputs lack.
        strength, ridge: that were chosen.
        change: None where the strength is 0.
        held_out: the error on batches that were held out, as a fraction of what it is without correction, before
            anything is rounded; None: there were none.
        judge: those batches, where more is to be chosen by them.
    """

    lack: Lack
    strength: float
    ridge: float
    change: Change | None
    held_out: float | None
    judge: Judge | None

    def target(self, weight: Tensor, missing: Tensor) -> Tensor:
        """What to quantize in the place of some rows W [R, I], given their M: V, float32."""
        return weight.float() if self.change is None else self.change.of(weight, missing)

    @property
    def record(self) -> dict[str, float]:
        """What was chosen, by name."""
        judged = {} if self.held_out is None else {"held_out": self.held_out}
        return {"strength": self.strength, "ridge": self.ridge, **judged}


def row_errors(weight: Tensor, quantized: Tensor, missing: Tensor, squares: Tensor, gram: Tensor) -> Tensor:
    """Of rows W and Q, mean |W x + e - Q x|², float64 [R].

    Args:
        weight, quantized: float [R, I]; a zero for Q tells the mean square of what the outputs are to be.
        missing, squares: M, float32 [R, I], and the mean of e², float64 [R].
        gram: C, float32 [I, I].
    """
    change = quantized - weight.float()
    crossed: Tensor = torch.linalg.vecdot(change, missing)
    return (squares - 2 * crossed.double() + row_products(change, gram)).clamp(min=0)
