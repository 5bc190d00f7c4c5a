"""Weights that come when a module is called. Onloading is made real on a CPU by saying that every tensor is away."""

from pathlib import Path

import pytest
import torch
from helpers import CPU, tiny_llama, token_batches
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_compress.memory.calls import onloaded_when_called
from lightning_compress.memory.source import is_on_meta, parameters_on_meta, weight_source
from lightning_compress.memory.store import WeightStore
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.transfer import Lane, Sent


def layers_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "LlamaDecoderLayer"]


class Plain(nn.Module):
    """A parameter of the root, of a container, and of leaves; a layer that is passed by; one that calls itself."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return self(x * self.weight, again=False) * self.weight if again else x + self.weight

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), self.Twice(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        inner: Tensor = self.layers[2][0](x)  # type: ignore[index]
        return inner + self.bias


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_outputs_are_those_of_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """From disk and from host memory; afterwards everything is at home."""
    torch.manual_seed(0)
    whole = Plain().eval()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with parameters_on_meta():
        empty = Plain().eval()
    x = torch.randn(3, 4)
    layers = ["layers.0", "layers.1", "layers.2"]
    with torch.no_grad():
        expected = whole(x)
        store = WeightStore(empty, Lane(CPU), weight_source(empty, tmp_path))
        with onloaded_when_called(empty, layers, store, prefetch_depth=depth):
            assert all(torch.equal(empty(x), expected) for _ in range(2))
            assert not empty.bias.is_meta
        assert is_on_meta(empty)
        assert empty.bias.is_meta
        monkeypatch.setattr(Lane, "is_away", lambda *_: True)
        monkeypatch.setattr(Lane, "send", lambda _, tensor: Sent(tensor.clone()))
        home = {name: tensor.data_ptr() for name, tensor in whole.state_dict().items()}
        store = WeightStore(whole, Lane(CPU))
        with onloaded_when_called(whole, layers, store, stays=["layers.0"], prefetch_depth=depth):
            assert all(torch.equal(whole(x), expected) for _ in range(2))
            away = {name for name, tensor in whole.state_dict().items() if tensor.data_ptr() != home[name]}
            assert away == {"bias", "layers.0.weight", "layers.0.bias"}
        assert {name: tensor.data_ptr() for name, tensor in whole.state_dict().items()} == home
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in whole.modules())


def test_one_layer_is_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail with contexts that are entered and never left."""
    monkeypatch.setattr(Lane, "is_away", lambda *_: True)
    monkeypatch.setattr(Lane, "send", lambda _, tensor: Sent(tensor.clone()))
    peaks = []
    for depth in (2, 8):
        model = tiny_llama(depth)
        at_home = list(model.state_dict().values())
        store = WeightStore(model, Lane(CPU))
        with torch.no_grad(), LiveMemory() as memory:
            memory.ignore(*at_home)
            with onloaded_when_called(model, layers_of(model), store, prefetch_depth=0):
                for batch in token_batches(2):
                    model(**batch, use_cache=False)
        peaks.append(memory.peak_bytes)
    assert peaks[1] <= 1.02 * peaks[0]


def test_an_error_in_the_model_brings_everything_home(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Plain()
    monkeypatch.setattr(Lane, "is_away", lambda *_: True)
    monkeypatch.setattr(Lane, "send", lambda _, tensor: Sent(tensor.clone()))
    home = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    calls = onloaded_when_called(model, ["layers.0"], WeightStore(model, Lane(CPU)))
    with pytest.raises(RuntimeError, match="cannot be multiplied"), torch.no_grad(), calls:
        model(torch.randn(3, 5))
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == home


class Inner(nn.Module):
    """Has a method beside `forward` that uses its parameters, and those of a child that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.child = nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.child(x) @ self.child.weight, self.weight)


class Reading(nn.Module):
    """Reads weights of modules without calling them, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4)
        self.inner = Inner()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.side = nn.Linear(4, 4)
        self.kept = [self.side.weight]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.embedding(ids)) @ self.layer.weight
        x = self.inner.encode(self.attention(x, x, x)[0] * self.scales[0] + self.scales[1])
        return nn.functional.linear(x @ self.kept[0], self.embedding.weight)


@pytest.mark.parametrize("stays", [[], ["layer"]])
def test_weights_that_are_read_without_a_call(tmp_path: Path, stays: list[str]) -> None:
    """Seen to fail without `lending`: other numbers at every run, or an error that names nothing."""
    torch.manual_seed(0)
    whole = Reading().eval()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with parameters_on_meta():
        empty = Reading().eval()
    store = WeightStore(empty, Lane(CPU), weight_source(empty, tmp_path))
    ids = torch.arange(6).view(2, 3)
    with torch.no_grad(), onloaded_when_called(empty, ["layer"], store, stays=stays):
        for _ in range(2):
            torch.testing.assert_close(empty(ids), whole(ids))  # products round by where their factors lie
        assert torch.equal(empty.inner.weight.sum(), whole.inner.weight.sum())
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in empty.parameters())
    assert not store._lent
    assert store.moved["disk_read"] > 0


def test_what_is_read_is_kept_until_a_module_returns(tmp_path: Path) -> None:
    """Seen to fail with values that are read at every use, and with those that stay to the end."""
    whole = Inner()
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with parameters_on_meta():
        empty = Inner()
    store = WeightStore(empty, Lane(CPU), weight_source(empty, tmp_path))
    with torch.no_grad(), onloaded_when_called(empty, [], store):
        before = store.moved["disk_read"]
        for _ in range(3):
            assert torch.equal(empty.child.weight + 1, whole.child.weight + 1)
        assert store.moved["disk_read"] - before == whole.child.weight.nbytes
        assert store._lent
        empty.child(torch.randn(2, 4))
        assert not store._lent


def test_autocast_keeps_no_casts(tmp_path: Path) -> None:
    """They would stay after their weights have left, and be used for those that come to the same parameters. Seen to
    fail: the second call gave what the first did."""
    model = nn.Linear(4, 4)
    x, bfloat16 = torch.randn(2, 4), {"device_type": "cpu", "dtype": torch.bfloat16}
    with torch.no_grad(), onloaded_when_called(model, [], WeightStore(model, Lane(CPU))), torch.autocast(**bfloat16):  # type: ignore[arg-type]
        before = model(x)
        model.weight.data = model.weight.data + 1
        assert not torch.equal(model(x), before)
    assert torch.is_autocast_cache_enabled()
