"""Sequential targets: what is onloaded at a time."""

import pytest
from helpers import tiny_llama
from torch import nn

from lightning_compress.errors import UnsupportedModelError
from lightning_compress.graph.targets import as_patterns, sequential_modules

LAYERS = ("model.layers.0", "model.layers.1")


def linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def test_default_is_what_the_author_declared() -> None:
    model = tiny_llama(2)
    assert sequential_modules(model, None, linears(model)) == LAYERS


def test_wrapped_models_too() -> None:
    wrapper = nn.Module()
    wrapper.inner = tiny_llama(2)
    assert sequential_modules(wrapper, None, linears(wrapper)) == tuple(f"inner.{name}" for name in LAYERS)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["LlamaDecoderLayer"], LAYERS),
        (["re:.*layers.1$"], LAYERS[1:]),
        (["model.layers.1", "model.layers.0"], LAYERS),
        (["LlamaDecoderLayer", "Linear"], (*LAYERS, "lm_head")),
        (["LlamaMLP"], ("model.layers.0.mlp", "model.layers.1.mlp")),
    ],
)
def test_patterns(patterns: list[str], expected: tuple[str, ...]) -> None:
    model = tiny_llama(2)
    assert sequential_modules(model, patterns, linears(model)) == expected


def test_every_linear() -> None:
    model = tiny_llama(1)
    assert sequential_modules(model, ["Linear"], linears(model)) == tuple(linears(model))


def test_nothing_matches() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"No module matches sequential_targets \['Decoder'\]. Classes in this model: .*LlamaDecoderLayer",
    ):
        sequential_modules(tiny_llama(1), ["Decoder"], [])


def test_plain_modules_are_cut_at_their_lists() -> None:
    model = nn.Module()
    model.stem = nn.Linear(2, 2)
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])
    assert sequential_modules(model, None, linears(model)) == ("blocks.0", "blocks.1"), "outermost only"


def test_without_lists_each_linear_for_itself() -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2), nn.Linear(2, 2)
    assert sequential_modules(model, None, ["a", "b"]) == ("a", "b")


def test_lists_without_anything_to_quantize_do_not_count() -> None:
    model = nn.Module()
    model.norms = nn.ModuleList([nn.LayerNorm(2)])
    model.a = nn.Linear(2, 2)
    assert sequential_modules(model, None, ["a"]) == ("a",)


def test_one_pattern_or_several() -> None:
    assert as_patterns("Linear") == as_patterns(["Linear"]) == ("Linear",)
    assert as_patterns(None) is None
    with pytest.raises(UnsupportedModelError, match=r"sequential_targets: 're:\*x' is no regular expression"):
        sequential_modules(nn.Sequential(nn.Linear(2, 2)), ["re:*x"], ["0"])
