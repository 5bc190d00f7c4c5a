"""The batch that is traced: like the user's, but with sizes that no constant of the model has.

A traced size of 1 becomes a constant and equal sizes become one symbol, so the batch that is traced has several rows,
and a length that is prime. It stays near the true length because models decide by it (`length > sliding_window`), and
takes its values from the true batch, in case a module has to be run on it for real.

Which dimensions are free is decided here too: rows of every tensor, and the token dimension of those that have one.
Tokens of which the batches have other lengths (an answer that is chosen and one that is rejected) are free for
themselves; so are sizes of images and sounds of which the batches have several, and then what is traced are true
batches: the number of image tokens has to fit. All other dimensions (mel bins, classes) are constants of the graph.
"""

from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from lightning_compress.graph.values import as_named_tuple, with_fields

ROWS = (3, 2)
SHORTEST = 11
"""Rows of the two synthetic batches, and their shortest length."""
_ROWS = "rows"
_OF_IMAGES = "of images"
_FEW = 64
"""Numbers in a tensor whose values, too, tell batches apart: sizes of images."""


@dataclass(frozen=True)
class Structure:
    """What a batch is without its tensors. `build` puts tensors in; other leaves are constants."""

    paths: tuple[str, ...]
    build: Callable[[Sequence[Tensor]], Any]


def flatten_batch(batch: Any) -> tuple[list[Tensor], Structure]:
    """Tensors of a nested batch (mapping, sequence, dataclass, tensor) in order, and the structure around them.

    >>> tensors, structure = flatten_batch({"a": torch.ones(2), "b": [torch.zeros(1), "x"]})
    >>> structure.paths
    ('a', 'b.0')
    >>> structure.build([torch.ones(1), torch.ones(3)])
    {'a': tensor([1.]), 'b': [tensor([1., 1., 1.]), 'x']}
    """
    found = [part for part in parts_of(batch) if isinstance(part.value, Tensor)]
    return [part.value for part in found], Structure(
        tuple(part.path for part in found), lambda tensors: _rebuilt(batch, iter(tensors).__next__)
    )


@dataclass(frozen=True)
class Part:
    """Something in a batch.

    Attributes:
        path: by its keys.
        value: itself.
        kind: of a container its type, of every mapping `Mapping`; None: it holds no others, or none that are looked at.
    """

    path: str
    value: Any
    kind: type | None


def parts_of(batch: Any, path: str = "") -> Iterator[Part]:
    """A batch and all that is in it, containers before what they hold.

    >>> [(part.path, part.value) for part in parts_of({"a": [1]})]
    [('', {'a': [1]}), ('a', [1]), ('a.0', 1)]
    """
    items = _items(batch)
    if items is None:
        yield Part(path, batch, None)
        return
    yield Part(path, batch, Mapping if isinstance(batch, Mapping) else type(batch))
    for key, item in items:
        yield from parts_of(item, f"{path}.{key}" if path else str(key))


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def _rebuilt(value: Any, next_tensor: Callable[[], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next_tensor()
    items = _items(value)
    if items is None:
        return value
    new = {key: _rebuilt(item, next_tensor) for key, item in items}
    if type(value) is dict or (isinstance(value, Mapping) and not isinstance(value, MutableMapping)):
        return new
    if isinstance(value, Mapping):
        # UserDict (BatchEncoding), OrderedDict (ModelOutput): a shallow copy keeps the type and what else it carries
        duplicate: Any = copy(value)
        if isinstance(duplicate, UserDict):
            duplicate.data = dict(duplicate.data)
        for key, item in new.items():
            duplicate[key] = item
        return duplicate
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return as_named_tuple(value, new.values())
    if isinstance(value, (list, tuple)):
        return type(value)(new.values())
    return with_fields(value, new)


@dataclass(frozen=True)
class Synthetic:
    """A batch to trace on.

    Attributes:
        tensors: in the order of `flatten_batch`.
        places: of each tensor what its dimensions count: rows, or tokens of a group; None: the size is a constant.
        has_fewer_rows: their number is no multiple of the true one.
        is_true: it is one of the user's.
        has_ragged_rows: true batches have other numbers of them.
        staying: (tensor, dimension) of rows that are as many in all true batches, unlike those of other tensors: the
            two ends of a graph's edges, [2, E].
    """

    tensors: tuple[Tensor, ...]
    places: tuple[tuple[str | None, ...], ...]
    has_fewer_rows: bool = False
    is_true: bool = False
    has_ragged_rows: bool = False
    staying: frozenset[tuple[int, int]] = frozenset()

    @property
    def dynamic(self) -> tuple[tuple[bool, ...], ...]:
        """Whether a size is a symbol."""
        return tuple(tuple(place is not None for place in of_tensor) for of_tensor in self.places)

    @property
    def rows(self) -> frozenset[tuple[int, int]]:
        """(Tensor, dimension) of the rows that are free."""
        return frozenset((i, d) for i, dims in enumerate(self.places) for d, place in enumerate(dims) if place == _ROWS)

    @property
    def lengths(self) -> frozenset[tuple[int, int]]:
        """(Tensor, dimension) of the lengths that are free."""
        free = ((i, d) for i, dims in enumerate(self.dynamic) for d, is_free in enumerate(dims) if is_free)
        return frozenset(free) - self.rows


def synthesize(
    paths: Sequence[str],
    tensors: Sequence[Tensor],
    *,
    separate_decoder: bool,
    fixed: Collection[tuple[int, int]] = (),
    others: Sequence[Sequence[Tensor]] = (),
    repeats_rows: bool = False,
    as_they_are: bool = False,
) -> tuple[Synthetic, Synthetic]:
    """Tensors like the given ones with rows and lengths to trace on, and again with others.

    Args:
        paths: key paths, as of `flatten_batch`.
        tensors: the true batch, flattened.
        separate_decoder: labels belong to a decoder with a length of its own.
        fixed: (tensor, dimension) whose sizes stay and are constants.
        others: further true batches.
        repeats_rows: there are 3 (2) times as many rows as in the true batch, for models that take rows together.
        as_they_are: true batches, whose values tell of their sizes.

    If every tensor is of tokens, the batch gets 3 (2) rows and a prime length; with pixels or features among them, the
    number of image tokens fits the images, so lengths stay and each row is repeated as often. Where rows are fixed
    then, or the images are of several sizes, the batch is the true one, and the second the one of the others that
    differs most.
    """
    separate = separate_decoder or any(_last(path).startswith("decoder_") for path in paths)
    groups = [_group(path, separate) for path in paths]
    sizes = _sizes(tensors, others)
    lengths = _lengths(paths, tensors, groups, sizes)
    given_rows = _num_rows(tensors, [lengths[group][0] for group in groups])
    row_dims = [_row_dim(tensor, given_rows, lengths[g][0]) for tensor, g in zip(tensors, groups, strict=True)]
    places = tuple(
        tuple(
            None if (index, dim) in fixed else _place(tensor, dim, row_dim, lengths, group, sizes[index][dim])
            for dim in range(tensor.ndim)
        )
        for index, (tensor, row_dim, group) in enumerate(zip(tensors, row_dims, groups, strict=True))
    )
    only_tokens = all(
        tensor.ndim < 2
        or any((dims[d] is not None or (index, d) in fixed) and d != row_dims[index] for d in range(tensor.ndim))
        for index, (tensor, dims) in enumerate(zip(tensors, places, strict=True))
    )
    staying, is_ragged = _staying(sizes, row_dims)
    fixes_rows = any((index, dim) in fixed for index, dim in enumerate(row_dims))
    if as_they_are or (not only_tokens and fixes_rows) or any(_OF_IMAGES in of_tensor for of_tensor in places):
        true = Synthetic(tuple(tensors), places, is_true=True, has_ragged_rows=is_ragged, staying=staying)
        return true, replace(true, tensors=tuple(_most_different(tensors, true.dynamic, others)))
    taken: set[int] = set()
    made = []
    few = only_tokens and not repeats_rows
    given = {group: length[0] for group, length in lengths.items()}
    for rows in ROWS if few else _times(tensors, places):
        new = _new_lengths(given, taken) if only_tokens else given
        factor = (rows, given_rows if few else 1)
        resized = [_resized(tensor, of_tensor, new, factor) for tensor, of_tensor in zip(tensors, places, strict=True)]
        has_fewer = few and given_rows > 1
        made.append(Synthetic(tuple(resized), places, has_fewer, has_ragged_rows=is_ragged, staying=staying))
    return made[0], made[1]


def true_ones(made: Synthetic, tensors: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """True batches of which the constants of one that was made hold: the one that it is like, and the smallest. None
    where it is one itself. No more rows of them than it has where it has fewer: the outputs of all may be too many."""
    if made.is_true:
        return []
    fitting = [other for other in others if _number_unlike(tensors, other, made.dynamic) >= 0]
    smallest = min([tensors, *fitting], key=lambda batch: sum(tensor.numel() for tensor in batch))
    found = [tensors] if smallest is tensors else [tensors, smallest]
    if not made.has_fewer_rows:
        return found
    return [list(map(_first_rows, batch, made.places)) for batch in found]


def _first_rows(tensor: Tensor, places: Sequence[str | None]) -> Tensor:
    for dim, place in enumerate(places):
        tensor = tensor.narrow(dim, 0, min(tensor.shape[dim], ROWS[0])) if place == _ROWS else tensor
    return tensor


def _times(tensors: Sequence[Tensor], places: Sequence[Sequence[str | None]]) -> Sequence[int]:
    """How often rows are repeated in the two batches: such that none are as many as there are of something else, which
    would be taken for the same (a graph with three edges for each node)."""
    sizes = [
        pair for tensor, dims in zip(tensors, places, strict=True) for pair in zip(tensor.shape, dims, strict=True)
    ]
    rows = {size for size, place in sizes if place == _ROWS}
    others = {size for size, place in sizes if place != _ROWS}
    free = [times for times in (*ROWS, 5, 7, 11) if others.isdisjoint(size * times for size in rows)]
    return free[:2] if len(free) > 1 else ROWS


def _most_different(
    tensors: Sequence[Tensor], dynamic: Sequence[Sequence[bool]], others: Sequence[Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Of batches that are alike but in dynamic sizes, the one with most of these unlike; the batch itself if alone."""

    return max([tensors, *others], key=lambda other: _number_unlike(tensors, other, dynamic))


def _number_unlike(tensors: Sequence[Tensor], other: Sequence[Tensor], dynamic: Sequence[Sequence[bool]]) -> int:
    """How many sizes, and tensors of a few numbers, are unlike in another batch; -1: a constant is."""
    pairs = list(zip(tensors, other, dynamic, strict=False))
    if len(other) != len(tensors) or any(mine.ndim != yours.ndim for mine, yours, _ in pairs):
        return -1
    unlike = [
        may_differ
        for mine, yours, dims in pairs
        for a, b, may_differ in zip(mine.shape, yours.shape, dims, strict=True)
        if a != b
    ]
    values = [  # of a few numbers, such as sizes of images
        torch.equal(mine, yours)
        for mine, yours, _ in pairs
        if mine.numel() <= _FEW and mine.shape == yours.shape and not mine.is_floating_point()
    ]
    return len(unlike) + values.count(False) if all(unlike) else -1


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _group(path: str, separate: bool) -> str:
    name = _last(path)
    return "decoder" if separate and (name.startswith("decoder_") or name == "labels") else "main"


def _sizes(tensors: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> list[list[tuple[int, ...]]]:
    """Of each tensor and dimension, the sizes in all batches, the batch itself first."""
    ranks = [tensor.ndim for tensor in tensors]
    batches = [tensors, *(other for other in others if [tensor.ndim for tensor in other] == ranks)]
    return [
        [tuple(batch[index].shape[dim] for batch in batches) for dim in range(rank)] for index, rank in enumerate(ranks)
    ]


def _lengths(
    paths: Sequence[str], tensors: Sequence[Tensor], groups: Sequence[str], sizes: Sequence[Sequence[tuple[int, ...]]]
) -> dict[str, tuple[int, ...]]:
    """The token lengths of the groups, in all batches: the second sizes of integer tensors [B, L], ids and masks first;
    or (0,). Those of a group that have lengths of their own are groups for themselves, named by the first path."""
    lengths: dict[str, tuple[int, ...]] = {}
    tokens = [index for index, tensor in enumerate(tensors) if tensor.ndim == 2 and not tensor.is_floating_point()]
    tokens.sort(key=lambda index: not _last(paths[index]).endswith(("input_ids", "attention_mask")))
    for group in dict.fromkeys(groups):
        lengths[group] = next((sizes[index][1] for index in tokens if groups[index] == group), (0,))
    for index in tokens:
        if len(set(sizes[index][1])) > 1 and sizes[index][1] not in lengths.values():
            lengths[paths[index]] = sizes[index][1]
    return lengths


def _staying(
    sizes: Sequence[Sequence[tuple[int, ...]]], row_dims: Sequence[int]
) -> tuple[frozenset[tuple[int, int]], bool]:
    """`Synthetic.staying` and `Synthetic.has_ragged_rows`."""
    rows = [(index, dim) for index, dim in enumerate(row_dims) if sizes[index]]
    stay = [(index, dim) for index, dim in rows if len(set(sizes[index][dim])) == 1]
    is_ragged = len(stay) < len(rows)
    return frozenset(stay) if is_ragged else frozenset(), is_ragged


def _num_rows(tensors: Sequence[Tensor], lengths: Sequence[int]) -> int:
    """Of the first tensor [B, L], else the most that any has."""
    pairs = zip(tensors, lengths, strict=True)
    rows = next((tensor.shape[0] for tensor, length in pairs if tensor.ndim == 2 and tensor.shape[1] == length), 0)
    return rows or max((tensor.shape[0] for tensor in tensors if tensor.ndim), default=1)


def _row_dim(tensor: Tensor, rows: int, length: int) -> int:
    """0, but 1 for multi-axis positions [3, B, L] (Qwen2-VL) and embeddings [L, B, C]."""
    if tensor.ndim != 3:
        return 0
    if tensor.is_floating_point():
        return int(rows != length and tensor.shape[:2] == (length, rows))
    return int(tensor.shape[1:] == (rows, length))


def _place(
    tensor: Tensor, dim: int, row_dim: int, lengths: Mapping[str, tuple[int, ...]], group: str, sizes: tuple[int, ...]
) -> str | None:
    """What a dimension counts: rows; or tokens of which group (in masks and ids wherever the sizes are its lengths, in
    embeddings [B, L, C] and [L, B, C] in the one beside the rows); or something of images or sounds of which batches
    have not as much; None: nothing that is free."""
    if dim == row_dim:
        return _ROWS
    differs = len(set(sizes)) > 1
    own = [each for each in (group, *lengths) if lengths[each] == sizes]
    if (dim != 1 - row_dim or tensor.ndim > 3) if tensor.is_floating_point() else dim < row_dim:
        own = []
    if own and (own[0] == group or differs):
        return own[0]
    return _OF_IMAGES if differs and dim > row_dim and tensor.is_floating_point() else None


def _new_lengths(lengths: Mapping[str, int], taken: set[int]) -> dict[str, int]:
    """A prime for each group, as near below the given length as possible, unlike all `taken` before."""
    new: dict[str, int] = {}
    for group, length in sorted(lengths.items()):
        nearest = chain(range(length, SHORTEST - 1, -1), count(max(length, SHORTEST)))
        new[group] = next(size for size in nearest if _is_prime(size) and size not in taken)
        taken.add(new[group])
    return new


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _resized(
    tensor: Tensor, places: Sequence[str | None], lengths: Mapping[str, int], factor: tuple[int, int]
) -> Tensor:
    """Rows times a rational factor, tokens to lengths, by repeating or leaving out."""
    for dim, place in enumerate(places):
        if place is not None:
            size = tensor.shape[dim]
            wanted = max(min(size, 2), size * factor[0] // factor[1]) if place == _ROWS else lengths[place]
            tensor = tensor.index_select(dim, torch.arange(wanted, device=tensor.device) % size)
    return tensor
