"""What takes the memory of modules that cannot run on fake tensors (see `footprint`)."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lightning_compress.calibration.solve import InputHook
from lightning_compress.graph.compat import pytree

QUANTIZING = 4
"""Copies of a module's input that exist while it is quantized and dequantized, the result included."""


@final
@dataclass(frozen=True)
class LikeQuantizing(InputHook):
    """Takes what `InputQuantizer` does (which must not run on fake tensors: compressed-tensors caches some of them)."""

    scale: Tensor

    def __call__(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not args:
            return args
        torch.empty((QUANTIZING - 1) * args[0].nbytes, dtype=torch.uint8)
        return (args[0].clone(), *args[1:])


def allowance(module: nn.Module, given: object, output: object) -> int:
    """Bytes for a module that reads values: see `footprint`."""
    tensors = [leaf for leaf in pytree.tree_leaves((given, output)) if isinstance(leaf, Tensor)]
    num_tokens = max((leaf.numel() // leaf.shape[-1] for leaf in tensors if leaf.ndim and leaf.shape[-1]), default=0)
    widths = sum(max(parameter.shape[-2:]) for parameter in module.parameters() if parameter.ndim > 1)
    return 4 * (sum(leaf.numel() for leaf in tensors) + 2 * num_tokens * widths)
