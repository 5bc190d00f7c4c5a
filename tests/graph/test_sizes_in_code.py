"""Code that asks for sizes of a batch, where batches have several: all of them are served, or it is told why not."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import pytest
import sympy
import torch
from helpers import check_inputs, compress_in_memory, recipe
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lightning_compress.errors import CalibrationDataError, UntraceableModelError
from lightning_compress.graph import fallback
from lightning_compress.graph.conditions import deciding_otherwise
from lightning_compress.graph.observed import observe
from lightning_compress.graph.python_functions import taking_symbols
from lightning_compress.graph.restore import assigned

WIDTH = 16

pytestmark = pytest.mark.filterwarnings("ignore::lightning_compress.graph.fallback.TraceFallbackWarning")

SIZES = ((3, 7), (3, 12), (2, 5), (2, 9))


def batches(sizes: Sequence[tuple[int, int]] = SIZES) -> list[dict[str, Tensor]]:
    """Of rows and lengths."""
    torch.manual_seed(1)
    return [{"x": torch.randn(*each, WIDTH), "ids": torch.zeros(each, dtype=torch.long)} for each in sizes]


class Between(nn.Module):
    """Two Linears and code between them, in a module of its own or not."""

    def __init__(self, code: Callable[[Tensor], Any], after: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.code: Any = code if after is None else Code(code)
        self.after = after or (lambda found: found)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.last(self.after(self.code(self.first(batch["x"]))))
        return found


class Code(nn.Module):
    def __init__(self, code: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Any:
        return self.code(x)


def padded(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 0, 0, 8 - x.shape[1])) if x.shape[1] < 8 else x


def mean_of_many(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True) if x.shape[1] > 8 else x


def twice_few(x: Tensor) -> Tensor:
    return torch.cat([x, x]) if x.shape[0] < 3 else x


def steps(x: Tensor) -> Tensor:
    return torch.stack([x[:, step] for step in range(min(8, x.shape[1]))], 1)


IN_A_MODULE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "padded": (padded, lambda x: x * x.shape[1]),
    "padded, with positions": (padded, lambda x: x + torch.arange(x.shape[1])[:, None]),
    "padded, and cut again": (lambda x: (padded(x), x), lambda both: both[0][:, : both[1].shape[1]] + both[1]),
    "mean": (mean_of_many, lambda x: x * x.shape[1]),
    "rows": (twice_few, lambda x: x * x.shape[0]),
    "steps": (steps, lambda x: x * x.shape[1]),
    "size": (lambda x: (x, 8 if x.shape[1] > 8 else x.shape[1]), lambda both: both[0] * both[1]),
    "number": (lambda x: (x, 2.0 if x.shape[1] > 8 else 0.5), lambda both: both[0] * both[1]),
    "rows that values choose": (lambda x: x[x[..., 0] > 0] * (2 if x.shape[1] > 8 else 1), lambda x: x * x.shape[0]),
}


@pytest.mark.parametrize(("code", "after"), IN_A_MODULE.values(), ids=IN_A_MODULE)
def test_modules_that_decide_by_a_size(
    code: Callable[[Tensor], Any], after: Callable[[Any], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is run anew for every batch, but what it returns for the traced one was taken for what all get. Seen to
    fail: mostly silently, with values of other batches; but for what is cut again and what values choose."""
    check_inputs(Between(code, after), batches(), monkeypatch)


def test_modules_that_squeeze_a_length_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another form where a length is one, which makes no difference behind it. Seen to fail: with that refused."""
    check_inputs(Between(lambda x: x.squeeze(1), lambda x: x * 2), batches(((3, 7), (3, 1), (2, 5))), monkeypatch)


def by_tokens(x: Tensor) -> Tensor:
    """In a loop, which takes a plain length."""
    sums = [x[:, :1]]
    for step in range(1, x.shape[1]):
        sums.append(sums[-1] / 2 + x[:, step : step + 1])
    return torch.cat(sums, 1)


OF_THE_LONGEST: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "size": (lambda x: by_tokens(x).mean(1, True) if x.shape[1] > 29 else by_tokens(x), lambda x: x * x.shape[1]),
    "number": (lambda x: (by_tokens(x), 2.0 if x.shape[1] > 29 else 0.5), lambda both: both[0] * both[1]),
}


@pytest.mark.parametrize(("code", "after"), OF_THE_LONGEST.values(), ids=OF_THE_LONGEST)
def test_what_the_longest_batch_alone_decides(
    code: Callable[[Tensor], Any], after: Callable[[Any], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a module with a loop over tokens, which is run on batches of a few sizes. Seen to fail: silently, with inputs
    that the longest batch does not have."""
    check_inputs(Between(code, after), batches(((3, 30), (3, 17), (2, 5))), monkeypatch)


DECIDES_IN_BETWEEN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "size": (lambda x: by_tokens(x)[:, : 1 if x.shape[1] == 17 else None], lambda x: x * x.shape[1]),
    "none": (lambda x: (by_tokens(x), x if x.shape[1] == 17 else None), lambda both: both[both[1] is not None]),
}


@pytest.mark.parametrize(("code", "after"), DECIDES_IN_BETWEEN.values(), ids=DECIDES_IN_BETWEEN)
def test_what_a_batch_alone_decides(code: Callable[[Tensor], Any], after: Callable[[Any], Tensor]) -> None:
    """Likewise; it is none of these sizes. Seen to fail: silently."""
    with pytest.raises(CalibrationDataError, match="code takes another way on a batch"):
        compress_in_memory(Between(code, after), batches(((3, 30), (3, 17), (2, 5))), recipe(4))


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda layers: nn.ModuleDict(dict(zip("ab", layers, strict=True)))])
def test_modules_in_lists_that_decide_by_a_size(
    kind: Callable[[list[nn.Module]], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists are never called, but what is in them is. Seen to fail: refused, with the advice to put such code into a
    module."""
    layers = kind([Code(padded), Code(mean_of_many)])

    def call_all(x: Tensor) -> Tensor:
        for layer in layers.children():
            x = layer(x)
        return x * x.shape[1]

    model = Between(call_all)
    model.layers = layers
    check_inputs(model, batches(), monkeypatch)


class Numbered(Code):
    def __init__(self, code: Callable[[Tensor], Any], layer_idx: int) -> None:
        super().__init__(code)
        self.layer_idx = layer_idx


def test_layers_that_differ_in_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they return elsewhere is found once. Seen to fail: twice for each of them, though one batch is such."""
    shapes: list[tuple[int, ...]] = []

    def code(x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor) and type(x.shape[1]) is int:
            shapes.append((*x.shape,))
        return padded(x)

    layers = [Numbered(code, number) for number in range(4)]
    model = Between(lambda x: torch.cat([layer(x) for layer in layers], 1))
    for layer in layers:
        model.add_module(f"layer_{layer.layer_idx}", layer)
    check_inputs(model, batches(((3, 12), (3, 7))), monkeypatch)
    assert shapes.count((3, 7, WIDTH)) == 1


def test_modules_that_return_something_else() -> None:
    """Seen to fail: an error of torch's, on the calibration data."""
    model = Between(lambda x: (x, None if x.shape[1] > 8 else x), lambda both: both[0] + (0 if both[1] is None else 1))
    with pytest.raises(
        UntraceableModelError, match=r"cannot record code \(Code\).*returns None, in another batch a ten"
    ):
        compress_in_memory(model, batches(), recipe())


BY_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "len": lambda x: x + torch.zeros(len(x), 1, WIDTH),
    "len in arithmetic": lambda x: x.flatten(0, 1) / len(x.flatten(0, 1)),
    "isinstance": lambda x: x * 2 if isinstance(x.shape[1], int) else x,
    "min": lambda x: x[:, : min(x.shape[1], 8)] * min(8, x.shape[1]),
    "min of several": lambda x: x * min([x.shape[1], 8, x.shape[0] + 5]),
    "max": lambda x: functional.pad(x, (0, 0, 0, max(8 - x.shape[1], 0))),
    "max of those that are yielded": lambda x: x * max(size + 1 for size in x.shape[:2]),
    "of numbers": lambda x: x * min(2, 3) * max((4,), default=5) * len("six") * max([], default=2),
}


@pytest.mark.parametrize("code", BY_FUNCTIONS.values(), ids=BY_FUNCTIONS)
def test_functions_of_python(code: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: `isinstance` silently, as no size was an `int` while the model was recorded; the others were
    refused, as rows or lengths of several numbers."""
    check_inputs(Between(code), batches(), monkeypatch)
    assert not {"len", "isinstance", "min", "max"} & globals().keys()


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "math": lambda x: x / math.sqrt(x.shape[1]) * math.log(math.sqrt(x.shape[0] + 1)),
    "math, rounded": lambda x: x[:, : math.ceil(math.log2(x.shape[1]))] * x.shape[1],
    "math, in a condition": lambda x: x * 2 if math.log(x.shape[1]) > 0.1 else x,
    "tensor": lambda x: x / torch.tensor(x.shape[1]),
    "tensor of several": lambda x: x * torch.tensor([[x.shape[1], 2.5], [1, x.shape[0]]], dtype=torch.float32).sum(),
    "tensor of a condition": lambda x: x * torch.as_tensor(x.shape[1] > 3),
    "tensor like another": lambda x: (
        x / x.new_tensor(x.shape[1]) * x.new_tensor([x.shape[0], 1], dtype=torch.int).sum()
    ),
    "steps": lambda x: x * torch.linspace(-1, 1, x.shape[1])[:, None] + torch.linspace(0, x.shape[1], steps=4).sum(),
    "flag of attention": lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=x.shape[1] > 1),
}


@pytest.mark.parametrize("code", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("targets", [None, ["Linear"]])
def test_numbers_of_sizes(
    code: Callable[[Tensor], Tensor], targets: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they wait for another subgraph. Seen to fail: refused, as lengths of several numbers, and of what
    is a condition as no number."""
    check_inputs(Between(code), batches(), monkeypatch, sequential_targets=targets)
    assert math.sqrt(4) == 2.0
    assert "new_tensor" not in vars(Tensor)


def test_lines_that_decide_are_told() -> None:
    """Seen to fail: neither of the lines was named."""

    def refused(code: Callable[[Tensor], Any]) -> str:
        with pytest.raises((CalibrationDataError, UntraceableModelError)) as caught:
            compress_in_memory(Between(code), batches(), recipe(4))
        return str(caught.value)

    def plain(x: Tensor) -> Tensor:
        return x / int(x.shape[1])

    def of_other_type(x: Tensor) -> Tensor:
        return x.softmax(x.shape[1] > 1)

    file = __file__.rpartition("/")[2]
    assert f"(batch 0: its sizes do not satisfy s63 > 8 (at {file}:{mean_of_many.__code__.co_firstlineno + 1}))" in (
        refused(mean_of_many)
    )
    assert f"for a constant (at {file}:{plain.__code__.co_firstlineno + 1}). Bring" in refused(plain)
    assert f"as a graph (at {file}:{of_other_type.__code__.co_firstlineno + 1}): TypeError" in refused(of_other_type)


class _LikeNumbers(type):
    """Of a class that tells by values what its instances are."""

    def __instancecheck__(cls, value: object) -> bool:
        return type(value) is int and value > 1

    def __subclasscheck__(cls, kind: type) -> bool:
        raise TypeError("it has none")


class Several(metaclass=_LikeNumbers):
    pass


@runtime_checkable
class Numeric(Protocol):
    numerator: int


@pytest.mark.parametrize("kinds", [Several, Numeric, (str, (Numeric,)), int | float, Integral])
def test_classes_that_sizes_are_instances_of(kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: TypeErrors, as the first and protocols with attributes have no subclasses that could be told."""
    check_inputs(Between(lambda x: x * 2 if isinstance(x.shape[1], kinds) else x), batches(), monkeypatch)


def test_names_that_code_puts_into_modules() -> None:
    """They stay its own. Seen to fail: one that it put there while it was recorded was gone."""
    with taking_symbols([], lambda function, size: size):
        assert "len" in globals()
        globals()["len"] = own = object()
    assert globals().pop("len") is own
    assert "min" not in globals()


@lru_cache
def positions(length: int) -> Tensor:
    return torch.arange(length)[:, None].sin()


class Table:
    """What was made of a length is kept."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.found:
            self.found[x.shape[1]] = torch.arange(x.shape[1])[:, None].cos()
        return x * self.found[x.shape[1]]


@pytest.mark.parametrize("code", [lambda x: x + positions(x.shape[1]), Table()])
def test_sizes_that_are_keys(code: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: both kinds of batches, as a symbol cannot be hashed; the first one is all right."""
    check_inputs(Between(code), batches(((3, 7), (2, 7))), monkeypatch)
    with pytest.raises(CalibrationDataError, match="one length"):
        compress_in_memory(Between(code), batches(), recipe())


class BySteps(Between):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.first(batch["x"])
        steps = {step: step + 1 for step in range(x.shape[1])}
        found: Tensor = self.last(x * steps.get(x.shape[1], 2))
        return found


def test_constants_that_are_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: `min() arg is an empty sequence`, where a size had become a constant before it was a key."""
    check_inputs(BySteps(lambda x: x), batches(((3, 7), (2, 7))), monkeypatch)


def test_outcomes_of_many_batches() -> None:
    """The same from functions of Python as from sympy."""
    rows, length = sympy.symbols("s0 s1", integer=True, positive=True)
    conditions = [rows * length**2 > 40, sympy.Eq(length, 3 * rows), sympy.Or(rows < 2, sympy.Not(length > 7))]
    conditions += [length - rows, sympy.Eq(length % 3, 0), sympy.Gt(length / rows, sympy.Rational(7, 3))]
    sizes: list[dict[sympy.Basic, int]] = [{rows: 1 + i % 3, length: 1 + i} for i in range(30)]
    outcomes: dict[sympy.Basic, list[object]] = {}
    deciding_otherwise(conditions, sizes, outcomes)
    for condition in conditions:
        assert outcomes[condition] == [condition.xreplace(each) for each in sizes]


class Reading(nn.Module):
    """Has to be run to tell what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.on_rows: Callable[[int], None] = lambda rows: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_rows(x.shape[0])
        return x[:, 1:] if (x > 100).any() else x[:, : x.shape[1] // 2 + 1]


def test_runs_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has to be run is run on a few rows. Seen to fail: on all of a true batch, which with the logits of so many
    takes more than there is room for."""
    model, rows = Between(lambda x: x), set[int]()
    model.code = Reading()

    def observed(*args: Any) -> Any:
        with assigned(model.code, on_rows=rows.add):
            return observe(*args)

    monkeypatch.setattr(fallback, "observe", observed)
    check_inputs(model, batches(((64, 7), (48, 12), (64, 5))), monkeypatch)
    assert rows == {2, 3}


def test_parts_that_are_all_in_some_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: refused, because `contiguous` has something to do, but not in the second batch."""

    def pairs(x: Tensor) -> Tensor:
        return x[:, : x.shape[1] // 2 * 2].contiguous().view(x.shape[0], -1, 2, WIDTH).sum(2)

    check_inputs(Between(pairs), batches(), monkeypatch)


def pooled(x: Tensor, graph: Tensor) -> Tensor:
    """A sum over the nodes of each graph: there are as many as values say."""
    number = int(graph.max()) + 1
    return x.new_zeros(number, x.shape[1]).index_add_(0, graph, x)


class Pooling(nn.Module):
    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return pooled(x, graph)


class OfGraphs(nn.Module):
    """Of sets of nodes without edges, and a loss of what is said of each of them."""

    def __init__(self, pooling: nn.Module | None, has_loss: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.pooling, self.has_loss = pooling, has_loss

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.first(batch["x"])
        x = pooled(x, batch["graph"]) if self.pooling is None else self.pooling(x, batch["graph"])
        out: Tensor = self.out(self.last(x).relu()).squeeze(-1)
        return functional.mse_loss(out, batch["of_graph"]) if self.has_loss else out


@pytest.mark.parametrize("has_loss", [False, True])
@pytest.mark.parametrize("pooling", [None, Pooling()])
def test_pooled_graphs(pooling: nn.Module | None, has_loss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: refused by their second batch or, with a loss, as batches of other numbers of nodes. Rows that are
    repeated are of as many graphs as before, which true batches show to be chance."""
    made: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    for nodes, graphs in ((9, 3), (12, 4), (7, 2)):
        of = torch.cat([torch.arange(graphs), torch.randint(graphs, (nodes - graphs,), generator=generator)])
        made.append({"x": torch.randn(nodes, WIDTH), "graph": of.sort().values, "of_graph": torch.randn(graphs)})
    model = OfGraphs(pooling, has_loss)
    with warnings.catch_warnings():  # of torch's, that predictions of repeated graphs are not as many as targets
        warnings.filterwarnings("ignore", "Using a target size", UserWarning)
        check_inputs(model, made, monkeypatch)


def ramp(x: Tensor, length: int) -> Tensor:
    """By an operator that takes plain numbers alone."""
    return x + torch.linspace(0, 1, length)[:, None]


def test_functions_that_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: refused, for only what found it by its name in a Python module called another in its place."""
    check_inputs(Between(steps_of_all), batches(), monkeypatch)


def steps_of_all(x: Tensor) -> Tensor:
    return torch.stack([x[:, step] for step in range(int(x.shape[1]))], 1)


class Packing(nn.Module):
    """Lengths that differ within a batch and between batches, of features and no ids."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        packed = pack_padded_sequence(self.first(batch["x"]), batch["lengths"], batch_first=True)
        found: Tensor = self.last(pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0])
        return found


def test_functions_that_take_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a size is no constant where batches have several: the function is a single call. Seen to fail: refused, as
    batches of several lengths."""
    check_inputs(Between(lambda x: ramp(x, x.shape[1])), batches(), monkeypatch)
    torch.manual_seed(1)
    lengths = ([7, 3, 2], [12, 12, 4], [5, 2])
    padded = [{"x": torch.randn(len(each), each[0], WIDTH), "lengths": torch.tensor(each)} for each in lengths]
    check_inputs(Packing(), padded, monkeypatch)


class Positions(nn.Module):
    """Has fewer positions than its batches have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(4, WIDTH))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.first(batch["x"] + self.positions)
        return found


def test_the_remedy_for_code_that_decides_by_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between modules it is refused; in a module of its own, as the error advises, it serves all batches."""

    def to_eights(x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, -x.shape[1] % 8)) if x.shape[1] % 8 else x

    def means(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 8, WIDTH).mean(2)

    given = batches(((2, 8), (2, 13), (2, 16), (3, 22)))
    with pytest.raises(CalibrationDataError, match=r"2 of 4 calibration batches.*nn.Module in which nothing"):
        compress_in_memory(Between(lambda x: means(to_eights(x))), given, recipe(4))
    check_inputs(Between(to_eights, means), given, monkeypatch)


def test_what_fits_in_no_way_ends() -> None:
    """Seen to fail: the same ways to make batches were tried over and over."""
    with pytest.raises(UntraceableModelError, match="must match"):
        compress_in_memory(Positions(), batches(((3, 7), (2, 7))), recipe(4))
