"""The kernels against eager operators: on the CPU through Triton's interpreter, on a GPU as they will run.

That of blocks fails if it drops or negates the corrections, runs from first to last, or reads a wrong group (all were
tried).
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from reference import scheme, weight_and_gram
from torch import Tensor

from lightning_compress.algorithms import kernels
from lightning_compress.algorithms.base import Factor
from lightning_compress.algorithms.factor import factorize
from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.grids import Grid, make_grid
from lightning_compress.algorithms.nearest_plane import nearest_plane, quantize_block
from lightning_compress.algorithms.scales import Scales, choose_scales, minmax_scales, moments
from lightning_compress.statistics import InputGram


def block_case(
    args: QuantizationArgs, seed: int, num_channels: int = 72, num_rows: int = 64
) -> tuple[Tensor, Factor, Scales, Grid]:
    weight, gram = weight_and_gram(num_rows, 96, seed=seed)
    grid = make_grid(args, weight.shape, torch.bfloat16).over(weight)
    factor = factorize(gram.matrix(), 0.01)
    return weight.t()[factor.order][-num_channels:].contiguous(), factor, minmax_scales(weight, grid), grid


def compare_blocks(of: bool | str, device: str, by_columns: bool = False, num_factors: int = 1) -> None:
    """Both versions on one block of two tiles that has corrections from elsewhere, channels that no power of two
    divides; of one factor or of two, stored by rows, or, as cuSOLVER's are, by columns. `of`: a preset, or whether
    integers are symmetric."""
    cases = [block_case(arguments(of), seed) for seed in (0, 1)]
    grid, num_channels = cases[0][-1], len(cases[0][0])
    factors = [case[1] for case in cases][:num_factors]
    weight = torch.stack([case[0] for case in cases], 1).to(device)  # [n, 2, 64]
    target = weight + 0.002 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(device)
    lowers = torch.stack([factor.lower[-num_channels:, -num_channels:] for factor in factors]).to(device)
    lowers = lowers.mT.contiguous().mT if by_columns else lowers
    pivots = torch.stack([factor.pivots[-num_channels:] for factor in factors]).to(device)
    added = torch.tensor([factor.added for factor in factors], dtype=torch.float64, device=device)
    groups = (factors[0].order // grid.group_size)[-num_channels:].to(device)

    def beside(matrices: list[Tensor | None]) -> Tensor | None:
        there = [matrix.float().t() for matrix in matrices if matrix is not None]
        return torch.stack(there, 1).to(device) if there else None

    scale, zero_point = beside([case[2].scale for case in cases]), beside([case[2].zero_point for case in cases])
    assert scale is not None
    t, rounded, delta = target.clone(), torch.empty_like(weight), torch.zeros_like(weight)
    quantize_block(t, weight, lowers, scale, zero_point, groups, grid, rounded, delta, [64, 64])
    each = t - weight + delta
    error = (pivots.t()[..., None] * each.square()).double().sum(0) - added[:, None] * delta.double().square().sum(0)
    kept = torch.int8 if grid.floats is None else torch.float16
    codes, fused_delta = torch.empty_like(weight, dtype=kept), torch.zeros_like(weight)
    fused_error = torch.ones(2, 64, dtype=torch.float64, device=device)
    stored = (scale, zero_point, groups, grid)
    kernels.quantize_block(target, weight, lowers, pivots, added, *stored, codes, fused_delta, fused_error)
    same = (codes == rounded).all(0)
    assert same.sum() >= same.numel() - 1  # a row may part ways at a tie
    torch.testing.assert_close(fused_delta[:, same], delta[:, same], rtol=0, atol=1e-6)
    torch.testing.assert_close(fused_error[same] - 1, error[same], rtol=1e-4, atol=1e-7)
    assert delta.any()


def arguments(of: bool | str, group_size: int = 32) -> QuantizationArgs:
    """The weights' arguments of a preset, or of integers that are symmetric or not."""
    if isinstance(of, bool):
        return scheme(4, of, group_size=group_size)
    found = preset_name_to_scheme(of, []).weights
    assert found is not None
    return found


def compare_moments(device: str, of: bool | str, group_size: int, dtype: torch.dtype = torch.float32) -> None:
    """Both versions on rows that no program's number divides."""
    weight = weight_and_gram(37, 6 * group_size)[0].to(device, dtype)
    grid = make_grid(arguments(of, group_size), weight.shape, torch.bfloat16).over(weight)
    start = minmax_scales(weight, grid)
    weighting = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(1)).to(device)
    candidates = start.scale.float() * torch.tensor([1.0, -0.8, 0.5], device=device)[:, None, None]
    with mock.patch.object(kernels, "usable", return_value=False):
        expected = moments(weight, weighting, candidates, start.zero_point, grid)
    found = kernels.moments(weight, weighting, candidates, start.zero_point, grid)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def interpreted(call: str) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    code = f"import torch, test_kernels; test_kernels.{call}"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=Path(__file__).parent)


needs_triton = pytest.mark.skipif(not kernels.AVAILABLE, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(
    not (kernels.AVAILABLE and torch.cuda.is_available()), reason="needs a CUDA device and Triton"
)
of_blocks = pytest.mark.parametrize(
    ("of", "by_columns", "num_factors"),
    [
        (True, False, 1),
        (True, True, 1),
        (False, True, 2),
        (True, False, 2),
        ("FP8_DYNAMIC", True, 2),
        ("MXFP4A16", False, 1),
        ("NVFP4A16", False, 1),
    ],
)
of_moments = pytest.mark.parametrize(
    ("of", "group_size"),
    [(True, 32), (False, 32), (True, 200), (False, 24), ("FP8_DYNAMIC", 24), ("MXFP4A16", 32), ("NVFP4A16", 16)],
)


@needs_triton
@of_blocks
def test_interpreted_block_equals_the_eager_one(of: bool | str, by_columns: bool, num_factors: int) -> None:
    """Seen to fail: with a factor that is stored by columns read as if by rows; with the first tile's factor, pivots or
    dampings for all; with a number of channels that is no constant, which NumPy from 2.4 on does not let Triton 3.6
    count to."""
    interpreted(f"compare_blocks({of!r}, 'cpu', {by_columns}, {num_factors})")


@needs_triton
@of_moments
def test_interpreted_moments_equal_the_eager_ones(of: bool | str, group_size: int) -> None:
    """Seen to fail: without the part of a group beyond 128 channels; with channels of the next group; with the zero
    point of the first row."""
    interpreted(f"compare_moments('cpu', {of!r}, {group_size})")


@pytest.mark.gpu
@needs_gpu
@of_blocks
def test_block_equals_the_eager_one(of: bool | str, by_columns: bool, num_factors: int) -> None:
    compare_blocks(of, "cuda", by_columns, num_factors)


@pytest.mark.gpu
@needs_gpu
@of_moments
def test_moments_equal_the_eager_ones(of: bool | str, group_size: int) -> None:
    compare_moments("cuda", of, group_size)
    compare_moments("cuda", of, group_size, torch.bfloat16)


@pytest.mark.gpu
@needs_gpu
def test_rows_do_not_depend_on_what_they_are_solved_with() -> None:
    """Codes and errors of tiles of several weights, together and alone, to the bit."""
    cases = [weight_and_gram(height, 256, seed=seed) for seed, height in enumerate((96, 200, 96))]
    weights = [case[0].to("cuda") for case in cases]
    factors = [factorize(case[1].matrix().to("cuda"), 0.01) for case in cases]
    grid = make_grid(scheme(4), weights[0].shape, torch.bfloat16)
    scales = [choose_scales(weight, None, grid, True) for weight in weights]
    for number, together in enumerate(nearest_plane(weights, factors, scales, grid)):
        alone = nearest_plane([weights[number]], [factors[number]], [scales[number]], grid)[0]
        assert torch.equal(alone[0], together[0])
        assert torch.equal(alone[1], together[1])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("of", [True, False, "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "NVFP4A16"])
def test_a_whole_weight_on_the_device(of: bool | str) -> None:
    """Gram, factor, scales and codes, with the kernel and without, and against the CPU."""
    weight, x = weight_and_gram(96, 256)[0], torch.randn(2048, 256) @ torch.randn(256, 256)
    results = []
    for device, is_fused in (("cuda", True), ("cuda", False), ("cpu", False)):
        gram = InputGram(256, device)
        gram.update(x.to(device))
        with mock.patch.object(kernels, "usable", return_value=is_fused):
            results.append(Gptq().solve(weight.to(device), {InputGram: gram}, arguments(of), torch.bfloat16))
    fused, eager, cpu = (result.codes.float().cpu() for result in results)
    assert (fused == eager).float().mean() > 0.99
    assert (fused == cpu).float().mean() > 0.99


def test_a_tensor_on_the_cpu_takes_the_eager_path() -> None:
    assert not kernels.usable(torch.zeros(1))
