"""torch's attention as the Linears that it is made of, and sequences that come before rows."""

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from transformers import SiglipVisionConfig, SiglipVisionModel

from lightning_compress.graph.execute import execute
from lightning_compress.graph.stages import computed_nodes
from lightning_compress.graph.trace import trace
from lightning_compress.graph.unfold import unfolded
from lightning_compress.recipe.attention import Attention

NUM_ROWS, NUM_QUERIES, NUM_KEYS, NUM_HEADS, WIDTH = 3, 4, 6, 2, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rows first": {"batch_first": True},
    "without bias": {"bias": False},
    "keys of other widths": {"kdim": 5, "vdim": 7, "batch_first": True},
    "with a key more": {"add_bias_kv": True, "batch_first": True},
    "with a key of zeros": {"add_zero_attn": True},
    "with both": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 5, "vdim": 7},
}


def inputs(attention: nn.MultiheadAttention, is_batched: bool) -> list[Tensor]:
    widths = (WIDTH, attention.kdim, attention.vdim)
    lengths = (NUM_QUERIES, NUM_KEYS, NUM_KEYS)
    found = [torch.randn(NUM_ROWS, length, width) for length, width in zip(lengths, widths, strict=True)]
    if not is_batched:
        return [tensor[0] for tensor in found]
    return found if attention.batch_first else [tensor.transpose(0, 1) for tensor in found]


def masks(is_batched: bool) -> list[dict[str, Tensor]]:
    num_heads = NUM_HEADS * (NUM_ROWS if is_batched else 1)
    later = torch.ones(NUM_QUERIES, NUM_KEYS, dtype=torch.bool).triu(2)
    padding = torch.zeros(NUM_ROWS, NUM_KEYS, dtype=torch.bool)
    padding[0, 4:] = True
    if not is_batched:
        padding = padding[0]
    shapes: list[dict[str, Tensor]] = [
        {"attn_mask": later},
        {"attn_mask": torch.randn(num_heads, NUM_QUERIES, NUM_KEYS)},
        {"attn_mask": torch.rand(num_heads, NUM_QUERIES, NUM_KEYS) > 0.9},
    ]
    paddings: list[dict[str, Tensor]] = [
        {},
        {"key_padding_mask": padding},
        {"key_padding_mask": torch.zeros(padding.shape).masked_fill(padding, -1.5)},
    ]
    return [one | other for one, other in product([{}, *shapes], paddings)]


@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_the_same_function(options: dict[str, Any], is_batched: bool) -> None:
    """Seen to fail: without the scale of the products; masks that were not padded for the keys that are added."""
    torch.manual_seed(0)
    folded = nn.MultiheadAttention(WIDTH, NUM_HEADS, **options).eval()
    for parameter in folded.parameters():
        nn.init.normal_(parameter)
    attention, given = Attention(folded).eval(), inputs(folded, is_batched)
    for mask, need_weights, average in product(masks(is_batched), (True, False), (True, False)):
        how: dict[str, Any] = {**mask, "need_weights": need_weights, "average_attn_weights": average}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of masks of two types
            expected, weights = folded(*given, **how)
        found, found_weights = attention(*given, **how)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(found_weights, weights)
    for name in ("in_proj_weight", "k_proj_weight", "in_proj_bias"):
        kept, made = getattr(folded, name), getattr(attention, name)
        assert made is None if kept is None else torch.equal(kept, made), name
    assert attention.num_heads == NUM_HEADS


def test_it_is_a_view() -> None:
    model = nn.Sequential(nn.MultiheadAttention(WIDTH, NUM_HEADS))
    before = model[0]
    with unfolded(model), torch.no_grad():
        model.get_parameter("0.k_proj.weight").fill_(2.0)
        model.get_parameter("0.v_proj.bias").fill_(3.0)
    assert model[0] is before
    assert bool((before.in_proj_weight[WIDTH : 2 * WIDTH] == 2).all())
    assert bool((before.in_proj_bias[2 * WIDTH :] == 3).all())
    assert not bool((before.in_proj_weight[2 * WIDTH :] == 2).any())


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_some_stay_whole() -> None:
    """A class with code of its own, weights that are computed, and transformers' models, whose checkpoints have
    `in_proj_weight`."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = SiglipVisionModel(SiglipVisionConfig(image_size=8, patch_size=4, **sizes))
    normed = spectral_norm(nn.MultiheadAttention(WIDTH, NUM_HEADS), "in_proj_weight")
    parametrized = parametrizations.orthogonal(nn.MultiheadAttention(WIDTH, NUM_HEADS), "in_proj_weight")
    for model in (*map(nn.Sequential, (Own(WIDTH, NUM_HEADS), normed, parametrized, vision)), vision):
        with unfolded(model):
            assert any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
            assert not any(isinstance(module, Attention) for module in model.modules())


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_graph_serves_all_lengths(batch_first: bool) -> None:
    """Seen to fail for sequences that come first: their length counted as rows, and differed from the mask's."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 16, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()

    def batch(length: int) -> tuple[Tensor, Tensor]:
        x, padding = torch.randn(4, length, WIDTH), torch.zeros(4, length, dtype=torch.bool)
        padding[1, 4:] = True
        return (x if batch_first else x.transpose(0, 1).contiguous()), padding

    def step(given: tuple[Tensor, Tensor]) -> Any:
        return model(given[0], src_key_padding_mask=given[1])

    batches = [batch(length) for length in (9, 5, 6)]
    names = [f"layers.0.self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
    with unfolded(model), torch.no_grad():
        traced = trace(model, step, batches[0], leaf_names=names, boundary_names=["layers.0"], others=batches)
        assert not traced.fallbacks
        for given in batches:
            placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
            values: dict[Any, object] = dict(zip(placeholders, given, strict=True))
            nodes = computed_nodes(traced.graph)
            execute(nodes, values, model, traced.constants, torch.device("cpu"), {})
            torch.testing.assert_close(values[nodes[-1]], step(given))
