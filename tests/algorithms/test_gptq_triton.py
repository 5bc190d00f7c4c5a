"""The fused kernel against the eager block: on the CPU through Triton's interpreter, on a GPU as it will run.

Fails if the kernel drops or negates the corrections, runs from first to last, or reads a wrong group (all were tried).
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from reference import scheme, weight_and_gram
from torch import Tensor

from lightning_compress.algorithms import gptq_triton
from lightning_compress.algorithms.base import Factor
from lightning_compress.algorithms.factor import factorize
from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.nearest_plane import nearest_plane, quantize_block
from lightning_compress.algorithms.scales import Grid, Scales, make_grid, minmax_scales
from lightning_compress.statistics import InputGram


def block_case(
    symmetric: bool, num_channels: int = 72, num_rows: int = 37
) -> tuple[torch.Tensor, Factor, Scales, Grid]:
    weight, gram = weight_and_gram(num_rows, 96)
    grid = make_grid(scheme(4, symmetric), weight.shape, torch.bfloat16)
    factor = factorize(gram.matrix(), 0.01)
    return weight.t()[factor.order][-num_channels:].contiguous(), factor, minmax_scales(weight, grid), grid


def compare(symmetric: bool, device: str, by_columns: bool = False) -> None:
    """Both versions on one block that has corrections from elsewhere, sizes that no power of two divides; the factor
    is stored by rows, or, as cuSOLVER's are, by columns."""
    weight, factor, scales, grid = block_case(symmetric)
    weight = weight.to(device)
    target = weight + 0.002 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(device)
    lower = factor.lower.to(device)
    lower = (lower.mT.contiguous().mT if by_columns else lower)[-len(weight) :, -len(weight) :]
    groups = (factor.order // grid.group_size)[-len(weight) :].to(device)
    scale = scales.scale.float().t().contiguous().to(device)
    zero_point = None if scales.zero_point is None else scales.zero_point.float().t().contiguous().to(device)
    results = []
    for is_fused in (False, True):
        t, codes, delta = target.clone(), torch.empty_like(weight), torch.zeros_like(weight)
        if is_fused:
            gptq_triton.quantize_block(t, weight, lower, scale, zero_point, groups, grid, codes, delta)
        else:
            each = (None if matrix is None else matrix[:, None] for matrix in (scale, zero_point))
            of_tile = (t[:, None], weight[:, None], lower[None], *each, groups, grid, codes[:, None], delta[:, None])
            quantize_block(*of_tile, [t.shape[1]])
        results.append((codes, delta, t))
    (codes, delta, t), (fused_codes, fused_delta, fused_t) = results
    same = (codes == fused_codes).all(0)
    assert same.sum() >= len(same) - 1  # a row may part ways at a tie
    torch.testing.assert_close(fused_delta[:, same], delta[:, same], rtol=0, atol=1e-6)
    torch.testing.assert_close(fused_t[:, same], t[:, same], rtol=0, atol=1e-6)
    assert delta.any()


@pytest.mark.skipif(not gptq_triton.AVAILABLE, reason="Triton is not installed")
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_interpreted_kernel_equals_the_eager_block(symmetric: bool, by_columns: bool) -> None:
    """In a process of its own: Triton decides at import whether it interprets. Seen to fail: with a factor that is
    stored by columns read as if by rows; with a number of channels that is no constant, which NumPy from 2.4 on does
    not let Triton 3.6 count to."""
    code = f"import test_gptq_triton; test_gptq_triton.compare({symmetric}, 'cpu', {by_columns})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=Path(__file__).parent)


@pytest.mark.gpu
@pytest.mark.skipif(not (gptq_triton.AVAILABLE and torch.cuda.is_available()), reason="needs a CUDA device and Triton")
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_kernel_equals_the_eager_block(symmetric: bool, by_columns: bool) -> None:
    compare(symmetric, "cuda", by_columns)


@pytest.mark.gpu
@pytest.mark.skipif(not (gptq_triton.AVAILABLE and torch.cuda.is_available()), reason="needs a CUDA device and Triton")
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_whole_weight_on_the_device(symmetric: bool) -> None:
    """Gram, factor, scales and codes, with the kernel and without, and against the CPU."""
    weight, x = weight_and_gram(96, 256)[0], torch.randn(2048, 256) @ torch.randn(256, 256)
    results = []
    for device, is_fused in (("cuda", True), ("cuda", False), ("cpu", False)):
        gram = InputGram(256, device)
        gram.update(x.to(device))
        with mock.patch.object(gptq_triton, "usable", return_value=is_fused):
            args = scheme(4, symmetric)
            results.append(Gptq().solve(weight.to(device), {InputGram: gram}, args, torch.bfloat16))
    fused, eager, cpu = results
    assert (fused.codes == eager.codes).float().mean() > 0.99
    assert (fused.codes.cpu() == cpu.codes).float().mean() > 0.99


def test_a_tensor_on_the_cpu_takes_the_eager_path() -> None:
    assert not gptq_triton.usable(torch.zeros(1))


def test_weights_of_several_factors_do_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows one. Seen to fail: the first one's served all."""

    def of_one_factor(t: Tensor, w: Tensor, lower: Tensor, *rest: Any) -> None:
        quantize_block(t, w, lower[None], *rest, [t.shape[2]] * t.shape[1])

    cases = [weight_and_gram(64, 96, seed=seed) for seed in (0, 1)]
    weights, factors = [case[0] for case in cases], [factorize(case[1].matrix(), 0.01) for case in cases]
    grid = make_grid(scheme(4), weights[0].shape, torch.bfloat16)
    scales = [minmax_scales(weight, grid) for weight in weights]
    expected = nearest_plane(weights, factors, scales, grid)
    monkeypatch.setattr(gptq_triton, "usable", lambda _: True)
    monkeypatch.setattr(gptq_triton, "quantize_block", of_one_factor)
    for number, ((codes, _), (found, _)) in enumerate(
        zip(expected, nearest_plane(weights, factors, scales, grid), strict=True)
    ):
        assert torch.equal(codes, found)
        assert torch.equal(codes, nearest_plane([weights[number]], [factors[number]], [scales[number]], grid)[0][0])
