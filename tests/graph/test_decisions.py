"""Branches that values decide: taken as all batches take them, and refused where they do not."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import tiny_llama, token_batches
from torch import Tensor, fx, nn

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.recording import trace_on
from lightning_compress.calibration.target import find_target
from lightning_compress.errors import UntraceableModelError
from lightning_compress.graph.execute import execute
from lightning_compress.graph.trace import Traced, trace, violated_guards

CPU = torch.device("cpu")
Condition = Callable[[Tensor], Any]


class Branching(nn.Module):
    """Two layers with a branch before them."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.condition = condition
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) if self.condition(x) else self.second(x).relu()
        return self.second(y)


CONDITIONS: dict[str, Condition] = {
    "bool": lambda x: (x > 0).any(),
    "not": lambda x: not (x < -9).any(),
    "int": lambda x: (x > 0).sum().item() > 3,
    "size": lambda x: (x > 0).sum().item() <= x.shape[0] * x.shape[1],
    "float": lambda x: x.abs().mean().item() > 0.1,
    "two": lambda x: (x > 0).sum() > (x > 5).sum(),
}


def graph_of(model: nn.Module, batch: Tensor, others: list[Tensor]) -> Traced:
    return trace(model, model, batch, leaf_names=["first", "second"], boundary_names=[], others=others)


def output(traced: Traced, model: nn.Module, x: Tensor) -> object:
    nodes = list(traced.graph.nodes)
    values: dict[fx.Node, object] = {node: x for node in nodes if node.op == "placeholder"}
    execute(nodes[:-1], values, model, traced.constants, CPU, {})
    return values[nodes[-1].args[0][0]]


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("is_true", [True, False])
def test_the_branch_that_all_batches_take(condition: Condition, is_true: bool) -> None:
    """Of either kind of batches; a batch of the other kind is noticed. Seen to fail: with the outcome always true."""
    torch.manual_seed(0)
    model = Branching(condition).eval()
    sizes = (4, 5, 3)
    yes = [torch.rand(rows, 8) + 0.5 for rows in sizes]
    no = [each.expand(rows, 8).clone() for rows in sizes for each in (torch.tensor(-10.0), torch.tensor(0.0))]
    no = [x for x in no if not bool(condition(x))]
    if not is_true and not no:
        pytest.skip("it holds of all batches")
    mine, others = (yes, no) if is_true else (no, yes)
    assert all(bool(condition(x)) is is_true for x in mine)
    traced = graph_of(model, mine[0], mine)
    assert "it takes the branches that all batches take" in traced.fallbacks[0].reason
    assert not any("scalar" in str(node.target) or "item" in str(node.target) for node in traced.graph.nodes)
    for x in mine:
        assert not violated_guards(traced, x)
        assert torch.equal(output(traced, model, x), model(x))  # type: ignore[arg-type]
    for x in others:
        (problem,) = violated_guards(traced, x)
        assert problem.startswith("by its values ")


def test_batches_that_differ() -> None:
    model = Branching(CONDITIONS["bool"]).eval()
    batches = [torch.rand(4, 8), torch.rand(4, 8), -torch.rand(4, 8)]
    with pytest.raises(UntraceableModelError, match="it takes one branch for batch 0 and another for batch 2"):
        trace_on(find_target(model), ["first", "second"], [], CalibrationSet(tuple(batches), has_padding=False))


def test_a_number_that_all_batches_have() -> None:
    """As `int(lengths.max())`, of which no graph knows how it goes on. Seen to fail: refused."""
    model = Branching(lambda x: len(range(int((x > 0).sum(1).max()))) == 8).eval()
    batches = [torch.rand(rows, 8) + 0.5 for rows in (4, 5, 3)]
    traced = graph_of(model, batches[0], batches)
    assert torch.equal(output(traced, model, batches[1]), model(batches[1]))  # type: ignore[arg-type]
    fewer = batches[2] - torch.cat([torch.zeros(3, 7), torch.full((3, 1), 9.0)], 1)
    (problem,) = violated_guards(traced, fewer)
    assert problem.endswith(" is not 8")
    with pytest.raises(UntraceableModelError, match="it takes 8 for batch 0 and 7 for batch 1"):
        graph_of(model, batches[0], [batches[0], fewer])


@pytest.mark.parametrize("by", ["weights", "outputs"])
def test_what_takes_more_than_the_batch(by: str) -> None:
    """Conditions on weights and on layers' outputs are not decided."""
    model = Branching(lambda x: True).eval()
    model.condition = lambda x: (model.second.weight if by == "weights" else model.second(x)).sum() > 0
    with pytest.raises(UntraceableModelError, match="data-dependent"):
        graph_of(model, torch.rand(4, 8), [])


def masked(x: Tensor) -> bool:
    """A mask that is written to through a view."""
    mask = torch.zeros_like(x)
    mask[:, 0] = x[:, 0]
    return bool((mask > 0).any())


def test_writes_through_views() -> None:
    """Seen to fail: with the writes that nobody reads left out."""
    model, batches = Branching(masked).eval(), [torch.rand(rows, 8) + 0.5 for rows in (4, 3)]
    traced = graph_of(model, batches[0], batches)
    assert torch.equal(output(traced, model, batches[1]), model(batches[1]))  # type: ignore[arg-type]
    assert violated_guards(traced, -batches[0])


def test_batches_stay_as_they_are() -> None:
    """A model may write to its inputs before it asks. Seen to fail: without copies."""
    model = Branching(lambda x: (x.mul_(2) > 0).any()).eval()
    batch = torch.rand(4, 8)
    kept = batch.clone()
    traced = graph_of(model, batch, [batch])
    violated_guards(traced, batch)
    assert torch.equal(batch, kept)


def test_batches_that_do_not_fit_are_named_as_ever() -> None:
    """By their sizes, not by an error of the decision."""
    model = Branching(CONDITIONS["bool"]).eval()
    traced = graph_of(model, torch.rand(4, 8), [torch.rand(4, 8), torch.rand(2, 4, 8)])
    (problem,) = violated_guards(traced, torch.rand(2, 4, 8))
    assert "in 3 dimensions, not torch.float32 in 2" in problem


@pytest.mark.parametrize("condition", [lambda x: x.mean().item() > 0, lambda x: torch.rand(()).item() > 0.5])
def test_what_nobody_can_tell(condition: Condition) -> None:
    """NaN is neither more nor less; random numbers are others on every rank."""
    batch = torch.full((4, 8), float("nan"))
    with pytest.raises(UntraceableModelError, match="data-dependent"):
        graph_of(Branching(condition).eval(), batch, [batch])


def test_a_traced_model_is_freed() -> None:
    """torch's caches keep the symbols of a trace. Seen to fail: with what decides by values left on them, and with what
    knows whether an operation runs."""

    def traced_models() -> list[weakref.ref[nn.Module]]:
        x, (batch, *_) = torch.rand(4, 8) + 0.5, token_batches(1)
        branching, llama = Branching(CONDITIONS["float"]).eval(), tiny_llama(1)
        graph_of(branching, x, [x])
        trace(llama, lambda given: llama(**given), batch, leaf_names=["lm_head"], boundary_names=[])
        return [weakref.ref(branching), weakref.ref(llama)]

    kept = traced_models()
    gc.collect()
    assert [each() for each in kept] == [None, None]
