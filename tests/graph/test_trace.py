"""What the rest of the package relies on in a traced graph. Each item was once found wrong by experiment.

Seen to fail when broken: fast path (without the packed-sequence patch), packed sequences (with it always on), sizes
(without moving their nodes), any batch (tracing the given one as it is), masks (comparing rows only), hooks (executor
calls `forward`).
"""

import functools
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from families import (
    Toy,
    assert_same,
    causal_lm,
    executed,
    layer_names,
    leaf_nodes,
    linear_names,
    randomized,
    token_batch,
    toy_batch,
    traced,
)
from torch import Tensor, fx, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BatchEncoding,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    masking_utils,
)
from transformers.modeling_outputs import BaseModelOutput

from lightning_compress.graph import trace as tracing
from lightning_compress.graph.fallback import OF_ONE_SIZE
from lightning_compress.graph.leaf import Leaf, leaf_input
from lightning_compress.graph.masks import token_mask_for
from lightning_compress.graph.stages import Schedule, subgraphs
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.graph.trace import trace, violated_guards

aten = torch.ops.aten


def tiny_t5() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 97}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    batch = {**token_batch(2, 9), **{f"decoder_{key}": value for key, value in token_batch(2, 9).items()}}
    return randomized(model), batch


def test_encoder_output_is_one_value_for_every_decoder_block() -> None:
    model, batch = tiny_t5()
    graph = traced(model, batch)
    readers = [*leaf_nodes(graph, "EncDecAttention.k"), *leaf_nodes(graph, "EncDecAttention.v")]
    assert len(readers) == 4
    assert len({leaf_input(node) for node in readers}) == 1
    # keys and values of the second block are computed from a value far before its span
    second = next(span for span in graph.spans if span.name == "decoder.block.1")
    assert list(graph.graph.nodes).index(leaf_input(readers[1])) < second.first


def test_each_value_finds_the_mask_of_its_own_sequence() -> None:
    """Encoder and decoder are equally long in the given batch; their lengths are different symbols all the same."""
    model, batch = tiny_t5()
    graph = traced(model, batch)

    def mask(leaf: str) -> str:
        found = token_mask_for(graph, leaf_input(leaf_nodes(graph, leaf)[0]))
        return found.node.name if found is not None else "none"

    assert mask("encoder.block.0.layer.0.SelfAttention.q") == "attention_mask"
    assert mask("decoder.block.0.layer.0.SelfAttention.q") == "decoder_attention_mask"
    assert mask("decoder.block.0.layer.1.EncDecAttention.q") == "decoder_attention_mask"
    assert mask("decoder.block.0.layer.1.EncDecAttention.v") == "attention_mask"


def test_flattened_tokens_find_their_mask() -> None:
    """[B * L, C], as experts get it."""
    graph = traced(causal_lm("qwen2_moe"), token_batch(2, 9))
    value = leaf_input(leaf_nodes(graph, "layers.0.mlp.shared_expert.gate_proj")[0])
    assert value.meta["val"].ndim == 2
    found = token_mask_for(graph, value)
    assert found is not None
    assert found.node.name == "attention_mask"


def test_shared_layers_are_called_repeatedly() -> None:
    sizes = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = randomized(AlbertForMaskedLM(AlbertConfig(**sizes, num_hidden_layers=3, vocab_size=97)))
    graph = traced(model, token_batch(2, 9))
    assert len(leaf_nodes(graph, "attention.query")) == 3
    assert [span.name for span in graph.spans] == ["albert.encoder.albert_layer_groups.0"] * 3
    assert_same(model, graph, token_batch(3, 5), token_batch(1, 4))


def test_members_of_a_group_need_not_be_consecutive() -> None:
    graph = traced(causal_lm("gptj"), token_batch(2, 9))
    names = ("0.attn.q_proj", "0.attn.k_proj", "0.attn.v_proj", "0.mlp.fc_in")
    members = [leaf_nodes(graph, name)[0] for name in names]
    assert len({leaf_input(member) for member in members}) == 1
    order = list(graph.graph.nodes)
    assert order.index(leaf_nodes(graph, "0.attn.out_proj")[0]) < order.index(members[-1])


def test_members_called_with_keywords() -> None:
    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(input=x) + self.b(x)

    model = Toy(Middle())
    graph = traced(model, toy_batch(2, 9))
    keyword, positional = leaf_nodes(graph, "middle.a")[0], leaf_nodes(graph, "middle.b")[0]
    assert keyword.kwargs
    assert leaf_input(keyword) is leaf_input(positional)
    assert_same(model, graph, toy_batch(3, 4))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [(1, 7), (2, 1), (1, 1), (3, 9), (4, 4)])
def test_any_batch_may_be_the_one_that_is_traced(shape: tuple[int, int]) -> None:
    """Also rows that equal the length, one row, one token."""
    model = causal_lm("llama", use_cache=False)
    graph = traced(model, token_batch(*shape))
    assert_same(model, graph, token_batch(3, 9), token_batch(1, 5), token_batch(2, 1), token_batch(1, 1))


def test_causal_attention_keeps_its_fast_path() -> None:
    model = causal_lm("llama")
    graph = traced(model, {"input_ids": token_batch(2, 9)["input_ids"]})
    attention = [node for node in graph.graph.nodes if node.target is aten.scaled_dot_product_attention.default]
    assert len(attention) == 2
    for node in attention:
        _, _, _, mask, _, is_causal = node.args
        assert (mask, is_causal, node.kwargs["enable_gqa"]) == (None, True, True)
    assert all(span.last - span.first < 40 for span in graph.spans)
    assert len(graph.graph.nodes) < 100


def test_packed_sequences_stay_apart() -> None:
    """Positions that start anew within a row: attention must not cross, as in the model."""
    model = causal_lm("llama", use_cache=False)

    def packed(rows: int, *lengths: int) -> dict[str, Tensor]:
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(rows, -1).clone()
        return {"input_ids": token_batch(rows, sum(lengths))["input_ids"], "position_ids": positions}

    assert_same(model, traced(model, packed(2, 5, 6)), packed(2, 5, 6), packed(3, 4, 2, 3), packed(1, 8))


def test_tensors_are_named_as_in_the_root() -> None:
    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 3.0))
            self.linear = nn.Linear(8, 8)
            self.register_buffer("shift", torch.ones(8))
            self.plain = torch.full((8,), 2.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * self.scale + self.shift) * self.plain + torch.tensor(0.5) + self.plain

    model = Toy(Middle())
    graph = traced(model, toy_batch(2, 9))
    names = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    assert {"middle.scale", "middle.shift"} < names
    assert names - {"middle.scale", "middle.shift"} == set(graph.constants)
    assert len(graph.constants) == 2
    assert_same(model, graph, toy_batch(3, 4))
    with torch.no_grad():
        model.middle.scale.mul_(2)
    assert_same(model, graph, toy_batch(3, 4))


def test_attention_sinks_are_direct_parameters() -> None:
    graph = traced(causal_lm("gpt_oss"), token_batch(2, 9))
    named = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    assert {"model.layers.0.self_attn.sinks", "model.layers.1.self_attn.sinks"} <= named


def test_values_are_not_kept_for_their_sizes() -> None:
    """A size is read right behind the value it belongs to; otherwise large values would live across stages."""
    graph = traced(causal_lm("qwen3_moe"), token_batch(2, 9))
    nodes = list(graph.graph.nodes)
    readers = [node for node in nodes if node.target is aten.sym_size.int]
    assert readers
    for node in readers:
        between = nodes[nodes.index(node.args[0]) + 1 : nodes.index(node)]
        assert all(other.op == "placeholder" or other in readers for other in between)


def test_spans_hold_the_calls_of_their_modules() -> None:
    graph = traced(causal_lm("llama"), token_batch(2, 9))
    nodes = list(graph.graph.nodes)
    for span in graph.spans:
        names = [node.target.name for node in nodes[span.first : span.last + 1] if isinstance(node.target, Leaf)]
        assert names
        assert all(name.startswith(span.name + ".") for name in names)
        outside = [*nodes[: span.first], *nodes[span.last + 1 :]]
        assert not [n for n in outside if isinstance(n.target, Leaf) and n.target.name.startswith(span.name + ".")]


@pytest.mark.slow
def test_looking_repeated_operations_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As models of many layers have it."""
    model, batch = causal_lm("llama"), token_batch(2, 9)
    found = []
    for least in (0, 1000):
        monkeypatch.setattr(tracing, "_LAYERS_TO_CACHE", least)
        graph = traced(model, batch)
        order = {node: number for number, node in enumerate(graph.graph.nodes)}
        nodes = [(n.op, n.target, [order[i] for i in n.all_input_nodes], str(n.meta.get("val"))) for n in order]
        found.append((nodes, graph.spans, list(map(str, graph.guards)), graph.fallbacks))
    assert found[0] == found[1]


def test_model_is_left_as_it_was() -> None:
    """Instance-level forwards, hooks, configuration and transformers' own functions."""
    model = causal_lm("qwen3_moe")
    layer, linear = model.model.layers[0], model.model.layers[0].self_attn.q_proj
    layer.forward = functools.partial(type(layer).forward, layer)
    plain = linear.forward
    linear.forward = lambda x: plain(x) * 2
    model.config._experts_implementation = "eager"
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    detect, config = masking_utils.find_packed_sequence_indices, model.config.to_dict()
    graph = traced(model, token_batch(2, 9))
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == attributes
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert masking_utils.find_packed_sequence_indices is detect
    assert model.config.to_dict() == config
    assert (model.config.use_cache, model.config._experts_implementation) == (True, "eager")
    assert_same(model, graph, token_batch(3, 7))


TABLES: dict[int, Tensor] = {}


def in_globals(size: int) -> Tensor:
    return TABLES.setdefault(size, torch.linspace(0, 1, size))


@functools.cache
def in_cache(size: int) -> Tensor:
    return torch.linspace(0, 1, size)


class Tables:
    tables: ClassVar[dict[int, Tensor]] = {}

    @classmethod
    def of(cls, size: int) -> Tensor:
        return cls.tables.setdefault(size, torch.linspace(0, 1, size))


def memoized() -> Callable[[int], Tensor]:
    tables: dict[int, Tensor] = {}
    return lambda size: tables.setdefault(size, torch.linspace(0, 1, size))


in_closure = memoized()


@pytest.mark.parametrize("by", ["globals", "cache", "class", "closure"])
@pytest.mark.parametrize("in_leaf", [False, True])
def test_what_is_cached_outside_of_modules_is_no_fake(by: str, in_leaf: bool) -> None:
    """Seen to fail: whoever ran the model afterwards, single calls of the graph among them, got fake tensors."""

    class Adding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if by == "class":
                return x + Tables.of(8)
            return x + {"globals": in_globals, "cache": in_cache, "closure": in_closure}[by](8)

    model = Toy(nn.Sequential(Adding(), nn.Linear(8, 8)) if in_leaf else Adding())
    TABLES.clear()
    Tables.tables.clear()
    in_cache.cache_clear()
    graph = traced(model, toy_batch(2, 9))
    assert_same(model, graph, toy_batch(2, 9), toy_batch(3, 5))


def test_hooks_run_once_and_with_their_module() -> None:
    model = Toy(nn.GELU())
    seen: list[int] = []
    model.first.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.first.register_forward_hook(lambda module, args, output: seen.append(len(output)) or output + 1)
    graph = traced(model, toy_batch(2, 9))
    seen.clear()
    executed(graph, model, toy_batch(4, 5))
    assert seen == [4]
    assert_same(model, graph, toy_batch(3, 4))


def test_a_model_without_weights_in_memory() -> None:
    """On the meta device the graph is the same."""
    model = causal_lm("llama")
    with torch.device("meta"):
        empty = LlamaForCausalLM(model.config).eval()
    assert str(traced(empty, token_batch(2, 9)).graph) == str(traced(model, token_batch(2, 9)).graph)


def test_violated_guards_name_the_condition() -> None:
    graph = traced(causal_lm("mpt"), token_batch(2, 9))
    assert violated_guards(graph, token_batch(5, 100)) == []
    assert violated_guards(graph, token_batch(1, 1)) == []
    assert any("128" in problem for problem in violated_guards(graph, token_batch(2, 200)))
    assert "attention_mask" in violated_guards(graph, {"input_ids": token_batch(2, 9)["input_ids"]})[0]
    mixed = {**token_batch(2, 9), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    assert violated_guards(graph, mixed) == ["attention_mask: size 1 is 8, not 9"]


def test_sliding_window_is_decided_for_lengths_like_the_traced_one() -> None:
    """Within the window the model needs no mask; the graph that was traced there says so to longer batches."""
    model = causal_lm("mistral", sliding_window=24, use_cache=False)
    ids = {shape: {"input_ids": token_batch(*shape)["input_ids"]} for shape in ((2, 13), (2, 40), (3, 33))}
    short, long = traced(model, ids[2, 13]), traced(model, ids[2, 40])
    assert violated_guards(short, ids[2, 40])
    assert violated_guards(long, ids[2, 13])
    assert_same(model, long, ids[2, 40], ids[3, 33])
    assert_same(model, short, ids[2, 13])


def test_batches_of_any_structure() -> None:
    encoding = BatchEncoding({"input_ids": torch.ones(2, 3), "extra": "text"})
    output = BaseModelOutput(last_hidden_state=torch.ones(1))
    tensors, structure = flatten_batch([encoding, (torch.zeros(4), 7), output])
    assert structure.paths == ("0.input_ids", "1.0", "2.last_hidden_state")
    rebuilt = structure.build([tensor + 1 for tensor in tensors])
    assert isinstance(rebuilt[0], BatchEncoding)
    assert isinstance(rebuilt[2], BaseModelOutput)
    assert rebuilt[0]["extra"] == "text"
    assert rebuilt[0]["input_ids"].sum() == 12
    assert rebuilt[2].last_hidden_state.item() == 2
    assert encoding["input_ids"].sum() == 6, "the given batch is not changed"


def test_step_of_a_module_around_the_model() -> None:
    """As a LightningModule: names are those in the root, tuples are batches, a scalar loss is an output."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = causal_lm("llama")

        def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            ids, mask = batch
            return self.net(input_ids=ids, attention_mask=mask, labels=ids).loss

    root = Root().eval()
    graph = trace(
        root, root.step, tuple(token_batch(2, 9).values()),
        leaf_names=linear_names(root), boundary_names=layer_names(root),
    )  # fmt: skip
    batch = tuple(token_batch(3, 7).values())
    assert graph.placeholders == ("0", "1")
    assert [span.name for span in graph.spans] == ["net.model.layers.0", "net.model.layers.1"]
    torch.testing.assert_close(executed(graph, root, batch)[""], root.step(batch).detach())


def test_nothing_runs_on_real_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is traceable is traced on fake tensors only: its size does not matter."""
    model = causal_lm("llama")
    real: list[str] = []
    original = nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        real.append(type(weight).__name__)
        return original(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", linear)
    graph = traced(model, token_batch(2, 9))
    assert isinstance(graph.graph, fx.Graph)
    assert real
    assert set(real) == {"FakeTensor"}


def test_shapes_as_arguments_and_calls_without_tensors() -> None:
    """As position embeddings of BART and ProphetNet are called."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 8)

        def forward(self, shape: torch.Size, device: torch.device) -> Tensor:
            out: Tensor = self.table(torch.arange(shape[1], device=device)).expand(*shape[:2], 8)
            return out

    class Around(Toy):
        def __init__(self) -> None:
            super().__init__(Positions())

        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            positions = self.middle(ids.shape, ids.device)
            return {"logits": self.last(self.first(x) + positions)}

    model = Around()
    graph = traced(model, toy_batch(2, 9))
    assert "middle" in {node.target.name for node in leaf_nodes(graph)}  # type: ignore[union-attr]
    parts = subgraphs(graph, frozenset({"first", "last"}), lambda name: name, Schedule.STAGED)
    assert [group.members for part in parts for step in part.steps for group in step.solve] == [("first",), ("last",)]
    assert_same(model, graph, toy_batch(3, 5), toy_batch(1, 12))


def test_a_linear_of_a_buffer_is_watched() -> None:
    """As those of Swin v2's relative positions: a buffer is no value of the run."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("coordinates", torch.randn(1, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.linear(self.coordinates)
            return out

    model = Toy(Biased())
    graph = traced(model, toy_batch(2, 9))
    parts = subgraphs(graph, frozenset({"middle.linear"}), lambda name: name, Schedule.STAGED)
    (source,) = [source for part in parts for step in part.steps for source in step.observe]
    assert source.inner == "middle.linear"


def test_a_length_that_the_model_insists_on() -> None:
    """A batch of 12 tokens is traced with 11, where the model takes another path: then the length is a constant."""

    class Root(Toy):
        def forward(self, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
            return super().forward(x if x.shape[1] >= 12 else x * 2, ids)

    model = Root(nn.GELU())
    graph = traced(model, toy_batch(2, 12))
    assert violated_guards(graph, toy_batch(4, 12)) == []
    assert_same(model, graph, toy_batch(4, 12))
    assert any("size 1 is 11, not 12" in problem for problem in violated_guards(graph, toy_batch(4, 11)))
    assert "one length only" in graph.fallbacks[0].reason
    assert graph.fallbacks[0].how == OF_ONE_SIZE
