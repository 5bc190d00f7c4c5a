"""What experts are solved with: the tokens that were routed to them, and where those are few, what all of them saw.

Grams are compared with a loop over transformers' own experts in float64. Seen to fail: with padding tokens left in,
with rows taken from the expert before, and with the lent part left out or counted as routed.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from helpers import (
    UNCHANGING,
    compress_in_memory,
    gram_sum,
    make_representable,
    padded,
    ragged_batches,
    recipe,
    seen_statistics,
    tiny_mixtral,
    token_batches,
)
from test_reference import drift_in, inputs_of
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig

from lightning_compress.errors import CalibrationDataError
from lightning_compress.graph.unfold import unfolded
from lightning_compress.report.experts import ExpertCoverageWarning
from lightning_compress.statistics import InputGram, MinMax

SCHEDULES = ["staged", "recompute", "block", "basic"]
STATIC = {
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor", "dynamic": False},
}


def routed_grams(model: nn.Module, batches: list[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Sum of x xᵀ over the tokens of every expert's Linear, and their number, with no code of ours."""
    grams: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    mask: list[Tensor] = []

    def add(name: str, x: Tensor) -> None:
        grams[name] = grams.get(name, 0) + x.double().T @ x.double()
        counts[name] = counts.get(name, 0) + len(x)

    def hook(path: str) -> Any:
        def observe(experts: Any, args: tuple[Tensor, ...]) -> None:
            hidden, chosen, _ = args
            for number in range(experts.num_experts):
                of_expert = (chosen == number).any(-1) & mask[-1]
                x = hidden[of_expert]
                gate, up = (x @ experts.gate_up_proj[number].T).chunk(2, dim=-1)
                for each, value in (("w1", x), ("w3", x), ("w2", torch.nn.functional.silu(gate) * up)):
                    add(f"{path}.{number}.{each}", value)

        return observe

    handles = [
        module.register_forward_pre_hook(hook(path))
        for path, module in model.named_modules()
        if path.endswith("experts")
    ]
    for batch in batches:
        mask.append(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).reshape(-1).bool())
        with torch.no_grad():
            model(**batch)
    for handle in handles:
        handle.remove()
    return grams, counts


def unchanging_mixtral(num_experts: int = 4) -> nn.Module:
    model = tiny_mixtral(2, num_experts)
    with unfolded(model):
        make_representable(model)
    return model


@pytest.mark.filterwarnings("ignore::lightning_compress.report.experts.ExpertCoverageWarning")
@pytest.mark.parametrize("batches", [padded(token_batches()), ragged_batches()], ids=["padded", "ragged"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_routed_tokens_only(monkeypatch: pytest.MonkeyPatch, schedule: str, batches: list[Any]) -> None:
    model = unchanging_mixtral()
    grams, counts = routed_grams(model, batches)
    seen = seen_statistics(monkeypatch)
    report = compress_in_memory(model, batches, recipe(**UNCHANGING), schedule=schedule)
    assert len(grams) == 2 * 4 * 3
    records = {record.module: record for record in report.modules}
    for name, gram in grams.items():
        statistic = cast(InputGram, seen[name][InputGram])
        assert statistic.num_tokens == records[name].num_tokens == counts[name], name
        assert records[name].num_lent == statistic.num_lent == max(32 - counts[name], 0)
        statistic._prior = None
        torch.testing.assert_close(gram_sum(seen[name]), gram, rtol=1e-5, atol=1e-5)


def never_chosen(model: nn.Module, number: int) -> None:
    """Let the routers of a Mixtral shun an expert: the hidden state has a channel that is always large."""
    with torch.no_grad():
        cast(Any, model).model.embed_tokens.weight.normal_()[:, 0] = 3
        for layer in cast(Any, model).model.layers:
            layer.mlp.gate.weight.normal_()[:, 0] = 0
            layer.mlp.gate.weight[number] = 0
            layer.mlp.gate.weight[number, 0] = -500


def test_starved_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as channels are missing are lent: of all experts' mean where they read the hidden state, of its
    mean energy where their channels are their own."""
    model = unchanging_mixtral()
    never_chosen(model, 2)
    batches = token_batches(1, rows=2, length=12)
    grams, counts = routed_grams(model, batches)
    seen = seen_statistics(monkeypatch)
    with pytest.warns(ExpertCoverageWarning, match="too few tokens for many experts"):
        report = compress_in_memory(model, batches, recipe(**UNCHANGING))
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"
        assert counts[f"{prefix}.2.w1"] == 0 < min(counts[f"{prefix}.{n}.w1"] for n in (0, 1, 3))
        for each in ("w1", "w2"):
            total = sum(grams[f"{prefix}.{n}.{each}"] for n in range(4)) / 48  # 24 tokens, two experts each
            prior = total if each == "w1" else torch.eye(32, dtype=torch.float64) * total.diagonal().mean()
            for number in range(4):
                name = f"{prefix}.{number}.{each}"
                lent = max(32 - counts[name], 0)
                expected = (grams[name] + lent * prior) / (counts[name] + lent)
                found = cast(InputGram, seen[name][InputGram])
                torch.testing.assert_close(found.matrix().double(), expected, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(found.diagonal().double(), expected.diagonal(), rtol=1e-5, atol=1e-6)
    summary = report.summary()
    fewest, most = 0, max(counts.values())
    assert f"experts: 8 in 2 layers saw {fewest} to {most} tokens each" in summary
    assert "8 saw fewer than they have channels (2 none)" in summary


def test_static_ranges_of_an_expert_without_tokens_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_mixtral(1, 4)
    never_chosen(model, 1)
    seen = seen_statistics(monkeypatch)
    with pytest.warns(ExpertCoverageWarning):
        compress_in_memory(model, token_batches(1), recipe(scheme=STATIC))
    ranges = [cast(MinMax, seen[f"model.layers.0.mlp.experts.{number}.w2"][MinMax]) for number in range(4)]
    assert ranges[1].num_tokens == 0 < ranges[0].num_tokens
    assert ranges[1].maximum == max(each.maximum for each in ranges)
    assert ranges[1].minimum == min(each.minimum for each in ranges)


def test_nothing_but_padding_is_refused() -> None:
    """Seen to fail: experts rounded as if all directions were alike, with the advice of 1 times as many samples."""
    empty = [{"input_ids": torch.ones(1, 6, dtype=torch.long), "attention_mask": torch.zeros(1, 6, dtype=torch.long)}]
    with pytest.raises(CalibrationDataError, match="'attention_mask' marks every token of all 1 calibration batches"):
        compress_in_memory(tiny_mixtral(1, 4), empty, recipe(ignore=["lm_head", "re:.*self_attn"]))


def test_routers_are_left_alone_unless_they_are_named() -> None:
    class Block(nn.Module):
        """A layer whose router is a Linear."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = tiny_mixtral(1, 4).model.layers[0].mlp.experts
            self.router, self.weigh, self.out = nn.Linear(32, 4), nn.Linear(32, 1), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
            return self.out(self.experts(x, chosen, weights) * self.weigh(x))

    batches = [torch.randn(40, 32) for _ in range(2)]
    report = compress_in_memory(Block(), batches, recipe())
    assert {record.module.partition(".")[0] for record in report.modules} == {"experts", "out"}
    assert [entry.module for entry in report.excluded if "chooses or weighs experts" in entry.reason] == [
        "router",
        "weigh",
    ]
    report = compress_in_memory(Block(), batches, recipe(targets=["Linear", "router"]))
    assert {record.module.partition(".")[0] for record in report.modules} == {"experts", "out", "router"}


def test_recipes_with_a_correction_leave_experts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The original model may send a token to other experts. It runs beside the quantized one all the same, and what
    comes behind the experts is corrected by what two forwards say. Seen to fail: with quantized experts in both."""
    model, batches = tiny_mixtral(2, 4), token_batches(9, rows=4)
    original, seen = deepcopy(model), seen_statistics(monkeypatch)
    report = compress_in_memory(model, batches, recipe(3, correct="inputs"))
    experts = [record for record in report.modules if ".experts." in record.module]
    others = [record for record in report.modules if ".experts." not in record.module]
    assert len(experts) == 2 * 4 * 3
    assert all(not record.correction and "Not corrected" in record.notes[0] for record in experts)
    assert len(others) == 8
    assert all(record.correction for record in others)
    name = "model.layers.1.self_attn.q_proj"
    ours, theirs = (inputs_of(each, batches, [name])[name] for each in (model, original))
    weight = original.get_submodule(name).get_parameter("weight").detach()
    lack = drift_in(seen[name]).lack(False)
    x = torch.cat(ours)
    expected = (torch.cat(theirs) - x) @ weight.double().t()
    found = lack.missing(weight, slice(0, len(weight))).double()
    scale = float(expected.abs().max() * x.abs().max())
    torch.testing.assert_close(found, expected.t() @ x / len(x), rtol=1e-3, atol=1e-5 * scale)
    assert expected.any()


def tiny_llama4() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"intermediate_size_mlp": 32, "interleave_moe_layer_step": 1, "num_local_experts": 4, "head_dim": 16}
    config = Llama4TextConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        **sizes,
    )
    model: nn.Module = Llama4ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    with unfolded(model):
        make_representable(model)
    return model


@pytest.mark.filterwarnings("ignore::lightning_compress.report.experts.ExpertCoverageWarning")
@pytest.mark.parametrize("batches", [padded(token_batches()), ragged_batches()], ids=["padded", "ragged"])
def test_a_stack_called_with_every_token_sees_routed_ones_only(
    monkeypatch: pytest.MonkeyPatch, batches: list[Any]
) -> None:
    """Llama 4 gives each expert all tokens, most of them zeros. Broken once by counting those: as many tokens each."""
    model = tiny_llama4()
    experts: Any = model.get_submodule("model.layers.1.feed_forward.experts")
    grams, counts = [torch.zeros(32, 32, dtype=torch.float64) for _ in range(8)], [0] * 4
    mask: list[Tensor] = []

    def observe(_: nn.Module, args: tuple[Tensor]) -> None:
        every_token = args[0].view(4, -1, 32)
        for number in range(4):
            x = every_token[number][mask[-1]]
            gate, up = (x @ experts.gate_up_proj[number]).chunk(2, dim=-1)
            inner = (torch.nn.functional.silu(gate) * up).double()
            counts[number] += int(x.any(-1).sum())
            grams[number] += x.double().T @ x.double()
            grams[4 + number] += inner.T @ inner

    handle = experts.register_forward_pre_hook(observe)
    for batch in batches:
        mask.append(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).reshape(-1).bool())
        with torch.no_grad():
            model(**batch)
    handle.remove()
    seen = seen_statistics(monkeypatch)
    report = compress_in_memory(model, batches, recipe(**UNCHANGING))
    num_lent = {record.module: record.num_lent for record in report.modules}
    assert sum(counts) == sum(int(each.sum()) for each in mask)
    assert len(set(counts)) > 1
    for number in range(8):
        name = f"model.layers.1.feed_forward.experts.{number % 4}.{'up' if number < 4 else 'down'}_proj"
        statistic = cast(InputGram, seen[name][InputGram])
        assert statistic.num_tokens == counts[number % 4]
        siblings = sum(grams[:4]) if number < 4 else sum(grams[4:])
        mean = siblings / sum(counts)
        prior = mean if number < 4 else torch.eye(32, dtype=torch.float64) * mean.diagonal().mean()
        lent = max(32 - counts[number % 4], 0)
        expected = (grams[number] + lent * prior) / (counts[number % 4] + lent)
        torch.testing.assert_close(statistic.matrix().double(), expected, rtol=1e-5, atol=1e-6)
        assert num_lent[name] == lent
        statistic._prior = None
        torch.testing.assert_close(gram_sum(seen[name]), grams[number], rtol=1e-5, atol=1e-5)
