"""Compressing from disk a model whose code uses weights of modules that it does not call: the files are those of the
model in memory."""

from pathlib import Path

import pytest
import torch
from helpers import compress, contents, recipe
from torch import Tensor, nn

from lightning_compress.memory.source import parameters_on_meta


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(16, 16) / 4)

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Base(nn.Module):
    """`gate` reads values, so it is recorded as a single call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.side = nn.Linear(16, 16, bias=False)
        self.net = Net()
        self.kept = [self.side.weight]

    def gate(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 1e9 else self.use(x)

    def use(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(self.gate(x))
        return hidden


class OfAChild(Base):
    def use(self, x: Tensor) -> Tensor:
        return x @ self.side.weight


class ByAnotherMethod(Base):
    def use(self, x: Tensor) -> Tensor:
        return self.net.encode(x)


class Kept(Base):
    def use(self, x: Tensor) -> Tensor:
        return x @ self.kept[0]


class KeptInTheGraph(Kept):
    def gate(self, x: Tensor) -> Tensor:
        return self.use(x)


@pytest.mark.parametrize("model_class", [OfAChild, ByAnotherMethod, Kept, KeptInTheGraph])
def test_the_files_are_those_of_the_model_in_memory(tmp_path: Path, model_class: type[Base]) -> None:
    """Seen to fail: with other bytes, or with NaN that the last module was blamed for."""
    torch.manual_seed(0)
    model = model_class()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    batches = [torch.randn(4, 16) for _ in range(3)]
    with parameters_on_meta():
        empty = model_class()
    given = recipe(4, ignore=["side"])
    compress(empty, batches, given, tmp_path / "disk", weights=tmp_path / "model.pt")
    compress(model, batches, given, tmp_path / "memory", verify=False)
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
