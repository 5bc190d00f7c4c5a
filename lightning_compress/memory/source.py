"""Models whose parameters are on the meta device, and where their values come from: a checkpoint folder.

Which stored tensors make up a parameter is transformers' own knowledge (renamed keys, fused and stacked weights); its
conversions are run here on one subgraph's tensors at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lightning_compress.errors import CompressionError
from lightning_compress.memory.files import StoredTensor, files_fingerprint, read_tensor, stored_tensors

Load = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class WeightSource:
    """Where the values of a model's meta parameters are.

    Attributes:
        loaders: for every key of the state dict, what reads it (and perhaps others that are stored together with it).
        fingerprint: changes when the values do (see `files.files_fingerprint`).
    """

    loaders: Mapping[str, Load]
    fingerprint: str


def is_on_meta(root: nn.Module) -> bool:
    """Whether any parameter has no values yet."""
    return any(parameter.is_meta for parameter in root.parameters())


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, whatever their size, and their buffers for real.

    Buffers that no checkpoint stores (rotary frequencies) are thus computed by the model's own code.
    """
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def weight_source(root: nn.Module, folder: Path) -> WeightSource:
    """Match a checkpoint folder to a model. Buffers that the checkpoint stores are read at once.

    Raises:
        CompressionError: the folder holds no readable safetensors, or not all of the model's parameters.
    """
    stored = stored_tensors(folder)
    loaders = _transformers_loaders(root, stored) if isinstance(root, PreTrainedModel) else _plain_loaders(stored)
    state = root.state_dict(keep_vars=True)
    known = {id(state[name]) for name in loaders if name in state}
    missing = [name for name, tensor in state.items() if tensor.is_meta and id(tensor) not in known]
    if missing:
        shapes = ", ".join(f"{name} {list(state[name].shape)}" for name in missing[:5])
        raise CompressionError(f"{folder} lacks {len(missing)} parameters of {type(root).__name__}: {shapes}.")
    with torch.no_grad():
        for name, tensor in state.items():
            if not tensor.is_meta and name in loaders:
                tensor.copy_(loaders[name]()[name])
    return WeightSource(loaders, files_fingerprint(folder))


def _plain_loaders(stored: Mapping[str, StoredTensor]) -> dict[str, Load]:
    return {name: _reading(name, tensor) for name, tensor in stored.items()}


def _reading(name: str, tensor: StoredTensor) -> Load:
    return lambda: {name: read_tensor(tensor)}


def _transformers_loaders(root: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> dict[str, Load]:
    conversions = get_model_conversion_mapping(root)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = root.state_dict()
    loaders: dict[str, Load] = {}
    converted: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    for key in sorted(stored, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, root.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            continue
        if pattern is None:
            loaders[name] = _reading(name, stored[key])
        else:
            converted.setdefault(name, (by_pattern[pattern], []))[1].append((key, pattern))
    for name, (converter, sources) in converted.items():
        load = _converting(root, name, converter, sources, stored)
        loaders.update(dict.fromkeys(_convert(root, name, converter, sources, lambda k: _empty(stored[k])), load))
    used = [conversion for conversion in conversions if conversion.was_used()]
    object.__setattr__(root, "_weight_conversions", used)  # as `from_pretrained` leaves it, for writing
    return loaders


def _converting(
    root: PreTrainedModel,
    name: str,
    converter: WeightConverter,
    sources: Sequence[tuple[str, str]],
    stored: Mapping[str, StoredTensor],
) -> Load:
    return lambda: _convert(root, name, converter, sources, lambda key: read_tensor(stored[key]))


def _convert(
    root: PreTrainedModel,
    name: str,
    converter: WeightConverter,
    sources: Sequence[tuple[str, str]],
    read: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """The parameters that a conversion makes of its source tensors (key, pattern)."""
    mapping = deepcopy(converter)
    for key, pattern in sources:
        mapping.add_tensor(name, key, pattern, read(key))  # type: ignore[arg-type]
    values = mapping.convert(name, model=root, config=root.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in values.items()}


def _empty(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _natural(key: str) -> list[tuple[int, int | str]]:
    """Sorts experts 2 before 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]
