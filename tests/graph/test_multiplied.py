"""Weights that code multiplies with, without calling the Linears that own them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_compress.graph.execute import execute
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.stages import computed_nodes
from lightning_compress.graph.trace import Traced, trace

WIDTH = 8


class Reading(nn.Module):
    """As attention of Swin (its own bias), BEiT (one put together) and Swin v2 (its own, changed) have it."""

    def __init__(self, bias: bool, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.other = nn.Parameter(torch.randn(WIDTH))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        bias = {"own": self.linear.bias, "other": self.other * 2, "none": None}[self.kind]
        return functional.linear(self.first(x), self.linear.weight, bias).relu()


def recorded(model: nn.Module, x: Tensor, multiplied: tuple[str, ...] = ("linear",)) -> Traced:
    names = ["first", "linear"]
    return trace(model, model, x, leaf_names=names, boundary_names=[], multiplied=multiplied)


def called(traced: Traced) -> set[str]:
    return {node.target.name for node in traced.graph.nodes if isinstance(node.target, Leaf)}


@pytest.mark.parametrize("kind", ["own", "other", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_they_are_called(bias: bool, kind: str) -> None:
    """Seen to fail: a module's own bias beside another."""
    torch.manual_seed(0)
    model, x = Reading(bias, kind), torch.randn(3, WIDTH)
    with torch.no_grad():
        traced = recorded(model, x)
        assert called(traced) == {"first", "linear"}
        assert not traced.only_read
        values: dict[Any, object] = {node: x for node in traced.graph.nodes if node.op == "placeholder"}
        nodes = computed_nodes(traced.graph)
        execute(nodes, values, model, traced.constants, torch.device("cpu"), {})
        torch.testing.assert_close(values[nodes[-1]], model(x))


class OfItsOwn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_not_where_a_call_is_something_else() -> None:
    model, x = Reading(True, "own"), torch.randn(3, WIDTH)
    with torch.no_grad():
        traced = recorded(model, x, multiplied=())
        assert (called(traced), traced.only_read) == ({"first"}, ("linear",))
        model.linear.register_forward_hook(lambda module, args, output: output * 2)
        assert "linear" not in called(recorded(model, x))
        model.linear = OfItsOwn(WIDTH, WIDTH)
        assert "linear" not in called(recorded(model, x))
