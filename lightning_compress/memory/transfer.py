"""Copies between host memory and the device, beside the device's computing.

On CUDA each direction has a stream of its own, so that both go at once, from and to pinned memory (PyTorch's host
allocator keeps and reuses it). Events order them with the computing stream: what computes waits for what arrives, and
memory that is given back is written to by later copies only when what used it has run. What goes to the device waits
for all that has begun to leave it, of which it may be a part. On one device there is nothing to copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

PIECE = 64 << 20
"""Bytes that are pinned at once on their way to a device: the block is there for another piece when it has been copied.
Pinning one as large as the tensor takes longer than the copy, and memory for good."""


@dataclass(frozen=True)
class Sent:
    """A tensor on its way: `value` may be used after `event`."""

    value: Tensor
    event: torch.cuda.Event | None = None


@final
class Lane:
    """The way between host memory and one device.

    Args:
        device: the other end.
    """

    def __init__(self, device: torch.device) -> None:
        is_here = device.type == "cuda" and torch.cuda.is_available()  # else it is only planned for
        # "cuda" alone is not equal to the device that its tensors say they are on
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_here and device.index is None else device
        self._to_device, self._to_host = (torch.cuda.Stream(self.device) if is_here else None for _ in range(2))

    def enter_thread(self) -> None:
        """Call in a thread of one's own before it sends: its device is another one at first."""
        if self._to_device is not None:
            torch.cuda.set_device(self.device)

    def is_away(self, tensor: Tensor) -> bool:
        """Whether the tensor has to be copied to be used on the device."""
        return tensor.device != self.device

    def send(self, tensor: Tensor) -> Sent:
        """Begin to copy to the device; do not change the tensor before it is received. May be called in any thread."""
        if self._to_device is None or self._to_host is None or not self.is_away(tensor):
            return Sent(tensor.to(self.device))
        self._to_device.wait_stream(self._to_host)
        with torch.cuda.stream(self._to_device):
            value, is_pinned = torch.empty_like(tensor, device=self.device), tensor.is_pinned()
            for there, here in zip(_pieces(value), _pieces(tensor), strict=True):
                there.copy_(here if is_pinned else here.pin_memory(), non_blocking=True)
            return Sent(value, self._to_device.record_event())

    def receive(self, sent: Sent) -> Tensor:
        """The tensor on the device, for what the calling thread computes from now on."""
        if sent.event is not None:
            torch.cuda.current_stream(self.device).wait_event(sent.event)
        return sent.value

    def fetch(self, tensor: Tensor, *, wait: bool = False) -> Tensor:
        """Begin to copy to host memory; what is sent back later waits for it, what reads it on the host has to `wait`
        here."""
        if self._to_host is None or tensor.device.type == "cpu":
            return tensor.cpu()
        self._to_host.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_host):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._to_host)
        if wait:
            self._to_host.synchronize()
        return host

    def give_back(self) -> None:
        """Call before tensors that were received are dropped: later copies wait for what has been using them."""
        if self._to_device is not None:
            self._to_device.wait_stream(torch.cuda.current_stream(self.device))


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Views of a tensor's rows, of `PIECE` bytes or one row."""
    rows = torch.atleast_1d(tensor)
    return torch.split(rows, max(1, PIECE * len(rows) // max(tensor.nbytes, 1)))
