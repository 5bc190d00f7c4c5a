"""Straightforward float64 counterparts of what `lightning_compress.algorithms` computes, written from the papers."""

from collections.abc import Callable

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from lightning_compress.statistics import InputGram


def weight_and_gram(
    num_rows: int, num_channels: int, num_tokens: int = 1024, seed: int = 0, outliers: bool = False
) -> tuple[Tensor, InputGram]:
    """A weight with a mean, and the Gram of strongly correlated inputs of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, num_channels, generator=generator) * 0.02 + 0.004
    mixing = torch.randn(num_channels, num_channels, generator=generator) * torch.rand(
        num_channels, generator=generator
    )
    x = torch.randn(num_tokens, num_channels, generator=generator) @ (mixing * 0.1)
    if outliers:
        x[:, ::17] *= 20
    gram = InputGram(num_channels, "cpu")
    gram.update(x)
    return weight, gram


def scheme(
    num_bits: int = 4, symmetric: bool = True, strategy: str = "group", group_size: int = 32
) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=num_bits,
        symmetric=symmetric,
        strategy=strategy,
        group_size=group_size if strategy == "group" else None,
    )


def expand(per_group: Tensor | None, num_rows: int, num_channels: int) -> Tensor:
    """[O, G], [O, 1] or [1] to float64 [O, I]; zeros for None."""
    if per_group is None:
        return torch.zeros(num_rows, num_channels, dtype=torch.float64)
    table = per_group.double().reshape(-1, per_group.shape[-1])
    return table.repeat_interleave(num_channels // table.shape[1], dim=1).expand(num_rows, num_channels)


def gptq(
    weight: Tensor, gram: Tensor, scale: Tensor, zero_point: Tensor | None, num_bits: int, damping: float, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Codes [O, I] of integers, and how far each was from a rounding border; see `rounded_gptq`."""

    def to_grid(exact: Tensor) -> Tensor:
        return exact.round().clamp(-(2 ** (num_bits - 1)), 2 ** (num_bits - 1) - 1)

    codes, exact = rounded_gptq(weight, gram, scale, zero_point, damping, order, to_grid)
    return codes, (exact - exact.floor() - 0.5).abs()


def rounded_gptq(
    weight: Tensor,
    gram: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    damping: float,
    order: Tensor,
    to_grid: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Codes [O, I], and what each was before it was rounded, by GPTQ as in arXiv 2210.17323, algorithm 1.

    Column by column on the Cholesky factor of the *inverse* of the damped Gram, in float64, in the given `order`.
    """
    scales, shifts = expand(scale, *weight.shape)[:, order], expand(zero_point, *weight.shape)[:, order]
    left = weight.double()[:, order]
    hessian = gram.double() + damping * gram.double().diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian[order][:, order]), upper=True)
    codes, exact = torch.empty_like(left), torch.empty_like(left)
    for k in range(left.shape[1]):
        exact[:, k] = left[:, k] / scales[:, k] + shifts[:, k]
        codes[:, k] = to_grid(exact[:, k])
        error = (left[:, k] - (codes[:, k] - shifts[:, k]) * scales[:, k]) / upper[k, k]
        left[:, k:] -= error[:, None] * upper[k, k:]
    inverse = order.argsort()
    return codes[:, inverse], exact[:, inverse]


def values(codes: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """(code - zero_point) * scale, float64 [O, I]."""
    return (codes.double() - expand(zero_point, *codes.shape)) * expand(scale, *codes.shape)


def relative_error(weight: Tensor, quantized: Tensor, gram: Tensor) -> float:
    """tr((W-Q) C (W-Q)ᵀ) / tr(W C Wᵀ)."""
    delta, full = weight.double() - quantized, weight.double()
    return float(torch.sum(delta @ gram.double() * delta) / torch.sum(full @ gram.double() * full))
