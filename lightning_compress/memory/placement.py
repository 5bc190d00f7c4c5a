"""Where the bytes of a run live, in one place."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_compress.memory.source import WeightSource


@dataclass(frozen=True)
class Placement:
    """Where weights and activations are.

    Attributes:
        device: where subgraphs run.
        cache_device: where activations wait between steps.
        source: where the values of parameters on the meta device are; all others are in host memory.
        prefetch: read the next subgraph's weights from `source` while one is computed.
        activation_budget: bytes of activations that may wait on `cache_device`; None: all of them.
        scratch_dir: folder of the file for the others; None: the system's temporary folder.
    """

    device: torch.device
    cache_device: torch.device
    source: WeightSource | None = None
    prefetch: bool = True
    activation_budget: int | None = None
    scratch_dir: Path | None = None
