"""Methods and functions as single calls: code of the model itself, around its layers, that reads values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import Toy, assert_same, leaf_nodes, toy_batch, traced
from torch import Tensor, nn

from lightning_compress.errors import CalibrationDataError, UntraceableModelError
from lightning_compress.graph.leaf import Leaf, Within
from lightning_compress.graph.methods import running_functions, running_methods
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


class Borrowing(Reading):
    """Its method uses the weight of a module that it does not call."""

    def counted(self, ids: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, found = super().counted(ids, x)
        return x @ self.table.weight, found

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)


def test_what_a_method_reads_of_modules_that_it_does_not_call() -> None:
    """Is brought along with what it calls. Seen to fail: with the root's own tensors alone."""
    model = Borrowing()
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "middle", "last"], boundary_names=[])
    (leaf,) = method_leaves(graph)
    assert leaf.within == Within(("tower",), ("scale", "table.weight"))
    assert_same(model, graph, *batches())


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
            return Toy.forward(self, x if x.sum() > self.scale else -x, ids)

    with pytest.raises(UntraceableModelError, match=r"the model itself \(Root\).* function or module of its own"):
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


class Parts(Reading):
    """As many values as the largest id says, as models make a list of their images."""

    def parts(self, ids: Tensor, x: Tensor) -> list[Tensor]:
        return [x * (number + 1) for number in range(int(ids.max()) + 1)]

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        return Toy.forward(self, sum(self.parts(ids, x), torch.zeros(())), ids)


class Picked(Reading):
    """A number of tokens that values decide, which the caller asks for."""

    def pick(self, ids: Tensor, x: Tensor) -> Tensor:
        return x[:, : int((ids == 0).sum(1).min())]

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        y = self.pick(ids, x)
        return Toy.forward(self, y * y.shape[1], ids)


def with_ones(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    batch["ids"][:, :number] = 1
    return batch


@pytest.mark.parametrize(
    ("kind", "given"), [(Parts, r"2 values .* recorded was 1 values"), (Picked, r"it gives \[2, 7, 8\]")]
)
def test_a_batch_on_which_it_would_give_something_else_is_refused(kind: type[Reading], given: str) -> None:
    """A graph holds how many values there are, and sizes that did not change. Seen to fail: silently wrong outputs."""
    model = kind()
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "middle", "last"], boundary_names=[])
    assert_same(model, graph, toy_batch(2, 9))
    with pytest.raises(CalibrationDataError, match=given):
        assert_same(model, graph, with_ones(toy_batch(2, 9), 2))


def test_sizes_that_values_decide_are_read() -> None:
    """Where the two batches that are observed differ in them by no rule: then any is served."""
    model = Picked()
    fields = {"leaf_names": ["first", "middle", "last"], "boundary_names": []}
    batch = with_ones(toy_batch(2, 23), 7)  # traced with 3 and 2 rows of 23 and 19 tokens: 16 and 12 are picked
    batch["ids"][:, 20:] = 1
    graph = traced(model, batch, **fields)
    assert_same(model, graph, batch, with_ones(toy_batch(3, 12), 4), with_ones(toy_batch(1, 30), 1))


class Setting(Reading):
    """Leaves something behind, which `forward` asks for or does not."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks, self.odd = asks, False

    def counted(self, ids: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.odd = bool(int((ids == 0).sum()) % 2)
        return super().counted(ids, x)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        x, found = self.counted(ids, x)
        if self.asks and self.odd:
            x = x * 5
        return Toy.forward(self, x + found["more"], ids)


def test_what_a_method_leaves_behind_must_not_be_used() -> None:
    """Seen to fail: the flag as it was before."""
    fields: dict[str, Any] = {"leaf_names": ["first", "middle", "last"], "boundary_names": []}
    unused = Setting(asks=False)
    assert_same(unused, traced(unused, toy_batch(2, 9), **fields), *batches())
    with pytest.raises(UntraceableModelError, match="counted sets odd, and code outside of it uses that"):
        traced(Setting(asks=True), toy_batch(2, 9), **fields)


def test_calls_within_a_call_are_not_its_own() -> None:
    """Seen to fail: the layouts of the inner calls, one after the other."""

    class Inner(Reading):
        def wide(self, ids: Tensor, x: Tensor, times: int) -> Tensor:
            return torch.cat([x] * (times + int(ids.min() < 0)), 1)

        def counted(self, ids: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            if int(ids.max()) < 0:
                return x, {}
            return self.wide(ids, x, 3)[:, : x.shape[1]], {"more": x}

        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            first = self.wide(ids, x, 1)
            x, found = self.counted(ids, first)
            return Toy.forward(self, torch.cat([x + found["more"], self.wide(ids, x, 2)], 1), ids)

    model = Inner()
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "middle", "last"], boundary_names=[])
    assert {leaf.name for leaf in method_leaves(graph)} == {"wide", "counted"}
    assert_same(model, graph, *batches())


def test_calls_of_a_leaf_within_a_method_are_not_its_own() -> None:
    """Where the method has been seen before. Seen to fail: the layout of the call within the method."""

    class Odd(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)[: len(input) if input.float().mean().isfinite().tolist() else 0]

    class Twice(Reading):
        def counted(self, ids: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return super().counted(ids, torch.cat([x, x], 1))

        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            y, _ = self.counted(ids, x)
            return Toy.forward(self, y[:, : x.shape[1]] + self.tower(x), ids)

    model = Twice()
    model.tower = Odd(8, 8)
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "middle", "last"], boundary_names=[])
    assert {leaf.name for leaf in method_leaves(graph)} == {"counted"}
    assert_same(model, graph, *batches())


def reading(ids: Tensor, most: int = 8) -> Tensor:
    """As masks of lengths are made."""
    return torch.arange(most) < float((ids == 0).float().sum()) % most


@torch.no_grad()
def decorated(ids: Tensor) -> Tensor:
    return torch.ones(8) * float(ids.float().sum() + 1)


def writing(ids: Tensor, x: Tensor) -> Tensor:
    return x.mul_(reading(ids))


class Masked(nn.Linear):
    """Calls the function, too, inside of what is one call anyway."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * reading(torch.zeros(4, 5), 8)


class Outside(Toy):
    """Its own code calls functions that read values."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.Sequential(Masked(8, 8), nn.ReLU()))
        self.function = function

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        found = super().forward(x * reading(ids) * decorated(ids), ids)
        return {"logits": found["logits"] * reading(ids, 5)}


def test_a_function_that_reads_values_is_a_call() -> None:
    """On every batch anew, also where it was imported to, and not where a leaf calls it. Seen to fail: refused; with
    what calls inside leaves gave (the outputs of another call)."""
    model, before = Outside(reading), reading
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "middle.0", "last"], boundary_names=[])
    place = reading.__module__
    names = [f"{place}:{name}" for name in ("reading", "decorated", "reading")]
    assert [leaf.name for leaf in method_leaves(graph)] == names
    assert {(leaf.within, leaf.owner) for leaf in method_leaves(graph)} == {(Within((), ()), None)}
    assert_same(model, graph, *batches())
    assert reading is before


def test_a_function_that_writes_is_refused() -> None:
    """What it is given would be changed for values that share its memory; the one that it calls is a call. Seen to
    fail: recorded; with nothing tried behind it."""

    class Writing(Toy):
        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            writing(ids, y := x + 1)
            return super().forward(y, ids)

    model = Writing(nn.ReLU())
    graph = traced(model, toy_batch(2, 9), leaf_names=["first", "last"], boundary_names=[])
    assert [leaf.name for leaf in method_leaves(graph)] == [f"{reading.__module__}:reading"]
    assert_same(model, graph, *batches())


def test_running_functions() -> None:
    """The one that the module's own code calls comes first; none where the module has not been called."""
    model = Outside(reading)
    with pytest.raises(AttributeError) as caught:
        model(torch.randn(1, 8), 3)
    place = reading.__module__
    assert running_functions(model, caught.value) == [f"{place}:reading"]
    assert running_functions(model.middle, caught.value) == []
