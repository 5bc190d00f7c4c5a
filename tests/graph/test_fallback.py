"""What happens when code cannot be recorded: the smallest part becomes a single call, and it is said.

Seen to fail when broken: RoPE (attributes not restored), shape rules (one synthetic batch, not two), guards (kept from
leaves).
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from families import Toy, assert_same, causal_lm, leaf_nodes, token_batch, toy_batch, traced
from torch import Tensor, nn

from lightning_compress.errors import UntraceableModelError
from lightning_compress.graph.fallback import OF_ONE_SIZE, TraceFallbackWarning
from lightning_compress.graph.trace import violated_guards


def test_rope_that_reads_positions() -> None:
    """Dynamic RoPE calls `.item()`: its output's shape comes from a real run, and its rescaled buffer is put back."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = causal_lm("llama", rope_parameters=rope, max_position_embeddings=16, use_cache=False)
    rotary = model.model.rotary_emb
    attributes, inv_freq = dict(rotary.__dict__), rotary.inv_freq
    graph = traced(model, token_batch(2, 32))
    assert rotary.__dict__ == attributes
    assert rotary.inv_freq is inv_freq
    assert [(f.module, f.hidden) for f in graph.fallbacks] == [("model.rotary_emb", ())]
    assert_same(model, graph, token_batch(2, 32), token_batch(3, 9), token_batch(1, 40))


class Looping(nn.Module):
    """No target inside, loops over the length, and returns several shapes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = x[:, 0]
        states = [state]
        for token in range(x.shape[1]):
            state = state * 0.5 + x[:, token]
            states.append(state)
        return torch.stack(states, 1), x.repeat(1, 2, 1), x.new_ones(3, 2, 11)


class AroundLooping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loop, self.linear = Looping(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        longer, doubled, fixed = self.loop(x)
        x = self.linear(longer[:, 1:]) + doubled.view(x.shape[0], 2, x.shape[1], 8)[:, 1]
        # the sizes of `fixed` are those of the synthetic batches, but no symbols
        return x * fixed.reshape(66).sum() + fixed.shape[0] + fixed.shape[1] + fixed.shape[2] + longer.shape[1]


def test_leaf_that_loops_over_the_length() -> None:
    """Sizes L + 1 and 2 L are found from two batches; 3, 2 and 11 stay numbers, though synthetic sizes are such."""
    model = Toy(AroundLooping())
    graph = traced(model, toy_batch(2, 11))
    assert [(fallback.module, fallback.hidden) for fallback in graph.fallbacks] == [("middle.loop", ())]
    assert_same(model, graph, toy_batch(2, 11), toy_batch(4, 6), toy_batch(1, 1))


def test_a_leaf_decides_for_itself() -> None:
    """What a leaf does with a size is no condition of the graph: it is run for real on every batch."""

    class LongOrShort(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[1] > 20 else x * 3

    model = Toy(LongOrShort())
    graph = traced(model, toy_batch(2, 9))
    assert violated_guards(graph, toy_batch(2, 30)) == []
    assert_same(model, graph, toy_batch(2, 30), toy_batch(2, 9))

    class Root(Toy):
        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            outputs = super().forward(x, ids)
            return {"logits": outputs["logits"] * 2} if x.shape[1] > 20 else outputs

    # the same condition between leaves is one, although a leaf has decided it before
    assert violated_guards(traced(Root(LongOrShort()), toy_batch(2, 9)), toy_batch(2, 30))


class Branching(nn.Module):
    """Chooses by value, which no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else self.linear(-x)


def test_innermost_failing_module_becomes_a_single_call() -> None:
    model = Toy(Branching())
    with pytest.warns(TraceFallbackWarning, match="Branching"):
        graph = traced(model, toy_batch(2, 9), boundary_names=[])
    assert [(fallback.module, fallback.hidden) for fallback in graph.fallbacks] == [("middle", ("middle.linear",))]
    assert_same(model, graph, toy_batch(3, 4), toy_batch(1, 5))


def test_a_boundary_that_fails_is_still_a_span() -> None:
    model = Toy(nn.Sequential(Branching(), Branching()))
    with pytest.warns(TraceFallbackWarning):
        graph = traced(model, toy_batch(2, 9), boundary_names=["middle.0", "middle.1"])
    assert [(span.name, span.last - span.first) for span in graph.spans] == [("middle.0", 0), ("middle.1", 0)]


def test_what_cannot_be_traced_is_named() -> None:
    class Root(Toy):
        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            return super().forward(x if x.sum() > self.last.weight.sum() else -x, ids)

    model = Root(nn.GELU())
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(UntraceableModelError, match=r"the model itself \(Root\).*layers compute.*module of its"):
        traced(model, toy_batch(2, 9))
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_a_step_that_fails_anyway_says_why() -> None:
    model = causal_lm("llama")
    with pytest.raises(UntraceableModelError, match="input_ids or inputs_embeds"):
        traced(model, {"attention_mask": torch.ones(2, 9, dtype=torch.long)})


class Together(Toy):
    """Takes rows together: `each` of them are one row of what it returns, or those of `table` are added to them."""

    def __init__(self, each: int = 1, table: int = 0) -> None:
        super().__init__(nn.GELU())
        self.each = each
        self.table = nn.Parameter(torch.randn(table, 1, 5)) if table else None

    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = nn.functional.one_hot(ids.remainder(8), 8).float()
        logits = super().forward(x, ids)["logits"]
        logits = logits.reshape(-1, self.each, *logits.shape[1:]).sum(1)
        return {"logits": logits if self.table is None else logits + self.table}


def ids(rows: int, length: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(1, 50, (rows, length))}


def test_rows_that_belong_together() -> None:
    """Seen to fail: recorded on three rows alone, which do not go into groups of four."""
    model = Together(each=4)
    graph = traced(model, ids(4, 13))
    assert_same(model, graph, ids(4, 13), ids(8, 5), ids(12, 20))
    assert not graph.fallbacks


def test_a_model_of_so_many_rows() -> None:
    """Other batches are refused. Seen to fail: 12 rows of x, and 4 of the table."""
    model = Together(table=4)
    graph = traced(model, ids(4, 13))
    assert_same(model, graph, ids(4, 13), ids(4, 5))
    assert "as many rows only" in graph.fallbacks[0].reason
    assert graph.fallbacks[0].how == OF_ONE_SIZE
    assert violated_guards(graph, ids(2, 13)) == ["ids: size 0 is 2, not 4"]


class Lent(nn.Module):
    """Is given a module."""

    def forward(self, x: Tensor, other: nn.Module, *, state: dict[str, object]) -> Tensor:
        state["kept"] = other
        return torch.tanh(x) @ other.weight.T  # type: ignore[operator, union-attr]


def test_what_is_called_with_a_module() -> None:
    """A graph cannot hold it, so the call is looked into. Seen to fail: NotImplementedError."""

    class Root(Toy):
        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            x = self.middle(self.first(x), self.first, state={"given": object()})
            return {"logits": self.last(x)}

    model = Root(Lent())
    graph = traced(model, toy_batch(2, 9))
    assert [node.target.name for node in leaf_nodes(graph)] == ["first", "last"]
    assert_same(model, graph, toy_batch(3, 4))


class Heads(nn.Module):
    """A layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).contiguous()
        y: Tensor = x + self.second(seen.reshape(x.shape))
        return y


class Unrolled(nn.Module):
    """Goes through the rows one by one behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Heads(), Heads()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.stack([row * 2 for row in x])


class UnrolledWithHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Unrolled(), nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.backbone(x)) + ids[..., None]}


def test_all_layers_are_hidden_in_the_end_only() -> None:
    """Rather batches of one size than a single call of all layers. Seen to fail: a single call, because the head is
    outside."""
    torch.manual_seed(0)
    model = UnrolledWithHead()
    graph = traced(model, toy_batch(3, 9), boundary_names=["backbone.layers.0", "backbone.layers.1"])
    assert [span.name for span in graph.spans] == ["backbone.layers.0", "backbone.layers.1"]
    assert [(fallback.module, fallback.hidden) for fallback in graph.fallbacks] == [("backbone", ())]
    assert violated_guards(graph, toy_batch(2, 9))
    assert_same(model, graph, toy_batch(3, 9), toy_batch(3, 5))


class Exchanging(nn.Module):
    """Asks other ranks in code of its own, or in a module inside of it without targets."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.inside, self.linear = nn.Linear(8, 8), Averaging(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "in its code":
            x = x.clone()
            dist.all_reduce(x)
        elif self.how == "in a module":
            x = self.inside(x)
        else:
            x = functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
        return self.linear(x)


class Averaging(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, x)
        return torch.stack(gathered).mean(0)


@pytest.mark.parametrize("how", ["in its code", "in a module", "by a functional collective"])
def test_exchanges_between_ranks(how: str) -> None:
    """A graph of them would mix batches of several ranks, and hang where one has a batch less (seen, where it became a
    single call)."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UntraceableModelError, match="exchanges tensors with other ranks"):
            traced(Toy(Exchanging(how)), toy_batch(2, 11))
    finally:
        dist.destroy_process_group()
