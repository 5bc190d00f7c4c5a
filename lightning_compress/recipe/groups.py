"""Group sizes against the shapes of the weights."""

import re
from collections.abc import Collection, Mapping, Sequence
from math import gcd

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy, QuantizationType
from torch import nn

from lightning_compress.algorithms.grids import width_of_groups
from lightning_compress.errors import UnsupportedModelError, listed

_OF_KERNELS = (32, 64, 128)
"""What vLLM's GPU kernels for weights alone take, beside one scale for each row (`MARLIN_SUPPORTED_GROUP_SIZES`)."""
_SMALL = 16
"""Groups of fewer weights take more for their scales than a bit per weight."""


def check_groups(
    weights: Mapping[str, QuantizationArgs], root: nn.Module, packed: Collection[str] = frozenset()
) -> None:
    """Of all modules at once: a size that one of them takes may be none for the next.

    Args:
        weights: how those of each module [O, I] are quantized; or what it reads [..., I].
        root: the model.
        packed: those whose codes, and zero points, are packed.

    Raises:
        UnsupportedModelError: a group size does not divide I; O or I is 0; no reader unpacks the zero points.
    """
    modules = dict(root.named_modules(remove_duplicate=False))  # of which there may be tens of thousands
    all_shapes = {name: list(modules[name].get_parameter("weight").shape) for name in weights}
    if empty := [name for name, shape in all_shapes.items() if 0 in shape]:
        shape = all_shapes[empty[0]]
        raise UnsupportedModelError(f"{empty[0]} has a weight of shape {shape}, without numbers: add it to `ignore`.")
    grouped: dict[int, dict[str, QuantizationArgs]] = {}
    for name, each in weights.items():
        if size := width_of_groups(each):
            grouped.setdefault(size, {})[name] = each
    for group, chosen in grouped.items():
        shapes = {name: all_shapes[name] for name in chosen}
        if failing := [name for name, shape in shapes.items() if shape[1] % group]:
            raise UnsupportedModelError(_not_divided(failing, shapes, chosen[failing[0]], group))
        if few := [name for name, shape in shapes.items() if name in packed and _in_one_word(chosen[name], shape)]:
            more = f" (and {len(few) - 1} more)" if len(few) > 1 else ""
            raise UnsupportedModelError(
                f"{few[0]}{more} has a weight of shape {shapes[few[0]]}: 4-bit zero points of up to 8 rows are packed "
                "into one row, which compressed-tensors does not unpack, so nobody could read the checkpoint. Add "
                f"{_to_ignore(few, weights)} to `ignore`, or take a scheme that is symmetric, of 8 bits, or with a "
                "scale for each row."
            )


def _in_one_word(args: QuantizationArgs, shape: Sequence[int]) -> bool:
    """Whether the zero points [O, G] are packed as [1, G], of which 4 bits are read as bytes of a transposed view."""
    return not args.symmetric and args.num_bits == 4 and shape[0] <= 8 and shape[1] > (args.group_size or shape[1])


def _to_ignore(some: Sequence[str], modules: Collection[str]) -> str:
    """What leaves some of the modules out, and no others: patterns of their last names, where those do.

    >>> _to_ignore(["a.o_proj", "b.o_proj"], ["a.o_proj", "b.o_proj", "a.q_proj"])
    "'re:.*o_proj$'"
    >>> _to_ignore(["a.o_proj"], ["a.o_proj", "b.o_proj"]), _to_ignore(["a.0", "b.0"], ["a.0", "b.0", "b.10"])
    ("'a.o_proj'", "'a.0', 'b.0'")
    """
    patterns = [f"re:.*{re.escape(last)}$" for last in dict.fromkeys(name.rpartition(".")[2] for name in some)]
    whole = re.compile("|".join(pattern.removeprefix("re:") for pattern in patterns))
    fit = len(patterns) < len(some) == sum(whole.match(name) is not None for name in modules)
    return listed([repr(each) for each in (patterns if fit else some)])


def _not_divided(
    failing: Sequence[str], shapes: Mapping[str, Sequence[int]], weights: QuantizationArgs, group: int
) -> str:
    some = _to_ignore(failing, shapes)
    name, common = failing[0], gcd(*(shape[1] for shape in shapes.values()))
    below = next((size for size in range(min(group, common), 0, -1) if common % size == 0), 1)
    above = next((size for size in range(group, common + 1) if common % size == 0), below)
    served = max((size for size in _OF_KERNELS if common % size == 0), default=None)
    nearest = (
        f"The nearest sizes that do are {below} and {above}"
        if below != above
        else f"The nearest size that does is {below}"
    )
    if served is not None and served != below:
        nearest += f"; vLLM's kernels on GPUs know {', '.join(map(str, _OF_KERNELS))}, of which {served} does"
    others = ", ".join(f"{other} {list(shapes[other])}" for other in failing[1:4])
    more = (
        f" The same holds for {len(failing) - 1} more modules ({others}{', ...' * (len(failing) > 4)})."
        if others
        else ""
    )
    start = f"{name} has a weight of shape {list(shapes[name])}, and group_size {group} does not divide its "
    if weights.scale_dtype is not None or weights.strategy == QuantizationStrategy.BLOCK or weights.dynamic:
        return (
            f"{start}{shapes[name][1]} input channels.{more} This format has no other size: add {some} to `ignore`, "
            "or take a scheme such as FP8_DYNAMIC or W4A16."
        )
    kind = QuantizationType(weights.type).value
    bits = f"num_bits: {weights.num_bits}, type: {kind}, symmetric: {str(weights.symmetric).lower()}"
    if served is None and below < _SMALL:
        change = f"Take one scale for each row (`scheme: {{weights: {{{bits}, strategy: channel}}}}`)"
    else:
        size = served or below
        change = (
            f"Give the modifier `group_size: {size}` (of the first in a command: recipe.modifiers.0.group_size={size})"
        )
    return (
        f"{start}{shapes[name][1]} input channels.{more} {nearest}, for all {len(shapes)} modules with that "
        f"group_size. {change}, or add {some} to `ignore`."
    )
