"""Match a recipe against a model: which module gets which scheme, and why every other one is left alone.

Everything that can be known before hours of calibration is checked here: group sizes against shapes, schemes against
what is implemented, tied weights, models that are quantized already.
"""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import cast

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationType
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_compress.algorithms.base import Algorithm, is_finite
from lightning_compress.algorithms.rtn import Rtn
from lightning_compress.errors import ComputedWeightError, NonFiniteError, UnsupportedModelError, listed
from lightning_compress.recipe.config import Modifier, Recipe
from lightning_compress.recipe.defaults import left_alone, output_embeddings
from lightning_compress.recipe.forms import Quantizable, classes, has_computed_weight, origin, why_not
from lightning_compress.recipe.groups import check_groups
from lightning_compress.recipe.refused import check_compiled, check_merged
from lightning_compress.recipe.schemes import check_scheme, scheme_format

OUTPUT_EMBEDDING = "lm_head"
PACKED = CompressionFormat.pack_quantized.value


@dataclass(frozen=True)
class Assignment:
    """What happens to one module."""

    module: str
    algorithm: Algorithm
    scheme: QuantizationScheme

    @property
    def weights(self) -> QuantizationArgs:
        """The weights' arguments; `resolve` refuses schemes without them."""
        assert self.scheme.weights is not None
        return self.scheme.weights


@dataclass(frozen=True)
class Excluded:
    """A module with a matrix of weights that stays as it is, and the reason."""

    module: str
    class_name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe with its meaning for one model. Modules are in the model's order."""

    recipe: Recipe
    assignments: Mapping[str, Assignment]
    excluded: tuple[Excluded, ...]


def matches(pattern: str, names: Sequence[str], module: nn.Module) -> bool:
    """Whether `pattern` (`re:...`, a module name, or a class name of the module or its bases) means this module, under
    one of its names."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    return pattern in names or pattern in classes(module)


def named_by(recipe: Recipe) -> Callable[[str, nn.Module], bool]:
    """Tells of a module and its name whether a target of the recipe names it, itself or its class."""
    targets = {target for modifier in recipe.modifiers for target in modifier.targets}
    return lambda name, module: name in targets or not targets.isdisjoint(classes(module))


def resolve(recipe: Recipe, root: nn.Module) -> ResolvedRecipe:
    """The recipe's meaning for `root`; module names are `root`'s.

    Raises:
        UnsupportedModelError: nothing matches; a scheme does not fit a module's shape; a tied or quantized module.
        NonFiniteError: a weight that is to be quantized holds NaN or Inf.
    """
    _check_writable(root)
    _check_not_quantized(root)
    check_merged(root)
    check_compiled(root)
    for modifier in recipe.modifiers:
        check_scheme(modifier.scheme, modifier.algorithm)
    assignments: dict[str, Assignment] = {}
    excluded: list[Excluded] = []
    matched = [False] * len(recipe.modifiers)
    wanted: list[list[str]] = [[] for _ in recipe.modifiers]
    embeddings, alone = output_embeddings(root), left_alone(root)
    places: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    for module, names in places.items():
        name = names[0]
        weight = getattr(module, "weight", None)
        chosen: Modifier | None = None
        reason = "no target of the recipe matches it"
        for position, modifier in enumerate(recipe.modifiers):
            if not any(matches(pattern, names, module) for pattern in modifier.targets):
                continue
            if not isinstance(module, nn.Linear) and not _names(modifier, names, module):
                continue
            matched[position] = True
            pattern = _ignoring_pattern(modifier, names, module, module in embeddings)
            if pattern is None and module in alone and not _is_named(modifier, names, module):
                reason = alone[module]
            elif pattern is None:
                chosen = modifier
                wanted[position].append(name)
            elif chosen is None:
                reason = f"ignored by the recipe ({pattern})"
        if chosen is not None:
            module = _quantizable(name, module)
            _check_inputs(name, module, chosen.scheme)
            assignments[name] = Assignment(name, _algorithm(chosen, module), _scheme(chosen, module))
        elif isinstance(weight, torch.Tensor) and weight.ndim >= 2:
            excluded.append(Excluded(name, type(module).__name__, tuple(weight.shape), reason))
    _check_matched(recipe, matched, assignments, root)
    _warn_of_unmatched(recipe, places)
    _warn_of_overridden(recipe, wanted)
    packed = {name for name, each in assignments.items() if scheme_format(each.scheme) == PACKED}
    check_groups({name: each.weights for name, each in assignments.items()}, root, packed)
    inputs = {name: each.scheme.input_activations for name, each in assignments.items()}
    check_groups({name: each for name, each in inputs.items() if each is not None}, root)
    _check_ties(assignments, root)
    _check_finite(assignments, root)
    return ResolvedRecipe(recipe, assignments, tuple(excluded + _bare_matrices(root)))


def without(resolved: ResolvedRecipe, root: nn.Module, reasons: Mapping[str, str]) -> ResolvedRecipe:
    """The same, but that some modules are left alone, each for a reason.

    Raises:
        UnsupportedModelError: a target means one of them, not its class; or nothing is left.
    """
    if not reasons:
        return resolved
    excluded = []
    for name, reason in reasons.items():
        module = root.get_submodule(name)
        shape = tuple(module.get_parameter("weight").shape)
        if any(_is_named(modifier, [name], module) for modifier in resolved.recipe.modifiers):
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}, weight of shape {list(shape)}) is named in `targets`, but {reason}. "
                "Remove it there, add it to `ignore`, or give the LightningModule a `calibration_step(self, batch)` "
                "that calls it."
            )
        excluded.append(Excluded(name, type(module).__name__, shape, reason))
    left = {name: assignment for name, assignment in resolved.assignments.items() if name not in reasons}
    if not left:
        named = listed([f"{each.module} {list(each.shape)}" for each in excluded])
        raise UnsupportedModelError(
            f"All {len(excluded)} modules that the recipe targets are left alone, as {excluded[0].reason}: {named}. "
            "Give the LightningModule a `calibration_step(self, batch)` that runs them, or other targets."
        )
    return replace(resolved, assignments=left, excluded=(*resolved.excluded, *excluded))


def _is_named(modifier: Modifier, names: Sequence[str], module: nn.Module) -> bool:
    """Whether a target means this very module, not its class."""
    return any(matches(pattern, names, module) for pattern in modifier.targets if pattern not in classes(module))


def _names(modifier: Modifier, names: Sequence[str], module: nn.Module) -> bool:
    """Whether a target names a module with a weight, itself or its class, as what is no Linear has to be."""
    return _has_weight(module) and (
        not set(names).isdisjoint(modifier.targets) or not classes(module).isdisjoint(modifier.targets)
    )


def _has_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), torch.Tensor)


def _algorithm(modifier: Modifier, module: Quantizable) -> Algorithm:
    """What quantizes a module. Of a table's rows one is picked at a time, so its Gram is diagonal and rounding to
    nearest, by scales that may be searched, is what GPTQ comes to."""
    algorithm = modifier.algorithm
    if modifier.scheme.input_activations is not None:
        algorithm = replace(algorithm, signed_scales=False)
    if isinstance(module, nn.Embedding) and not isinstance(algorithm, Rtn):
        return Rtn(signed_scales=algorithm.signed_scales, scale_search=getattr(algorithm, "scale_search", False))
    return algorithm


def _scheme(modifier: Modifier, module: Quantizable) -> QuantizationScheme:
    """A scheme with the format that it is stored in, where that depends on the module: readers give a table that is not
    initialized new values, and look for its `weight`, which int8 codes may be."""
    weights = modifier.scheme.weights
    assert weights is not None
    is_int8 = weights.num_bits == 8 and weights.type == QuantizationType.INT
    if isinstance(module, nn.Embedding) and is_int8 and modifier.scheme.format is None:
        return modifier.scheme.model_copy(update={"format": CompressionFormat.int_quantized.value})
    return modifier.scheme


def _ignoring_pattern(
    modifier: Modifier, names: Sequence[str], module: nn.Module, is_output_embedding: bool
) -> str | None:
    for pattern in modifier.ignore:
        if matches(pattern, names, module) or (pattern == OUTPUT_EMBEDDING and is_output_embedding):
            return pattern
    return None


def _bare_matrices(root: nn.Module) -> list[Excluded]:
    """Parameters of two and more dimensions that are no module's `weight` (stacked experts, position tables)."""
    return [
        Excluded(
            f"{name}.{key}" if name else key,
            type(module).__name__,
            tuple(parameter.shape),
            "not the weight of a Linear",
        )
        for name, module in root.named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if key != "weight" and parameter.ndim >= 2
    ]


def _check_writable(root: nn.Module) -> None:
    found = [name for name, parameter in root.named_parameters() if is_lazy(parameter)]
    if found:
        module = type(root.get_submodule(found[0].rpartition(".")[0])).__name__
        raise UnsupportedModelError(
            f"{found[0]} ({module}) has no shape before the model has run: run a batch through it first, for instance "
            "in `setup` or `configure_model`."
        )
    for name, parameter in root.named_parameters():
        is_one = any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        if is_one or parameter.is_inference():
            why = "is one number at several places (`expand`)" if is_one else "was made under `torch.inference_mode()`"
            raise UnsupportedModelError(
                f"{name} {list(parameter.shape)} {why}, so it cannot be written to. Give the model parameters of its "
                "own: `module.weight = nn.Parameter(module.weight.clone())`, outside of `inference_mode`."
            )


def _check_not_quantized(root: nn.Module) -> None:
    config = getattr(root, "config", None)
    if getattr(config, "quantization_config", None) is not None or getattr(root, "hf_quantizer", None) is not None:
        raise UnsupportedModelError(
            "The model is quantized already (its config has a quantization_config). Compress the original checkpoint "
            "instead; of one that was released in FP8 or MXFP4 only, the floats that it stands for: model.dequantize="
            "true, or in Python as docs/memory.md has it."
        )
    for name, module in root.named_modules():
        weight = getattr(module, "weight", None)
        packed = isinstance(weight, torch.Tensor) and not (weight.is_floating_point() or weight.is_complex())
        if hasattr(module, "quantization_scheme") or hasattr(module, "weight_packed") or packed:
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__}) is quantized already. Compress the original, unquantized model "
                "instead."
            )


def _quantizable(name: str, module: nn.Module) -> Quantizable:
    reason = why_not(module)
    if reason is None and not isinstance(module, Quantizable):
        reason = "it is the whole model; wrap it in a module"
    if isinstance(module, Quantizable) and reason is None:
        return module
    weight = cast(torch.Tensor, module.weight)
    kind = ComputedWeightError if has_computed_weight(module) else UnsupportedModelError
    raise kind(
        f"{name} ({type(module).__name__}, weight of shape {list(weight.shape)}) cannot be "
        f"quantized: {reason}. Remove it from `targets`, or add {name!r} to `ignore`."
    )


def _check_inputs(name: str, module: Quantizable, scheme: QuantizationScheme) -> None:
    if scheme.input_activations is not None and not isinstance(module, nn.Linear):
        raise UnsupportedModelError(
            f"{name} ({type(module).__name__}, weight of shape {list(module.weight.shape)}) has no inputs that a "
            f"checkpoint could say how to quantize. Give its class a modifier of its own, with a scheme such as W8A16."
        )


def _check_matched(
    recipe: Recipe, matched: Sequence[bool], assignments: Mapping[str, Assignment], root: nn.Module
) -> None:
    present = sorted(
        {type(module).__name__ for module in root.modules() if getattr(module, "weight", None) is not None}
    )
    if not present:
        raise UnsupportedModelError(
            f"{type(root).__name__} has no modules with weights, so there is nothing to compress."
        )
    for modifier, found in zip(recipe.modifiers, matched, strict=True):
        if not found:
            raise UnsupportedModelError(
                f"No module matches the targets {list(modifier.targets)}. Classes with weights in this model: "
                f"{', '.join(present)}. Patterns (`re:`) reach Linears alone; others have to be named, or their class."
            )
    if not assignments:
        raise UnsupportedModelError(
            "Every module that the targets match is ignored or left alone, so nothing would be compressed; shorten "
            f"`ignore`, or name other classes; those with weights in this model: {', '.join(present)}."
        )


def _warn_of_unmatched(recipe: Recipe, places: Mapping[nn.Module, Sequence[str]]) -> None:
    """Patterns that mean nothing, but for the default one of `ignore`."""
    known = [name for names in places.values() for name in names if name]
    for modifier in recipe.modifiers:
        for kind, patterns in (("targets", modifier.targets), ("ignore", modifier.ignore)):
            for pattern in patterns:
                found = (module for module, names in places.items() if matches(pattern, names, module))
                around = next(found, None)
                if pattern == OUTPUT_EMBEDDING or (
                    around is not None and (_has_weight(around) or any(map(_has_weight, found)))
                ):
                    continue
                what, close = "is no module or class of the model", get_close_matches(pattern, known, n=1)
                perhaps = f" Did you mean {close[0]!r}?" if close else ""
                if around is not None:
                    what, inside = "means modules without weights of their own", re.escape(places[around][0])
                    perhaps = f" What is inside of one is meant by 're:{inside}[.]'."
                warnings.warn(
                    f"{pattern!r} of the recipe's `{kind}` {what}, so it changes nothing.{perhaps}", stacklevel=2
                )


def _warn_of_overridden(recipe: Recipe, wanted: Sequence[Sequence[str]]) -> None:
    """Modifiers that quantize nothing, for later ones take the modules that each wants, or there are none."""
    last = {name: position for position, names in enumerate(wanted) for name in names}
    for position, (modifier, names) in enumerate(zip(recipe.modifiers, wanted, strict=True)):
        if position in last.values():
            continue
        why = f"later ones, which override it, have all that it matches ({listed(names, 2)}): put it behind them"
        if not names:
            why = f"all that its targets match is among its `ignore`, {list(modifier.ignore)}, or is left alone"
        warnings.warn(
            f"Modifier {position} of the recipe (targets {list(modifier.targets)}) quantizes nothing: {why}.",
            stacklevel=2,
        )


def _check_ties(assignments: Mapping[str, Assignment], root: nn.Module) -> None:
    modules = dict(root.named_modules(remove_duplicate=False))
    others, told = _overlapping(root), dict[str, str]()
    for name in assignments:
        weight = modules[name].weight
        tied = [other for other in others[id(origin(weight))] if modules[other.rpartition(".")[0]] is not modules[name]]
        if tied:
            told[name] = f"{name} (shape {list(weight.shape)}) shares its weight with {', '.join(tied)}"
    if told:
        they, them = ("it", "it") if len(told) == 1 else ("they", "them")
        raise UnsupportedModelError(
            f"{'; '.join(told.values())}, so {they} cannot be quantized alone. "
            f"Add {', '.join(map(repr, told))} to `ignore`, or untie {them} first: clone the weight and set "
            f"config.tie_word_embeddings=False. (An `ignore` of your own replaces the default, {OUTPUT_EMBEDDING}.)"
        )


def _overlapping(root: nn.Module) -> dict[int, list[str]]:
    """By the id of each parameter the names of all that have memory in common with it, its own among them: those that
    are one parameter, and those that were made of the same values (`nn.Parameter(other)`, `.data = other.data`)."""
    spans: list[tuple[int, int, int, int, str]] = []
    for name, parameter in root.named_parameters(remove_duplicate=False):
        tensor = origin(parameter)
        start = int(tensor.storage_offset()) * tensor.itemsize
        # of what has gaps (gate and up may be columns of one matrix) only where it begins is looked at
        size = int(tensor.nbytes) if tensor.is_contiguous() else tensor.itemsize
        spans.append((tensor.untyped_storage()._cdata, start, start + size, id(tensor), name))
    found: dict[int, list[str]] = {}
    names, storage, end = list[str](), 0, 0
    for place, start, stop, number, name in sorted(spans):
        if place != storage or start >= end:
            names, storage, end = [], place, start
        names.append(name)
        end = max(end, stop)
        found[number] = names
    return found


def _check_finite(assignments: Mapping[str, Assignment], root: nn.Module) -> None:
    modules = dict(root.named_modules())
    for name in assignments:
        weight = modules[name].weight
        if not weight.is_meta and not is_finite(weight):  # those on disk are checked when they are read
            raise NonFiniteError(
                f"The weight of {name} (shape {list(weight.shape)}, {weight.dtype}) holds NaN or Inf. Nothing was "
                "written. "
                "Repair the checkpoint, or add the module to `ignore`."
            )
