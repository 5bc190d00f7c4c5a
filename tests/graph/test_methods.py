"""Methods as single calls: code of the model itself, around its layers, that reads values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import Toy, assert_same, leaf_nodes, toy_batch, traced
from torch import Tensor, nn

from lightning_compress.errors import UntraceableModelError
from lightning_compress.graph.leaf import Leaf, Within
from lightning_compress.graph.methods import running_methods
from lightning_compress.graph.trace import Traced


class Reading(Toy):
    """Its root holds all layers, and a method of it counts what is in `ids`."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.tower = nn.Linear(8, 8)

    def counted(self, ids: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if int((ids == 0).sum()) % 2:
            return x * self.scale, {"more": self.tower(x)}
        return x + self.scale, {"more": self.tower(x)}

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        x, found = self.counted(ids, x)
        return super().forward(x + found["more"], ids)


def method_leaves(graph: Traced) -> list[Leaf]:
    return [node.target for node in leaf_nodes(graph) if isinstance(node.target, Leaf) and node.target.within]


def batches() -> list[dict[str, Tensor]]:
    """An even and an odd number of zeros."""
    odd = toy_batch(3, 7)
    odd["ids"][0, 0] = 1
    return [toy_batch(2, 9), odd, toy_batch(1, 5)]


def test_a_method_that_reads_values_is_a_call() -> None:
    """It decides anew on every batch, knows whose weights it needs, and hides no layers but its own. Seen to fail: with
    the method recorded as it went (one branch for all)."""
    model = Reading()
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "middle", "last"], boundary_names=[])
    (leaf,) = method_leaves(graph)
    assert (leaf.name, leaf.within) == ("counted", Within(("tower",), ("scale",)))
    assert leaf.modules == ("tower",)
    assert [(fallback.module, fallback.hidden) for fallback in graph.fallbacks] == [("counted", ())]
    assert {node.target.name for node in leaf_nodes(graph)} == {"counted", "first", "middle", "last"}  # type: ignore[union-attr]
    assert_same(model, graph, *batches())
    assert "counted" not in model.__dict__


def test_targets_inside_a_method_are_said_to_be_hidden() -> None:
    model = Reading()
    with pytest.warns(match=r"Reading \(counted\) is recorded as a single call"):
        graph = traced(model, toy_batch(2, 9), leaf_names=["first", "tower", "last"], boundary_names=[])
    assert [(fallback.module, fallback.hidden) for fallback in graph.fallbacks] == [("counted", ("tower",))]
    assert_same(model, graph, *batches())


class Nested(Reading):
    """The method that reads is called by one whose result is no tensor: the inner one is the call."""

    def outer(self, ids: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
        moved, _ = self.counted(ids, x)
        return lambda y: y + moved

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        return Toy.forward(self, self.outer(ids, x)(x), ids)


def test_the_innermost_method_that_will_do() -> None:
    model = Nested()
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "middle", "last"], boundary_names=[])
    assert [leaf.name for leaf in method_leaves(graph)] == ["counted"]
    assert_same(model, graph, *batches())


class Unusable(Reading):
    """The inner method returns what no graph holds, so the outer one is the call."""

    def inner(self, ids: Tensor) -> Any:
        return object() if int(ids.sum()) % 2 else Exception

    def counted(self, ids: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return (x if self.inner(ids) is Exception else -x), {"more": self.tower(x)}


def test_a_method_whose_result_no_graph_holds_is_given_up() -> None:
    model = Unusable()
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "middle", "last"], boundary_names=[])
    assert [leaf.name for leaf in method_leaves(graph)] == ["counted"]
    assert_same(model, graph, *batches())


def test_what_has_no_method_of_its_own_is_refused() -> None:
    class Root(Reading):
        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            return Toy.forward(self, x if ids.sum() > 0 else -x, ids)

    with pytest.raises(UntraceableModelError, match=r"the model itself \(Root\).* module of its own"):
        traced(Root(), toy_batch(2, 9), boundary_names=[])


def test_running_methods() -> None:
    """Of this module alone, innermost first, without `forward` and what every module has."""
    model = Nested()

    def broken(*_: object) -> None:
        raise ArithmeticError

    model.tower.forward = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(ArithmeticError) as caught:
        model(**toy_batch(2, 9))
    assert running_methods(model, caught.value) == ["counted", "outer"]
    assert running_methods(model.tower, caught.value) == []
