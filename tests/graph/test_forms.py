"""Modules in the places of those that keep their matrices in another form: the same function, of the same memory."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D as TransformersConv1D

from lightning_compress.errors import UnsupportedModelError
from lightning_compress.graph.execute import execute
from lightning_compress.graph.stages import computed_nodes
from lightning_compress.graph.trace import trace
from lightning_compress.graph.unfold import unfold, unfolded
from lightning_compress.recipe.forms import Conv1D, Convolution, OfItsOwn, why_not
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import named_by, resolve

SCHEME = {"weights": {"num_bits": 4, "strategy": "channel"}}
CONVOLUTIONS: dict[str, nn.Conv1d | nn.Conv2d] = {
    "patches": nn.Conv2d(3, 5, 4, stride=4),
    "padded": nn.Conv2d(3, 5, 3, padding=1),
    "reflecting": nn.Conv2d(3, 5, 3, padding=2, padding_mode="reflect"),
    "circular": nn.Conv2d(3, 5, (3, 2), padding=(1, 0), padding_mode="circular", stride=(1, 2)),
    "same": nn.Conv2d(3, 5, (4, 3), padding="same", dilation=2),
    "valid without bias": nn.Conv2d(3, 5, 3, padding="valid", bias=False, stride=2),
    "frames": nn.Conv1d(3, 5, 4, stride=2, padding=1, dilation=2),
    "same in sequences": nn.Conv1d(3, 5, 4, padding="same", dilation=2),
    "replicating in sequences": nn.Conv1d(3, 5, 3, padding=2, padding_mode="replicate", bias=False),
}


def always(name: str, module: nn.Module) -> bool:
    return True


@pytest.mark.parametrize("convolution", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(convolution: nn.Conv1d | nn.Conv2d) -> None:
    """The same values, which code can view. Seen to fail: with channels last, which `view` refuses."""
    torch.manual_seed(0)
    model, dims = nn.Sequential(deepcopy(convolution)).double(), len(convolution.kernel_size)
    for shape in ((2, 3, *(12, 9)[-dims:]), (3, *(16, 11)[-dims:])):
        images = torch.randn(shape).double()
        expected = model(images)
        with unfolded(model, always):
            assert isinstance(model[0], Convolution)
            found = model(images)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert found.stride() == expected.stride()
        assert type(model[0]) is type(convolution)


def test_a_convolution_that_was_changed_after_it_was_made() -> None:
    """As code that dilates a backbone does (segmentation_models_pytorch). Seen to fail: with the padding that a module
    notes when it is made."""
    model, images = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, stride=2)), torch.randn(2, 3, 12, 9)
    model[0].stride, model[0].dilation, model[0].padding = 1, (2, 3), (2, 3)  # type: ignore[assignment]
    expected = model(images)
    with unfolded(model, always):
        torch.testing.assert_close(model(images), expected)


@pytest.mark.parametrize("convolution", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_graph_of_a_convolution_serves_other_batches(convolution: nn.Conv1d | nn.Conv2d) -> None:
    torch.manual_seed(0)
    model, sizes = nn.Sequential(deepcopy(convolution), nn.ReLU()), (12, 10)[-len(convolution.kernel_size) :]
    with unfolded(model, always), torch.no_grad():
        batches = [torch.randn(size, 3, *sizes) for size in (2, 5)]
        traced = trace(model, model, batches[0], leaf_names=["0"], boundary_names=[], others=batches)
        assert "0" in {getattr(node.target, "weights_of", None) for node in traced.graph.nodes}
        for images in batches:
            values: dict[Any, object] = {node: images for node in traced.graph.nodes if node.op == "placeholder"}
            nodes = computed_nodes(traced.graph)
            execute(nodes, values, model, traced.constants, torch.device("cpu"), {})
            assert torch.equal(values[nodes[-1]], model(images))  # type: ignore[arg-type]


def test_conv1d() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(TransformersConv1D(6, 4)).double()
    x = torch.randn(2, 3, 4).double()
    with unfolded(model):
        assert isinstance(model[0], Conv1D)
        assert model[0].weight.shape == (6, 4)
        inside = model(x)
    torch.testing.assert_close(model(x), inside, rtol=1e-12, atol=1e-12)


class Linear(nn.Module):
    """Of a library's own, as torch_geometric has it."""

    def __init__(self, inputs: int, outputs: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


def test_a_linear_of_a_class_of_its_own() -> None:
    """By its class, less those that do something else. Seen to fail: refused, as no Linear; with the forward of its
    class, where it has another."""
    model = nn.Sequential(Linear(4, 6), Linear(6, 6, scale=0.5), Linear(6, 6))
    own = model[2].forward
    model[2].forward = lambda x: own(x.tanh())
    recipe = load_recipe(
        {"modifiers": [{"algorithm": "rtn", "scheme": SCHEME, "targets": ["Linear"], "ignore": ["1", "2"]}]}
    )
    x = torch.randn(3, 4)
    expected = model(x)
    with unfolded(model, named_by(recipe)):
        assert [type(each) for each in model] == [OfItsOwn, Linear, Linear]
        assert torch.equal(model(x), expected)
        assert (model[0].scale, deepcopy(model)[0].scale) == (1.0, 1.0)
        assert [*resolve(recipe, model).assignments] == ["0"]
    assert [type(each) for each in model] == [Linear, Linear, Linear]
    assert not unfold(model).places


@pytest.mark.parametrize("module", [TransformersConv1D(6, 4), nn.Conv2d(2, 3, 2), nn.Conv1d(2, 3, 2), Linear(6, 4)])
def test_what_is_written_is_in_the_model(module: nn.Module) -> None:
    model = nn.Sequential(module)
    kept = dict(model.named_parameters())
    with unfolded(model, always), torch.no_grad():
        weight = model[0].get_parameter("weight")
        weight.copy_(torch.arange(weight.numel()).view(weight.shape))
        joined = model[0].joined("weight", weight)  # type: ignore[operator]
        assert model.state_dict().keys() == kept.keys()
    assert dict(model.named_parameters()) == kept
    assert torch.equal(joined, module.get_parameter("weight"))
    assert sorted(module.get_parameter("weight").flatten().tolist()) == list(range(weight.numel()))


def test_a_module_of_two_places_stays_one() -> None:
    shared = TransformersConv1D(4, 4)
    model = nn.ModuleDict({"first": nn.Sequential(shared), "second": nn.Sequential(shared)})
    with unfolded(model):
        assert model["first"][0] is model["second"][0]
        assert isinstance(model["first"][0], Conv1D)
    assert model["first"][0] is model["second"][0] is shared


def test_only_named_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1, groups=2))
    found = unfold(model, lambda name, module: name in ("1", "2"))
    assert [key for _, key, _, _ in found.places] == ["1"], "groups are several matrices"
    assert not unfold(model).places


def test_hooks_are_those_of_both() -> None:
    """Quantized inputs of a `Conv1D` outlive the run, and an earlier run's are seen in the next."""
    model = nn.Sequential(TransformersConv1D(4, 4))
    seen: list[Tensor] = []
    with unfolded(model):
        model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    with unfolded(model):
        model(torch.ones(1, 4))
    assert len(seen) == 3


def test_channels_last() -> None:
    """No view of such a weight is a matrix, so it is laid out anew. Seen to fail: with a copy in its place."""
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = nn.Sequential(conv)
    with unfolded(model, always), torch.no_grad():
        model[0].get_parameter("weight").fill_(2)
    assert conv.weight.eq(2).all()


class Causal(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (2, 0, 2, 0)))


class Standardized(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


class CausalInTime(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (2, 0)))


class Doubled(TransformersConv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Causal(2, 2, 3), "a forward of its own"),
        (Standardized(2, 2, 3), "a forward of its own"),
        (CausalInTime(2, 2, 3), "a forward of its own"),
        (Linear(4, 6, scale=0.5), "a Linear in all but its class"),
        (nn.Conv1d(4, 4, 3, groups=4), "its 4 groups"),
        (Doubled(2, 2), "a forward of its own"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3)), "computed from other parameters"),
    ],
)
def test_what_only_looks_like_one(module: nn.Module, reason: str) -> None:
    """Is not replaced, and refused where it is named. Seen to fail: with any subclass replaced."""
    model = nn.Sequential(module)
    assert not unfold(model, always).places
    assert reason in str(why_not(module))


def test_one_matrix_for_tied_weights() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), TransformersConv1D(3, 2), nn.Embedding(2, 3))
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    recipe = load_recipe({"modifiers": [{"algorithm": "rtn", "scheme": SCHEME, "targets": ["Conv2d", "Conv1D"]}]})
    with unfolded(model, always):
        assert model[0].weight is model[1].weight
        with pytest.raises(UnsupportedModelError, match=r"0 .* shares its weight with 1.weight"):
            resolve(recipe, model)
        del model[0]
        with pytest.raises(UnsupportedModelError, match=r"1 .* shares its weight with 2.weight"):
            resolve(recipe, model)


def test_a_convolution_has_one_name() -> None:
    """Its first one; the second reaches nothing."""
    shared = nn.Conv2d(2, 2, 1)
    model = nn.ModuleDict({"first": shared, "second": shared})
    assert not unfold(model, lambda name, module: name == "second").places
    assert len(unfold(model, lambda name, module: name == "first").places) == 2


def test_what_models_ask_of_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1))
    with unfolded(model, always):
        assert (model[0].stride, model[0].in_channels, model[0].padding) == ((2, 2), 2, (1, 1))
        assert deepcopy(model)[0].kernel_size == (3, 3)
        assert not hasattr(model[0], "no_such")
