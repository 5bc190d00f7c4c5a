"""What calibration remembers of a layer's inputs: sums, maxima and minima over tokens.

Method: every statistic is a set of accumulators that combine by sum, max or min, so that any split of the batches over
ranks, and any order, gives the same answer, and a rank that saw no token changes nothing (`reductions` names the
tensors and how each combines).

Alternative not taken: running means (`gram = n/(n+m) gram + ...`, as in IST-DASLab/gptq). They need one more pass per
batch, depend on the order of the batches, and have to be undone before ranks can be combined.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

Reduction = Literal["sum", "max", "min"]


@final
@dataclass(frozen=True)
class Beside:
    """What the original model has to say of the tokens of a batch.

    Attributes:
        difference: float32, original values less those of now: of the linears' inputs, [T, I]; or of their outputs with
            the original weights, and the residual that these are added to, [T, O]. The statistic says which.
        held_out: the batch is kept apart, to judge by.
        magnitude: float32 [T, 1], the root mean square of the residual that the outputs are added to; None: there is
            none.
    """

    difference: Tensor
    held_out: bool
    magnitude: Tensor | None = None


class Statistic(ABC):
    """An accumulator over the input tokens of one group of linear layers.

    Attributes:
        num_lent: tokens that an expert which saw too few was lent (see `complete`); None: nobody asked.
    """

    num_lent: int | None = None

    @abstractmethod
    def __init__(self, num_channels: int, device: torch.device | str, num_outputs: int = 0) -> None:
        """Start empty for inputs of `num_channels` channels (I), of linears that have `num_outputs` rows (O) in all."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens seen so far (on all ranks, once reduced). Reading it waits for the device."""

    @abstractmethod
    def update(self, x: Tensor, beside: Beside | None = None) -> None:
        """Add the tokens `x` [T, I], padding already removed; T may be 0, the dtype may be any float.

        `beside` is what the original model has to say of them, in a run that has a reference stream.
        """

    @abstractmethod
    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """The accumulators by name, each with how ranks combine it. Reduce the tensors in place.

        Of a NaN on some ranks alone "max" and "min" may leave nothing (gloo's do): such accumulators hold infinities
        in its place.
        """

    def largest(self) -> tuple[float, ...]:
        """The largest entry of each sum, by which its grid is fixed; as many on every rank."""
        return ()

    def settle(self, largest: Sequence[float]) -> None:  # noqa: B027 (most have nothing to settle)
        """Called once on every rank, when each has seen its first batch, or none if it has none, with what `largest`
        says on the rank with the first batch of all."""

    @classmethod  # noqa: B027 (few need it)
    def complete(cls, siblings: Sequence["Statistic"], same_channels: bool) -> None:
        """Called with those of all experts of a layer, or of one module that saw nothing, reduced: what some saw too
        little of, they take from all.

        Args:
            siblings: of this class, for as many channels each.
            same_channels: channel i means the same to all of them (the model's hidden state), not to each its own.
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
