"""Pack codes into the tensors of a checkpoint, with compressed-tensors' own compressors.

The compressors take a weight and quantize it themselves, so they are given codes x scale in float32, from which they
recover exactly the codes that were solved. A weight in bfloat16 would not do: its rounding moves some codes.
"""

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
)
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightTransform

from lightning_compress.algorithms.grids import read_dtype
from lightning_compress.calibration.quantized import QuantizedModule, dequantize_weight
from lightning_compress.export.copies import with_shared
from lightning_compress.graph.experts import Experts
from lightning_compress.graph.names import weight_of
from lightning_compress.memory.naming import conversions_of, naming, stacks_in
from lightning_compress.recipe.defaults import output_embeddings
from lightning_compress.recipe.forms import OtherForm, Quantizable, Storable, class_name
from lightning_compress.recipe.parts import transformers_models
from lightning_compress.recipe.resolve import ResolvedRecipe
from lightning_compress.recipe.schemes import scheme_format

PackedModule = dict[str, Tensor]
PACKED_NAMES = (
    "weight",
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_zero_point",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
)
"""What a packed module may consist of."""


DEQUANTIZES = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""Whether transformers gives weights that it is told to dequantize the model's type, and does not initialize them."""

_EXPERT = re.compile(r"experts\.\d+\.")


def pack(quantized: QuantizedModule) -> PackedModule:
    """The checkpoint tensors of one module under their local names (`weight_packed`, `weight_scale`, ...), in host
    memory; of a GPU's, when its stream has been waited for: packing the next module does not wait."""
    solved, scale = quantized.solved, quantized.solved.scale.float()
    weight = dequantize_weight(solved.codes, scale, solved.zero_point, quantized.weights, torch.float32)
    state: PackedModule = {"weight": weight, "weight_scale": solved.scale}
    if solved.zero_point is not None:
        state["weight_zero_point"] = solved.zero_point
    if solved.global_scale is not None:  # in FP8, of which torch computes nothing, scales are a little later
        state["weight_scale"] = (scale * solved.global_scale).to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = torch.tensor([solved.global_scale], dtype=torch.float32, device=weight.device)
    # members of a group share what is known of their inputs, but safetensors stores no tensor twice
    state |= {name: tensor.clone() for name, tensor in quantized.inputs.tensors.items()}
    compressor = BaseCompressor.get_value_from_registry(scheme_format(quantized.scheme))
    packed: Mapping[str, Tensor] = compressor.compress(state, quantized.scheme)
    return {key: tensor.contiguous().to("cpu", non_blocking=True) for key, tensor in packed.items()}


def unpack(state: PackedModule, scheme: QuantizationScheme) -> Tensor:
    """The weight [O, I] that a module's packed tensors stand for (see `read_dtype`)."""
    compressor = BaseCompressor.get_value_from_registry(scheme_format(scheme))
    weight: Tensor = compressor.decompress(dict(state), scheme)["weight"]
    return weight


def nbytes(packed: PackedModule) -> int:
    """Bytes of a packed module."""
    return sum(tensor.nbytes for tensor in packed.values())


def checkpoint_names(root: nn.Module) -> dict[str, str]:
    """Module names as the original checkpoint has them, where transformers renames on loading."""
    conversions = _conversions(root)
    if not conversions:
        return {}
    inverted = _inverted(conversions)
    names: dict[str, str] = {}
    for name, module in root.named_modules():
        if isinstance(module, Storable) or _holds_matrix(module):
            key = _stored_key(f"{name}.weight", inverted)
            if key.endswith(".weight"):  # else nothing but the weight itself is renamed
                names[name] = key.removesuffix(".weight")
    return names


def _conversions(root: nn.Module) -> Sequence[WeightTransform]:
    conversions: Sequence[WeightTransform] | None = getattr(root, "_weight_conversions", None)
    if conversions is None and isinstance(root, PreTrainedModel):  # as transformers does when it saves
        default = get_model_conversion_mapping(root, add_legacy=False)
        conversions = [conversion for conversion in default if not isinstance(conversion, PrefixChange)]
    return conversions or []


def _inverted(conversions: Sequence[WeightTransform]) -> list[WeightTransform]:
    return [conversion.reverse_transform() for conversion in reversed(conversions)]


def _stored_key(key: str, inverted: Sequence[WeightTransform]) -> str:
    for conversion in inverted:
        renamed, matched = conversion.rename_source_key(key)
        key = renamed if matched is not None else key
    return key


def packed_names(root: nn.Module) -> dict[str, str]:
    """Of packed modules the names in the checkpoint, where they differ from those in memory.

    A weight that is a part of a larger one there, or whose name does not lead back to the module, is packed under its
    own: no conversion knows how to join or rename what it became. (transformers, which converts all that it reads,
    cannot read such modules; `load_compressed` takes names of the model as they are.)
    """
    moved = {name: stored for name, stored in checkpoint_names(root).items() if stored != name}
    if not moved or not isinstance(root, PreTrainedModel):
        return moved
    place_of = naming(root, conversions_of(root), stacks_in(root))
    return {name: stored for name, stored in moved.items() if place_of(f"{stored}.weight") == (f"{name}.weight", None)}


def own_names(root: nn.Module, quantized: Collection[str], shards: Iterable[Collection[str]]) -> set[str]:
    """Keys of the state dict that keep their names, for in the checkpoint they would be parts of one tensor with others
    that are packed, or that another shard holds.

    Args:
        root: the model.
        quantized: names of its modules that are packed.
        shards: the keys of each shard.
    """
    names = checkpoint_names(root)
    taken_apart = {names[name] for name in quantized if name in names}
    own = {f"{name}.weight" for name, stored in names.items() if stored in taken_apart and name not in quantized}
    conversions = _conversions(root)
    if any(isinstance(each, WeightConverter) and len(each.target_patterns) > 1 for each in conversions):
        inverted = _inverted(conversions)
        places: dict[str, dict[str, int]] = {}
        for number, keys in enumerate(shards):
            for key in keys:
                places.setdefault(_stored_key(key, inverted), {})[key] = number
        scattered = (keys for keys in places.values() if len({*keys.values()}) > 1)
        own.update(chain.from_iterable(scattered))
    return own


def quantization_config(resolved: ResolvedRecipe, root: nn.Module, rename: Mapping[str, str]) -> dict[str, object]:
    """The `quantization_config` of config.json.

    With one scheme the targets are classes (`Linear`) and output embeddings, which are no Linears in vLLM, less an
    `ignore` list, which also names what holds a matrix and is no Linear here: routers are Linears in vLLM, which would
    take their weights for packed ones. With several, every group names its modules: readers that fuse q/k/v into one
    layer resolve names, but would let the class name win over them. What is not fused is targeted by its class, too:
    vLLM has no names for embeddings. Where a module has another name in the checkpoint, both are given: vLLM resolves
    the file's names, transformers its own.

    Args:
        resolved: which module got which scheme.
        root: the model.
        rename: module names in the checkpoint where they differ from those in memory.
    """
    schemes = _by_scheme(resolved)
    found = {name: module for name, module in root.named_modules() if isinstance(module, Quantizable)}
    targeted = {class_name(module): None for name, module in found.items() if name in resolved.assignments}
    known = [name for name, module in found.items() if class_name(module) in targeted]
    matrices = [name for name, module in root.named_modules() if _holds_matrix(module)]
    ignore = [name for name in (*known, *matrices) if name not in resolved.assignments]
    heads = [name for name in resolved.assignments if root.get_submodule(name) in output_embeddings(root)]
    unfused = {
        kind: [name for name in known if class_name(found[name]) == kind] for kind in targeted if kind != "Linear"
    }
    groups = {
        f"group_{number}": scheme.model_copy(
            update={
                "targets": [*targeted, *_both_names(heads, rename)]
                if len(schemes) == 1
                else [*_targets(members, known, rename), *_wholly(members, ignore, unfused)],
                "format": scheme_format(scheme),
            }
        )
        for number, (scheme, members) in enumerate(schemes)
    }
    formats = {str(group.format) for group in groups.values()}
    config = QuantizationConfig(
        config_groups=groups,
        format=formats.pop() if len(formats) == 1 else CompressionFormat.mixed_precision.value,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=_both_names(ignore, rename),
    )
    dumped: dict[str, object] = config.model_dump(mode="json")
    if _is_read_dequantized(root, resolved):
        dumped["dequantize"] = True
    return dumped


def becomes_bfloat16(root: nn.Module, resolved: ResolvedRecipe) -> bool:
    """Whether transformers would compute with weights in bfloat16 in a model that is in another dtype, and fail."""
    return _is_read_in_bfloat16(root, resolved) and not (DEQUANTIZES and _is_read_dequantized(root, resolved))


def _is_read_in_bfloat16(root: nn.Module, resolved: ResolvedRecipe) -> bool:
    """Whether weights are of another dtype in the model than they are decompressed in (see `read_dtype`)."""
    chosen = ((weight_of(root, name).dtype, each.weights) for name, each in resolved.assignments.items())
    return any(dtype != read_dtype(weights, dtype) for dtype, weights in chosen)


def forgets_zero_points(root: nn.Module, resolved: ResolvedRecipe) -> bool:
    """Whether transformers cannot read this checkpoint because of its packed zero points (see `packs_zero_points`)."""
    packed = any(packs_zero_points(scheme) for scheme, _ in _by_scheme(resolved))
    return packed and not _is_read_dequantized(root, resolved)


def fails_to_initialize(root: nn.Module, resolved: ResolvedRecipe) -> bool:
    """Whether transformers fails on loading, for the model's own code initializes weights that are packed."""
    is_dequantized = _has_other_forms(root, resolved) or _only_weights(resolved) is not None
    return not (DEQUANTIZES and is_dequantized) and _initializes_packed(root, resolved)


def _by_scheme(resolved: ResolvedRecipe) -> list[tuple[QuantizationScheme, list[str]]]:
    """The modules of each scheme."""
    found: list[tuple[QuantizationScheme, list[str]]] = []
    for name, assignment in resolved.assignments.items():
        for scheme, members in found:
            if scheme == assignment.scheme:
                members.append(name)
                break
        else:
            found.append((assignment.scheme, [name]))
    return found


def _is_read_dequantized(root: nn.Module, resolved: ResolvedRecipe) -> bool:
    """Whether transformers is told to: it misreads what has several schemes then, and leaves inputs as they are."""
    alone = _only_weights(resolved)
    return _has_other_forms(root, resolved) or (
        alone is not None
        and (
            packs_zero_points(alone)
            or _is_read_in_bfloat16(root, resolved)
            or _is_tied(root, resolved)
            or _initializes_packed(root, resolved)
        )
    )


def _only_weights(resolved: ResolvedRecipe) -> QuantizationScheme | None:
    """The one scheme, if there is one and it leaves inputs as they are."""
    schemes = [scheme for scheme, _ in _by_scheme(resolved)]
    return schemes[0] if len(schemes) == 1 and schemes[0].input_activations is None else None


def _holds_matrix(module: nn.Module) -> bool:
    """Whether a module of no class that is packed has a `weight` [O, I], as routers do."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, Storable)


def packs_zero_points(scheme: QuantizationScheme) -> bool:
    """transformers lays modules out on the meta device, where compressed-tensors (0.20) forgets that zero points are
    packed.

    Loading then fails on their shapes, unless the file says `dequantize`, a key of transformers' that others do not
    read.
    """
    assert scheme.weights is not None
    return scheme_format(scheme) == CompressionFormat.pack_quantized.value and not (
        scheme.weights.symmetric or scheme.weights.strategy == QuantizationStrategy.TENSOR
    )


def _has_other_forms(root: nn.Module, resolved: ResolvedRecipe) -> bool:
    """Whether matrices are packed that the model's own modules keep in another form: transformers would leave those
    out and initialize them. Told to dequantize, it finds that their shapes are wrong, and refuses."""
    return any(isinstance(root.get_submodule(name), OtherForm) for name in resolved.assignments)


def _is_tied(root: nn.Module, resolved: ResolvedRecipe) -> bool:
    """Whether a quantized module is at several places of the model: transformers ties weights, and packed modules have
    none."""
    assigned = {root.get_submodule(name) for name in resolved.assignments}
    return sum(module in assigned for _, module in root.named_modules(remove_duplicate=False)) > len(assigned)


def _initializes_packed(root: nn.Module, resolved: ResolvedRecipe) -> bool:
    """Whether a model's `_init_weights` reaches for the weights of what is quantized: with packed ones it fails on
    loading (T5, Mamba, Falcon). It is tried, on a copy without values, nor experts, which it sees as stacks."""
    stacks = [module for module in root.modules() if isinstance(module, Experts)]
    memo: dict[int, Any] = {id(stack): nn.Identity() for stack in stacks}
    packed = {name for name, each in resolved.assignments.items() if not keeps_weight(each.scheme)}
    stacked = {part for stack in stacks for part in stack.modules()}
    memo |= {id(tensor): tensor.to("meta") for tensor in root.buffers()}
    for tensor in root.parameters():
        memo[id(tensor)] = tensor if tensor.is_meta else nn.Parameter(tensor.detach().to("meta"), requires_grad=False)
    for prefix, model in transformers_models(root).items():
        copied = copy.deepcopy(model, with_shared(model, memo))
        for name in packed:
            if name.startswith(prefix) and root.get_submodule(name) not in stacked:
                copied.get_submodule(name.removeprefix(prefix))._parameters.pop("weight")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if any(_lacks_weight(_responsible(copied, path), module) for path, module in copied.named_modules()):
                return True
    return False


def _lacks_weight(model: PreTrainedModel, module: nn.Module) -> bool:
    try:
        model._init_weights(module)
    except AttributeError:
        return True
    except RuntimeError:  # of buffers that grow when they are used (SeamlessM4T's positions), as new ones have not
        return False
    return False


def keeps_weight(scheme: QuantizationScheme) -> bool:
    """Whether a packed module's codes are its `weight`, not its `weight_packed`."""
    compressor = BaseCompressor.get_value_from_registry(scheme_format(scheme))
    return "weight" in compressor.compression_param_names(scheme)


def _responsible(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost transformers model that a module is of; it initializes it."""
    names = path.split(".") if path else []
    around = (model.get_submodule(".".join(names[:length])) for length in range(len(names), -1, -1))
    return next(module for module in around if isinstance(module, PreTrainedModel))


def _targets(members: Sequence[str], others: Sequence[str], rename: Mapping[str, str]) -> list[str]:
    """Modules of one scheme among several, by name; experts by patterns, by which transformers tells whose scheme is
    theirs, with any number in place of layer and expert where all that it fits are among them."""
    chosen, known = set(_both_names(members, rename)), _both_names(others, rename)
    targets: dict[str, None] = {}
    for name in _both_names(members, rename):
        if _EXPERT.search(name) is None:
            targets[name] = None
            continue
        pattern = re.sub(r"\d+", r"\\d+", re.escape(name))
        fits_all = all(other in chosen for other in known if re.fullmatch(pattern, other))
        targets[f"re:{pattern if fits_all else re.escape(name)}$"] = None
    return list(targets)


def _wholly(members: Collection[str], ignore: Collection[str], unfused: Mapping[str, Sequence[str]]) -> list[str]:
    """Classes of which all modules that are not ignored are members."""
    return [kind for kind, names in unfused.items() if {*names} - {*ignore} <= {*members}]


def _both_names(names: Iterable[str], rename: Mapping[str, str]) -> list[str]:
    """Names in the checkpoint and, where they differ, in memory."""
    return list(dict.fromkeys(each for name in names for each in (rename.get(name, name), name)))
