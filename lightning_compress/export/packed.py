"""Reading compressed checkpoints: into a module, or as a source of weights, unpacked one tensor at a time."""

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import match_targets
from torch import Tensor, nn

from lightning_compress.algorithms.grids import read_dtype
from lightning_compress.calibration.layout import added_to_state, identity
from lightning_compress.calibration.quantized import InputQuantizer, quantize_inputs, read_whole
from lightning_compress.calibration.static_inputs import StaticInput
from lightning_compress.calibration.target import owner
from lightning_compress.errors import CompressionError, listed
from lightning_compress.export.checkpoint import check_finished
from lightning_compress.export.packing import PACKED_NAMES, packed_names, unpack
from lightning_compress.graph.unfold import unfolded
from lightning_compress.memory.dequantized import METHODS, dequantized
from lightning_compress.memory.files import StoredTensor, stored_tensors
from lightning_compress.memory.source import Readable, WeightSource, is_on_meta, tensor_loads, weight_source

_SCALE = ".weight_scale"


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight [O, I] in its parts."""

    parts: Mapping[str, StoredTensor]
    scheme: QuantizationScheme
    is_matrix = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        if "weight_shape" in self.parts:
            return tuple(self.parts["weight_shape"].read().tolist())
        if "weight" in self.parts:
            return self.parts["weight"].shape
        num_rows, num_bytes = self.parts["weight_packed"].shape
        return num_rows, 2 * num_bytes

    @property
    def dtype(self) -> torch.dtype:
        """That it is read in."""
        assert self.scheme.weights is not None
        return read_dtype(self.scheme.weights, self.parts["weight_scale"].dtype)

    def read(self) -> Tensor:
        """The dequantized weight."""
        return unpack({name: part.read() for name, part in self.parts.items()}, self.scheme)


def stored_quantization(folder: Path) -> QuantizationConfig | None:
    """What `config.json` in `folder` says about quantization by compressed-tensors; None if nothing, or another method
    whose weights are read as plain ones.

    Raises:
        CompressionError: it is quantized by a method that cannot be read.
    """
    found = _said(folder)
    method = found.get("quant_method")
    if not found or method in METHODS:
        return None
    if method != "compressed-tensors":
        raise CompressionError(
            f"{folder} is quantized by {method!r}; only {', '.join(METHODS)} and compressed-tensors checkpoints can be "
            "read."
        )
    known = {key: value for key, value in found.items() if key in QuantizationConfig.model_fields}
    return QuantizationConfig.model_validate(known)


def _said(folder: Path) -> dict[str, Any]:
    """The `quantization_config` in a folder's config.json."""
    return _config(folder).get("quantization_config") or {}


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def quantized_modules(config: QuantizationConfig, names: Collection[str]) -> dict[str, QuantizationScheme]:
    """The schemes of the modules that a checkpoint holds quantized, by the library's own matching rules.

    Args:
        config: of the checkpoint.
        names: of its tensors.
    """
    by_target = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    kinds = (nn.Linear, nn.Embedding, partial(nn.Conv1d, kernel_size=1), partial(nn.Conv2d, kernel_size=1))
    samples = [kind(1, 1, device="meta") for kind in kinds]
    modules = [name.removesuffix(_SCALE) for name in names if name.endswith(_SCALE)]
    found = {name: [match_targets(name, sample, list(by_target)) for sample in samples] for name in modules}
    return {name: by_target[next(chain.from_iterable(targets))] for name, targets in found.items()}


def unfolded_as_packed(root: nn.Module, folder: Path | None) -> AbstractContextManager[None]:
    """Within: stacked experts and `Conv1D`s of a model are Linears, and so are the convolutions that a checkpoint in
    `folder`, of any kind, holds packed."""
    config = None if folder is None or not folder.is_dir() else stored_quantization(folder)
    if folder is None or config is None:
        return unfolded(root)
    return unfolded(root, _packed_in(root, quantized_modules(config, stored_tensors(folder).keys())))


def _packed_in(root: nn.Module, schemes: Collection[str]) -> Callable[[str, nn.Module], bool]:
    names = packed_names(root)
    return lambda name, module: names.get(name, name) in schemes


def original_source(root: nn.Module, folder: Path, place: str = "") -> WeightSource:
    """Where the values of a model's meta parameters are: a checkpoint that is not compressed. Weights that were
    released in FP8 or MXFP4 are read as the floats they stand for, in the dtype that the model is built in.

    Raises:
        CompressionError: see `memory.source.weight_source` and `memory.dequantized`.
    """
    check_finished(folder)
    said = _said(folder)
    if said.get("quant_method") not in METHODS:
        return weight_source(root, folder, place)
    dtype = next((parameter.dtype for parameter in root.parameters() if parameter.is_meta), torch.bfloat16)
    source = weight_source(root, folder, place, decode=partial(dequantized, config=said, dtype=dtype))
    return replace(source, method=str(said["quant_method"]))


def checkpoint_source(root: nn.Module, folder: Path) -> WeightSource:
    """Where the values of a model's meta parameters are: a checkpoint of any kind, compressed or not.

    Of a compressed one also the quantization of inputs is taken: hooks on the modules of `root` do it.

    Raises:
        CompressionError: see `memory.source.weight_source`.
    """
    config = stored_quantization(folder)
    if config is None:
        return original_source(root, folder)
    check_finished(folder)
    stored = stored_tensors(folder)
    schemes = quantized_modules(config, stored.keys())
    source = weight_source(root, folder, decode=partial(_decoded, schemes=schemes))
    _quantize_inputs(root, stored, schemes)
    return source


def load_compressed(module: nn.Module, directory: str | Path) -> nn.Module:
    """Load a compressed checkpoint into a module of the architecture it was made from; returns the module.

    Weights are dequantized into the module's parameters, in their dtype; quantized inputs are quantized by forward
    pre-hooks. What wraps a transformers model whose checkpoint it is has it loaded into that. For checkpoints of
    transformers models `from_pretrained` does the same without the original class at hand.

    Raises:
        CompressionError: the folder holds no compressed checkpoint, or its tensors do not fit the module.
        TypeError: the module is none, or the folder is no path.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"The module is one that has been made, not {module!r}; then comes the checkpoint's folder.")
    if not isinstance(directory, str | PathLike):
        raise TypeError(f"The directory is the path of a checkpoint's folder, not {directory!r}.")
    directory = Path(directory)
    config = stored_quantization(directory)
    if config is None:
        raise CompressionError(
            f"{directory} holds no compressed checkpoint (no config.json with a quantization_config)."
        )
    if is_on_meta(module):
        raise CompressionError(
            f"Parameters of {type(module).__name__} are on the meta device, so nothing can be loaded into them. Build "
            "it with values, whatever they are."
        )
    stored = stored_tensors(directory)
    schemes = quantized_modules(config, stored.keys())
    root = owner(module) if "model_type" in _config(directory) else module
    with unfolded(root, _packed_in(root, schemes)):
        _load(root, directory, stored, schemes)
    return module


def _load(
    module: nn.Module, directory: Path, stored: Mapping[str, StoredTensor], schemes: Mapping[str, QuantizationScheme]
) -> None:
    loads, unexpected = tensor_loads(module, _decoded(stored, schemes), directory)
    entries = module.state_dict(keep_vars=True)
    state = OrderedDict(pair for load in dict.fromkeys(loads.values()) for pair in load().items())
    vars(state)["_metadata"] = getattr(entries, "_metadata", None)  # the versions of its modules, which some ask for
    added = {*added_to_state(module, entries)}
    tensors = {key: value for key, value in entries.items() if key not in added}
    remedy = "Give the model that was compressed, built with the same configuration."
    for key, value in state.items():
        if key in tensors and tensors[key].shape != value.shape:
            raise CompressionError(
                f"{directory} does not fit {type(module).__name__}: {key} is {list(value.shape)} there and "
                f"{list(tensors[key].shape)} in the module. {remedy}"
            )
    missing, unknown = module.load_state_dict(state, strict=False)
    loaded = {identity(tensors[key]) for key in state if key in tensors}
    missing = [key for key in missing if key in tensors and identity(tensors[key]) not in loaded]  # nor tied to it
    if missing or unknown or unexpected:
        inside = (name for name, part in module.named_children() if part.state_dict().keys() >= {*unknown, *unexpected})
        fits = next(inside, None) if unknown or unexpected else None
        faults = [f"it lacks {listed(missing)}"] if missing else []
        faults += [f"the module has no {listed([*unknown, *unexpected])}"] if unknown or unexpected else []
        raise CompressionError(
            f"{directory} does not fit {type(module).__name__}: {', and '.join(faults)}. "
            f"{remedy if fits is None else f'Its `{fits}` has these names: give that.'}"
        )
    _quantize_inputs(module, stored, schemes)


def _quantize_inputs(
    root: nn.Module, stored: Mapping[str, StoredTensor], schemes: Mapping[str, QuantizationScheme]
) -> None:
    """Let modules quantize what they read, where their schemes say so, and no others."""
    read_whole(root)
    in_memory = {stored_name: name for name, stored_name in packed_names(root).items()}
    for module, scheme in schemes.items():
        if scheme.input_activations is not None:
            parts = ((name, stored.get(f"{module}.{name}")) for name in PACKED_NAMES)
            static = StaticInput.of({name: part.read() for name, part in parts if part is not None and "input" in name})
            target = root.get_submodule(in_memory.get(module, module))
            quantize_inputs(target, InputQuantizer(scheme.input_activations, static))


def _decoded(stored: Mapping[str, StoredTensor], schemes: Mapping[str, QuantizationScheme]) -> dict[str, Readable]:
    """The tensors of the model: packed ones as one weight each."""
    tensors: dict[str, Readable] = {}
    for key, tensor in stored.items():
        module, _, name = key.rpartition(".")
        if module not in schemes or name not in PACKED_NAMES:
            tensors[key] = tensor
    for module, scheme in schemes.items():
        keys = {name: f"{module}.{name}" for name in PACKED_NAMES}
        parts = {name: stored[key] for name, key in keys.items() if key in stored}
        tensors[f"{module}.weight"] = PackedWeight(parts, scheme)
    return tensors
