"""Sizes that an operation chooses among others: a slice ends where its tensor does, rows are padded to the longest.

What an operation decides inside it decides anew when it is run, but the size of its result would be recorded as the
traced batch has it. So where batches differ in what is chosen, it is recorded as a minimum or maximum. Where all agree
nothing changes: `cos[:length]` is of that length, not of the lesser of two. The alternative, conditions that batches
have to meet, would refuse those on both sides of `ids[:, :512]`.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.nn import functional

from lightning_compress.graph.values import Sizes, is_symbolic, sizes_in


def within_bounds(function: object, args: tuple[Any, ...], batches: Sequence[Sizes]) -> tuple[Any, ...]:
    """The arguments of an operation; of a slice with bounds that are within its tensor in all batches."""
    if function is not torch.ops.aten.slice.Tensor or len(args) < 3:  # bounds that it has by default are left out
        return args
    tensor, dim, *bounds = args
    return tensor, dim, *(_within(bound, tensor.shape[dim], batches) for bound in bounds[:2]), *bounds[2:]


def _within(bound: int | SymInt | None, size: int | SymInt, batches: Sequence[Sizes]) -> int | SymInt | None:
    if bound is None or not (is_symbolic(bound) or is_symbolic(size)):
        return bound
    at, ends = sizes_in(batches, bound), sizes_in(batches, size)
    if len({number < 0 for number in at}) != 1 or len(at) != len(ends):
        return bound
    pairs = list(zip(at, ends, strict=True))
    if at[0] < 0:
        return torch.sym_max(bound + size, 0) if len({place + end < 0 for place, end in pairs}) > 1 else bound
    return torch.sym_min(bound, size) if len({place > end for place, end in pairs}) > 1 else bound


def pad_sequence(
    batches: Sequence[Sizes],
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    """As `aten.pad_sequence`, of parts; `NotImplemented` where the same one is the longest in all batches."""
    sizes = [tensor.shape[0] for tensor in sequences]
    lengths = [sizes_in(batches, size) for size in sizes]
    longest = [max(numbers) for numbers in zip(*lengths, strict=False)]
    if not longest or longest in lengths:
        return NotImplemented
    length = reduce(torch.sym_max, sizes)
    padded = []
    for tensor, size in zip(sequences, sizes, strict=True):
        sides = (length - size, 0) if padding_side == "left" else (0, length - size)
        padded.append(functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1), *sides), value=padding_value))
    return torch.stack(padded, 0 if batch_first else 1)
