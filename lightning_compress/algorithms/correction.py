"""Error correction: weights that make good for what was quantized before them, in closed form.

GPTQ lets a linear reproduce its own output on the inputs that it is given. Those have gone through quantized modules
already, and so has the residual that its output is added to; neither error is ever repaired. With the statistics of a
run of the original model beside the quantized one (`statistics.Drift`), the weight V of least error against what the
original model has there solves a ridge regression: mean |e - (V - W) x|² + ridge |V - W|², with e = W (x_ref - x) +
r_ref - r. So V = W + strength * M (C + ridge mean(diag C) I)⁻¹, M = mean of e xᵀ, C the Gram; V is quantized in W's
place.

The full correction fits the calibration set, not the language. Ridge and strength are chosen by the error on batches
that were held out: with X = M (C + ..)⁻¹ from the other batches it is, less a constant, s² tr(X C' Xᵀ) - 2 s tr(X M'ᵀ),
so the best strength s in [0, 1] is known in closed form, and the ridges are compared by what is left. Zero is among the
strengths: on those batches a correction never does harm. The choice made, X is made of all batches, row by row.

Published relatives: GPTAQ (arXiv 2504.02692) and Qronos (arXiv 2505.11695) correct for the inputs, W (x_ref - x), at
full strength with the ridge of GPTQ's damping; `correct="inputs", strength=1, ridge=damping` has the same objective
(they interleave the correction with the rounding of each column, which in exact arithmetic is the rounding of V).
Neither knows the residual, and neither holds back.

Scales: with the codes K of a row fixed, the scales of its groups that minimize (v - sK) C (v - sK)ᵀ solve a system of
one equation per group; GPTQ finds new codes for them, in turns.
"""

import torch
from torch import Tensor

from lightning_compress.algorithms.base import Correction, row_products
from lightning_compress.algorithms.factor import cholesky
from lightning_compress.algorithms.scales import Grid, Scales, stored
from lightning_compress.errors import SolveError
from lightning_compress.statistics import Drift

RIDGES = (0.03, 0.1, 0.3)
"""Candidates, as fractions of the Gram's mean diagonal."""
JUDGED = 512
"""At most so many outputs, evenly spaced, are judged by: a choice for the group needs no more."""
WITHOUT_CHOICE = (0.5, 0.1)
"""Strength and ridge where there is nothing to choose by: one batch."""
_TOWARDS_OLD = 1e-3  # how much refitted scales are drawn to those before, as a fraction of the mean diagonal


def correct(gram: Tensor, drift: Drift, strength: float | None = None, ridge: float | None = None) -> Correction:
    """The correction of a weight [O, I].

    Args:
        gram: C of all tokens, float32 [I, I].
        drift: of the same tokens, for the same outputs.
        strength, ridge: None: choose.

    Raises:
        SolveError: the Gram cannot be factorized with the ridge.
    """
    missing = drift.missing()
    strength, ridge, left = _chosen(gram, missing, drift, strength, ridge)
    lower = None if strength == 0 else _factor(gram, ridge)
    return Correction(missing, drift.squares(), strength, ridge, lower, left)


def _chosen(
    gram: Tensor, missing: Tensor, drift: Drift, strength: float | None, ridge: float | None
) -> tuple[float, float, float | None]:
    """Strength, ridge, and what they leave of the error on batches that were held out."""
    if strength is not None and ridge is not None:
        return strength, ridge, None
    rows = torch.linspace(0, len(missing) - 1, min(len(missing), JUDGED), device=missing.device).round().long()
    held, count = drift.held_out(rows), drift.num_tokens
    if held is None or held.num_tokens == count:
        default_strength, default_ridge = WITHOUT_CHOICE
        return default_strength if strength is None else strength, default_ridge if ridge is None else ridge, None
    rest = count - held.num_tokens
    fit_gram = gram.mul(count / rest).sub_(held.gram, alpha=held.num_tokens / rest)
    fit_missing = missing[rows].mul_(count / rest).sub_(held.missing, alpha=held.num_tokens / rest)
    before = float(held.squares.sum())
    found = []
    for each in RIDGES if ridge is None else (ridge,):
        solution = torch.cholesky_solve(fit_missing.t(), _factor(fit_gram, each)).t()
        along = float(torch.linalg.vecdot(solution, held.missing).sum(dtype=torch.float64))
        across = float(torch.linalg.vecdot(solution @ held.gram, solution).sum(dtype=torch.float64))
        best = min(max(along / across, 0.0), 1.0) if across > 0 else 0.0
        used = best if strength is None else strength
        gained = used * (2 * along - used * across)
        found.append((1 - gained / before if before > 0 else 1.0, used, each))
    left, strength, ridge = min(found, key=lambda choice: choice[0])
    return strength, ridge, left


def _factor(gram: Tensor, ridge: float) -> Tensor:
    """The Cholesky factor of C + ridge mean(diag C) I."""
    lower = cholesky(gram.clone(), ridge * float(gram.diagonal().mean(dtype=torch.float64)))
    if lower is None:
        raise SolveError(
            f"The Gram of {len(gram)} input channels cannot be factorized for a correction with ridge {ridge:g}: give "
            "more samples or a larger ridge, or leave the correction out (correct=none)."
        )
    return lower


def correction_bytes(num_rows: int, num_channels: int) -> tuple[int, int]:
    """At most alive inside `correct` of a weight [O, I], and of that what it returns.

    M is summed in float64. While ridges are compared there are, of the outputs that are judged, M of batches held out
    and of the others, a solution with its product and other terms, and the Grams of batches held out, of the others,
    and as it is factorized.
    """
    weight, gram = 4 * num_rows * num_channels, 4 * num_channels**2
    judged = 4 * min(num_rows, JUDGED) * num_channels
    return max(3 * weight, weight + 7 * judged + 3 * gram) + 24 * num_rows, weight + gram + 8 * num_rows


def refit_bytes(num_rows: int, num_channels: int, num_groups: int) -> int:
    """At most alive inside `refitted` for R rows of I channels."""
    return 4 * num_rows * (5 * num_channels + 3 * num_groups**2)


def refitted(target: Tensor, gram: Tensor, codes: Tensor, scales: Scales, grid: Grid) -> Scales:
    """The scales that fit the codes best, min over s of (v - s K) C (v - s K)ᵀ for every row v.

    Args:
        target: [R, I].
        gram: C, float32 [I, I].
        codes: int8 [R, I].
        scales: that the codes were found with; the result is drawn to them a little.
        grid: the scheme; not per tensor.
    """
    num_rows, num_channels = codes.shape
    size = grid.group_size
    num_groups = num_channels // size
    values = codes.float().view(num_rows, num_groups, size)
    if scales.zero_point is not None:
        values = values - scales.zero_point[..., None].float()
    flat = values.reshape(num_rows, num_channels)
    normal = torch.empty(num_rows, num_groups, num_groups, device=codes.device)
    for group in range(num_groups):
        rows = gram[group * size : (group + 1) * size]
        normal[:, group] = ((values[:, group] @ rows) * flat).view(num_rows, num_groups, size).sum(-1)
    right = ((target.float() @ gram) * flat).view(num_rows, num_groups, size).sum(-1)
    before = scales.scale.float()
    pull = _TOWARDS_OLD * normal.diagonal(dim1=1, dim2=2).mean(-1, keepdim=True)
    normal.diagonal(dim1=1, dim2=2).add_(pull + torch.finfo(torch.float32).tiny)
    found = torch.linalg.solve(normal, right + pull * before)
    is_good = found.isfinite() & (found != 0)
    if not grid.signed_scales:
        is_good &= found > 0
    return Scales(stored(torch.where(is_good, found, before), grid), scales.zero_point)


def row_errors(
    weight: Tensor, quantized: Tensor, rows: slice, correction: Correction, gram: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of rows W and Q against what the original model has there, t = W x + e: mean |t - Q x|² and mean t², [R] each.

    Args:
        weight, quantized: float [R, I].
        rows: which they are.
        correction: of all rows.
        gram: C, float32 [I, I].
    """
    missing, squares = correction.missing[rows], correction.squares[rows]
    weight = weight.float()
    change = quantized - weight
    error = squares - 2 * (change * missing).sum(1, dtype=torch.float64) + row_products(change, gram)
    energy = squares + 2 * (weight * missing).sum(1, dtype=torch.float64) + row_products(weight, gram)
    return error.clamp(min=0), energy.clamp(min=0)
