"""Round-to-nearest, and what all algorithms share: tiles, stacking, splitting, checks."""

import pytest
import torch
from reference import relative_error, scheme, values, weight_and_gram

from lightning_compress.algorithms.base import Algorithm, RowTile, join, split
from lightning_compress.algorithms.catalog import ALGORITHMS
from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.rows import here
from lightning_compress.algorithms.rtn import Rtn
from lightning_compress.algorithms.tiling import ON_CPU, ON_GPU, tiling_of
from lightning_compress.distributed.share import assign
from lightning_compress.errors import NonFiniteError, SolveError
from lightning_compress.statistics import InputGram, row_products


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_every_code_is_the_nearest(symmetric: bool, strategy: str) -> None:
    """No neighbouring code is closer; fails with truncation instead of rounding, or a wrong zero-point."""
    weight, _ = weight_and_gram(32, 128)
    (solved,) = split(Rtn().solve(weight, {}, scheme(4, symmetric, strategy), torch.bfloat16), [32])
    distance = (weight - values(solved.codes, solved.scale, solved.zero_point)).abs()
    for step in (-1, 1):
        neighbour = (solved.codes + step).clamp(-8, 7)
        other = (weight - values(neighbour, solved.scale, solved.zero_point)).abs()
        assert (distance <= other + 1e-7).all()
    assert solved.error == pytest.approx(
        relative_error(weight, values(solved.codes, solved.scale, solved.zero_point), torch.eye(128))
    )
    assert solved.damping == 0.0


def test_scale_search_lowers_the_error_it_minimizes() -> None:
    """Unweighted without a Gram; with one, weighted by its diagonal, which is another optimum."""
    weight, gram = weight_and_gram(32, 128, outliers=True)
    plain = Rtn().solve(weight, {}, scheme(3), torch.bfloat16)
    searched = Rtn(scale_search=True).solve(weight, {}, scheme(3), torch.bfloat16)
    assert searched.error < 0.97 * plain.error
    diagonal = torch.diag(gram.diagonal())
    weighted = Rtn(scale_search=True).solve(weight, {InputGram: gram}, scheme(3), torch.bfloat16)
    errors = [relative_error(weight, values(s.codes, s.scale, None), diagonal) for s in (weighted, searched, plain)]
    assert errors[0] < 0.97 * errors[1]
    assert errors[0] < 0.97 * errors[2]


def test_with_a_gram_the_error_is_that_of_the_output() -> None:
    weight, gram = weight_and_gram(32, 600)
    solved = Rtn().solve(weight, {InputGram: gram}, scheme(group_size=8), torch.bfloat16)
    expected = relative_error(weight, values(solved.codes, solved.scale, None), gram.matrix())
    assert solved.error == pytest.approx(expected, rel=1e-4)


def test_row_products_are_exact_for_every_row() -> None:
    weight, gram = weight_and_gram(7, 600)
    expected = torch.sum(weight.double() @ gram.matrix().double() * weight.double(), dim=1)
    torch.testing.assert_close(row_products(weight, gram.matrix()), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(row_products(weight, None), weight.double().square().sum(1))


@pytest.mark.parametrize("num_rows", [1, 63, 64, 2047, 2048, 2049, 4096, 4608, 28672])
def test_row_tiles_cover_every_row_once_without_small_remainders(num_rows: int) -> None:
    tiles = ON_CPU.row_tiles(num_rows)
    assert [row for tile in tiles for row in range(tile.start, tile.stop)] == list(range(num_rows))
    heights = [tile.stop - tile.start for tile in tiles]
    assert max(heights) <= 512
    assert min(heights) >= min(num_rows, 256)
    assert all(tile.start % 32 == 0 for tile in tiles)


@pytest.mark.parametrize("num_rows", [1, 2048, 2049, 4096, 6144, 28672])
def test_tiles_of_a_gpu_are_higher(num_rows: int) -> None:
    """A launch takes as long for a few rows as for thousands."""
    tiles = ON_GPU.row_tiles(num_rows)
    assert [row for tile in tiles for row in range(tile.start, tile.stop)] == list(range(num_rows))
    heights = [tile.stop - tile.start for tile in tiles]
    assert max(heights) <= 2048
    assert min(heights) >= min(num_rows, 1024)
    assert ON_GPU.stack_rows(14336) == 8192
    assert (tiling_of(torch.device("cpu")), tiling_of(torch.device("cuda", 1))) == (ON_CPU, ON_GPU)


@pytest.mark.parametrize("num_rows", [1536, 2304, 4096, 5120, 11008, 28672])
@pytest.mark.parametrize("size", [2, 4])
def test_a_few_ranks_get_even_loads(num_rows: int, size: int) -> None:
    heights = [tile.stop - tile.start for tile in ON_CPU.row_tiles(num_rows)]
    loads = [sum(heights[number] for number in share) for share in assign(heights, size)]
    assert max(loads) <= 1.05 * num_rows / size


@pytest.mark.parametrize("algorithm", [Rtn(), Rtn(scale_search=True), Gptq()])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
@pytest.mark.parametrize("num_rows", [2300, 2285])
def test_tiles_can_be_solved_apart(algorithm: Algorithm, strategy: str, num_rows: int) -> None:
    """What ranks do: `prepare` once, each its tiles; together they are what `solve` returns, to the last bit."""
    weight, gram = weight_and_gram(num_rows, 64)
    statistics, args, splits = {InputGram: gram}, scheme(strategy=strategy), [2000, num_rows - 2000]
    whole = algorithm.solve(weight, statistics, args, torch.bfloat16, splits)
    prepared = algorithm.prepare(weight, statistics, args, torch.bfloat16, splits, here)
    tiles = ON_CPU.row_tiles(num_rows)
    assert len(tiles) == 8
    of = [RowTile(weight, rows, prepared) for rows in tiles]
    parts = [part for some in (of[:1], of[1:6], of[6:]) for part in algorithm.solve_tiles(some)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))
    assert torch.equal(whole.scale, torch.cat([part.scale for part in parts]))
    assert torch.equal(whole.row_error, torch.cat([part.row_error for part in parts]))


@pytest.mark.parametrize("algorithm", [Rtn(scale_search=True), Gptq(), Gptq(refit=1), Gptq(activation_order=False)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("num_rows", [[96] * 5, [96, 100, 37, 512, 250], [1100, 60, 1100]])
def test_weights_can_be_solved_together(algorithm: Algorithm, symmetric: bool, num_rows: list[int]) -> None:
    """What is done with experts: tiles of weights with Grams, and orders of channels, of their own go through the
    channels together, and each ends as it does alone, to the last bit. Seen to fail: with the first factor, or its
    groups, for all; with a factor for each weight where weights have several tiles of rows."""
    args = scheme(symmetric=symmetric)
    cases = [weight_and_gram(rows, 320, seed=seed) for seed, rows in enumerate(num_rows)]
    prepared = [algorithm.prepare(w, {InputGram: gram}, args, torch.bfloat16, [len(w)], here) for w, gram in cases]
    tiled = [
        [RowTile(w, rows, each) for rows in ON_CPU.row_tiles(len(w))]
        for (w, _), each in zip(cases, prepared, strict=True)
    ]
    found = iter(algorithm.solve_tiles([part for parts in tiled for part in parts]))
    for (weight, gram), parts in zip(cases, tiled, strict=True):
        together = join([next(found) for _ in parts])
        alone = algorithm.solve(weight, {InputGram: gram}, args, torch.bfloat16)
        for name in ("codes", "scale", "row_error", "row_energy"):
            assert torch.equal(getattr(together, name), getattr(alone, name)), name


def test_split_gives_each_member_its_rows_and_its_error() -> None:
    weight, gram = weight_and_gram(48, 64)
    weight[32:] *= 10
    solved = Gptq().solve(weight, {InputGram: gram}, scheme(symmetric=False), torch.bfloat16, [32, 16])
    first, second = split(solved, [32, 16])
    assert torch.equal(torch.cat([first.codes, second.codes]), solved.codes)
    for member, rows in ((first, weight[:32]), (second, weight[32:])):
        assert member.zero_point is not None
        assert member.zero_point.dtype == torch.int8
        quantized = values(member.codes, member.scale, member.zero_point)
        assert member.error == pytest.approx(relative_error(rows, quantized, gram.matrix()), rel=2e-3)
    assert first.damping == second.damping == 0.01


def test_an_all_zero_weight_has_no_error() -> None:
    solved = Rtn().solve(torch.zeros(4, 64), {}, scheme(), torch.bfloat16)
    assert solved.error == 0.0
    assert not solved.codes.any()


@pytest.mark.parametrize("algorithm", [Rtn(), Gptq()])
def test_bad_weights_are_errors(algorithm: Algorithm) -> None:
    weight, gram = weight_and_gram(8, 64)
    for bad in (float("nan"), float("inf"), float("-inf")):
        broken = weight.clone()
        broken[3, 5] = bad
        with pytest.raises(NonFiniteError, match=r"\(8, 64\) holds NaN or Inf"):
            algorithm.solve(broken, {InputGram: gram}, scheme(), torch.bfloat16)
    with pytest.raises(SolveError, match="no floating-point matrix"):
        algorithm.solve(weight[0], {InputGram: gram}, scheme(), torch.bfloat16)


def test_large_finite_weights_are_no_error() -> None:
    """Their sum overflows float32, which must not be taken for an Inf among them."""
    Rtn().solve(torch.full((4, 64), 3e38), {}, scheme(), torch.float32)


def test_the_catalog_names_every_algorithm() -> None:
    assert dict(ALGORITHMS) == {"gptq": Gptq, "rtn": Rtn}
    for kind in ALGORITHMS.values():
        assert kind() == kind()
