"""Which tensor goes to which shard of a checkpoint: a function of the model, the subgraphs and the recipe alone."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain

from torch import Tensor, nn

from lightning_compress.algorithms.base import runs
from lightning_compress.calibration.amounts import num_shards
from lightning_compress.graph.stages import Subgraph
from lightning_compress.recipe.resolve import ResolvedRecipe

_SHARD_BYTES = 1 << 28
"""Of what no subgraph holds, this much is in memory at a time, or one layer if that is more."""


def shard_keys(root: nn.Module, subgraphs: Sequence[Subgraph], resolved: ResolvedRecipe) -> list[list[list[str]]]:
    """The keys of the state dict by part and shard: a part is a subgraph, in order, or after them a shard of what no
    subgraph holds."""
    state = root.state_dict(keep_vars=True)
    return [_split(keys, state, resolved) for keys in _parts(root, subgraphs)]


def packed_bytes(key: str, tensor: Tensor, resolved: ResolvedRecipe) -> int:
    """About what a tensor takes in its shard: codes, and scales if there are many."""
    if not _is_quantized(key, resolved):
        return tensor.nbytes
    args = resolved.assignments[key.rpartition(".")[0]].weights
    width = args.group_size if args.group_size and args.group_size > 0 else None
    scales = 0 if width is None else tensor.numel() // width * (tensor.itemsize if args.scale_dtype is None else 1)
    return int(-(-tensor.numel() * args.num_bits // 8) + scales)  # at least one


def stored_bytes(root: nn.Module, subgraphs: Sequence[Subgraph], resolved: ResolvedRecipe) -> list[int]:
    """About what the shards of each part take (see `shard_keys`), tied tensors once."""
    state = root.state_dict(keep_vars=True)
    return [sum(packed_bytes(key, state[key], resolved) for key in keys) for keys in _parts(root, subgraphs)]


def _is_quantized(key: str, resolved: ResolvedRecipe) -> bool:
    module, _, name = key.rpartition(".")
    return name == "weight" and module in resolved.assignments


def _split(keys: Sequence[str], state: Mapping[str, Tensor], resolved: ResolvedRecipe) -> list[list[str]]:
    """The keys of a part by shard: quantized weights in runs of about equal size, all else in the last one (what
    transformers may join under another name stays together)."""
    sizes = {key: packed_bytes(key, state[key], resolved) for key in keys}
    quantized = [key for key in keys if _is_quantized(key, resolved)]
    number = num_shards(sum(sizes.values()), len(quantized))
    shards: list[list[str]] = [[] for _ in range(number)]
    total, so_far = sum(sizes[key] for key in quantized), 0
    for key in quantized:
        shards[so_far * number // total].append(key)
        so_far += sizes[key]
    shards[-1] += [key for key in keys if not _is_quantized(key, resolved)]
    return [shard for shard in shards if shard]


def _parts(root: nn.Module, subgraphs: Sequence[Subgraph]) -> list[list[str]]:
    """The keys of the state dict that each subgraph's shards hold, and after them, in as many parts as it takes, those
    that no subgraph has.

    A tied tensor is written once: with the name of the module that is solved, else with its first name that is not
    declared to be tied to another.
    """
    ignored = set(getattr(root, "_keys_to_ignore_on_save", None) or ())
    tied = set(getattr(root, "all_tied_weights_keys", None) or ())
    solved_by = {module: number for number, subgraph in enumerate(subgraphs) for module in subgraph.solved}
    by_tensor: dict[object, list[str]] = {}
    state = root.state_dict(keep_vars=True)
    ignored |= {*added_to_state(root, state)}
    for key, tensor in state.items():
        if key not in ignored:
            by_tensor.setdefault(identity(tensor), []).append(key)
    names = (
        min(keys, key=lambda key: (key.rpartition(".")[0] not in solved_by, key in tied)) for keys in by_tensor.values()
    )
    first_with: dict[str, int] = {}
    for number, subgraph in enumerate(subgraphs):
        for name in (*subgraph.modules, *subgraph.tensors):
            first_with.setdefault(name, number)
    parts: list[list[str]] = [[] for _ in subgraphs]
    rest: dict[str, int] = {}
    for key in names:
        holders = [first_with[name] for name in accumulate(key.split("."), "{}.{}".format) if name in first_with]
        number = solved_by.get(key.rpartition(".")[0], min(holders, default=-1))
        if number < 0:
            rest[key] = state[key].nbytes
        else:
            parts[number].append(key)
    return [*parts, *_rest(rest)]


def added_to_state(root: nn.Module, state: Mapping[str, object]) -> list[str]:
    """Keys of a model's state dict that are no tensors of its modules: what `get_extra_state` or a hook adds."""
    modules = dict(root.named_modules(remove_duplicate=False))
    parts = {key: key.rpartition(".") for key in state}
    return [
        key
        for key, value in state.items()
        if not (isinstance(value, Tensor) and hasattr(modules.get(parts[key][0]), parts[key][2]))
    ]


def rest_sizes(root: nn.Module, subgraphs: Sequence[Subgraph]) -> tuple[int, int, int]:
    """Bytes of what no subgraph holds, of its largest shard, and of its largest tensor."""
    state = root.state_dict(keep_vars=True)
    parts = [[state[key].nbytes for key in keys] for keys in _parts(root, subgraphs)[len(subgraphs) :]]
    shards = [sum(part) for part in parts]
    return sum(shards), max(shards, default=0), max((max(part) for part in parts), default=0)


def _rest(sizes: Mapping[str, int]) -> list[list[str]]:
    """Keys in parts of at most `_SHARD_BYTES`, or of one unit.

    Units are what transformers may store as one tensor, or rename together: a layer (up to the first number in the
    name), and of what is in none the branches (`lm_head`, `model.norm`).
    """
    units: dict[str, list[str]] = {}
    for key in sizes:
        names = key.split(".")
        first_number = next((place for place, name in enumerate(names) if name.isdigit()), 1)
        units.setdefault(".".join(names[: first_number + 1]), []).append(key)
    together = runs(list(units.values()), [sum(sizes[key] for key in unit) for unit in units.values()], _SHARD_BYTES)
    return [list(chain(*part)) for part in together]


def identity(tensor: Tensor) -> object:
    """Equal for tensors that are one in memory: safetensors stores no memory twice."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride()
