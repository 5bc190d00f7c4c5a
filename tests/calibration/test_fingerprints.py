"""What tells one run from another."""

import pytest
import torch
from torch import nn

from lightning_compress.calibration.resume import fingerprints


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
