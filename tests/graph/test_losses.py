"""What comes behind the last module that is quantized decides nothing, and what libraries around modules do with
containers and errors is no matter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import CHANGES_NOTHING, check_inputs, compress_in_memory
from torch import Tensor, nn
from torch.nn import functional

from lightning_compress.errors import CalibrationDataError, UntraceableModelError
from lightning_compress.graph.execute import execute
from lightning_compress.graph.stages import computed_nodes
from lightning_compress.graph.targets import sequential_modules
from lightning_compress.graph.trace import trace

WIDTH = 16


def in_batch(z: Tensor) -> Tensor:
    return functional.cross_entropy(z @ z.t(), torch.arange(len(z)))


def by_numpy(z: Tensor) -> Tensor:
    return torch.as_tensor(z.detach().numpy().sum())


def by_sign(z: Tensor) -> Tensor:
    return z.sum() if z.mean().item() > 0 else z.abs().sum()


def by_pairs(z: Tensor) -> Tensor:
    return torch.stack([(z[i] - z[j]).square().sum() for i in range(z.shape[0]) for j in range(i)]).sum()


class Losing(nn.Module):
    """Its last Linear runs twice. A function in a list cannot be replaced by a single call."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.out = nn.Linear(WIDTH, WIDTH)
        self.losses = [loss]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.losses[0](self.out(self.out(x).relu()))


def batches() -> list[Tensor]:
    """The last has fewer rows, and the second another sign."""
    torch.manual_seed(1)
    return [torch.randn(8, WIDTH) + 1, torch.randn(8, WIDTH) - 1, torch.randn(5, WIDTH)]


@pytest.mark.parametrize("loss", [in_batch, by_numpy, by_sign, by_pairs])
def test_losses(loss: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: batches of another path, values in a branch, numpy's arrays. Seen to fail: the second call of the
    last Linear left out."""
    report = check_inputs(Losing(loss), batches(), monkeypatch, schedule="basic")
    assert not report.fallbacks


class Branching(Losing):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.mean().item() > 0 else -x)


def test_what_comes_before_does_decide() -> None:
    """And it is the first error that is told."""
    with pytest.raises((CalibrationDataError, UntraceableModelError), match="one branch for batch 0 and another"):
        compress_in_memory(Branching(by_numpy), batches(), CHANGES_NOTHING)


class Normalizing(nn.Module):
    """As sentence-transformers' `Normalize`: what it is given is a dict, in which it replaces a value."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features.update(embedding=functional.normalize(features["embedding"], dim=-1) * self.scale)
        features["seen"].append(len(features))
        return features


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), Normalizing(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        features: dict[str, Any] = {"embedding": self.first(x), "seen": []}
        return self.last(self.norm(features)["embedding"])  # type: ignore[no-any-return]


def test_dicts_that_modules_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: a tensor that was said to be kept on a module."""
    check_inputs(Passing(), batches(), monkeypatch)


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, values: list[Tensor], names: dict[str, Tensor]) -> Tensor:
        values.append(names.pop("x"))
        return sum(values, torch.zeros(())) * self.scale


class Giving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taking, self.linear = Taking(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.taking([x + 1], {"x": x * 2}))  # type: ignore[no-any-return]


def test_containers_of_a_graph_may_be_written_to() -> None:
    """By calls whose containers nobody reads afterwards. Seen to fail: fx's own refuse it."""
    model, x = Giving(), torch.randn(3, WIDTH)
    with torch.no_grad():
        traced = trace(model, model, x, leaf_names=["linear"], boundary_names=[])
        for _ in range(2):
            values: dict[Any, object] = {node: x for node in traced.graph.nodes if node.op == "placeholder"}
            nodes = computed_nodes(traced.graph)
            execute(nodes, values, model, traced.constants, torch.device("cpu"), {})
            torch.testing.assert_close(values[nodes[-1]], model(x))


class Explaining(nn.Module):
    """As einx: an error inside is told as one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(12, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        try:
            x = ids[..., None] + self.positions
            return self.linear(x)  # type: ignore[no-any-return]
        except Exception as error:
            raise ValueError("the following code was generated") from error


def test_a_size_that_is_a_constant_is_found_behind_other_errors() -> None:
    """Seen to fail: the library's error was quoted."""
    given = [torch.zeros(3, 12, dtype=torch.long)]
    report = compress_in_memory(Explaining(), given, CHANGES_NOTHING)
    assert [record.module for record in report.modules] == ["linear"]


def test_lists_in_lists_are_no_layers() -> None:
    """Nobody calls them. Seen to fail: all layers were one subgraph."""
    model = nn.Module()
    layers = [nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]) for _ in range(2)]
    model.layers = nn.ModuleList(layers)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert sequential_modules(model, None, names) == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")
