"""Statistics of what linears read: the Gram that GPTQ needs (Frantar et al., arXiv 2210.17323) and ranges."""

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from lightning_compress.statistics.base import Beside, Reduction, Statistic
from lightning_compress.statistics.sums import GramSum, add_gram


@final
class InputGram(Statistic):
    """The Gram matrix of the inputs, C = mean over tokens of x xᵀ, shape [I, I]; if asked for, that of batches that are
    held out beside it.

    Every `update` is one product and one term of the sum; ranks have to form the same ones. Without `settle`, the
    second update settles by what the first has brought, which is what a run on one rank does.
    """

    def __init__(
        self, num_channels: int, device: torch.device | str, num_outputs: int = 0, keeps_held_out: bool = False
    ) -> None:
        self._grams = tuple(GramSum(num_channels, device) for _ in range(1 + keeps_held_out))
        self._counts = torch.zeros(len(self._grams), dtype=torch.int64)  # in host memory: read without waiting
        self._is_empty = True
        self._prior: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self._counts[0])

    @property
    def num_held_out(self) -> int:
        """Of the tokens, those held out; 0 where nobody asked for them."""
        return int(self._counts[1]) if len(self._counts) > 1 else 0

    @torch.no_grad()
    def update(self, x: Tensor, beside: Beside | None = None) -> None:
        num_channels = self._grams[0].num_channels
        if x.ndim != 2 or x.shape[1] != num_channels:
            raise ValueError(
                f"An InputGram of {num_channels} channels was given an input of shape {tuple(x.shape)}, "
                "but needs [tokens, channels]."
            )
        number = 2 if beside is not None and beside.held_out else 1  # of the sums that this is a term of
        self._counts[:number].add_(x.shape[0])
        if x.shape[0] == 0:
            return
        if not self._is_empty and self._grams[0].sum.quantum is None:
            self.settle(self.largest())
        self._is_empty = False
        add_gram(x, self._grams[:number])

    def largest(self) -> tuple[float, ...]:
        return (float(self._grams[0].diagonal().max()),)

    @torch.no_grad()
    def settle(self, largest: Sequence[float]) -> None:
        for gram in self._grams:
            gram.sum.settle(*largest)

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        names = ("gram", "gram held out")
        grams: dict[str, tuple[Tensor, Reduction]] = {
            name: (gram.sum.read(), "sum") for name, gram in zip(names, self._grams, strict=False)
        }
        return {**grams, "num_tokens": (self._counts, "sum")}

    @classmethod
    @torch.no_grad()
    def complete(cls, siblings: Sequence[Statistic], same_channels: bool) -> None:
        """Fewer tokens than channels leave directions that none of them has shown. As many as are missing are lent: of
        the mean Gram of all siblings; of its mean diagonal alone, where channels mean something else to each, and where
        no sibling has seen a token, which then is 1."""
        grams = [sibling for sibling in siblings if isinstance(sibling, InputGram)]
        width = grams[0]._grams[0].num_channels
        total = sum(gram.num_tokens for gram in grams)
        starved = [gram for gram in grams if gram.num_tokens < width]
        if not starved:
            return
        prior = torch.zeros(width, width, dtype=torch.float32, device=grams[0]._grams[0].sum.values.device)
        if not total:
            prior.diagonal().fill_(1)
        for gram in grams:
            share = gram.num_tokens / max(total, 1)
            if same_channels:
                prior.add_(gram.matrix(), alpha=share)
            else:
                prior.diagonal().add_(float(gram.diagonal().mean(dtype=torch.float64)) * share)
        for gram in starved:
            gram._prior, gram.num_lent = prior, width - gram.num_tokens

    def matrix(self) -> Tensor:
        """The mean Gram, float32 [I, I], exactly symmetric; all zeros when no token was seen and none lent."""
        gram = self._grams[0].mean(self.num_tokens)
        if self._prior is not None:
            num_lent = self.num_lent or 0
            share = num_lent / (self.num_tokens + num_lent)
            gram.mul_(1 - share).add_(self._prior, alpha=share)
        return gram

    def matrix_held_out(self) -> Tensor:
        """As `matrix`, of batches that were held out."""
        return self._grams[1].mean(self.num_held_out)

    def diagonal(self) -> Tensor:
        """The mean square of every input channel, float32 [I]."""
        if self._prior is not None:
            return self.matrix().diagonal().clone()
        return self._grams[0].diagonal().div(max(self.num_tokens, 1)).float()


@final
class MinMax(Statistic):
    """The smallest and the largest input value of the whole tensor, float32 [1] each: a static activation range.

    Before the first token `minimum` is +inf and `maximum` -inf, the neutral elements of their reductions. With a NaN
    they are -inf and +inf, for a NaN of some ranks is lost between them.
    """

    def __init__(self, num_channels: int, device: torch.device | str, num_outputs: int = 0) -> None:
        self._num_tokens = torch.zeros((), dtype=torch.int64)
        self.minimum = torch.full((1,), float("inf"), dtype=torch.float32, device=device)
        self.maximum = torch.full((1,), float("-inf"), dtype=torch.float32, device=device)

    @property
    def num_tokens(self) -> int:
        return int(self._num_tokens)

    @torch.no_grad()
    def update(self, x: Tensor, beside: Beside | None = None) -> None:
        self._num_tokens += x.shape[0]
        if x.numel():
            low, high = x.aminmax()
            torch.minimum(self.minimum, _instead_of_nan(low, -math.inf), out=self.minimum)
            torch.maximum(self.maximum, _instead_of_nan(high, math.inf), out=self.maximum)

    @classmethod
    def complete(cls, siblings: Sequence[Statistic], same_channels: bool) -> None:
        """What saw no token takes the range of all."""
        ranges = [sibling for sibling in siblings if isinstance(sibling, MinMax)]
        low, high = (torch.stack([getattr(each, name) for each in ranges]) for name in ("minimum", "maximum"))
        for each in (each for each in ranges if not each.num_tokens):
            each.minimum, each.maximum = low.amin(0), high.amax(0)

    def reductions(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        return {
            "minimum": (self.minimum, "min"),
            "maximum": (self.maximum, "max"),
            "num_tokens": (self._num_tokens, "sum"),
        }


def _instead_of_nan(x: Tensor, value: float) -> Tensor:
    """float32; infinities stay."""
    return x.float().nan_to_num(value, math.inf, -math.inf)
