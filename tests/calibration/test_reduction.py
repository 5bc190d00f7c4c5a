"""How statistics of ranks become those of all."""

import pytest
import torch
from torch import Tensor, fx

from lightning_compress.calibration.observe import Statistics, reduce_statistics, settle_statistics
from lightning_compress.distributed.collective import SingleProcess
from lightning_compress.graph.shared_inputs import Source
from lightning_compress.statistics import InputGram, MinMax, Reduction, Statistic

WIDTHS = (8, 16, 300)  # the last one's Gram is large


def gathered(scale: float) -> Statistics:
    graph = fx.Graph()
    found: Statistics = {}
    for width in WIDTHS:
        kinds: dict[type[Statistic], Statistic] = {InputGram: InputGram(width, "cpu"), MinMax: MinMax(width, "cpu")}
        for seed in range(2):
            x = scale * torch.randn(20, width, generator=torch.Generator().manual_seed(width + seed))
            for statistic in kinds.values():
                statistic.update(x)
        found[Source(graph.placeholder(f"x{width}"))] = kinds
    return found


class OfTwo(SingleProcess):
    """The first of two ranks, whose other one has gathered the same of inputs ten times as large."""

    size = 2

    def __init__(self) -> None:
        self.calls: list[tuple[torch.dtype, Reduction, int]] = []
        self.said: list[str] = []
        others = gathered(10).values()
        self._theirs = [of for kinds in others for each in kinds.values() for of in each.reductions().values()]

    def reduce(self, tensor: Tensor, reduction: Reduction, what: str) -> None:
        self.calls.append((tensor.dtype, reduction, tensor.numel()))
        self.said.append(what)
        alike = [t.flatten() for t, kind in self._theirs if kind == reduction and t.dtype == tensor.dtype]
        if tensor.dtype == torch.float64:  # of Grams the large one is alone
            alike = [t for t in alike if (t.numel() > 10_000) == (tensor.numel() > 10_000)]
        theirs = torch.cat(alike)
        assert theirs.shape == tensor.shape
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[reduction]
        tensor.copy_(combine(tensor, theirs))


def test_what_is_small_is_combined_together() -> None:
    """Counts, ranges and small Grams of many experts would each wait for every rank. Seen to fail: one by one."""
    mine, ranks = gathered(1), OfTwo()
    sources = list(mine)
    reduce_statistics(sources, dict.fromkeys(sources, (8, 8)), mine, ranks)
    large = 256 * 256 + 44 * 300
    assert sorted(ranks.calls, key=str) == sorted(
        [
            (torch.float64, "sum", large),
            (torch.float64, "sum", 8 * 8 + 16 * 16),
            (torch.int64, "sum", 6),
            (torch.float32, "min", 3),
            (torch.float32, "max", 3),
        ],
        key=str,
    )
    assert {"the statistics of x300", "the statistics of x8 to x300"} == set(ranks.said)
    alone, others = gathered(1), gathered(10)
    for source, expected, theirs in zip(sources, alone.values(), others.values(), strict=True):
        for kind, statistic in expected.items():
            statistic.merge(theirs[kind])
            for name, (tensor, _) in mine[source][kind].reductions().items():
                assert torch.equal(tensor, statistic.reductions()[name][0]), (source, name)


@pytest.mark.parametrize("largest", [None, 7.5])
def test_ranks_agree_once_on_all_grids_of_a_step(largest: float | None) -> None:
    """Seen to fail: with one agreement for every source."""

    class Second(SingleProcess):
        rank, size = 1, 2
        asked = 0

        def broadcast(self, value: object, what: str, source: int = 0) -> object:  # type: ignore[override]
            self.asked += 1
            assert (source, what) == (0, "the first batch at x8 to x300")
            assert isinstance(value, list)
            return value if largest is None else [[largest] * len(entries) for entries in value]

    ranks, graph = Second(), fx.Graph()
    statistics: Statistics = {
        Source(graph.placeholder(f"x{width}")): {InputGram: InputGram(width, "cpu"), MinMax: MinMax(width, "cpu")}
        for width in WIDTHS
    }
    settle_statistics(list(statistics), dict.fromkeys(statistics, (8, 8)), statistics, ranks, 0)
    assert ranks.asked == 1
    for kinds in statistics.values():
        gram = kinds[InputGram]
        assert isinstance(gram, InputGram)
        quantum = gram._grams[0].sum.quantum
        assert quantum == (0 if largest is None else 2.0 ** (3 - 34)), "of a first batch that brought nothing, none"
