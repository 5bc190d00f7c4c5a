"""Weights at home and on the device. Copies are made real on a CPU by saying that every tensor is away from it."""

import pytest
import torch
from helpers import CPU
from torch import Tensor, nn

from lightning_compress.memory.store import WeightStore


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every tensor that is onloaded, in order; onloading copies."""
    made: list[Tensor] = []

    def copy(_: WeightStore, tensor: Tensor) -> Tensor:
        made.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(WeightStore, "_is_away", lambda *_: True)
    monkeypatch.setattr(WeightStore, "_copy", copy)
    return made


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.table = nn.Parameter(torch.randn(3))


def test_only_what_is_named_is_onloaded_and_comes_home(copies: list[Tensor]) -> None:
    model = Tied()
    home = {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}
    with WeightStore(model, CPU).onload(["norm"], ["table"]):
        away = {name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.data_ptr() != home[name]}
        assert away == {
            "norm.weight",
            "norm.bias",
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
            "table",
        }
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()} == home


def test_tied_weights_are_onloaded_once_and_stay_tied(copies: list[Tensor]) -> None:
    """Broken once by collecting tensors in a list instead of by identity."""
    model = Tied()
    with WeightStore(model, CPU).onload(["embed", "head"]):
        assert len(copies) == 1
        assert model.head.weight is model.embed.weight
    assert model.head.weight is model.embed.weight


def test_written_values_reach_both_copies(copies: list[Tensor]) -> None:
    """Broken once by writing to the device copy alone."""
    model = Tied()
    store = WeightStore(model, CPU)
    with store.onload(["head"]):
        store.write(model.head.weight, torch.full((5, 4), 3.0))
        assert torch.equal(model.head.weight, torch.full((5, 4), 3.0))
    assert torch.equal(model.embed.weight, torch.full((5, 4), 3.0))


def test_nothing_is_left_after_an_error(copies: list[Tensor]) -> None:
    model = Tied()
    home = model.table.data_ptr()
    with pytest.raises(RuntimeError, match="stop"), WeightStore(model, CPU).onload([], ["table"]):
        raise RuntimeError("stop")
    assert model.table.data_ptr() == home


def test_a_failing_copy_brings_the_others_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """An out-of-memory error on the way leaves no parameter on the device."""
    model = Tied()
    home = {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}
    done: list[int] = []

    def copy(_: WeightStore, tensor: Tensor) -> Tensor:
        if len(done) == 3:
            raise torch.OutOfMemoryError("full")
        done.append(1)
        return tensor.clone()

    monkeypatch.setattr(WeightStore, "_is_away", lambda *_: True)
    monkeypatch.setattr(WeightStore, "_copy", copy)
    with pytest.raises(torch.OutOfMemoryError), WeightStore(model, CPU).onload(["norm"]):
        pass
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()} == home


def test_nothing_is_copied_where_home_is_the_device() -> None:
    model = Tied()
    pointer = model.table.data_ptr()
    with WeightStore(model, CPU).onload(["embed"], ["table"]):
        assert model.table.data_ptr() == pointer


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    model = Tied()
    store = WeightStore(model, torch.device("cuda", torch.cuda.current_device()))
    before = torch.cuda.memory_allocated()
    with store.onload(["embed", "head"]):
        assert model.head.weight.is_cuda
        assert torch.cuda.memory_allocated() > before
        store.write(model.head.weight, torch.ones(5, 4, device="cuda"))
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(model.embed.weight, torch.ones(5, 4))
