"""Models whose parameters are on the meta device, and where their values come from: a folder of safetensors files, or
a checkpoint of Lightning, in one file or sharded.

Which tensors of a transformers folder make up a parameter is transformers' own knowledge (renamed keys, fused and
stacked weights); its conversions are run here on one subgraph's tensors at a time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter

from lightning_compress.errors import CompressionError, listed
from lightning_compress.graph.awaited import nobody_brings
from lightning_compress.graph.experts import Experts
from lightning_compress.graph.restore import assigned
from lightning_compress.graph.unfold import Unfolding
from lightning_compress.memory.dequantized import Dequantized
from lightning_compress.memory.files import StoredTensor, files_fingerprint, is_sharded, stored_tensors
from lightning_compress.memory.naming import WithStacks, conversions_of, naming, stacks_in
from lightning_compress.memory.pickled import stored_state_dict
from lightning_compress.memory.sharded import ShardedTensor, blocks_of, sharded_state_dict
from lightning_compress.recipe.parts import transformers_models

Load = Callable[[], Mapping[str, Tensor]]


class Readable(Protocol):
    """A tensor that is not in memory.

    Attributes:
        is_matrix: it is a packed weight, a matrix [O, I], whatever form the module keeps it in that it is for.
    """

    is_matrix: bool

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> Tensor:
        """Its values, in host memory."""


@dataclass(frozen=True)
class WeightSource:
    """Where the values of a model's meta parameters are.

    Attributes:
        loaders: for every key of the state dict, what reads it (and perhaps others that are stored together with it).
        fingerprint: changes when the values do (see `files.files_fingerprint`).
        method: the `quant_method` of what is stored, where it is dequantized when it is read.
        converting: bytes that bringing a weight into another form than it is stored in takes beside it, at most.
    """

    loaders: Mapping[str, Load]
    fingerprint: str
    method: str = ""
    converting: int = 0


def is_on_meta(root: nn.Module) -> bool:
    """Whether any parameter has no values yet."""
    return any(parameter.is_meta for parameter in root.parameters())


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, whatever their size, and their buffers for real.

    Buffers that no checkpoint stores (rotary frequencies) are thus computed by the model's own code. Values that
    parameters would get inside, also those that `from_pretrained` reads, are gone: they are read anew from `weights=`.
    What is one parameter of several modules stays one.
    """
    register = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # what stands for a parameter, as long as that is about to be given to other modules

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or param.is_meta:
            register(self, name, param)
            return
        if param not in made:
            made[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, made[param])

    with assigned(nn.Module, register_parameter=on_meta):
        yield


def weight_source(
    root: nn.Module,
    weights: Path,
    place: str = "",
    decode: Callable[[Mapping[str, StoredTensor]], Mapping[str, Readable]] = dict,
) -> WeightSource:
    """Match what is stored to a model. Buffers that are stored, too, are read at once; those on the meta device have
    values from then on.

    Args:
        root: the model.
        weights: a folder of safetensors files (or one such file), or a checkpoint that `torch.save` or
            `torch.distributed.checkpoint` wrote. Names in safetensors are those of `root`, or those of the
            transformers model in it; names in a checkpoint are those of the LightningModule around `root`.
        place: the path of `root` in that LightningModule, where it is known.
        decode: makes the model's tensors of those that are stored, where they differ.

    Raises:
        CompressionError: `weights` cannot be read, lacks parameters or buffers of the model, has other shapes, may be
            matched in several ways, or contradicts parameters that are in memory; or the model keeps other tensors that
            have no values.
    """
    if not weights.exists():
        raise CompressionError(f"weights={weights}: there is no such file or folder.")
    if is_sharded(weights):
        shards = sharded_state_dict(weights)
        stored, found = blocks_of(shards), _in_state_dict(root, shards, place, weights)
    elif weights.is_file() and weights.suffix != ".safetensors":
        stored = stored_state_dict(weights)
        found = _in_state_dict(root, stored, place, weights)
    else:
        stored = stored_tensors(weights)
        found = _in_folder(root, decode(stored), weights)
    missing = _missing(root, found)
    if missing:
        shapes = _with_shapes(root, missing)
        raise CompressionError(
            f"{weights} lacks {len(missing)} parameters of {type(root).__name__}: {shapes}. Build what it does not "
            "hold outside `parameters_on_meta()`, with its values, or give a checkpoint of the whole model."
        )
    state = _tensors(root)
    wrong = [name for name, entry in found.items() if name in state and entry.shape != tuple(state[name].shape)]
    if wrong:
        shapes = listed([f"{name} {list(found[name].shape)} for {list(state[name].shape)}" for name in wrong])
        raise CompressionError(
            f"{weights} holds {len(wrong)} tensors of another shape than {type(root).__name__} has: {shapes}. Build "
            "the model with the configuration that the weights were trained with."
        )
    _settle_memory(root, found, weights)
    _check_the_rest(root)
    converting = max((entry.converting for entry in found.values()), default=0)
    loaders = {name: entry.load for name, entry in found.items()}
    return WeightSource(loaders, files_fingerprint(stored), converting=converting)


def tensor_loads(root: nn.Module, stored: Mapping[str, Readable], folder: Path) -> tuple[dict[str, Load], list[str]]:
    """What reads the tensors of a model, by their names there, of those that are stored in a folder; and the names of
    those stored that it has no place for.

    Raises:
        CompressionError: they may be matched in several ways.
    """
    found = _in_folder(root, stored, folder)
    used = {key for entry in found.values() for key in entry.keys}
    return {name: entry.load for name, entry in found.items()}, [key for key in stored if key not in used]


@dataclass(frozen=True)
class _Found:
    """What reads a tensor of the model, the shape it will have, and what it is made of by the names in the file; where
    it is stored as it is, that too; else the bytes that there are beside it while it is `converting`."""

    load: Load
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    is_matrix: bool = False
    stored: Readable | None = None
    converting: int = 0

    def part(self, name: str, of: range) -> Tensor:
        """Of the first dimension of this tensor of the model a range, without the memory of the rest."""
        if isinstance(self.stored, StoredTensor | ShardedTensor | Dequantized):
            return self.stored.part(of.start, of.stop).read()
        return self.load()[name][of.start : of.stop].clone()


def _tensors(root: nn.Module) -> dict[str, Tensor]:
    """The state dict without extra states, the module's own objects."""
    return {name: value for name, value in root.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _missing(root: nn.Module, found: Collection[str]) -> list[str]:
    """Meta tensors of which no name is found."""
    state = _tensors(root)
    known = {id(state[name]) for name in found if name in state}
    return [name for name, tensor in state.items() if tensor.is_meta and id(tensor) not in known]


def _with_shapes(root: nn.Module, names: Sequence[str]) -> str:
    state = _tensors(root)
    return listed([f"{name} {list(state[name].shape)}" for name in names])


def _settle_memory(root: nn.Module, found: Mapping[str, _Found], weights: Path) -> None:
    """Read stored buffers. Parameters in memory keep their values, which must not contradict what is stored."""
    other: list[str] = []
    with torch.no_grad():
        for name, tensor in _tensors(root).items():
            is_parameter = isinstance(tensor, nn.Parameter)
            if name not in found or (is_parameter and tensor.is_meta):
                continue
            value = found[name].load()[name].to(tensor.dtype)
            if tensor.is_meta:
                _put_buffer(root, tensor, value)
            elif not is_parameter:
                tensor.copy_(value)
            elif not torch.equal(tensor, value.to(tensor.device)):
                other.append(name)
    if other:
        raise CompressionError(
            f"{len(other)} parameters of {type(root).__name__} are in memory and, with other values, in {weights}: "
            f"{_with_shapes(root, other)}. Build the whole model within `parameters_on_meta()` to take the stored "
            "values, or give weights that do not hold them to keep those in memory."
        )


def _put_buffer(root: nn.Module, meta: Tensor, value: Tensor) -> None:
    """In its place, wherever it is."""
    for module in root.modules():
        module._buffers.update({key: value for key, buffer in module._buffers.items() if buffer is meta})


def _check_the_rest(root: nn.Module) -> None:
    """Raise if there is a tensor without values that is no parameter."""
    left = nobody_brings(root)
    if left:
        raise CompressionError(
            f"{len(left)} tensors of {type(root).__name__} that are no parameters are on the meta device, and no "
            f"checkpoint holds them: {listed(left)}. Build the model within `parameters_on_meta()`, not "
            "`torch.device('meta')`, and compute in `forward`, or from real values, what follows from a parameter."
        )


def _in_state_dict(root: nn.Module, stored: Mapping[str, Readable], place: str, weights: Path) -> dict[str, _Found]:
    """A part of a LightningModule's state dict: the one at `place`, else the only one that holds all of the model."""
    prefixes = [f"{place}." if place else "", ""]
    for prefix in prefixes:
        if not _missing(root, found := _named(root, stored, prefix)):
            return found
    longest = max((name for name, tensor in _tensors(root).items() if tensor.is_meta), key=len)
    ends = sorted({key.removesuffix(longest) for key in stored if f".{key}".endswith(f".{longest}")})
    whole = [prefix for prefix in ends if not _missing(root, _named(root, stored, prefix))]
    if len(whole) > 1:
        names = ", ".join(prefix.removesuffix(".") for prefix in whole)
        raise CompressionError(
            f"{weights} holds {len(whole)} models that {type(root).__name__} may be: {names}. Give the LightningModule "
            "that the checkpoint is of, or a file with the state dict of the one that is meant."
        )
    return _named(root, stored, (whole or ends or prefixes)[0])


def _in_folder(root: nn.Module, stored: Mapping[str, Readable], weights: Path) -> dict[str, _Found]:
    """Names of the model itself, or of the transformers model in it whose values are wanted."""
    if isinstance(root, PreTrainedModel):
        return _transformers_tensors(root, stored)
    found = _named(root, stored)
    inner = {prefix: model for prefix, model in transformers_models(root).items() if is_on_meta(model)}
    if not inner or not _missing(root, found):
        return found
    if len(inner) > 1:
        models = ", ".join(f"{prefix.removesuffix('.')} ({type(model).__name__})" for prefix, model in inner.items())
        raise CompressionError(
            f"{type(root).__name__} holds {len(inner)} transformers models without values ({models}), and {weights} "
            "does not name its tensors as it does, so whose they are is not clear. Give a checkpoint of the "
            f"{type(root).__name__} (`trainer.save_checkpoint`), or build one of the models with its values."
        )
    ((prefix, model),) = inner.items()
    return _transformers_tensors(model, stored, prefix)


def _named(root: nn.Module, stored: Mapping[str, Readable], prefix: str = "") -> dict[str, _Found]:
    """The tensors whose names begin with `prefix`, without it."""
    named = {key.removeprefix(prefix): key for key in stored if key.startswith(prefix)}
    return _taken_apart(root, {name: _reading(name, key, stored[key]) for name, key in named.items()})


def _reading(name: str, key: str, tensor: Readable) -> _Found:
    return _Found(lambda: {name: tensor.read()}, tensor.shape, (key,), tensor.is_matrix, tensor)


def _transformers_tensors(
    model: PreTrainedModel, stored: Mapping[str, Readable], prefix: str = ""
) -> dict[str, _Found]:
    """What a transformers checkpoint holds of `model`; names get a prefix: the model's place in a larger one."""
    conversions = conversions_of(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    stacks = stacks_in(model)
    place_of, asked = naming(model, conversions, stacks), WithStacks(model, stacks)
    found: dict[str, _Found] = {}
    converted: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}
    for key in sorted(stored, key=_natural):
        if (place := place_of(key)) is None:
            continue
        name, pattern = place
        if pattern is None:
            found[prefix + name] = _reading(prefix + name, key, stored[key])
        else:
            converted.setdefault(name, (by_pattern[pattern], []))[1].append((key, pattern))
    for name, (converter, sources) in converted.items():
        convert = partial(_convert, asked, name, converter, sources)
        load, shapes = _converting(convert, stored, prefix), convert(lambda key: _empty(stored[key]))
        keys = tuple(key for key, _ in sources)
        size = len(converter.operations) * sum(_empty(stored[key]).nbytes for key in keys)  # each makes anew
        entries = {key: _Found(load, tuple(value.shape), keys, converting=size) for key, value in shapes.items()}
        found.update({prefix + key: entry for key, entry in entries.items()})
    used = [conversion for conversion in conversions if conversion.was_used()]
    object.__setattr__(model, "_weight_conversions", used)  # as `from_pretrained` leaves it, for writing
    return _taken_apart(model, found, prefix)


def _taken_apart(root: nn.Module, found: Mapping[str, _Found], prefix: str = "") -> dict[str, _Found]:
    """Parameters of modules that others are in the place of, as these have them; a stack of experts is read once for
    all."""
    stacks = {f"{prefix}{name}": place for name, place in stacks_in(root).items()}
    apart: dict[str, _Found] = {}
    for name, entry in found.items():
        if name in stacks and not entry.is_matrix:
            apart.update(_linears_of(entry, *stacks[name], name))
        else:
            apart[name] = entry
    return apart


def _linears_of(stack: _Found, unfolding: Unfolding, key: str, name: str) -> dict[str, _Found]:
    """What reads them; those of one part of the experts together."""
    path = name.removesuffix(key)
    found: dict[str, _Found] = {}
    parts = unfolding.parts if isinstance(unfolding, Experts) else [range(stack.shape[0])]

    def load(part: range) -> dict[str, Tensor]:
        value = stack.part(name, part) if len(parts) > 1 else stack.load()[name]
        return {path + local: of for local, of in unfolding.split(key, value, part.start).items()}

    size = stack.converting * (2 if len(parts) > 1 else 1)  # of all parts, as they are made
    for part in parts:
        shapes = unfolding.split(key, torch.empty(len(part), *stack.shape[1:], device="meta"), part.start)
        reading = partial(load, part)
        entries = {local: _Found(reading, tuple(of.shape), stack.keys, converting=size) for local, of in shapes.items()}
        found.update({path + local: entry for local, entry in entries.items()})
    return found


def _converting(
    convert: Callable[[Callable[[str], Tensor]], dict[str, Tensor]], stored: Mapping[str, Readable], prefix: str
) -> Load:
    return lambda: {prefix + key: value for key, value in convert(lambda key: stored[key].read()).items()}


def _convert(
    model: WithStacks,
    name: str,
    converter: WeightConverter,
    sources: Sequence[tuple[str, str]],
    read: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    """The parameters that a conversion makes of its source tensors (key, pattern)."""
    mapping = deepcopy(converter)
    for key, pattern in sources:
        mapping.add_tensor(name, key, pattern, read(key))  # type: ignore[arg-type]
    values = mapping.convert(name, model=model, config=model.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in values.items()}


def _empty(stored: Readable) -> Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")


def _natural(key: str) -> list[tuple[int, int | str]]:
    """Sorts experts 2 before 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in key.split(".")]
