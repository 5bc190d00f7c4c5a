"""Buffers that every rank has its own of."""

import torch
from torch import nn

from lightning_compress.distributed.collective import Collective


@torch.no_grad()
def share_buffers(root: nn.Module, collective: Collective) -> None:
    """Give all ranks the first one's buffers, as in the checkpoints of a training: DDP sums gradients, but leaves each
    rank the running means of its own batches."""
    if collective.size == 1:
        return
    mine = {name: buffer for name, buffer in root.named_buffers() if not buffer.is_meta}
    of_first = collective.broadcast({name: buffer.cpu() for name, buffer in mine.items()}, "sharing buffers")
    for name, buffer in mine.items():
        if name in of_first and buffer.shape == of_first[name].shape:  # others are another model, which is found later
            buffer.copy_(of_first[name])
