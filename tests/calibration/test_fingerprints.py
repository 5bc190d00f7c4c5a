"""What tells one run from another."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BatchEncoding

from lightning_compress.calibration.resume import data_fingerprint, fingerprints
from lightning_compress.graph.trace import trace


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


class Block(nn.Module):
    """Run as one call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.leaky, self.norm = nn.Linear(4, 4), nn.LeakyReLU(0.1), nn.LayerNorm(4)
        self.scale, self.activation = 1.0, lambda x: x.relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.leaky(self.linear(x)))) * self.scale


def test_options_inside_a_single_call_count() -> None:
    """Whether it is in training or not does not. Seen to fail: a run went on with another slope, as its graph has the
    call alone."""
    torch.manual_seed(0)
    weights = Block().state_dict()

    def model_and_digest() -> tuple[Block, Callable[[], str]]:
        root = nn.Sequential(Block())
        root[0].load_state_dict(weights)
        traced = trace(root, root, torch.randn(2, 4), leaf_names=["0"], boundary_names=[])
        return root[0], lambda: fingerprints({}, None, root, "", (), traced)["model"]

    (_, expected), (block, digest) = model_and_digest(), model_and_digest()
    assert digest() == expected()
    block.eval()
    assert digest() == expected()
    found = [digest()]
    for owner, name, value in (
        (block.leaky, "negative_slope", 0.2),
        (block.norm, "eps", 0.1),
        (block, "scale", 2.0),
        (block, "activation", functional.relu),
        (block, "activation", functional.gelu),
        (block, "activation", partial(functional.gelu, approximate="tanh")),
        (block, "activation", torch.tanh),
        (block, "scale", torch.float64),
    ):
        setattr(owner, name, value)
        found.append(digest())
    assert len(set(found)) == len(found)


class Opaque:
    """Printed with its address."""


def test_what_is_no_tensor_counts_by_its_content() -> None:
    """Seen to fail: the order in a set and an object's address told the same data apart in another process, and of a
    large array the ends were looked at."""
    first, second = {0, 8}, {8, 0}
    assert repr(first) != repr(second), "else this shows nothing"
    assert data_fingerprint([{"a": first, "b": Opaque()}]) == data_fingerprint([{"a": second, "b": Opaque()}])
    assert data_fingerprint([{"a": first}]) != data_fingerprint([{"a": {0, 16}}])
    array = np.zeros(2000)
    other = array.copy()
    other[1000] = 1
    assert data_fingerprint([{"a": array}]) == data_fingerprint([{"a": array.copy()}])
    assert data_fingerprint([{"a": array}]) != data_fingerprint([{"a": other}])
