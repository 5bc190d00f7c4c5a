"""Cutting graphs: which modules are solved together, where each schedule cuts, and what lives how long."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import VOCAB, Skipping, tiny_llama, token_batches
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, GPTJConfig, GPTJForCausalLM, T5Config, T5ForConditionalGeneration

from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.shared_inputs import Group
from lightning_compress.graph.stages import (
    Schedule,
    Step,
    Subgraph,
    computed_nodes,
    datafree_subgraphs,
    last_steps,
    segments,
    subgraphs,
)
from lightning_compress.graph.targets import sequential_modules
from lightning_compress.graph.trace import Traced, trace

STAGED, BLOCK, BASIC = Schedule.STAGED, Schedule.BLOCK, Schedule.BASIC
Layout = Callable[..., tuple[Subgraph, ...]]


class Model:
    """A model traced once, to be laid out in several ways."""

    def __init__(
        self, model: nn.Module, batch: Any, step: Callable[[Any], Any] | None = None, ignore: Sequence[str] = ()
    ) -> None:
        self.names = tuple(n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in ignore)
        boundaries = sequential_modules(model, None, self.names)
        self.traced: Traced = trace(
            model, step or (lambda b: model(**b)), batch, leaf_names=self.names, boundary_names=boundaries
        )

    def parts(
        self, schedule: Schedule, key: Callable[[str], object] = lambda name: 0, names: Sequence[str] | None = None
    ) -> tuple[Subgraph, ...]:
        return subgraphs(self.traced, frozenset(self.names if names is None else names), key, schedule)


def steps(parts: Sequence[Subgraph]) -> list[Step]:
    return [step for part in parts for step in part.steps]


def groups(parts: Sequence[Subgraph]) -> list[tuple[str, ...]]:
    return [group.members for step in steps(parts) for group in step.solve]


def short(members: Sequence[str]) -> str:
    return "+".join(name.rpartition(".")[2] for name in members)


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model(tiny_llama(2), token_batches()[0], ignore=["lm_head"])


@pytest.fixture(scope="module")
def t5() -> Model:
    config = T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_decoder_layers=3,
        num_heads=2,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    ids = token_batches()[0]["input_ids"]
    return Model(
        T5ForConditionalGeneration(config).eval(),
        {"input_ids": ids, "decoder_input_ids": ids[:, :7]},
        ignore=["lm_head"],
    )


@pytest.fixture(scope="module")
def albert() -> Model:
    config = AlbertConfig(
        vocab_size=VOCAB,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
    )
    torch.manual_seed(0)
    return Model(AlbertModel(config).eval(), token_batches()[0])


@pytest.mark.parametrize("schedule", [STAGED, BLOCK, BASIC])
def test_members_of_a_group_share_their_input(llama: Model, schedule: Schedule) -> None:
    expected = ["q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj"] * 2
    assert [short(members) for members in groups(llama.parts(schedule))] == expected


@pytest.mark.parametrize("schedule", [STAGED, BLOCK, BASIC])
def test_everything_is_solved_once(llama: Model, t5: Model, albert: Model, schedule: Schedule) -> None:
    for model in (llama, t5, albert):
        solved = [name for members in groups(model.parts(schedule)) for name in members]
        assert sorted(solved) == sorted(model.names)


def test_another_key_is_another_group(llama: Model) -> None:
    """Two schemes on one input: one cut, one observation, two solves."""
    parts = llama.parts(STAGED, key=lambda name: name.endswith("v_proj"))
    assert [short(members) for members in groups(parts)][:3] == ["q_proj+k_proj", "v_proj", "o_proj"]
    first = next(step for step in steps(parts) if step.solve)
    assert len(first.solve) == 2
    assert len(first.observe) == 1


def test_staged_runs_every_node_once_up_to_the_last_group(llama: Model) -> None:
    """Broken once by leaving `_trimmed` out, and by starting each step one node late."""
    run = [node for step in steps(llama.parts(STAGED)) for node in step.nodes]
    everything = computed_nodes(llama.traced.graph)
    assert run == everything[: len(run)]
    behind = [node.target.name for node in everything[len(run) :] if isinstance(node.target, Leaf)]
    assert behind[0] == "model.layers.1.mlp.down_proj", "nothing reads what the last solved modules compute"
    assert "model.norm" in behind
    assert "lm_head" in behind


def test_staged_cuts_right_before_the_first_member(llama: Model) -> None:
    position = {node: at for at, node in enumerate(computed_nodes(llama.traced.graph))}
    calls = {node.target.name: at for node, at in position.items() if isinstance(node.target, Leaf)}
    done = 0
    for step in steps(llama.parts(STAGED)):
        done += len(step.nodes)
        for group in step.solve:
            assert done == calls[group.members[0]]
            assert all(position[source.node] < done for source in group.sources)


def test_recompute_runs_twice_what_leads_to_a_wide_input(llama: Model) -> None:
    """From the inputs of gate and up to the product of both, which is twice as wide, and nothing else."""
    found = steps(llama.parts(Schedule.RECOMPUTE))
    assert [short(step.solve[0].members) for step in found if not step.keep] == ["down_proj"] * 2
    for step, following in itertools.pairwise(found):
        if not step.keep:
            assert following.nodes[: len(step.nodes)] == step.nodes
    kept = [node for step in found if step.keep for node in step.nodes]
    everything = computed_nodes(llama.traced.graph)
    assert kept == everything[: len(kept)]


def test_block_runs_twice_and_keeps_once(llama: Model) -> None:
    first, *layers = llama.parts(BLOCK)
    assert [step.keep for step in first.steps] == [True], "the embedding quantizes nothing and runs once"
    assert [[step.keep for step in part.steps] for part in layers] == [[False, True], [False]], (
        "the last layer need not go on"
    )
    observing, going_on = layers[0].steps
    assert observing.nodes == going_on.nodes
    assert (len(observing.solve), len(going_on.solve), going_on.observe) == (4, 0, ())


def test_basic_is_one_pass_over_everything(llama: Model) -> None:
    (part,) = llama.parts(BASIC)
    (step,) = part.steps
    assert list(step.nodes) == computed_nodes(llama.traced.graph)
    assert len(step.solve) == 8


def test_subgraphs_are_the_layers_with_the_weights_they_need(llama: Model) -> None:
    for schedule in (STAGED, BLOCK):
        parts = llama.parts(schedule)
        assert [part.name for part in parts] == ["model.embed_tokens", "model.layers.0", "model.layers.1"]
        assert parts[0].modules[0] == "model.embed_tokens"
        for number in (0, 1):
            part = parts[number + 1]
            assert set(part.solved) == {name for name in llama.names if f"layers.{number}." in name}
            assert all(name.startswith(f"model.layers.{number}.") for name in part.modules)
            assert set(part.solved) < set(part.modules), "norms and activations are needed too"


def test_segments_cover_the_graph_in_order(llama: Model, t5: Model) -> None:
    for model in (llama, t5):
        assert [node for part in segments(model.traced) for node in part.nodes] == computed_nodes(model.traced.graph)


def test_last_steps(llama: Model) -> None:
    """Broken once by leaving observed sources out."""
    for schedule in (STAGED, BLOCK, BASIC):
        parts = llama.parts(schedule)
        last = last_steps(parts)
        readers: dict[Any, int] = {}
        for number, step in enumerate(steps(parts)):
            for node in step.nodes:
                readers.update(dict.fromkeys(node.all_input_nodes, number))
            readers.update({source.node: number for source in step.observe})
        assert last == readers


def test_sources_are_forgotten_after_their_last_group(llama: Model, t5: Model, albert: Model) -> None:
    for model in (llama, t5, albert):
        for schedule in (STAGED, BLOCK, BASIC):
            alive: set[Any] = set()
            for step in steps(model.parts(schedule)):
                alive |= set(step.observe)
                assert {source for group in step.solve for source in group.sources} <= alive
                alive -= set(step.forget)
            assert not alive


def test_members_apart() -> None:
    """GPT-J reads one norm with q/k/v and, many nodes later, with the MLP's first layer."""
    torch.manual_seed(0)
    config = GPTJConfig(
        vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    model = Model(GPTJForCausalLM(config).eval(), token_batches()[0], ignore=["lm_head"])
    for schedule in (STAGED, BLOCK, BASIC):
        assert [short(members) for members in groups(model.parts(schedule))] == [
            "q_proj+k_proj+v_proj+fc_in",
            "out_proj",
            "fc_out",
        ]
    graph = computed_nodes(model.traced.graph)
    calls = {node.target.name.rpartition(".")[2]: at for at, node in enumerate(graph) if isinstance(node.target, Leaf)}
    assert calls["q_proj"] < calls["out_proj"] < calls["fc_in"], "this model is no test of members apart any more"


def test_one_input_for_many_subgraphs(t5: Model) -> None:
    """The encoder's output: observed once, solved in each decoder block for the members that are there."""
    for schedule in (STAGED, BLOCK):
        parts = t5.parts(schedule)
        cross = [
            (part.name, step, group)
            for part in parts
            for step in part.steps
            for group in step.solve
            if "EncDecAttention.k" in group.members[0]
        ]
        assert [name for name, _, _ in cross] == [f"decoder.block.{number}" for number in range(3)]
        assert all(len(group.members) == 2 for _, _, group in cross)
        sources = {group.sources for _, _, group in cross}
        assert len(sources) == 1
        ((source,),) = sources
        assert sum(source in step.observe for step in steps(parts)) == 1
        assert [source in step.forget for _, step, _ in cross] == [False, False, True]
    (whole,) = [group for group in groups(t5.parts(BASIC)) if "EncDecAttention.k" in group[0]]
    assert len(whole) == 6, "with everything onloaded at once there is one group of all of them"


def test_a_value_that_two_blocks_read() -> None:
    """Of two passes the first sees it as it was before the block was solved, so the next block observes it anew, and
    nothing of it is kept in between."""
    model = Skipping()
    skipping = Model(model, torch.randn(3, 5, 32), model)
    for schedule, num_observed in ((STAGED, 1), (BLOCK, 2), (BASIC, 1)):
        layout = steps(skipping.parts(schedule))
        by_member = {name: group for step in layout for group in step.solve for name in group.members}
        (source,) = by_member["layers.1.skip"].sources
        assert by_member["layers.0.down"].sources == (source,)
        observed = [step for step in layout if source in step.observe]
        assert len(observed) == num_observed
        assert sum(source in step.forget for step in layout) == num_observed
        if schedule is BLOCK:
            assert all(source in step.forget for step in observed)


def test_shared_layers_are_solved_once(albert: Model) -> None:
    """On the inputs of all calls up to the first cut behind one of them; the graph holds three calls of each."""
    query = "encoder.albert_layer_groups.0.albert_layers.0.attention.query"
    calls = sum(node.target == Leaf(query) for node in albert.traced.graph.nodes)
    assert calls == 3
    counts = {}
    for schedule in (STAGED, BLOCK, BASIC):
        (group,) = [group for step in steps(albert.parts(schedule)) for group in step.solve if query in group.members]
        assert short(group.members) == "query+key+value"
        counts[schedule] = len(group.sources)
    assert counts == {STAGED: 1, BLOCK: 1, BASIC: 3}


def test_opaque_leaf() -> None:
    """A layer that only runs as a whole: observed from inside, run twice, cut only around it."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu()) if bool(x.sum() > 0) else self.down(self.up(-x))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.layers = nn.ModuleList([Mixer(), Mixer()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = x + layer(x)
            return x

    torch.manual_seed(0)
    stack = Stack()
    with pytest.warns(UserWarning, match="Mixer .* recorded as a single call"):
        model = Model(stack, torch.randn(3, 5, 4), stack)
    parts = model.parts(STAGED)
    inner = [
        (short(group.members), group.sources[0].inner)
        for step in steps(parts)
        for group in step.solve
        if group.sources[0].inner
    ]
    assert inner == [("down", "layers.0.down"), ("up", "layers.0.up"), ("down", "layers.1.down"), ("up", "layers.1.up")]
    whole = [step for step in steps(parts) if any(source.inner for source in step.observe)]
    assert all(len(step.nodes) == 1 and not step.keep for step in whole)


def test_datafree() -> None:
    parts = datafree_subgraphs([("layers.0", ["layers.0.a", "layers.0.b"]), ("head", ["head"])])
    assert [part.solved for part in parts] == [("layers.0.a", "layers.0.b"), ("head",)]
    assert all(step.nodes == () and step.observe == () for step in steps(parts))
    assert all(isinstance(group, Group) and group.sources == () for step in steps(parts) for group in step.solve)


def test_constants_of_the_trace_are_no_weights() -> None:
    """A tensor made in the forward belongs to no module. Broken once by onloading it from one."""

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.shift = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
            return self.b(x * self.shift)

    module = Masking()
    model = Model(module, torch.randn(2, 3, 4), module)
    tensors = [name for part in model.parts(STAGED) for name in part.tensors]
    assert model.traced.constants
    assert tensors == ["shift"]
