"""What a training run takes of memory: foreseen before its first batch, measured in its first steps, and compared.

Foreseen is what `rehearsal` finds on fake tensors. Measured is what PyTorch's allocator handed out on a CUDA device,
and the bytes of live storages on a CPU, where an allocator keeps no books. On a CPU the two were seen to be equal to
the byte, but for: what Lightning keeps of logged values (some 10 bytes each), what hooks of the module and other
callbacks make, batches of other sizes than the first one, and operators whose results hold more than they show
(`mse_loss`). Not done: profiling of the whole run, which costs time in every batch and says no more, for the steps of
a run are alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_compress.errors import CompressionError, listed
from lightning_compress.foresight.jobs import Phase
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.plugin.rehearsal import STEPS, leaves, num_bytes, rehearse, track
from lightning_compress.plugin.settings import check_number

_MIB = 1 << 20


@final
@dataclass(frozen=True)
class MemoryRow:
    """A phase of training at its worst moment.

    Attributes:
        phase: forward, backward or step; batch, all of them, where the module optimizes itself.
        foreseen: its parts, in bytes; None: not foreseen.
        measured_bytes: all of it; None: the run did not get there.

    >>> MemoryRow("step", Phase("step", weights=50, gradients=48), 100).error
    -0.02
    """

    phase: str
    foreseen: Phase | None
    measured_bytes: int | None

    @property
    def foreseen_bytes(self) -> int | None:
        """All parts."""
        return None if self.foreseen is None else self.foreseen.peak

    @property
    def error(self) -> float | None:
        """By which part of what was measured the forecast is above it (below: negative)."""
        if self.foreseen is None or not self.measured_bytes:
            return None
        return round(self.foreseen.peak / self.measured_bytes - 1, 6)


@final
@dataclass(frozen=True)
class MemoryReport:
    """What was foreseen and what was measured on one rank's device.

    Attributes:
        device: whose memory.
        rows: a phase each, in order.
        num_steps: of the optimizer, that were measured.
        notes: what was not foreseen, or not measured, and why.
    """

    device: str
    rows: tuple[MemoryRow, ...]
    num_steps: int
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """As text, a line each."""
        head = f"{f'memory on {self.device}, MiB':28}{'foreseen':>12}{'measured':>12}{'error':>9}"
        return [head, *map(_line, self.rows), *self.notes]


def _line(row: MemoryRow) -> str:
    sizes = [
        f"{'-':>12}" if size is None else f"{size / _MIB:12.2f}" for size in (row.foreseen_bytes, row.measured_bytes)
    ]
    return f"{row.phase:28}{''.join(sizes)}" + ("" if row.error is None else f"{100 * row.error:+8.1f}%")


@final
class MemoryReportCallback(Callback):
    """Foresees what a `fit` takes of memory before its first batch, measures its first steps, and says both.

    For any LightningModule with automatic optimization, on one device or with DDP (this rank's share). The forecast
    runs `training_step`, the backward and the optimizer's step twice on tensors without values, with the first batch
    of the training dataloader; weights, data order and random numbers of the run are those of a run without this
    callback. If that is not possible (`training_step` reads values, as by `.item()`; manual optimization; several
    dataloaders), a warning says why, and the run is measured only.

    Measured are the first steps of the optimizer: on CUDA by the allocator, whose peak statistics are reset; on a CPU
    by following every storage, which makes those batches several times slower.
    List it behind a CompressionCallback: what that tries before the first step would be measured as part of it.

    Args:
        num_steps: of the optimizer, that are measured; each has as many batches as gradients are accumulated over.
            With one, the optimizer's state is not there in the forward and the backward yet.
        foresee: False: measure only.

    Attributes:
        report: of the last `fit`, once its steps are measured, or it ended; None before.
    """

    def __init__(self, num_steps: int = STEPS, foresee: bool = True) -> None:
        check_number("num_steps", num_steps, 1)
        self.num_steps = num_steps
        self.foresee = foresee
        self.report: MemoryReport | None = None
        self._foreseen: Mapping[str, Phase] = {}
        self._notes: list[str] = []
        self._meter: _Meter | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Foresee."""
        self.report, self._foreseen, self._notes = None, {}, []
        if self.foresee:
            try:
                self._foreseen = rehearse(trainer, pl_module)
            except CompressionError as error:
                self._notes.append(f"Nothing is foreseen: {error}")
                rank_zero_warn(f"MemoryReportCallback: nothing is foreseen, only measured: {error}")
        fused = [name for name, module in pl_module.named_modules() if isinstance(module, nn.LSTM)]
        if self._foreseen and fused and pl_module.device.type == "cpu" and torch.backends.mkldnn.enabled:
            self._notes.append(
                f"oneDNN runs {listed(fused, 3)} as a whole (LSTM), and keeps two to three times as much for the "
                "backward as the operators that tensors without values run."
            )
        self._meter = _Meter(pl_module.device)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin with what is there."""
        if self._meter is not None:
            states = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
            gradients = [parameter.grad for parameter in pl_module.parameters()]
            self._meter.begin([*pl_module.parameters(), *pl_module.buffers(), gradients, states], batch)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """The forward is done."""
        if self._meter is not None and pl_module.automatic_optimization:
            self._meter.close("forward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The backward is done."""
        if self._meter is not None and pl_module.automatic_optimization:
            self._meter.close("backward")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """What follows in this batch is a step."""
        if self._meter is not None:
            self._meter.is_stepping = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is done; after enough of them the report is made."""
        if self._meter is None:
            return
        is_automatic = pl_module.automatic_optimization
        if not is_automatic or self._meter.is_stepping:
            self._meter.close("step" if is_automatic else "batch")
        self._meter.end(is_step=not is_automatic or self._meter.is_stepping)
        if self._meter.num_steps >= self.num_steps:
            self._finish()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Behind a batch that a hook has skipped, and its epoch with it."""
        if self._meter is not None:
            self._meter.leave()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A run of fewer steps."""
        self._finish()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Follow no further."""
        if self._meter is not None:
            self._meter.leave()
        self._meter = None

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Likewise."""
        if self._meter is not None:
            self._meter.leave()
        self._meter = None

    def _finish(self) -> None:
        meter, self._meter = self._meter, None
        if meter is None:
            return
        meter.leave()
        names = dict.fromkeys((*self._foreseen, *meter.worst))
        if self._foreseen and meter.num_steps < STEPS:
            self._notes.append(
                f"The forecast is of {STEPS} steps, of which {meter.num_steps} ran: the optimizer's state and the "
                "gradients of the step before are in it."
            )
        if self._foreseen and meter.device.type == "cuda":
            self._notes.append(
                "Measured too, but not foreseen: the rounding of blocks, and tensors outside the module."
            )
        rows = tuple(MemoryRow(name, self._foreseen.get(name), meter.worst.get(name)) for name in names)
        self.report = MemoryReport(str(meter.device), rows, meter.num_steps, tuple(self._notes))
        for line in self.report.lines():
            rank_zero_info(line)


@final
class _Meter:
    """The most that phases have alive, over batches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.worst: dict[str, int] = {}
        self.num_steps = 0
        self.is_stepping = False
        self._memory = LiveMemory()
        self._is_inside = False
        self._batch_bytes = 0

    def begin(self, tensors: Any, batch: Any) -> None:
        """A batch, before which these tensors are there."""
        self.is_stepping = False
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        # batches that the dataset keeps are no part of this step, and on a CPU they are no copies
        self._memory.ignore(*leaves(batch))
        self._batch_bytes = num_bytes(batch)
        track(self._memory, tensors)
        self._memory.reset_peak()
        self._memory.__enter__()  # type: ignore[no-untyped-call]
        self._is_inside = True

    def close(self, name: str) -> None:
        """What there was at most since the last call is of this phase."""
        on_cuda = self.device.type == "cuda"
        found = torch.cuda.max_memory_allocated(self.device) if on_cuda else self._memory.peak_bytes + self._batch_bytes
        self.worst[name] = max(self.worst.get(name, 0), found)
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._memory.reset_peak()

    def end(self, is_step: bool) -> None:
        """Of the batch."""
        self.num_steps += is_step
        self.leave()

    def leave(self) -> None:
        """Follow no further."""
        if self._is_inside:
            self._is_inside = False
            self._memory.__exit__(None, None, None)  # type: ignore[no-untyped-call]
