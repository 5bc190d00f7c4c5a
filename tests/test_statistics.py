"""Statistics are sums: the same answer for any split of the tokens, any order, any number of ranks."""

import math
from contextlib import nullcontext
from functools import reduce

import pytest
import torch
from torch import Tensor

from lightning_compress.graph.cuda import AsOnCuda
from lightning_compress.graph.fakes import new_fake_mode
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.statistics import InputGram, MinMax, Statistic


def correlated(num_tokens: int, num_channels: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(num_channels, num_channels, generator=generator)
    return torch.randn(num_tokens, num_channels, generator=generator) @ mixing + 0.5


def every_statistic() -> list[type[Statistic]]:
    return [InputGram, MinMax]


def snapshot(statistic: Statistic) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, (tensor, _) in statistic.reductions().items()}


@pytest.mark.parametrize("num_channels", [1, 40, 256, 300, 600])
def test_gram_is_the_mean_of_outer_products(num_channels: int) -> None:
    """Against float64; fails if a block is left out, transposed or mirrored to the wrong place (each was tried)."""
    x = correlated(500, num_channels)
    gram = InputGram(num_channels, "cpu")
    for batch in x.split(130):
        gram.update(batch)
    expected = (x.double().t() @ x.double() / 500).float()
    torch.testing.assert_close(gram.matrix(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(gram.diagonal(), gram.matrix().diagonal(), rtol=0, atol=0)
    assert torch.equal(gram.matrix(), gram.matrix().t())
    assert gram.num_tokens == 500


def test_wider_blocks_of_a_gpu_make_the_same_gram() -> None:
    """Seen to fail: with the diagonal of the first block only; with spans of the other kind."""
    x = torch.randn(300, 1500, generator=torch.Generator().manual_seed(0))
    with AsOnCuda():
        gram = InputGram(1500, "cpu")
    of_cpu = InputGram(1500, "cpu")
    (entries, _), (of_cpu_entries, _) = gram.reductions()["gram"], of_cpu.reductions()["gram"]
    assert len(entries) == 1024**2 + 476 * 1500 > len(of_cpu_entries)
    for each in (gram, of_cpu):
        each.update(x)
    torch.testing.assert_close(gram.matrix(), of_cpu.matrix())
    assert torch.equal(gram.diagonal(), gram.matrix().diagonal())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gram_of_low_precision_inputs_is_that_of_their_values(dtype: torch.dtype) -> None:
    x = correlated(64, 48).to(dtype)
    low, full = InputGram(48, "cpu"), InputGram(48, "cpu")
    low.update(x)
    full.update(x.float())
    assert torch.equal(low.matrix(), full.matrix())


@pytest.mark.parametrize("kind", every_statistic())
def test_sharding_the_batches_over_ranks_changes_nothing(kind: type[Statistic]) -> None:
    """Reducing three ranks (one of which saw nothing) equals one rank; fails with a wrong kind of reduction."""
    batches = correlated(240, 300).split(40)
    alone = kind(300, "cpu")
    for batch in batches:
        alone.update(batch)
    ranks = [kind(300, "cpu") for _ in range(3)]
    for index, batch in enumerate(batches):
        ranks[index % 2].update(batch)
    ranks[2].merge(ranks[1])
    ranks[2].merge(ranks[0])
    for name, expected in snapshot(alone).items():
        torch.testing.assert_close(snapshot(ranks[2])[name], expected, rtol=1e-12, atol=0)
    assert ranks[2].num_tokens == 240
    if isinstance(alone, InputGram) and isinstance(ranks[2], InputGram):
        assert torch.equal(alone.matrix(), ranks[2].matrix())


def summed(batches: list[Tensor], shares: list[list[int]]) -> Tensor:
    """What ranks with these shares of the batches end with, each share in its order; batch 0 is the first of all."""
    grams = [InputGram(batches[0].shape[1], "cpu") for _ in shares]
    for gram, share in zip(grams, shares, strict=True):
        if share:
            gram.update(batches[share[0]])
    largest = grams[next(rank for rank, share in enumerate(shares) if 0 in share)].largest()
    for gram in grams:
        gram.settle(largest)
    for gram, share in zip(grams, shares, strict=True):
        for number in share[1:]:
            gram.update(batches[number])
    for gram in grams[1:]:
        grams[0].merge(gram)
    return torch.cat([tensor.flatten().double() for tensor, _ in grams[0].reductions().values()])


SHARES = [
    [list(range(24))],
    [[0, *range(23, 0, -1)]],
    [list(range(12, 24)), list(range(12))],
    [[5, 1, 9], [0, 2, 3, 4, 6, 7, 8, *range(10, 24)], []],
    [[number] for number in range(23, -1, -1)],
]


def test_neither_order_nor_ranks_reach_the_last_bit() -> None:
    """Plain float64 sums of these batches differ between orders (asserted, so the test can fail)."""
    batches = [correlated(16, 300, seed) * 9.0 ** (seed % 3 - 1) for seed in range(24)]
    products = [(batch.t() @ batch).double() for batch in batches]
    assert not torch.equal(sum(products), sum(products[::-1]))  # type: ignore[arg-type]
    expected = summed(batches, SHARES[0])
    for shares in SHARES[1:]:
        assert torch.equal(summed(batches, shares), expected), shares
    gram = InputGram(300, "cpu")
    for batch in batches:
        gram.update(batch)
    torch.testing.assert_close(gram.matrix() * (24 * 16), sum(products).float(), rtol=1e-6, atol=1e-3)  # type: ignore[union-attr]


def test_products_halfway_between_two_multiples_are_rounded_alike_in_any_order() -> None:
    """Float64 rounds such a sum to the even multiple, so to what is there already; fails if products are not lifted."""
    quantum = 2.0**-33
    batches = [torch.tensor([[1.0, (number % 4) * quantum / 2]]) for number in range(24)]
    expected = summed(batches, SHARES[0])
    for shares in SHARES[1:]:
        assert torch.equal(summed(batches, shares), expected), shares


def test_a_gram_whose_first_batch_is_zero_takes_what_comes() -> None:
    gram = InputGram(2, "cpu")
    gram.settle(gram.largest())
    for _ in range(3):
        gram.update(torch.tensor([[1.0, 3.0]]))
    assert gram.matrix().tolist() == [[1.0, 3.0], [3.0, 9.0]]


def test_reading_in_between_changes_nothing() -> None:
    batches = correlated(120, 300).split(30)
    read, unread = InputGram(300, "cpu"), InputGram(300, "cpu")
    for batch in batches:
        for gram in (read, unread):
            gram.update(batch)
        read.matrix()
    assert torch.equal(read.matrix(), unread.matrix())


@pytest.mark.parametrize("kind", every_statistic())
def test_no_tokens_are_fine(kind: type[Statistic]) -> None:
    x = correlated(10, 20)
    statistic = kind(20, "cpu")
    statistic.update(x[:0])
    assert statistic.num_tokens == 0
    statistic.update(x)
    only = kind(20, "cpu")
    only.update(x)
    statistic.update(x[:0])
    assert all(torch.equal(a, b) for a, b in zip(snapshot(statistic).values(), snapshot(only).values(), strict=True))


def test_gram_without_tokens_is_zero() -> None:
    assert not InputGram(7, "cpu").matrix().any()


def test_min_max() -> None:
    x = torch.tensor([[1.0, -5.0], [3.0, 2.0]])
    extremes = MinMax(2, "cpu")
    for row in x.split(1):
        extremes.update(row)
    assert extremes.minimum.tolist() == [-5.0]
    assert extremes.maximum.tolist() == [3.0]


def test_a_nan_is_seen_behind_minima_and_maxima_that_lose_it() -> None:
    """As those of gloo do. Seen to fail: with a NaN in the accumulators."""
    ranks = [MinMax(2, "cpu") for _ in range(3)]
    for statistic, value in zip(ranks, (1.0, math.nan, 2.0), strict=True):
        statistic.update(torch.tensor([[0.0, value]]))
    lost = {"min": torch.fmin, "max": torch.fmax, "sum": torch.add}
    for name, (_, reduction) in ranks[0].reductions().items():
        of_all = [rank.reductions()[name][0] for rank in ranks]
        assert reduction == "sum" or not reduce(lost[reduction], of_all).isfinite().any()


def test_a_wrong_width_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"8 channels.*\(3, 9\)"):
        InputGram(8, "cpu").update(torch.ones(3, 9))


def test_inputs_that_require_grad_are_not_followed() -> None:
    gram = InputGram(4, "cpu")
    gram.update(torch.ones(3, 4, requires_grad=True))
    assert not gram.matrix().requires_grad


@pytest.mark.parametrize(
    ("dtype", "on_cuda", "copies"), [(torch.bfloat16, True, 0), (torch.bfloat16, False, 1), (torch.float64, True, 1)]
)
def test_tensor_cores_take_halves_as_they_are(dtype: torch.dtype, on_cuda: bool, copies: int) -> None:
    """Elsewhere a copy in float32 is made. On fake tensors, of which the last update is followed."""
    with new_fake_mode(symbolic=False), AsOnCuda() if on_cuda else nullcontext():
        gram, x = InputGram(512, "cpu"), torch.empty(4096, 512, dtype=dtype)
        with LiveMemory() as memory:
            gram.update(x)
        assert memory.peak_bytes // (4 * x.numel()) == copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_callers_autocast_changes_no_sum(dtype: torch.dtype) -> None:
    """Seen to fail: products in half precision, of float16 infinite ones."""
    x = 300 * correlated(64, 8)
    plain, inside = InputGram(8, "cpu"), InputGram(8, "cpu")
    plain.update(x)
    with torch.autocast("cpu", dtype):
        inside.update(x)
    assert torch.equal(plain.matrix(), inside.matrix())


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_callers_precision_of_products_changes_no_sum(precision: str) -> None:
    """Seen to fail with "medium" where the CPU multiplies in bfloat16 (AMX): entries were off by 7e-4."""
    x = correlated(512, 512)
    plain, inside = InputGram(512, "cpu"), InputGram(512, "cpu")
    plain.update(x)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        inside.update(x)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(plain.matrix(), inside.matrix())
