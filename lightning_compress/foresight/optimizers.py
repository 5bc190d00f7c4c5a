"""The memory of bitsandbytes' 8-bit AdamW, without its arithmetic.

After bitsandbytes 0.50 (`bitsandbytes/optim/optimizer.py`, `Optimizer2State.init_state`; arXiv 2110.02861): two states
of a byte per number and a float32 scale per 256 of them, float32 states for tensors below 4096 numbers, tables of the
values of codes that all tensors share. Its kernel reads and writes in place, so a step takes nothing more; done with
torch's operators it would, which is why there is none here. `torch.optim` has no such optimizer, and bitsandbytes' own
calls its kernels, which fake tensors do not have.
"""

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

BLOCK, MIN_NUMEL = 256, 4096


def state_bytes(num_parameters: int) -> int:
    """Of a tensor of so many numbers, without tables.

    >>> state_bytes(4095), state_bytes(4096)
    (32760, 8320)
    """
    if num_parameters < MIN_NUMEL:
        return 2 * 4 * num_parameters
    return 2 * num_parameters + 2 * 4 * -(-num_parameters // BLOCK)


def step_bytes(parameters: int, gradients: int, states: int) -> int:
    """That a step reads and writes if it goes over everything once: gradients are read, all else is written too.

    >>> step_bytes(parameters=4, gradients=4, states=8)
    28
    """
    return 2 * parameters + gradients + 2 * states


@final
class AdamW8bitMemory(torch.optim.Optimizer):
    """Has the states of bitsandbytes' `AdamW8bit` after its first step; parameters stay as they are."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self._tables: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make the states that are missing."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.grad is not None and not self.state[parameter]:
                self.state[parameter].update(self._new_state(parameter))

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        if parameter.numel() < MIN_NUMEL:
            return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
        if not self._tables:
            self._tables = [torch.zeros(256, dtype=torch.float32, device=parameter.device) for _ in range(2)]
        blocks = -(-parameter.numel() // BLOCK)
        state: dict[str, Any] = {}
        for number, table in enumerate(self._tables, 1):
            state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"qmap{number}"] = table
            state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return state
