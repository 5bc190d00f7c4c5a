"""The compression stage as a fit loop: one epoch, of which every step is one subgraph.

It subclasses Lightning's fit loop because logging, progress bars and profilers ask for that type. Only bystander
callbacks take part: others would react to weights and metrics that are not training (early stopping has raised,
averaging has overwritten compressed weights, pruning has corrupted them).

Alternative not taken: one epoch per subgraph. Progress bars then start anew for each, and show no time to go.
"""

from collections.abc import Generator
from contextlib import closing
from typing import final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ModelSummary, ProgressBar, Timer

from lightning_compress.calibration.records import SubgraphRecord
from lightning_compress.plugin import compat
from lightning_compress.plugin.job import Job, run_job
from lightning_compress.report.report import Report

BYSTANDERS = (ProgressBar, ModelSummary, Timer, DeviceStatsMonitor)


def bystanders(callbacks: list[Callback], own: Callback) -> list[Callback]:
    """The callbacks that may take part in the compression stage, in their order."""
    return [callback for callback in callbacks if callback is own or isinstance(callback, BYSTANDERS)]


@final
class CompressionLoop(compat.FitLoop):
    """Drives `run_job` with a Trainer's hooks around each subgraph.

    Args:
        trainer: whose stage this is.
        job: the prepared compression.
        max_subgraphs: stop after so many (`fast_dev_run`).
    """

    def __init__(self, trainer: pl.Trainer, job: Job, max_subgraphs: int | None) -> None:
        super().__init__(trainer, min_epochs=0, max_epochs=1)
        self._job = job
        self._max_subgraphs = max_subgraphs
        self.max_batches = len(job.run.flow.subgraphs[:max_subgraphs])
        self.record: SubgraphRecord | None = None
        self.report: Report | None = None

    def run(self) -> None:
        trainer = self.trainer
        names = [subgraph.name for subgraph in self._job.run.flow.subgraphs[: self._max_subgraphs]]
        compat.call_callbacks(trainer, "on_train_start")
        compat.call_callbacks(trainer, "on_train_epoch_start")
        stop = False
        with closing(run_job(self._job, self._max_subgraphs)) as job:
            for index, name in enumerate(names):
                compat.describe_progress(trainer, f"Compressing {name}")
                compat.begin_step(trainer)
                compat.call_callbacks(trainer, "on_train_batch_start", None, index)
                with compat.profile(trainer, "subgraph"):
                    self.record = next(job)
                compat.call_callbacks(trainer, "on_train_batch_end", None, None, index)
                compat.end_step(trainer, self)
                stop = trainer.should_stop or trainer.received_sigterm
                if stop:
                    break
            compat.describe_progress(trainer, "Writing")
            with compat.profile(trainer, "export"):
                self.report = _finish(job, stop)
        compat.describe_progress(trainer, "Compressed")
        compat.call_callbacks(trainer, "on_train_epoch_end")
        compat.end_epoch(trainer)
        compat.call_callbacks(trainer, "on_train_end")


def _finish(job: Generator[SubgraphRecord, bool | None, Report], stop: bool) -> Report:
    """Let the job write what it has, after its last subgraph or, told to stop, before."""
    try:
        job.send(stop)
    except StopIteration as finished:
        report: Report = finished.value
        return report
    raise AssertionError("the job has more subgraphs than the loop")
