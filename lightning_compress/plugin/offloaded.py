"""`trainer.validate`, `test` and `predict` on a model that is larger than the device, or than memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import Metric

from lightning_compress.calibration.target import owner
from lightning_compress.export.packed import checkpoint_source, unfolded_as_packed
from lightning_compress.graph.targets import sequential_modules, with_parameters
from lightning_compress.memory.calls import onloaded_when_called
from lightning_compress.memory.host import available_bytes, free_on
from lightning_compress.memory.store import WeightStore
from lightning_compress.memory.transfer import Lane
from lightning_compress.plugin import compat
from lightning_compress.plugin.module import compressed_module


@contextmanager
def offloaded(
    module: pl.LightningModule, device: torch.device, weights: Path | None, budget: int | None
) -> Iterator[None]:
    """Inside the context the module can be run on `device`: its layers' weights are there while they are called.

    Args:
        module: in host memory, or with parameters on the meta device.
        device: where it runs.
        weights: folder or checkpoint that the values of parameters on the meta device are read from.
        budget: bytes of weights that may stay on the device between calls; None: half of what is free there.

    Raises:
        CompressionError: `weights` does not hold what the model lacks.
    """
    root = owner(compressed_module(module))
    with unfolded_as_packed(root, weights):
        yield from _offloaded(module, root, device, weights, budget)


def _offloaded(
    module: pl.LightningModule, root: nn.Module, device: torch.device, weights: Path | None, budget: int | None
) -> Iterator[None]:
    source = None if weights is None else checkpoint_source(root, weights)
    layers = sequential_modules(root, None, with_parameters(root))
    sizes = {name: sum(tensor.nbytes for tensor in root.get_submodule(name).parameters()) for name in layers}
    stays = _staying(sizes, _free_bytes(device) // 2 if budget is None else budget)
    home = compat.module_device(module)
    _move_others(module, root, device)
    try:
        with onloaded_when_called(root, layers, WeightStore(root, Lane(device), source), stays=stays):
            yield
    finally:
        _move_others(module, root, home)


def _staying(sizes: Mapping[str, int], budget: int) -> list[str]:
    """The first layers, as far as `budget` reaches when the largest two others come and go.

    >>> layers = {"0": 10, "1": 10, "2": 10, "3": 10}
    >>> [len(_staying(layers, budget)) for budget in (40, 39, 30, 29, 0)]
    [4, 1, 1, 0, 0]
    """
    left = budget if sum(sizes.values()) <= budget else budget - 2 * max(sizes.values(), default=0)
    stays: list[str] = []
    for name, size in sizes.items():
        left -= size
        if left < 0:
            break
        stays.append(name)
    return stays


def _free_bytes(device: torch.device) -> int:
    return free_on(device) if device.type == "cuda" else available_bytes()


def _move_others(module: pl.LightningModule, root: nn.Module, device: torch.device) -> None:
    """What the store does not bring: metrics' states, and buffers outside of `root`."""
    compat.set_module_device(module, device)
    inside = {id(child) for child in root.modules()}
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
        elif id(child) not in inside:
            for name, buffer in child.named_buffers(recurse=False):
                setattr(child, name, buffer.to(device))
