"""What goes between ranks comes out as it went in."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_compress.distributed.message import from_bytes, to_bytes


@dataclass(frozen=True)
class Pair:
    first: Tensor
    second: object


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(4, 6, dtype=torch.bfloat16).t(),
        torch.tensor(True),
        torch.empty(0, 7),
        torch.arange(10, dtype=torch.int8)[2:9:3],
    ],
    ids=["matrix", "transposed bfloat16", "scalar", "empty", "strided"],
)
def test_tensors_within_anything(tensor: Tensor) -> None:
    given = [Pair(tensor, ("word", None, {"again": tensor})), 1.5]
    found = from_bytes(to_bytes(given))
    assert isinstance(found, list)
    pair = found[0]
    assert isinstance(pair, Pair)
    assert isinstance(pair.second, tuple)
    for mine in (pair.first, pair.second[2]["again"]):
        assert mine.dtype == tensor.dtype
        assert torch.equal(mine, tensor)
    assert pair.second[:2] == ("word", None)
    assert found[1] == 1.5


def test_a_small_part_of_a_large_tensor_is_small() -> None:
    """As pickled by PyTorch, a view brings all of its storage."""
    assert len(to_bytes(torch.zeros(1000, 1000)[:2])) < 10_000
