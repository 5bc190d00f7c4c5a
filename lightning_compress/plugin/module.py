"""What is compressed of what a Trainer runs, and on which device."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn


def compressed_module(pl_module: nn.Module) -> nn.Module:
    """What is compressed: the module that an adapter carries, else the LightningModule itself."""
    return pl_module.model if isinstance(pl_module, Adapter) else pl_module


def onloads(trainer: pl.Trainer) -> bool:
    """Whether the Trainer's strategy is `SequentialOnloadStrategy`, which knows this module, not the other way."""
    return getattr(trainer.strategy, "strategy_name", None) == "sequential_onload"


def onload_device(trainer: pl.Trainer) -> torch.device:
    """Where subgraphs run: the Trainer's CUDA device, else the CPU (other accelerators lack float64)."""
    device = trainer.strategy.root_device
    return device if device.type == "cuda" else torch.device("cpu")


class Adapter(pl.LightningModule):
    """Carries a module that is no LightningModule through `Trainer.fit`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The carried module's."""
        return self.model(*args, **kwargs)
