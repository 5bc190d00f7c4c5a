"""Parameters that another tensor stands for: operations get that one, whoever kept the parameter."""

from copy import deepcopy

import pytest
import torch
from families import Toy, assert_same, toy_batch, traced
from torch import Tensor, nn
from torch.nn import functional

from lightning_compress.graph.awaited import substituted
from lightning_compress.memory.source import parameters_on_meta

VALUES = torch.randn(4, 4)


def test_operations_get_what_stands_for_it() -> None:
    """Of products and convolutions torch makes uninitialised memory, without an error, if it does not."""
    meta, x = nn.Parameter(torch.empty(4, 4, device="meta")), torch.randn(3, 4)
    uses = (
        lambda w: functional.linear(x, w),
        lambda w: x @ w.t(),
        lambda w: functional.conv1d(x[:, :, None], w[:, :, None]),
        lambda w: torch.ops.aten.mm.default(x, w),
        lambda w: torch.cat([x, w]),
        lambda w: torch.einsum("ij,jk->ik", x, w),
        lambda w: functional.embedding(torch.tensor([1, 2]), w),
        lambda w: w.detach().T,
        lambda w: torch.zeros(2, device=w.device),
        deepcopy,
    )
    for context in (torch.no_grad, torch.inference_mode):
        with context(), substituted([meta], lambda _: VALUES):
            assert all(torch.equal(use(meta), use(VALUES)) for use in uses)
            assert meta.is_meta
            assert isinstance(meta, nn.Parameter)
            assert (meta.shape, meta.dtype, meta.nbytes, hash(meta)) == (VALUES.shape, torch.float32, 64, id(meta))
    assert type(meta) is nn.Parameter
    assert not vars(meta)


def test_the_outermost_counts() -> None:
    meta = nn.Parameter(torch.empty(4, 4, device="meta"))
    with substituted([meta], lambda _: VALUES):
        with substituted([meta], lambda _: 2 * VALUES):
            assert torch.equal(meta + 0, VALUES)
        assert torch.equal(meta + 0, VALUES)


class Keeping(Toy):
    """Multiplies with a parameter that it keeps in a list."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))
        self.side = nn.Linear(8, 8)
        self.kept = [self.side.weight]

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        return super().forward(x @ self.kept[0].t(), ids)


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_parameter_that_code_keeps_is_recorded_by_its_name(on_meta: bool) -> None:
    """Else it would be a constant, which nobody brings to the device, and on the meta device no graph would do."""
    model = Keeping()
    with parameters_on_meta():
        empty = Keeping()
    graph = traced(empty if on_meta else model, toy_batch(2, 9), boundary_names=[])
    assert not graph.constants
    assert "side.weight" in {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    assert not graph.fallbacks
    assert_same(model, graph, toy_batch(1, 5))
