"""What can be quantized: modules whose weight is a matrix [O, I] that rows of the input are multiplied by, or is picked
from.

Some keep it in another form. Within `graph.unfold.unfolded`, classes of this file take their places, with views of the
same memory as parameters, under the same names: a `Conv1D` (GPT-2's, which stores [I, O]) is a Linear then, a
`Conv1d` or `Conv2d` a Linear of the patches that it reads, and what is a Linear in all but its class is one by its
class, too (torch_geometric's).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parameter import is_lazy
from transformers import pytorch_utils

Convolving = nn.Conv1d | nn.Conv2d


@final
class Conv1D(nn.Linear):
    """In place of transformers' `Conv1D`: the same function."""

    def __init__(self, folded: pytorch_utils.Conv1D, weight: nn.Parameter) -> None:
        super().__init__(folded.nx, folded.nf, device="meta")
        self.weight = weight
        self.bias = folded.bias
        share_hooks(self, folded)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the parameters that have another form in the module that this replaces."""
        return ("weight",)

    def split(self, key: str, stack: Tensor, first: int = 0) -> dict[str, Tensor]:
        """Of such a parameter the ones here, as views."""
        return {key: stack.t()}

    def joined(self, key: str, tensor: Tensor) -> Tensor:
        """A parameter as the module has it that this replaces."""
        return tensor.t() if key == "weight" else tensor


@final
class OfItsOwn(nn.Linear):
    """In place of a module of a class of its own that is a Linear (see `is_linear`): the same parameters.

    Only what a recipe names, itself or its class, is replaced.
    """

    folded: nn.Module

    def __init__(self, folded: nn.Module, weight: nn.Parameter) -> None:
        super().__init__(weight.shape[1], weight.shape[0], device="meta")
        self.weight = weight
        self.bias = cast(nn.Parameter, folded._parameters.get("bias"))
        self.__dict__.update(folded=folded)  # not a child
        share_hooks(self, folded)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the parameters that have another form in the module that this replaces: none."""
        return ()

    def split(self, key: str, stack: Tensor, first: int = 0) -> dict[str, Tensor]:
        """Of such a parameter the ones here."""
        return {key: stack}

    def joined(self, key: str, tensor: Tensor) -> Tensor:
        """A parameter as the module has it that this replaces."""
        return tensor

    def __getattr__(self, name: str) -> Any:
        """What else the module has."""
        return attribute_of_either(self, name)


@final
class Convolution(nn.Module):
    """In place of a `torch.nn.Conv1d` or `Conv2d`: the same function, of the patches [B, L, C kh kw] that the kernel
    lies on; what has one dimension is an image of height 1.

    Only what a recipe names is replaced: patches that overlap take kh kw times the image's memory.
    """

    folded: Convolving

    def __init__(self, folded: Convolving, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = folded.bias
        self.rows = Rows(self)
        self.__dict__.update(folded=folded)  # not a child
        share_hooks(self, folded)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the parameters that have another form in the module that this replaces."""
        return ("weight",)

    def split(self, key: str, stack: Tensor, first: int = 0) -> dict[str, Tensor]:
        """Of such a parameter the ones here, as views."""
        return {key: stack.flatten(1)}

    def joined(self, key: str, tensor: Tensor) -> Tensor:
        """A parameter as the module has it that this replaces."""
        return tensor.view(self.folded.weight.shape) if key == "weight" else tensor

    def __getattr__(self, name: str) -> Any:
        """What else a convolution has: models read its stride."""
        return attribute_of_either(self, name)

    def forward(self, image: Tensor) -> Tensor:
        """Of images [B, C, H, W] or [C, H, W], or of sequences [B, C, L] or [C, L]."""
        conv, kernel = self.folded, tuple(self.folded.weight.shape[2:])
        if image.ndim == 1 + len(kernel):
            return cast(Tensor, self(image[None]))[0]
        step, wide = _of_each(conv.stride, len(kernel)), _of_each(conv.dilation, len(kernel))
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        padded = functional.pad(image, _padding(conv, kernel, wide), mode=mode)
        sizes = zip(padded.shape[2:], kernel, wide, step, strict=True)
        found = [(size - each * (taps - 1) - 1) // by + 1 for size, taps, each, by in sizes]
        kernel, wide, step = ((1, *each)[-2:] for each in (kernel, wide, step))
        high = padded if padded.ndim == 4 else padded.unsqueeze(2)
        y: Tensor = self.rows(functional.unfold(high, kernel, wide, stride=step).transpose(1, 2))
        return y.transpose(1, 2).contiguous().view(image.shape[0], -1, *found)  # which code views


@final
class Rows(nn.Module):
    """What of a `Convolution` is a Linear: a single call of the graph. Owns nothing: the parameters are its owner's."""

    owner: Convolution

    def __init__(self, owner: Convolution) -> None:
        super().__init__()
        self.__dict__.update(owner=owner)  # not a child

    def forward(self, input: Tensor) -> Tensor:
        """Of rows [..., I]."""
        return functional.linear(input, self.owner.weight, self.owner.bias)


def _padding(conv: Convolving, kernel: Sequence[int], wide: Sequence[int]) -> list[int]:
    """What it pads by, as `functional.pad` has it: of zeros by what it says now, which code changes together with the
    dilation of a module that there is (backbones of segmentation models)."""
    if conv.padding_mode != "zeros":
        return conv._reversed_padding_repeated_twice
    if conv.padding == "same":
        spans = [each * (taps - 1) for taps, each in zip(kernel, wide, strict=True)]
        sides = [(span // 2, span - span // 2) for span in spans]
    else:
        sides = [(each, each) for each in _of_each(0 if conv.padding == "valid" else conv.padding, len(kernel))]
    return [number for pair in reversed(sides) for number in pair]


def _of_each(number: Any, num_dims: int) -> tuple[int, ...]:
    """A number for each dimension, where code has set one for all."""
    return (number,) * num_dims if isinstance(number, int) else tuple(number)


Quantizable = nn.Linear | nn.Embedding | Convolution
OtherForm = Conv1D | Convolution | OfItsOwn
"""What takes the place of a module that readers of checkpoints do not take for a Linear."""
Storable = Quantizable | pytorch_utils.Conv1D | Convolving
"""Modules that may be packed in a checkpoint, in place or not."""


def reader(module: nn.Module) -> nn.Module:
    """The module whose input the rows are that a quantizable module multiplies."""
    return module.rows if isinstance(module, Convolution) else module


def class_name(module: Quantizable) -> str:
    """What configurations of checkpoints call it, its own subclass or not."""
    if isinstance(module, nn.Linear):
        return "Linear"
    return "Embedding" if isinstance(module, nn.Embedding) else _kind(module.folded).__name__


def classes(module: nn.Module) -> set[str]:
    """Names of the classes that a target can mean it by: its own and its bases', of what it takes the place of, too."""
    both = (module, module.folded) if isinstance(module, Convolution | OfItsOwn) else (module,)
    return {base.__name__ for each in both for base in type(each).__mro__}


def has_computed_weight(module: nn.Module) -> bool:
    """Whether a weight that could be quantized comes of other parameters."""
    return isinstance(module, Storable) and "weight" not in module._parameters


def why_not(module: nn.Module) -> str | None:
    """Why a module, in place or not, cannot be quantized, or None."""
    module = module.folded if isinstance(module, Convolution) else module
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "it changes its weight when it is called (max_norm)"
    if isinstance(module, Convolving) and module.groups > 1:
        return f"its {module.groups} groups of channels are as many matrices"
    if has_computed_weight(module):
        return (
            "its weight is computed from other parameters (weight_norm, spectral_norm, pruning or another "
            "parametrization), which can be folded into it first: torch.nn.utils.parametrize.remove_parametrizations, "
            "remove_weight_norm or prune.remove"
        )
    if isinstance(module, Storable) and module.weight.is_complex():
        return "its weight is complex, and formats have real numbers only"
    if isinstance(module, Convolving | pytorch_utils.Conv1D) and not _is_as_it_says(module):
        return "its class has a forward of its own"
    if isinstance(module, nn.Linear) and not is_product(module):
        return NO_PRODUCT
    if isinstance(module, Storable):
        return None
    return (
        "only Linear, transformers' Conv1D, Embedding, Conv1d, Conv2d and what is a Linear in all but its class can be "
        "quantized"
    )


def _kind(module: Convolving | pytorch_utils.Conv1D) -> type[nn.Module]:
    """The known class that a module is of, or of one derived from it."""
    return next(kind for kind in (nn.Conv1d, nn.Conv2d, pytorch_utils.Conv1D) if isinstance(module, kind))


def _is_as_it_says(module: Convolving | pytorch_utils.Conv1D) -> bool:
    """Whether a class that is derived from a known one computes the same."""
    known = _kind(module)
    names = [name for name in ("_conv_forward",) if hasattr(known, name)]
    return has_forward_of(module, known) and all(getattr(type(module), name) is getattr(known, name) for name in names)


def has_forward_of(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes what a class does: neither its own class nor the module itself has another forward."""
    return type(module).forward is kind.forward and "forward" not in module.__dict__


def is_linear(module: nn.Module) -> bool:
    """Whether a module that is no Linear by its class is one: it has a weight [O, I], perhaps a bias [O], nothing else,
    and multiplies by the one and adds the other. Tried on random values."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if isinstance(module, Storable) or weight is None or is_lazy(weight) or weight.ndim != 2:
        return False
    if module._parameters.keys() - {"weight", "bias"} or module._buffers or module._modules:
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": weight.shape} if bias is None else {"weight": weight.shape, "bias": bias.shape}
    values = {name: torch.randn(shape, generator=generator).to(weight.dtype) for name, shape in shapes.items()}
    x = torch.randn(3, weight.shape[1], generator=generator).to(weight.dtype)
    try:
        with _tried(module):
            found = functional_call(_Forward(module), {f"module.{key}": each for key, each in values.items()}, (x,))
            return torch.equal(found, functional.linear(x, **values))
    except Exception:  # whatever code makes of what is not meant for it
        return False


NO_PRODUCT = "its class has a forward of its own, in which its input is not what is multiplied by its weight"


def is_product(module: nn.Linear) -> bool:
    """Whether the weight is multiplied by the input itself, as adapters leave it, and not by a normed or masked one:
    with another weight, outputs differ by the input times the difference.

    Tried on random values; of few outputs, where the code takes those.
    """
    if has_forward_of(module, nn.Linear):
        return True
    return any(_multiplies_input(module, outputs) for outputs in (min(8, module.out_features), module.out_features))


def _multiplies_input(module: nn.Linear, num_outputs: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(module.weight.dtype)

    values = {f"module.{name}": random(*each.shape) for name, each in module.named_parameters() if name != "weight"}
    if module.bias is not None:
        values["module.bias"] = random(num_outputs)
    x, *rows = random(3, module.in_features), random(1, module.in_features), random(1, module.in_features)
    try:
        with _tried(module):
            of_rows = [
                functional_call(_Forward(module), {**values, "module.weight": row.expand(num_outputs, -1)}, (x,))
                for row in rows
            ]
        found = (of_rows[0] - of_rows[1])[..., :num_outputs].float()
        expected = (x.float() @ (rows[0] - rows[1]).float().t()).expand(-1, num_outputs)
        return found.shape == expected.shape and bool((found - expected).norm() < 0.05 * expected.norm())
    except Exception:  # whatever code makes of values that are not quite its own
        return False


@contextmanager
def _tried(module: nn.Module) -> Iterator[None]:
    """Within: a module's own code may run, as it does in eval mode, and leaves nothing behind."""
    modes = {each: each.training for each in module.modules()}
    attributes = dict(module.__dict__)
    try:
        for each in modes:
            each.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        module.__dict__.clear()
        module.__dict__.update(attributes)
        for each, training in modes.items():
            each.training = training


@final
class _Forward(nn.Module):
    """A module's function, without hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.module.forward(x)
        return output


def origin(parameter: Tensor) -> Tensor:
    """The parameter of the model that this one is a view of, or itself."""
    found: Tensor = getattr(parameter, "origin", parameter)
    return found


def as_matrix(folded: Convolving | pytorch_utils.Conv1D) -> nn.Parameter:
    """The weight of a module as a matrix [O, I], a view of it."""
    with torch.no_grad():
        if isinstance(folded, Convolving) and not folded.weight.is_contiguous():  # channels last: no view would do
            folded.weight.data = folded.weight.data.contiguous()
    weight = folded.weight.detach()
    view = nn.Parameter(weight.flatten(1) if isinstance(folded, Convolving) else weight.t(), requires_grad=False)
    view.origin = folded.weight  # type: ignore[attr-defined]
    return view


def attribute_of_either(module: nn.Module, name: str) -> Any:
    """Of a module in the place of another: its own, or else that of the other, `folded`."""
    try:
        return nn.Module.__getattr__(module, name)
    except AttributeError:
        if "folded" not in module.__dict__:  # while it is copied
            raise
        return getattr(module.__dict__["folded"], name)


def share_hooks(module: nn.Module, folded: nn.Module) -> None:
    """What is hooked on to one of them is on the other too."""
    names = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
    for name in (*names, "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
        module.__dict__[name] = folded.__dict__[name]
