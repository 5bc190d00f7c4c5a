"""Modules that keep their matrices in another form, as the Linears that they are (see `experts` and `recipe.forms`);
Linears that share all their parameters, as one that is called at all their places.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import final

from torch import nn
from transformers import PreTrainedModel, pytorch_utils
from transformers.conversion_mapping import get_model_conversion_mapping

from lightning_compress.graph.experts import Experts, Stack, assembled, projection_names, stack_of
from lightning_compress.graph.signatures import module_signature
from lightning_compress.recipe.attention import Attention, is_plain
from lightning_compress.recipe.forms import (
    Conv1D,
    Convolution,
    Convolving,
    OfItsOwn,
    OtherForm,
    Storable,
    as_matrix,
    is_linear,
    why_not,
)

Unfolding = Experts | Attention | OtherForm
Named = Callable[[str, nn.Module], bool]


@final
@dataclass(frozen=True)
class Unfolded:
    """Modules that can take the places of those of whose memory their parameters are views.

    Attributes:
        places: for each a module, the name of its child, that child, and what takes its place.
        experts: of a model all of them, also those that are in place already.
        num_parts: in how many parts they are run meanwhile.
        encoders: torch's own.
    """

    places: tuple[tuple[nn.Module, str, nn.Module, Unfolding | nn.Linear], ...]
    experts: tuple[Experts, ...]
    num_parts: int
    encoders: tuple[nn.TransformerEncoder, ...]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within: they are in place; what is written to their parameters is in the model's afterwards.

        Parameters must not move meanwhile, for then views are views no more. What has come to quantize its inputs
        stays: a stack has no inputs of its own, and of Linears that are one all do then. Layers with hooks do not take
        the nested tensors that an encoder makes of padded ones.
        """
        before = [len(experts.parts) for experts in self.experts]
        for experts in self.experts:
            experts.divide(self.num_parts)
        for parent, key, _, unfolding in self.places:
            parent._modules[key] = unfolding.train(parent.training)
        try:
            yield
        finally:
            for experts, number in zip(self.experts, before, strict=True):
                experts.divide(number)
            for parent, key, folded, unfolding in self.places:
                shares_hooks = isinstance(unfolding, Unfolding)  # with what it replaces
                inside = (module for module in unfolding.modules() if not (shares_hooks and module is unfolding))
                if not any(module._forward_pre_hooks for module in inside):
                    parent._modules[key] = folded
            for encoder in self.encoders:
                if any(module._forward_pre_hooks for module in encoder.modules()):
                    encoder.use_nested_tensor = False


def unfold(root: nn.Module, named: Named = lambda name, module: False, num_parts: int = 1) -> Unfolded:
    """The modules of a model that can be Linears, which are not in place yet.

    Args:
        root: the model.
        named: tells by name and module which convolutions, and modules of classes of their own, are meant; the others
            always are.
        num_parts: in how many parts the experts of a layer are run.
    """
    found: dict[nn.Module, Unfolding | nn.Linear] = {}
    first: dict[object, Unfolding | nn.Linear] = {}  # of those that are one
    conversions: dict[str, list[object]] = {}
    matrices: dict[int, nn.Parameter] = {}  # of tied weights, one
    for name, module in root.named_modules():
        if not name:
            continue
        stack = stack_of(module)
        if stack is None and not isinstance(module, Storable | nn.MultiheadAttention):
            if named(name, module) and is_linear(module):
                found[module] = OfItsOwn(module, module.get_parameter("weight"))
            continue
        alike = _what_it_is(module)
        if alike in first:
            found[module] = first[alike]
        elif stack is not None:
            found[module] = first[alike] = _experts(root, name, module, stack, conversions)
        elif isinstance(module, nn.MultiheadAttention):
            if is_plain(module) and not isinstance(_model_around(root, name)[1], PreTrainedModel):
                found[module] = first[alike] = Attention(module)
        elif (linear := _linear(name, module, matrices, named)) is not None:
            found[module] = first[alike] = linear
        elif isinstance(module, nn.Linear):
            first[alike] = module
    places: list[tuple[nn.Module, str, nn.Module, Unfolding | nn.Linear]] = []
    for parent in root.modules():
        places += [(parent, key, child, found[child]) for key, child in parent._modules.items() if child in found]
    known = dict.fromkeys(module for module in (*root.modules(), *found.values()) if isinstance(module, Experts))
    encoders = tuple(module for module in root.modules() if isinstance(module, nn.TransformerEncoder))
    return Unfolded(tuple(places), tuple(known), num_parts, encoders)


def unfolded(
    root: nn.Module, named: Named = lambda name, module: False, num_parts: int = 1
) -> AbstractContextManager[None]:
    """Within: what `unfold` finds is in place (see `Unfolded.in_place`)."""
    return unfold(root, named, num_parts).in_place()


def most_experts(root: nn.Module) -> int:
    """Of a layer of a model; 1 if it has none."""
    found = (module.stack if isinstance(module, Experts) else stack_of(module) for module in root.modules())
    return max((stack.num_experts for stack in found if stack is not None), default=1)


def _linear(
    name: str, module: nn.Module, matrices: dict[int, nn.Parameter], named: Named
) -> Conv1D | Convolution | None:
    if not isinstance(module, pytorch_utils.Conv1D | Convolving):
        return None
    if why_not(module) is not None or (isinstance(module, Convolving) and not named(name, module)):
        return None
    if id(module.weight) not in matrices:
        matrices[id(module.weight)] = as_matrix(module)
    matrix = matrices[id(module.weight)]
    return Convolution(module, matrix) if isinstance(module, Convolving) else Conv1D(module, matrix)


def _what_it_is(module: nn.Module) -> object:
    """Equal for modules that share all their parameters and compute the same; of those with hooks, the module."""
    signature = module_signature(module)
    return module if signature is None else (signature, *map(id, module.parameters()))


def _experts(
    root: nn.Module,
    name: str,
    module: nn.Module,
    stack: Stack,
    conversions: dict[str, list[object]],
) -> Experts:
    model_path, model = _model_around(root, name.rpartition(".")[0])
    if model_path not in conversions:
        found = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
        conversions[model_path] = list(found)
    own = name.removeprefix(f"{model_path}.") if model_path else name
    if stack.num_every and isinstance(model, PreTrainedModel):
        chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
        stack = replace(stack, num_every=min(chosen or stack.num_experts, stack.num_experts))
    names, weights = projection_names(conversions[model_path], own, stack.has_gate), stack.names[:2]
    is_assembled = len(assembled(conversions[model_path], own, weights)) == len(weights) or bool(stack.num_every)
    return Experts(module, stack, names, is_assembled=is_assembled or not isinstance(model, PreTrainedModel))


def _model_around(root: nn.Module, path: str) -> tuple[str, nn.Module]:
    """The outermost transformers model on the way to a module, else the root."""
    names = path.split(".") if path else []
    for length in range(len(names) + 1):
        prefix = ".".join(names[:length])
        if isinstance(module := root.get_submodule(prefix), PreTrainedModel):
            return prefix, module
    return "", root
