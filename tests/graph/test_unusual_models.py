"""Code that users write and no published model has: every module has to be solved with the inputs that it has.

All were seen to fail before: with other inputs, with those of other batches, or with an error.
"""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, cast

import pytest
import torch
from helpers import (
    CHANGES_NOTHING,
    check_inputs,
    compress_in_memory,
    gram_sum,
    make_representable,
    recipe,
    seen_statistics,
)
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from lightning_compress.errors import CalibrationDataError, CalibrationWarning, UntraceableModelError
from lightning_compress.graph.fallback import TraceFallbackWarning
from lightning_compress.graph.trees import tensors_in

WIDTH = 16

pytestmark = pytest.mark.filterwarnings("ignore::lightning_compress.graph.fallback.TraceFallbackWarning")


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def values(number: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 7, WIDTH) for _ in range(number)]


class Layers(nn.Module):
    """Two of a kind, and a Linear."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.out = nn.ModuleList([kind(), kind()]), linear()

    def forward(self, x: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.out(x[0] if isinstance(x, tuple) else x)
        return found


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class SetsScale(nn.Module):
    """By an attribute, as of a condition that all layers shall see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaling, self.second = linear(), Scaling(), linear()

    def forward(self, x: Tensor) -> Tensor:
        self.scaling.scale = x.mean((0, 1))
        found: Tensor = self.second(self.scaling(self.first(x)).relu())
        return found


class Weighted(Scaling):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.weight


class SetsWeighted(SetsScale):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = Weighted()


@pytest.mark.parametrize("kind", [SetsScale, SetsWeighted])
def test_what_is_set_on_a_module_before_it_is_called(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without weights is recorded by its operations; the layer around another is a single call, which sets it
    itself."""
    report = check_inputs(Layers(kind), values(), monkeypatch)
    assert [each.module for each in report.fallbacks] == ["layers.0", "layers.1"] * (kind is SetsWeighted)


def test_what_is_set_on_a_module_with_weights() -> None:
    with pytest.raises(UntraceableModelError, match=r"`scale` of scaling is set before .* as an argument"):
        compress_in_memory(SetsWeighted().eval(), values(), CHANGES_NOTHING)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH).float()
        return self.table


class Core(nn.Module):
    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table, self.weight = table, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x * self.table(x).cos() * self.weight
        return found


class SharesTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = Table()
        self.first, self.second, self.third = linear(), linear(), linear()
        self.left, self.right = Core(table), Core(table)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.third(self.right(self.second(self.left(self.first(x)))))
        return found


def test_a_table_that_two_modules_share_and_one_makes() -> None:
    report = compress_in_memory(SharesTable().eval(), values(), recipe(4))
    assert len(report.modules) == 3
    assert not report.fallbacks


class Switched(nn.Module):
    """What is set is plain, and owned by a module with weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scaling, self.second = linear(), Weighted(), linear()

    def forward(self, x: Tensor) -> Tensor:
        self.scaling.scale, self.scaling.place = 3.0, ((1, "a"), torch.float32, x.device)
        found: Tensor = self.second(self.scaling(self.first(x)))
        self.scaling.scale = 1.0
        return found


def test_numbers_that_are_set_before_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Switched()
    assert not check_inputs(model, values(), monkeypatch).fallbacks


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.cell = linear(), linear(), linear(), Growing()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.third(self.cell(self.second(self.cell(self.first(x)))))
        return found


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.factor *= 2
        return x * self.factor


def test_a_module_that_counts_its_calls_over_several_steps() -> None:
    with pytest.warns(CalibrationWarning, match=r"cell keeps something from one call to the next.*schedule=basic"):
        compress_in_memory(Twice().eval(), values(), recipe(4))


class Swapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        masked = {"weight": self.first.weight * (self.first.weight > 0)}
        found: Tensor = self.second(torch.func.functional_call(self.first, masked, (x,)).relu())
        return found


def test_weights_that_are_swapped_for_a_call() -> None:
    with pytest.raises(UntraceableModelError, match="`weight` of first is set before it is called"):
        compress_in_memory(Swapping().eval(), values(), CHANGES_NOTHING)


class Remembering(nn.Module):
    """Adds what it has seen since it was told to forget."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.memory = x if self.memory is None else self.memory + x
        return self.memory.relu()


class ForgetsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.cell, self.second = linear(), Remembering(), linear()

    def forward(self, x: Tensor) -> Tensor:
        self.cell.memory = None
        found: Tensor = self.second(self.cell(self.first(x)))
        return found


@pytest.mark.parametrize("schedule", ["staged", "block"])
def test_batches_do_not_see_what_others_left(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what was left before: the hooks' runs leave something."""
    model = ForgetsFirst()
    check_inputs(model, [*values(), values()[0][:2]], monkeypatch, schedule=schedule)
    assert model.cell.memory is not None
    assert len(model.cell.memory) == 2, "as it was"


class Averaging(nn.Module):
    """Puts a new tensor where its buffer was."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.second = linear(), _Averaging(), linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.inner(self.first(x)))
        return found


class _Averaging(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.mean((0, 1))
        return x - self.mean


def test_a_buffer_that_is_replaced_is_that_of_before() -> None:
    found = []
    for batches in (values(), values()[::-1]):
        model = Averaging().eval()
        compress_in_memory(model, batches, recipe(3))
        assert not model.inner.mean.any()
        found.append(model.second.weight)
    assert torch.equal(*found)


class OfPair(nn.Module):
    """What it branches on makes it a single call; it hands on how large its input was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, given: Any) -> Any:
        x, shape = given if isinstance(given, tuple) else (given, given.shape)
        x = x * 0 if float(x.sum()) > 1e9 else x
        return self.linear(x.view(shape)).relu(), x.shape


def test_single_calls_that_take_their_tensors_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_inputs(Layers(OfPair), [*values(), values()[0][:2]], monkeypatch)
    assert report.fallbacks[0].hidden == ("layers.0.linear",)


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, rotary: Tensor, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        return h + rotary.mean() if float(h.sum()) < 1e9 else h


class RotaryFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(32, WIDTH), Rotated(), linear()
        self.rotary = nn.Parameter(torch.ones(40, 8))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embed(batch["input_ids"])
        found: Tensor = self.out(self.layer(self.rotary[: hidden.shape[1]], hidden))
        return found


def test_padding_is_known_whichever_argument_the_hidden_states_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_statistics(monkeypatch)
    mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    batch = {"input_ids": torch.arange(18).view(2, 9), "attention_mask": mask}
    compress_in_memory(RotaryFirst().eval(), [batch], recipe(4))
    assert {statistic.num_tokens for statistic in seen["layer.linear"].values()} == {14}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.cell = linear(), nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.inner(x), lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.cell(packed)[0], batch_first=True)[0]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = Recurrent(), linear()

    def forward(self, batch: Any) -> Tensor:
        found: Tensor = self.out(self.encoder(batch["x"], batch["lengths"]))
        return found


def test_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 steps: what says how long rows are does not fit a shortened batch, so a true one is traced."""
    batches = [
        {"x": torch.randn(3, length, WIDTH), "lengths": torch.tensor([length, 4, length - 3])} for length in (20, 14)
    ]
    check_inputs(Classifier(), batches, monkeypatch)


class Graph(nn.Module):
    """Sums over edges [2, E] among nodes, to which it adds one from each node to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def forward(self, batch: Any) -> Tensor:
        own = torch.arange(batch["x"].shape[0]).expand(2, -1)
        source, target = torch.cat([batch["edges"], own], 1)
        y = self.first(batch["x"])
        found: Tensor = self.last(torch.zeros_like(y).index_add(0, target, y[source]))
        return found


def test_graphs_of_other_numbers_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of edges are no rows, as the batches show. Seen to fail: recorded for as many nodes only."""
    batches = [
        {"x": torch.randn(nodes, WIDTH), "edges": torch.randint(nodes, (2, edges))}
        for nodes, edges in ((9, 20), (7, 16), (5, 11))
    ]
    check_inputs(Graph(), batches, monkeypatch)


class KeepsOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = _Keeps(), linear()

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        found: Tensor = self.linear(self.norm.kept)
        return found


class _Keeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.tanh()
        return x


def test_a_layer_around_a_module_that_keeps_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    report = check_inputs(Layers(KeepsOutput), values(), monkeypatch)
    assert [fallback.hidden for fallback in report.fallbacks] == [("layers.0.linear",), ("layers.1.linear",)]


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.vmap(self.first, in_dims=1, out_dims=1)(x).relu())
        return found


class Differentiating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.func.grad(lambda given: self.first(given).square().sum())(x))
        return found


@pytest.mark.parametrize("kind", [Mapped, Differentiating])
def test_transformed_functions(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    make_representable(model := Layers(kind).eval())
    seen, inputs = seen_statistics(monkeypatch), values()
    compress_in_memory(model, inputs, CHANGES_NOTHING)
    expected = sum(x.reshape(-1, WIDTH).double().T @ x.reshape(-1, WIDTH).double() for x in inputs)
    torch.testing.assert_close(gram_sum(seen["layers.0.first"]), expected, rtol=1e-5, atol=1e-4)


@dataclass
class Sized:
    """Fields that are not given."""

    x: Tensor
    length: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.length = torch.tensor(float(self.x.shape[1]))


class OfSized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, batch: Sized) -> Tensor:
        found: Tensor = self.linear(batch.x / batch.length)
        return found


def test_dataclasses_with_fields_that_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    check_inputs(OfSized(), [Sized(x) for x in values()], monkeypatch)


@dataclass
class Scaled:
    """What it is made of is not what it has afterwards."""

    x: Tensor
    by: InitVar[float]
    shift: float | None = 1.0

    def __post_init__(self, by: float) -> None:
        self.x = self.x * by
        self.by_two = 2 * by


class Shifting(nn.Module):
    def forward(self, given: Scaled) -> Tensor:
        return given.x * given.by_two if given.shift is None else given.x + given.shift


class GivesScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shifting, self.second = linear(), Shifting(), linear()

    def forward(self, batch: Scaled) -> Tensor:
        found: Tensor = self.second(self.shifting(Scaled(self.first(batch.x), 0.5, shift=None)))
        return found


def test_dataclasses_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: scaled twice, refused for want of `by`, shifted by the default."""
    check_inputs(GivesScaled(), [Scaled(x, 3.0) for x in values()], monkeypatch)


@dataclass
class State:
    x: Tensor
    before: Any = None


class Halving(nn.Module):
    def forward(self, state: State) -> None:
        state.x.mul_(0.5)


class Advances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()
        self.halving = Halving()

    def forward(self, x: Tensor) -> Tensor:
        state = State(self.first(x))
        y: Tensor = self.second(state.x)
        self.halving(state)
        return y + cast(Tensor, self.third(state.x))


def test_modules_that_write_to_a_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: `third` was taken to read what `second` does."""
    report = check_inputs(Layers(Advances), values(), monkeypatch)
    assert not report.fallbacks
    first = State(torch.ones(2))
    first.before = State(torch.ones(3), before=[first])
    assert [len(tensor) for tensor in tensors_in((first, "x"))] == [2, 3]


class Neighbours(nn.Module):
    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("edges", torch.eye(7).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(torch.stack([torch.sparse.mm(self.edges, row) for row in x]))
        return found


def test_sparse_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    check_inputs(Neighbours(), values(), monkeypatch)


def test_a_dropout_with_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: left out, as any in eval mode."""
    model = nn.Sequential(nn.Sequential(linear(), nn.Dropout(), linear()), linear())
    model[0][1].forward = lambda x: 3 * x
    check_inputs(model, values(), monkeypatch)


class Overwriting(nn.Module):
    """Part of what `first` has read is changed before `second` reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second, self.third = linear(), nn.ReLU(inplace=True), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.third(x)
        y: Tensor = self.first(h)
        self.act(h[..., : WIDTH // 2])
        found: Tensor = y + self.second(h)
        return found


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x[..., : WIDTH // 2], {"rest": x[..., WIDTH // 2 :]}


class Viewing(Overwriting):
    """Likewise, by views that modules have given; the second one is of the same tensor as the call of a like one."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.halves = nn.Flatten(0, 1), Halves()

    def forward(self, x: Tensor) -> Tensor:
        h = self.third(x)
        y: Tensor = self.first(h)
        self.flat(x)
        self.flat(h).mul_(0.5)
        y = y + self.second(h)
        self.halves(h)[1]["rest"].add_(1)
        return y + h


class Flattening(nn.Module):
    """Its body cannot be run on symbolic sizes; where it reads values, only for real."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads and (x > 1e9).any():
            return -x.flatten(0, 1)
        assert [*range(x.shape[1])]
        return x.flatten(0, 1)


class ViewingByLoop(Viewing):
    reads = False

    def __init__(self) -> None:
        super().__init__()
        self.flat: nn.Module = Flattening(self.reads)


class ViewingByValues(ViewingByLoop):
    reads = True


class Damping(nn.Module):
    """Writes to what it is given, in such a body."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        if self.reads and (x > 1e9).any():
            return -x.sum(1, keepdim=True)
        for step in range(x.shape[1]):
            x[:, step] *= 0.5
        return x.sum(1, keepdim=True)


class WritingByLoop(Overwriting):
    reads = False

    def __init__(self) -> None:
        super().__init__()
        self.damping = Damping(self.reads)

    def forward(self, x: Tensor) -> Tensor:
        h = self.third(x)
        y: Tensor = self.first(h)
        total = self.damping(h)
        y = y + self.second(h)
        return y + total


class WritingByValues(WritingByLoop):
    reads = True


@pytest.mark.parametrize("schedule", ["staged", "block", "recompute"])
@pytest.mark.parametrize("kind", [Overwriting, Viewing, ViewingByLoop, ViewingByValues, WritingByLoop, WritingByValues])
def test_modules_that_write_to_a_view_of_a_value(
    kind: type[nn.Module], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_inputs(Layers(kind), values(), monkeypatch, schedule=schedule)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found: Tensor = self.second(h) if float(h.mean()) > 0 else self.third(h)
        return found


def test_a_single_call_is_said_to_be_one() -> None:
    """Not what was tried before, and named of all of them."""
    with pytest.warns(TraceFallbackWarning, match=r"Skipping \(layers\.0 and 1 more\) is recorded as a single call"):
        report = compress_in_memory(Layers(Skipping).eval(), values(), recipe(4))
    assert [len(fallback.hidden) for fallback in report.fallbacks] == [3, 3]


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        found: Tensor = self.linear(x + noise)
        return found


def test_numbers_from_a_generator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph can hold it; a single call makes it anew."""
    report = check_inputs(Layers(Drawing), values(), monkeypatch)
    assert "draws from a generator of the model's own" in report.fallbacks[0].reason


class Transformed(nn.Module):
    """Called by a transformation, outside of any module that could be one call."""

    def __init__(self, transformed: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.transformed = linear(), transformed

    def forward(self, x: Tensor) -> Tensor:
        return self.transformed(self.layer, x)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda layer, x: torch.func.vmap(layer)(x),
        lambda layer, x: torch.func.grad(lambda y: layer(y).sum())(x),
    ],
)
def test_transformations_are_named(transformed: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Seen to fail: with what torch says when a tensor is used outside of them."""
    with pytest.raises(UntraceableModelError, match=r"layer \(Linear\).* transformation of torch\.func .*own"):
        compress_in_memory(Transformed(transformed), values(), recipe(4, strategy="channel"))


class Slope(nn.Module):
    """Computes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            gradient = torch.autograd.grad(self.layer(x).tanh().sum(), x)[0]
        return cast(Tensor, self.out(gradient))


class SlopeByMethod(Slope):
    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.slope(x)))

    def slope(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.layer(x).tanh().sum(), x)[0]


def test_gradients_outside_of_any_call() -> None:
    """Seen to fail: the call of torch.autograd was taken for one that a graph can hold, and failed when it was run."""
    with pytest.raises(UntraceableModelError, match="give the code a function or module of its own"):
        compress_in_memory(Slope(), values(), recipe(4, strategy="channel"))
    report = compress_in_memory(SlopeByMethod(), values(), recipe(4, strategy="channel"))
    assert {record.module for record in report.modules} == {"layer", "out"}


class Measuring(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int, float, bool]:
        numbers = x.numpy()
        return x.relu(), int(10 * numbers[..., 0].sum()), float(numbers.mean()), bool(numbers.max() > 9)


class OfMeasured(nn.Module):
    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.measuring, self.second, self.use = linear(), Measuring(), linear(), use

    def forward(self, x: Tensor) -> Tensor:
        x, *numbers = self.measuring(x)
        found: Tensor = self.second(self.first(x) * self.use(*numbers))
        return found


@pytest.mark.parametrize(
    "use",
    [
        lambda number, mean, is_high: number,
        lambda number, mean, is_high: mean,
        lambda number, mean, is_high: 2 if number < 0 else 3,
        lambda number, mean, is_high: 1,
    ],
)
def test_numbers_that_a_module_reads_from_values(use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: those of one batch for all."""
    batches = [x + number - 1 for number, x in enumerate(values())]
    check_inputs(Layers(lambda: OfMeasured(use)), batches, monkeypatch)


def test_a_flag_that_is_another_in_a_later_batch() -> None:
    """Seen to fail: taken for that of the first."""
    model = Layers(lambda: OfMeasured(lambda number, mean, is_high: 2 if is_high else 3)).eval()
    batches = [torch.full((3, 7, WIDTH), value) for value in (1.0, 10.0)]
    with pytest.raises(CalibrationDataError, match=r"layers\.0\.measuring takes another way"):
        compress_in_memory(model, batches, recipe())


class Shortened(nn.Module):
    """Takes a dozen tokens of each row, of which a batch may have fewer, and tells how many these are."""

    def __init__(self, place: slice, in_a_leaf: bool = False) -> None:
        super().__init__()
        self.place, self.first, self.last = place, linear(), linear()
        self.leaf = _Shortens(place) if in_a_leaf else None

    def forward(self, batch: Any) -> Tensor:
        y = self.first(batch["x"])
        y = y[:, self.place] if self.leaf is None else self.leaf(y)
        found: Tensor = self.last(y * torch.arange(y.shape[1])[:, None] / y.shape[1])
        return found


class _Shortens(nn.Module):
    def __init__(self, place: slice) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.place]


@pytest.mark.parametrize("in_a_leaf", [False, True])
@pytest.mark.parametrize("place", [slice(12), slice(-12, None), slice(2, -5)])
def test_slices_that_shorten_some_batches(place: slice, in_a_leaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the dozen that the longest batch has was taken for the length of all; where nothing broke by it,
    the statistics were of other values."""
    lengths = (20, 10, 14)
    batches = [{"x": torch.randn(3, length, WIDTH), "ids": torch.zeros(3, length).long()} for length in lengths]
    check_inputs(Shortened(place, in_a_leaf), batches, monkeypatch)


class OfSequences(nn.Module):
    """Pads what comes as a list, whose longest one is another in each batch."""

    def __init__(self, side: str) -> None:
        super().__init__()
        self.side, self.first, self.last = side, linear(), linear()

    def forward(self, batch: list[Tensor]) -> Tensor:
        x = pad_sequence(batch, batch_first=True, padding_value=0.5, padding_side=self.side)
        found: Tensor = self.last(self.first(x) * torch.arange(x.shape[1])[:, None] / x.shape[1])
        return found


@pytest.mark.parametrize("side", ["left", "right"])
def test_lists_that_are_padded(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the longest of the traced batch was taken for that of all."""
    lengths = ((3, 9, 5), (8, 4, 6), (2, 5, 7))
    batches = [[torch.randn(length, WIDTH) for length in each] for each in lengths]
    check_inputs(OfSequences(side), batches, monkeypatch)


class InParts(nn.Module):
    """Takes the tokens in three parts, of which the last is what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def forward(self, batch: Any) -> Tensor:
        parts = [self.first(part).cumsum(1) for part in batch["x"].chunk(3, 1)]
        found: Tensor = self.last(torch.cat(parts, 1))
        return found


def test_tokens_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: refused, since the strides of what is left are of `Max(1, its length)`."""
    lengths = (20, 9, 12)
    batches = [{"x": torch.randn(3, length, WIDTH), "ids": torch.zeros(3, length).long()} for length in lengths]
    check_inputs(InParts(), batches, monkeypatch, schedule="basic")
