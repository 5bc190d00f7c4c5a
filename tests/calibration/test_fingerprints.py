"""What tells one run from another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from lightning_compress.calibration.resume import data_fingerprint, fingerprints


@dataclass
class Batch:
    """As users have them."""

    x: Tensor


def of_model(*tensors: torch.Tensor) -> str:
    root = nn.Module()
    for number, tensor in enumerate(tensors):
        root.register_buffer(f"tensor{number}", tensor)
    return fingerprints({}, None, root, "", ())["model"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_every_value_counts(dtype: torch.dtype) -> None:
    """Seen to fail: one of so many in a tensor was looked at, and ranks with other rows of an embedding went on."""
    values = torch.randint(0, 2, (1203,), generator=torch.Generator().manual_seed(0)).to(dtype)
    before = of_model(values)
    assert before == of_model(values.clone())
    for at in (0, 1, 601, 1199, 1202):
        other = values.clone()
        other.view(torch.uint8)[at * dtype.itemsize] ^= 1
        assert of_model(other) != before, at


def test_layouts_do_not_count() -> None:
    values = torch.randn(51, 60)
    same = [values, values.t().contiguous().t(), torch.cat([torch.zeros(1), values.flatten()])[1:].view(51, 60)]
    assert len({of_model(each) for each in same}) == 1


@pytest.mark.parametrize("made", [Batch, lambda x: {"a": BatchEncoding({"x": x})}], ids=["dataclass", "BatchEncoding"])
def test_every_value_of_a_batch_counts(made: Callable[[Tensor], Any]) -> None:
    """Seen to fail: what is printed of a long tensor was looked at, and a run went on with other data."""
    x = torch.zeros(2, 1000)
    other = x.clone()
    other[0, 500] = 1
    assert data_fingerprint([made(x)]) == data_fingerprint([made(x.clone())]) != data_fingerprint([made(other)])


def test_names_in_a_batch_count() -> None:
    ids, mask = torch.zeros(2, 3), torch.ones(2, 3)
    assert data_fingerprint([{"a": ids, "b": mask}]) != data_fingerprint([{"b": ids, "a": mask}])
