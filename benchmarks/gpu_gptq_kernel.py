"""Time of one GPTQ block on a GPU: the fused Triton kernel against the eager operations.

    python benchmarks/gpu_gptq_kernel.py [--channels 128] [--repeats 50] [--preset PRESET]

PRESET names the scheme of the weights, integers or floats. Prints, for several heights of row tiles, the median time in
microseconds of each and their ratio; then the same for whole weights of Llama-3-8B (`nearest_plane`: this kernel plus
the products between blocks). Needs a CUDA device and Triton.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from lightning_compress.algorithms import kernels
from lightning_compress.algorithms.base import runs
from lightning_compress.algorithms.factor import factorize
from lightning_compress.algorithms.grids import make_grid
from lightning_compress.algorithms.nearest_plane import nearest_plane, quantize_block
from lightning_compress.algorithms.scales import minmax_scales
from lightning_compress.algorithms.tiling import ON_GPU

LLAMA_3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def median_us(function: Callable[[], object], repeats: int) -> float:
    """Median wall time of `function` in microseconds, after three calls to warm up."""
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def block(args: QuantizationArgs, num_channels: int, num_rows: int, repeats: int) -> None:
    """One block of `num_channels` channels by `num_rows` rows."""
    weight = 0.02 * torch.randn(num_channels, 1, num_rows, device="cuda")
    lower = torch.randn(num_channels, num_channels, device="cuda").mul_(0.05).tril_(-1)
    lower.diagonal().fill_(1)
    by_rows = weight[:, 0].t()
    grid = make_grid(args, by_rows.shape, torch.bfloat16).over(by_rows)
    scale = minmax_scales(by_rows, grid).scale.float().t()[:, None].contiguous()
    groups = torch.arange(num_channels, device="cuda") // grid.group_size
    target, rounded, delta = weight.clone(), torch.empty_like(weight), torch.zeros_like(weight)
    kept = torch.int8 if grid.floats is None else torch.float16
    codes = torch.empty(weight.shape, dtype=kept, device="cuda")
    pivots, added = torch.ones(1, num_channels, device="cuda"), torch.zeros(1, dtype=torch.float64, device="cuda")
    error = torch.zeros(1, num_rows, dtype=torch.float64, device="cuda")

    def without_kernel() -> None:
        of_block = (scale, None, groups, grid, rounded, delta.zero_())
        quantize_block(target.copy_(weight), weight, lower[None], *of_block, [num_rows])

    def with_kernel() -> None:
        of_block = (pivots, added, scale, None, groups, grid, codes, delta.zero_(), error)
        kernels.quantize_block(target.copy_(weight), weight, lower[None], *of_block)

    eager, fused = median_us(without_kernel, max(repeats // 5, 3)), median_us(with_kernel, repeats)
    different = float((codes != rounded).float().mean())
    print(f"{num_channels:>8} {num_rows:>8} {eager:>12.0f} {fused:>12.0f} {eager / fused:>8.1f}x {different:>10.1e}")


def whole(args: QuantizationArgs, name: str, num_rows: int, num_channels: int) -> None:
    """All row tiles of one weight, factor and scales given."""
    weight = 0.02 * torch.randn(num_rows, num_channels, device="cuda")
    x = torch.randn(2 * num_channels, num_channels, device="cuda")
    factor = factorize(x.t() @ x / len(x), 0.01)
    grid = make_grid(args, weight.shape, torch.bfloat16).over(weight)
    scales = minmax_scales(weight, grid)

    def run() -> list[torch.Tensor]:
        tiles, codes = ON_GPU.row_tiles(num_rows), []
        for stack in runs(tiles, [tile.stop - tile.start for tile in tiles], ON_GPU.stack_rows(num_channels)):
            scales_of = [scales.rows(rows) for rows in stack]
            found = nearest_plane([weight[rows] for rows in stack], [factor] * len(stack), scales_of, grid)
            codes += [each for each, _ in found]
        return codes

    fused, ours = median_us(run, 5), torch.cat(run())
    with mock.patch.object(kernels, "usable", return_value=False):
        eager, theirs = median_us(run, 3), torch.cat(run())
    different = float((ours.float() != theirs.float()).float().mean())
    ratio = eager / fused
    print(f"{name:>8} {num_rows:>8} {eager / 1e3:>10.1f}ms {fused / 1e3:>10.1f}ms {ratio:>8.1f}x {different:>9.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--preset", default="W4A16", help="of compressed-tensors")
    options = parser.parse_args()
    if not (torch.cuda.is_available() and kernels.AVAILABLE):
        sys.exit("This benchmark needs a CUDA device and Triton.")
    args = preset_name_to_scheme(options.preset, []).weights
    assert args is not None
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.preset}, medians")
    print(f"{'channels':>8} {'rows':>8} {'eager us':>12} {'fused us':>12} {'ratio':>9} {'different':>10}")
    for num_rows in (512, 1024, 2048):
        block(args, options.channels, num_rows, options.repeats)
    for name, (num_rows, num_channels) in LLAMA_3_8B.items():
        whole(args, name, num_rows, num_channels)


if __name__ == "__main__":
    main()
