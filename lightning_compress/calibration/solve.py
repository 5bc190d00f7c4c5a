"""Solve one group and put the result into the model.

The dequantized weight comes from compressed-tensors' own `dequantize` on the stored codes and scales, so the model in
memory holds bit for bit what a reader of the checkpoint computes.
"""

import json
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from math import prod
from typing import Any, final

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from compressed_tensors.quantization.utils import calculate_range, compute_dynamic_scales_and_zp
from torch import Tensor, nn

from lightning_compress.algorithms.base import Part, Solved, join, runs, split
from lightning_compress.algorithms.grids import read_dtype
from lightning_compress.algorithms.rows import ByRows, here
from lightning_compress.algorithms.tiling import Tiling, tiling_of
from lightning_compress.calibration.static_inputs import NOT_STATIC, StaticInput, has_static_input, static_input
from lightning_compress.distributed.collective import Collective
from lightning_compress.distributed.share import fill, keeps_whole, shared, shares_factor
from lightning_compress.errors import NonFiniteError, SolveError
from lightning_compress.graph.compat import FakeTensor, Shapes, outside_modes
from lightning_compress.graph.leaf import first_tensor
from lightning_compress.graph.names import module_named, weight_of
from lightning_compress.graph.stages import Group
from lightning_compress.memory.store import WeightStore
from lightning_compress.recipe.resolve import Assignment, ResolvedRecipe
from lightning_compress.statistics import MinMax, Statistic
from lightning_compress.statistics.sums import full_float32

GroupStatistics = Mapping[type[Statistic], Statistic]
_TOGETHER = 1 << 28
"""Weights of groups that whole ranks solve before the results are exchanged; a byte each until they are packed."""


@dataclass(frozen=True)
class QuantizedModule:
    """The result for one module: codes and scales of its weight, and what is known of its inputs."""

    module: str
    scheme: QuantizationScheme
    solved: Solved
    inputs: StaticInput = NOT_STATIC

    @property
    def weights(self) -> QuantizationArgs:
        """The weights' arguments."""
        assert self.scheme.weights is not None
        return self.scheme.weights

    def dequantized(self) -> Tensor:
        """The weight [O, I] that the codes and scales stand for, as it is read from the checkpoint."""
        solved = self.solved
        dtype = read_dtype(self.weights, solved.scale.dtype)
        return dequantize_weight(solved.codes, solved.scale, solved.zero_point, self.weights, dtype)


@dataclass(frozen=True)
class Restored:
    """What a quantized module computes with: its dequantized weight [O, I], and what is known of its inputs."""

    weight: Tensor
    inputs: StaticInput


def dequantize_weight(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, args: QuantizationArgs, dtype: torch.dtype
) -> Tensor:
    """compressed-tensors' value of codes [O, I] under scales, computed in the scale's dtype."""
    weight: Tensor = dequantize(x_q=codes, scale=scale, zero_point=zero_point, args=args)
    return weight.to(dtype)


class InputHook(ABC):  # noqa: B024 (what it does is up to those who register it)
    """Marks the forward pre-hooks by which quantized modules read quantized inputs."""


@final
@dataclass(frozen=True)
class InputQuantizer(InputHook):
    """A forward pre-hook that quantizes and dequantizes a linear's input, as the checkpoint's runtime will."""

    args: QuantizationArgs
    static: StaticInput = NOT_STATIC

    def __call__(
        self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        place, x = first_tensor(args, kwargs)
        if isinstance(place, str):
            return args, {**kwargs, place: self._quantized(module, x)}
        return (*args[:place], self._quantized(module, x), *args[place + 1 :]), kwargs

    def _quantized(self, module: nn.Module, x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            if isinstance(x.fake_mode.shape_env, Shapes):  # recorded: the model is, without this
                return x
            with outside_modes():  # what compressed-tensors keeps for good must not be fake
                calculate_range(self.args, x.device)
        if x.numel() == 0:
            return x
        static = self.static.to(x.device)
        is_dynamic = static.scale is None
        rows = x.reshape(1, -1, x.shape[-1]) if is_dynamic and isinstance(module, nn.Linear) else x
        scale, zero_point, global_scale = static.scale, static.zero_point, static.global_scale
        if is_dynamic:  # compressed-tensors takes the first two dimensions for those of tokens
            scale, zero_point = compute_dynamic_scales_and_zp(rows, self.args, module, global_scale)
        quantized: Tensor = fake_quantize(rows, scale, zero_point, self.args, global_scale).reshape(x.shape)
        if not torch.is_grad_enabled():
            return quantized
        rounded: Tensor = _StraightThrough.apply(x, quantized)  # type: ignore[no-untyped-call]
        return rounded


class _StraightThrough(torch.autograd.Function):
    """Rounding, through which gradients pass as if there were none (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def quantize_inputs(module: nn.Module, quantizer: InputQuantizer) -> None:
    """Quantize what `module` reads from now on, instead of how an earlier run did."""
    read_whole(module)
    module.register_forward_pre_hook(quantizer, with_kwargs=True)


def read_whole(root: nn.Module) -> list[str]:
    """Let all modules read their inputs as they are; the names of those that quantized them."""
    found: list[str] = []
    for name, module in root.named_modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, InputQuantizer):
                del module._forward_pre_hooks[number], module._forward_pre_hooks_with_kwargs[number]
                found.append(name)
    return found


_VERSION = "_quantized_version"


def _mark(weight: Tensor) -> None:
    """Remember which version of it is quantized; any later write gives it another."""
    if not weight.is_inference():
        setattr(weight, _VERSION, weight._version)


def already_quantized(root: nn.Module) -> list[str]:
    """The names of the parameters that are as an earlier run in this process left them."""
    marked = ((name, weight) for name, weight in root.named_parameters() if hasattr(weight, _VERSION))
    return [name for name, weight in marked if getattr(weight, _VERSION) == weight._version]


def group_key(assignment: Assignment, module: nn.Module) -> tuple[object, ...]:
    """What modules must share, beside their input, to be solved as one."""
    weight = module.get_parameter("weight")
    return assignment.algorithm, json.dumps(assignment.scheme.model_dump(mode="json")), weight.dtype, weight.shape[1]


def describe_scheme(scheme: QuantizationScheme) -> str:
    """A scheme in a word, e.g. `W4A16 int group 128`."""
    weights, inputs = scheme.weights, scheme.input_activations
    assert weights is not None
    activations = "" if inputs is None else f", {'dynamic' if inputs.dynamic else 'static'} {_name(inputs)}"
    bits = f"W{weights.num_bits}A{inputs.num_bits if inputs else 16}"
    return f"{bits} {_name(weights)}{'' if weights.symmetric else ' asymmetric'}{activations}"


def _name(arguments: QuantizationArgs) -> str:
    """Of type and strategy, which is an enum where it was not given but follows from the group size."""
    kind = "float " if arguments.type == QuantizationType.FLOAT else ""
    sizes = arguments.block_structure or ([] if arguments.group_size in (None, -1) else [arguments.group_size])
    size = f" {'x'.join(map(str, sizes))}" if sizes else ""
    return f"{kind}{QuantizationStrategy(arguments.strategy).value}{size}"


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
    parts: list[list[Part]] = []
    for each in stacks:
        with _naming(each.description), full_float32(each.weight.device):
            args = (each.assignment.weights, each.dtype, each.rows)
            prepared = algorithm.prepare(each.weight, each.statistics, *args, _by_rows(each, sharing))
            row_tiles = tiling_of(each.weight.device).row_tiles(len(each.weight))
            parts.append([Part(each.weight, rows, prepared) for rows in row_tiles])
    device, names = stacks[0].weight.device, dict.fromkeys([stacks[0].description, stacks[-1].description])
    tiles = list(chain(*parts))
    with _naming(" to ".join(names)), full_float32(device):
        if sharing is None:
            found = algorithm.solve_parts(tiles)
        else:
            what = f"the solution of {', '.join(groups[0].members)}"
            costs = [tile.height for tile in tiles]
            found = [part.to(device) for part in shared(algorithm.solve_parts, tiles, costs, sharing, what)]
    solved = iter(found)
    joined = [join([next(solved) for _ in of_one]) for of_one in parts]
    return [_modules(*each, resolved) for each in zip(stacks, joined, strict=True)]


def _by_rows(stacked: _Stacked, sharing: Collective | None) -> ByRows:
    if sharing is None or not shares_factor(stacked.weight.shape[1], sharing.size):
        return here
    return partial(fill, collective=sharing, what=f"the factor of {', '.join(stacked.group.members)}")


def apply(quantized: QuantizedModule, root: nn.Module, store: WeightStore) -> None:
    """Let the model compute with the quantized weight and, where the scheme says so, with quantized inputs."""
    found = Restored(quantized.dequantized(), quantized.inputs)
    put(found, quantized.module, quantized.scheme, root, store)


def put(restored: Restored, name: str, scheme: QuantizationScheme, root: nn.Module, store: WeightStore) -> None:
    """`apply` for a module whose dequantized weight is at hand."""
    module = root.get_submodule(name)
    store.write(module.get_parameter("weight"), restored.weight)
    _mark(module.get_parameter("weight"))
    if scheme.input_activations is not None:
        quantize_inputs(module, InputQuantizer(scheme.input_activations, restored.inputs))


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
