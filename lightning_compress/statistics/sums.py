"""Sums over batches that do not depend on the order of the batches, nor on how ranks share them.

Method: a float32 product per batch, rounded to a fixed grid and summed in float64 without any error. Of 16-bit
activations a GPU's tensor cores make the same product (each product of two is exact in float32, where they are summed).

How the rounding comes for free: with the accumulator starting at 1.5 * 2^52 quanta, the spacing of float64 there is one
quantum, so the very addition rounds. Only a product that lies halfway between two multiples would be rounded by what is
in the accumulator (to the even one); products are made 2^-47 larger while they are added, which lifts every such one
above the middle, and none that is below over it (a float32 has 24 bits). The sum is exact up to 2^17 batches of the
size that the quantum was chosen for, and an ordinary float64 sum beyond that.

Alternatives not taken: multiplying in float64 would make the products exact too, at twice to four times the time.
Rounding each product before it is added takes 2.6 times as long as the addition.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import final

import torch
from torch import Tensor

BLOCK_ON_CPU, BLOCK_ON_GPU = 256, 1024
"""Columns per block of a Gram: narrow enough to skip most of the upper half, wide enough for fast products; a GPU has
done with the one of an expert's few tokens before the next is called."""
_LIFT = 1 + 2.0**-47
_QUANTUM_BITS = 34  # the largest entry of the first batch is at most so many bits above the quantum


@final
class ExactSum:
    """float64 [n] of float32 terms, none of whose bits depends on their order or split (see the module's docstring)."""

    def __init__(self, size: int, device: torch.device | str) -> None:
        self.values = torch.zeros(size, dtype=torch.float64, device=device)
        self.quantum: float | None = None  # 0: whatever comes is added as it is
        self._offset = 0.0  # what the accumulators hold beside the sum

    def begin(self) -> float:
        """Called before terms are added to `values`; returns the factor that they have to be added with."""
        self._set_offset(1.5 * 2**52 * (self.quantum or 0.0))  # where reading has taken it away
        return _LIFT if self.quantum else 1.0

    def settle(self, largest: float) -> None:
        """Fix the grid by the largest entry of the first batch; where that is zero (an expert that the first batch does
        not reach), terms are added as they are."""
        if self.quantum is not None:
            return
        if not 0 < largest < math.inf:  # NaN too: those are found and said elsewhere
            self.quantum = 0.0
            return
        self.quantum = 2.0 ** (math.frexp(largest)[1] - _QUANTUM_BITS)
        self.values.mul_(_LIFT)
        self._set_offset(1.5 * 2**52 * self.quantum)

    def read(self) -> Tensor:
        """The sum, in place."""
        self._set_offset(0.0)
        return self.values

    def _set_offset(self, offset: float) -> None:
        """Adding it rounds what is there to multiples of the quantum; taking it away again changes nothing."""
        if offset != self._offset:
            self.values.add_(offset - self._offset)
            self._offset = offset


@final
class GramSum:
    """The exact sum of x xᵀ. Row block b holds the columns up to its own end: the lower triangle, and each diagonal
    block in full."""

    def __init__(self, num_channels: int, device: torch.device | str) -> None:
        self.num_channels = num_channels
        is_on_gpu = torch.empty(0, device=device).is_cuda  # a fake tensor may say so of a CPU
        self.spans = _spans(num_channels, BLOCK_ON_GPU if is_on_gpu else BLOCK_ON_CPU)
        self.sum = ExactSum(sum(self._sizes), device)

    @property
    def _sizes(self) -> list[int]:
        """Entries of every row block."""
        return [(end - start) * end for start, end in self.spans]

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Views of the sum."""
        parts = self.sum.values.split(self._sizes)
        return [part.view(-1, end) for part, (_, end) in zip(parts, self.spans, strict=True)]

    def diagonal(self) -> Tensor:
        """float64 [I]."""
        self.sum.read()
        return torch.cat(
            [block[:, start:].diagonal() for (start, _), block in zip(self.spans, self.blocks, strict=True)]
        )

    def mean(self, count: int) -> Tensor:
        """Over so many tokens, float32 [I, I], exactly symmetric; all zeros when there were none."""
        self.sum.read()
        gram = torch.empty(self.num_channels, self.num_channels, dtype=torch.float32, device=self.sum.values.device)
        for (start, end), block in zip(self.spans, self.blocks, strict=True):
            torch.div(block, max(count, 1), out=gram[start:end, :end])
            gram[:start, start:end] = gram[start:end, :start].t()
            corner = gram[start:end, start:end].tril_()
            corner.add_(corner.tril(-1).t())
        return gram


def add_gram(x: Tensor, to: Sequence[GramSum]) -> None:
    """Add the tokens [T, I] to several sums; the product is made once."""
    factors = [gram.sum.begin() for gram in to]
    in_halves = _has_tensor_cores_for(x)
    x = x if in_halves else x.float()
    with full_float32(x.device):
        for number, (start, end) in enumerate(to[0].spans):
            left, right = x[:, start:end].t(), x[:, :end]
            product = torch.mm(left, right, out_dtype=torch.float32) if in_halves else left @ right
            for gram, factor in zip(to, factors, strict=True):
                gram.blocks[number].add_(product, alpha=factor)


def _has_tensor_cores_for(x: Tensor) -> bool:
    """Whether the GPU multiplies tensors of this type, and sums in float32: bfloat16 from compute capability 8.0 on."""
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    is_here = x.device.type == "cuda"  # a fake tensor's may be a CPU
    return x.dtype == torch.float16 or not is_here or torch.cuda.get_device_capability(x.device) >= (8, 0)


def row_products(weight: Tensor, gram: Tensor | None) -> Tensor:
    """w C wᵀ of every row w of `weight` [R, I], float64 [R]; w wᵀ without a Gram.

    Block by block of the lower triangle, which is half the work of the full product.
    """
    if gram is None:
        return weight.double().square().sum(1)
    weight = weight.float()
    total = torch.zeros(weight.shape[0], dtype=torch.float64, device=weight.device)
    width = 128 if weight.device.type == "cpu" else 1024
    for start in range(0, weight.shape[1], width):
        end = min(start + width, weight.shape[1])
        block = weight[:, start:end]
        product = weight[:, :start] @ gram[:start, start:end] if start else torch.zeros_like(block)
        product = torch.addmm(product, block, gram[start:end, start:end], beta=2)
        total.add_(torch.linalg.vecdot(product, block))
    return total


def matrix_bytes(num_channels: int) -> int:
    """At most alive inside `InputGram.matrix`, with its result: a block of rows in both precisions beside it (on a GPU,
    which converts as it writes, less)."""
    return 4 * num_channels**2 + 24 * BLOCK_ON_CPU * num_channels


def _spans(num_channels: int, block: int) -> list[tuple[int, int]]:
    """Start and end of every column block.

    >>> _spans(600, 256)
    [(0, 256), (256, 512), (512, 600)]
    """
    return [(start, min(start + block, num_channels)) for start in range(0, num_channels, block)]


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Products in true float32, also under a caller's autocast and `torch.set_float32_matmul_precision`: TF32 keeps 10
    bits of mantissa, and bfloat16, which some CPUs multiply in at "medium", 7; too few for a Gram that will be
    factorized."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    products = backend.matmul
    before = products.fp32_precision
    autocast = torch.amp.is_autocast_available(device.type)
    with torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        products.fp32_precision = "ieee"
        try:
            yield
        finally:
            products.fp32_precision = before
