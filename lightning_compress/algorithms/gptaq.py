"""GPTAQ: what each channel's input lacks is passed on to the channels behind it, along with its rounding error.

Reference: Li et al., GPTAQ (arXiv 2504.02692), code Intelligent-Computing-Lab/GPTAQ. With the inverse Gram H⁻¹ = Uᵀ U,
U upper triangular, D = mean of (x_ref - x) xᵀ and P = a triu(D Uᵀ, 1) U, when channel k has been rounded to q_k all
channels j behind it change by -(v_k - q_k) / U_kk U_kj + v_k P_kj, where v_k is the weight before it was rounded. In
its code a is 0.25, and where j is in a later block of 128 channels, it takes q_k for v_k.

So v (1 - P) = w - (v - q) Û_off, with Û = diag(U)⁻¹ U, for all rows w at once. Take the factor H = L Lᵀ of `gptq`, in
which channels are in the opposite order, R = Û⁻¹ its unit lower triangle, N = P R = a tril(D R⁻ᵀ, -1) diag(L)⁻². Then
v - q = (w T - q) B, with T = R (R - N)⁻¹ = 1 + N (R - N)⁻¹ and B = (R - N) (1 - N)⁻¹: what `nearest_plane` does with
the weight w T and with B in place of R. No second walk through the channels is needed, on a CPU or on a GPU; D = 0 is
GPTQ.
"""

from dataclasses import replace

import torch

from lightning_compress.algorithms.base import Factor
from lightning_compress.algorithms.target import Correction, Mapped
from lightning_compress.statistics import InputDrift, InputLack, matrix_bytes

STRENGTH = 0.25
"""a, as in the published code."""


def pass_on(factor: Factor, drift: InputDrift, strength: float, ridge: float) -> tuple[Factor, Correction]:
    """The factor that passes on what inputs lack, too, and what is quantized with it.

    Args:
        factor: of the damped Gram.
        drift: of the same tokens.
        strength: a.
        ridge: the damping, for the record.
    """
    lack = drift.lack()
    assert isinstance(lack, InputLack)
    order, solve = factor.order, torch.linalg.solve_triangular
    crossed = lack.cross.index_select(0, order).index_select(1, order)
    passed = solve(factor.lower.t(), crossed, upper=True, left=False, unitriangular=True)
    passed.div_(factor.pivots).mul_(strength).tril_(-1)
    del crossed
    both = factor.lower - passed
    change = solve(both, passed, upper=False, left=False, unitriangular=True)
    lower = solve(passed.neg_(), both, upper=False, left=False, unitriangular=True)
    del both, passed
    back = order.argsort()
    by = change.index_select(0, back).index_select(1, back)
    return replace(factor, lower=lower), Correction(lack, strength, ridge, Mapped(by), None, None)


def pass_on_bytes(num_channels: int) -> tuple[int, int]:
    """At most alive inside `pass_on` for I channels, and of that what it adds to the factor that it is given."""
    gram = 4 * num_channels**2
    lack, block = 2 * gram, matrix_bytes(num_channels) - gram
    return max(lack + 2 * gram + block, lack + 6 * gram), lack + gram
