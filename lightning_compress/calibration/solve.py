"""Solve the groups of modules that are ready at the same time, rows or whole groups shared out over the ranks."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from math import prod

import torch
from torch import Tensor, nn

from lightning_compress.algorithms.base import RowTile, Solved, join, runs, split
from lightning_compress.algorithms.rows import ByRows, here
from lightning_compress.algorithms.tiling import Tiling, tiling_of
from lightning_compress.calibration.quantized import QuantizedModule
from lightning_compress.calibration.static_inputs import has_static_input, static_input
from lightning_compress.distributed.collective import Collective
from lightning_compress.distributed.share import fill, keeps_whole, shared, shares_factor
from lightning_compress.errors import NonFiniteError, SolveError
from lightning_compress.graph.names import module_named, weight_of
from lightning_compress.graph.shared_inputs import Group
from lightning_compress.recipe.resolve import Assignment, ResolvedRecipe
from lightning_compress.statistics import MinMax, Statistic
from lightning_compress.statistics.sums import full_float32

GroupStatistics = Mapping[type[Statistic], Statistic]
_TOGETHER = 1 << 28
"""Weights of groups that whole ranks solve before the results are exchanged; a byte each until they are packed."""


def group_key(assignment: Assignment, module: nn.Module) -> tuple[object, ...]:
    """What modules must share, beside their input, to be solved as one."""
    weight = module.get_parameter("weight")
    return assignment.algorithm, json.dumps(assignment.scheme.model_dump(mode="json")), weight.dtype, weight.shape[1]


def needed_statistics(assignment: Assignment) -> tuple[type[Statistic], ...]:
    """What has to be gathered about a module's input before it can be solved."""
    static = (MinMax,) if has_static_input(assignment.scheme) else ()
    return tuple(dict.fromkeys((*assignment.algorithm.statistics(assignment.weights), *static)))


def solve_groups(
    groups: Sequence[Group],
    root: nn.Module,
    resolved: ResolvedRecipe,
    gathered: Callable[[Group], GroupStatistics],
    collective: Collective,
) -> Iterator[QuantizedModule]:
    """Quantize the groups that are ready at the same time, in order.

    The ranks share out the rows of each; or, where that is faster (experts, schedule `block`), whole groups, whose
    results then exist together.

    Args:
        groups: whose members have not been changed.
        root: the model.
        resolved: its recipe.
        gathered: the statistics of a group, of all ranks.
        collective: the ranks.

    Raises:
        SolveError: the algorithm failed; the message names the members and the shape.
        NonFiniteError: the input of a group held NaN or Inf.
    """
    for run in _together(groups, root):
        costs = [_costs(group, root, resolved) for group in run]
        device = weight_of(root, run[0].members[0]).device
        tiling = tiling_of(device)
        if collective.size == 1:
            for batch in stacked_groups(run, root, resolved, tiling):
                yield from chain(*_solve(batch, root, resolved, gathered))
            continue
        if not keeps_whole(costs, collective.size):
            for group in run:
                yield from chain(*_solve([group], root, resolved, gathered, collective))
            continue

        def solve(mine: Sequence[Group], tiling: Tiling = tiling) -> list[list[QuantizedModule]]:
            batches = stacked_groups(mine, root, resolved, tiling)
            return [each for batch in batches for each in _solve(batch, root, resolved, gathered)]

        names = f"the solutions of {run[0].members[0]} to {run[-1].members[-1]}"
        for quantized in chain(*shared(solve, run, [sum(cost) for cost in costs], collective, names)):
            yield replace(quantized, solved=quantized.solved.to(device))


def bytes_together(groups: Sequence[Group], root: nn.Module) -> int:
    """At most the bytes of codes that exist at once, where ranks solve whole groups."""
    sizes = ((prod(stacked_shape(group, root)) for group in run) for run in _together(groups, root))
    return max(map(sum, sizes), default=0)


def _together(groups: Sequence[Group], root: nn.Module) -> list[list[Group]]:
    return runs(groups, [prod(stacked_shape(group, root)) for group in groups], _TOGETHER)


def stacked_shape(group: Group, root: nn.Module) -> tuple[int, int]:
    """[O, I] of the stacked rows of a group's members."""
    weights = [weight_of(root, name) for name in group.members]
    return sum(map(len, weights)), weights[0].shape[1]


def _costs(group: Group, root: nn.Module, resolved: ResolvedRecipe) -> tuple[float, float]:
    return resolved.assignments[group.members[0]].algorithm.costs(*stacked_shape(group, root))


def stacked_groups(
    groups: Sequence[Group], root: nn.Module, resolved: ResolvedRecipe, tiling: Tiling
) -> list[list[Group]]:
    """Consecutive groups, of one scheme and shape, that are solved together (see `Tiling.joined_weights`)."""
    alike = [list(found) for _, found in groupby(groups, lambda group: _kind(group, root, resolved))]
    batches: list[list[Group]] = []
    for found in alike:
        number = tiling.joined_weights(*stacked_shape(found[0], root))
        batches += [found[start : start + number] for start in range(0, len(found), number)]
    return batches


def _kind(group: Group, root: nn.Module, resolved: ResolvedRecipe) -> tuple[object, ...]:
    name = group.members[0]
    return *group_key(resolved.assignments[name], module_named(root, name)), *stacked_shape(group, root)


@dataclass(frozen=True)
class _Stacked:
    """A group with the stacked rows of its members [O, I], and how many each has."""

    group: Group
    weight: Tensor
    rows: tuple[int, ...]
    statistics: GroupStatistics
    assignment: Assignment

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and scales."""
        return self.weight.dtype

    @property
    def description(self) -> str:
        """Members and shape."""
        return f"{', '.join(self.group.members)} (stacked weight {list(self.weight.shape)})"


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Within: errors say whose they are."""
    try:
        yield
    except ValueError as error:
        raise SolveError(f"{what}: {error}") from error


def _stacked(group: Group, root: nn.Module, resolved: ResolvedRecipe, statistics: GroupStatistics) -> _Stacked:
    weights = [weight_of(root, name).detach() for name in group.members]
    _check_finite(group, statistics)
    rows = tuple(len(weight) for weight in weights)
    return _Stacked(group, torch.cat(weights), rows, statistics, resolved.assignments[group.members[0]])


def _modules(stacked: _Stacked, solved: Solved, resolved: ResolvedRecipe) -> list[QuantizedModule]:
    inputs = static_input(stacked.assignment.scheme, stacked.statistics, stacked.dtype)
    return [
        QuantizedModule(name, resolved.assignments[name].scheme, part, inputs)
        for name, part in zip(stacked.group.members, split(solved, stacked.rows), strict=True)
    ]


@torch.no_grad()
def _solve(
    groups: Sequence[Group],
    root: nn.Module,
    resolved: ResolvedRecipe,
    gathered: Callable[[Group], GroupStatistics],
    sharing: Collective | None = None,
) -> list[list[QuantizedModule]]:
    """Quantize groups of one kind, each from the stack of its members' rows, tiles of all of them together, which
    the ranks of `sharing`, if that is given, share out."""
    algorithm = resolved.assignments[groups[0].members[0]].algorithm
    stacks = [_stacked(group, root, resolved, gathered(group)) for group in groups]
    tiled: list[list[RowTile]] = []
    for each in stacks:
        with _naming(each.description), full_float32(each.weight.device):
            args = (each.assignment.weights, each.dtype, each.rows)
            prepared = algorithm.prepare(each.weight, each.statistics, *args, _by_rows(each, sharing))
            row_tiles = tiling_of(each.weight.device).row_tiles(len(each.weight))
            tiled.append([RowTile(each.weight, rows, prepared) for rows in row_tiles])
    device, names = stacks[0].weight.device, dict.fromkeys([stacks[0].description, stacks[-1].description])
    tiles = list(chain(*tiled))
    with _naming(" to ".join(names)), full_float32(device):
        if sharing is None:
            found = algorithm.solve_tiles(tiles)
        else:
            what = f"the solution of {', '.join(groups[0].members)}"
            costs = [tile.height for tile in tiles]
            found = [part.to(device) for part in shared(algorithm.solve_tiles, tiles, costs, sharing, what)]
    solved = iter(found)
    joined = [join([next(solved) for _ in of_one]) for of_one in tiled]
    return [_modules(*each, resolved) for each in zip(stacks, joined, strict=True)]


def _by_rows(stacked: _Stacked, sharing: Collective | None) -> ByRows:
    if sharing is None or not shares_factor(stacked.weight.shape[1], sharing.size):
        return here
    return partial(fill, collective=sharing, what=f"the factor of {', '.join(stacked.group.members)}")


def _check_finite(group: Group, statistics: GroupStatistics) -> None:
    ranges = statistics.get(MinMax)
    if isinstance(ranges, MinMax) and bool(ranges.minimum > ranges.maximum):
        raise SolveError(
            f"No token reached {', '.join(group.members)}, nor any expert that is solved along with it, so there is no "
            "range to quantize its inputs by. Give more samples, fewer expert_parts, or a scheme with dynamic inputs."
        )
    tensors: Sequence[Tensor] = [
        tensor for statistic in statistics.values() for tensor, _ in statistic.reductions().values()
    ]
    if not all(bool(torch.isfinite(tensor.sum())) for tensor in tensors):
        raise NonFiniteError(
            f"The input of {', '.join(group.members)} holds NaN or Inf on the calibration data. "
            "Run the model in "
            "a wider dtype (bfloat16 or float32), or look for the first module that produces it."
        )
