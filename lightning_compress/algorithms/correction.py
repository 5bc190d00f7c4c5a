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

Published relatives aim at the original model's outputs for W (x_ref - x) too, without the residual, and correct while
they round. Qronos (arXiv 2505.11695), with H = C + λI and G = mean of x x_refᵀ + λI: q_1 = round((G_1 w - H_12 w_2) /
H_11), then w_2 = (H_22)⁻¹ (G_2 w - H_21 q_1), where 2 stands for all later channels, and GPTQ of those. GPTQ of V =
H⁻¹ G w, which is strength 1 with the damping for a ridge (`correct="qronos"`), is the same but for q_1 = round(V_1): it
counts on the later channels' making up for the first one, as for every other. GPTAQ (arXiv 2504.02692) passes what
column i lacks on to the columns behind it only (`gptaq`); V is the minimum over all columns at once.
"""

import torch
from torch import Tensor

from lightning_compress.algorithms.factor import cholesky
from lightning_compress.algorithms.target import Correction, Judge, Ridge
from lightning_compress.errors import SolveError
from lightning_compress.statistics import Drift, Lack, matrix_bytes, row_products

RIDGES = (0.03, 0.1, 0.3)
"""Candidates, as fractions of the Gram's mean diagonal."""
JUDGED = 128
"""At most so many outputs, evenly spaced, are judged by: a choice for the group needs no more."""
WITHOUT_CHOICE = (0.5, 0.1)
"""Strength and ridge where there is nothing to choose by: one batch."""


def correct(
    weight: Tensor,
    gram: Tensor,
    drift: Drift,
    strength: float | None = None,
    ridge: float | None = None,
    keeps_judge: bool = False,
) -> Correction:
    """The correction of a weight [O, I].

    Args:
        weight: W.
        gram: C of all tokens, float32 [I, I].
        drift: of the same tokens, for the same outputs.
        strength, ridge: None: choose.
        keeps_judge: more is to be chosen by the batches that are held out.

    Raises:
        SolveError: the Gram cannot be factorized with the ridge.
    """
    strength, ridge, left = _chosen(weight, gram, drift, strength, ridge)
    judge = None
    if keeps_judge and 0 < drift.inputs.num_held_out < drift.num_tokens:
        judge = Judge(drift.inputs.matrix_held_out(), drift.lack(held_out=True))
    change = None if strength == 0 else Ridge(strength, _factor(gram, ridge))
    return Correction(drift.lack(), strength, ridge, change, left, judge)


def _chosen(
    weight: Tensor, gram: Tensor, drift: Drift, strength: float | None, ridge: float | None
) -> tuple[float, float, float | None]:
    """Strength, ridge, and what they leave of the error on batches that were held out."""
    if strength is not None and ridge is not None:
        return strength, ridge, None
    count, num_held = drift.num_tokens, drift.inputs.num_held_out
    if num_held in (0, count):
        default_strength, default_ridge = WITHOUT_CHOICE
        return default_strength if strength is None else strength, default_ridge if ridge is None else ridge, None
    rows = (
        torch.linspace(0, len(weight) - 1, min(len(weight), JUDGED), dtype=torch.float32, device=weight.device)
        .round()
        .long()
    )
    judged, rest = weight[rows], count - num_held
    missing, before = _said(drift.lack(held_out=True), judged, rows)
    held_gram = drift.inputs.matrix_held_out()
    fit_gram = gram.mul(count / rest).sub_(held_gram, alpha=num_held / rest)
    fit_missing = _said(drift.lack(), judged, rows)[0].mul_(count / rest).sub_(missing, alpha=num_held / rest)
    found = []
    for each in RIDGES if ridge is None else (ridge,):
        solution = torch.cholesky_solve(fit_missing.t(), _factor(fit_gram, each)).t()
        along = float(torch.linalg.vecdot(solution, missing).sum(dtype=torch.float64))
        across = float(row_products(solution, held_gram).sum())
        best = min(max(along / across, 0.0), 1.0) if across > 0 else 0.0
        used = best if strength is None else strength
        gained = used * (2 * along - used * across)
        found.append((1 - gained / before if before > 0 else 1.0, used, each))
    left, strength, ridge = min(found, key=lambda choice: choice[0])
    return strength, ridge, left


def _said(lack: Lack, weight: Tensor, rows: Tensor) -> tuple[Tensor, float]:
    """M of these rows, which are `weight`, and the sum of their mean e²."""
    return lack.missing(weight, rows), float(lack.squares(weight, rows).sum())


def _factor(gram: Tensor, ridge: float) -> Tensor:
    """The Cholesky factor of C + ridge mean(diag C) I."""
    lower = cholesky(gram.clone(), ridge * float(gram.diagonal().mean(dtype=torch.float64)))
    if lower is None:
        raise SolveError(
            f"The Gram of {len(gram)} input channels cannot be factorized for a correction with ridge {ridge:g}: give "
            "more samples or a larger ridge, or leave the correction out (correct=none)."
        )
    return lower


def correction_bytes(num_rows: int, num_channels: int, is_by_inputs: bool, keeps_judge: bool) -> tuple[int, int]:
    """At most alive inside `correct` of a weight [O, I], and of that what it returns.

    What is lacked takes two matrices [I, I] where it follows from the inputs, and nothing where it was summed. While
    ridges are compared there are, of the outputs that are judged, weights, M of batches held out and of the others, a
    solution with its product and other terms; and the Grams of batches held out, of the others, and a factor.
    """
    gram, judged = 4 * num_channels**2, 4 * min(num_rows, JUDGED) * num_channels
    lack, block = 2 * gram if is_by_inputs else 0, matrix_bytes(num_channels) - gram
    making, comparing = lack + 2 * gram + block + 5 * judged, 3 * gram + 8 * judged
    judge = lack + gram if keeps_judge else 0
    return max(making, comparing, judge + lack + gram + block) + 24 * num_rows, judge + lack + gram + 8 * num_rows
