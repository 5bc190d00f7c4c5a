"""Which modules are what they say: a weight that rows of their input are multiplied by."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.idefics.modeling_idefics import IdeficsDecoupledLinear

from lightning_compress.recipe.forms import why_not


class Normed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(functional.layer_norm(input, input.shape[-1:]))


class Masked(nn.Linear):
    def __init__(self, width: int, height: int) -> None:
        super().__init__(width, height)
        self.register_buffer("mask", (torch.rand(height, width) > 0.2).float())

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight * self.mask, self.bias)


class Adapted(nn.Linear):
    """As loralib has it."""

    def __init__(self, width: int, height: int) -> None:
        super().__init__(width, height)
        self.lora_A = nn.Parameter(torch.randn(4, width))
        self.lora_B = nn.Parameter(torch.randn(height, 4))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.lora_A.t() @ self.lora_B.t()


class Choosing(nn.Linear):
    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(input)
        return logits, logits.argmax(-1)


def norming(width: int, height: int) -> nn.Linear:
    """Of torch's class, with another forward."""
    module = nn.Linear(width, height)

    def forward(x: Tensor) -> Tensor:
        return functional.linear(functional.layer_norm(x, x.shape[-1:]), module.weight, module.bias)

    module.forward = forward  # type: ignore[method-assign]
    return module


def wrapping(width: int, height: int) -> nn.Linear:
    """As accelerate has it."""
    module = nn.Linear(width, height)
    own = module.forward
    module.forward = lambda x: own(x.contiguous())  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "is_product"),
    [
        *((nn.Linear, True), (FalconLinear, True), (Adapted, True), (wrapping, True)),
        *((Normed, False), (Masked, False), (Choosing, False), (norming, False)),
    ],
)
def test_linears_with_a_forward_of_their_own(
    kind: Callable[..., nn.Linear], is_product: bool, dtype: torch.dtype, on_meta: bool
) -> None:
    """Quantized if their input is what the weight is multiplied by: with another one the Gram would be wrong."""
    module = kind(64, 48).to(dtype)
    if on_meta:
        for name, parameter in module.named_parameters():
            setattr(module, name, nn.Parameter(parameter.to("meta")))
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))  # hooks are another's affair
    assert (why_not(module) is None) == is_product
    if not is_product:
        assert "forward of its own, in which its input is not" in str(why_not(module))


def test_further_outputs_beside_the_product() -> None:
    assert why_not(IdeficsDecoupledLinear(32, 40, out_additional_features=8)) is None
