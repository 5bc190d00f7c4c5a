"""The compression stage as a fit loop: one epoch, of which every step is one subgraph.

It subclasses Lightning's fit loop because logging, progress bars and profilers ask for that type. Only bystander
callbacks take part: others would react to weights and metrics that are not training (early stopping has raised,
averaging has overwritten compressed weights, pruning has corrupted them). Where nothing is trained, a ModelCheckpoint
that saves between steps may save between subgraphs (see `plugin.progress`); its best and last training checkpoints are
not at stake then.

Alternative not taken: one epoch per subgraph. Progress bars then start anew for each, and show no time to go.
"""

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ModelSummary, ProgressBar, Timer

from lightning_compress.calibration.records import SubgraphRecord
from lightning_compress.plugin import compat
from lightning_compress.plugin.job import Job
from lightning_compress.plugin.progress import Progress
from lightning_compress.plugin.run import run_job
from lightning_compress.report.report import Report

BYSTANDERS = (ProgressBar, ModelSummary, Timer, DeviceStatsMonitor)


def bystanders(callbacks: list[Callback], own: Callback, checkpoints: bool) -> list[Callback]:
    """The callbacks that may take part in the compression stage, in their order.

    Args:
        callbacks: the Trainer's.
        own: ours.
        checkpoints: whether checkpoints between subgraphs are small and can be continued from.
    """
    return [
        callback
        for callback in callbacks
        if callback is own or isinstance(callback, BYSTANDERS) or (checkpoints and compat.saves_between_steps(callback))
    ]


@final
class CompressionLoop(compat.FitLoop):
    """Drives `run_job` with a Trainer's hooks around each subgraph.

    Args:
        trainer: whose stage this is.
        job: the prepared compression.
        signals: what the ranks got is answered behind each subgraph.
        max_subgraphs: stop after so many (`fast_dev_run`).
        continues: the run that it has to continue, if `ckpt_path` says so.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        job: Job,
        signals: compat.HeldSignals,
        max_subgraphs: int | None,
        continues: Progress | None = None,
    ) -> None:
        super().__init__(trainer, min_epochs=0, max_epochs=1)
        self._training = trainer.fit_loop
        self._job = job
        self._signals = signals
        self._max_subgraphs = max_subgraphs
        self._continues = continues
        self.max_batches = len(job.run.flow.subgraphs[:max_subgraphs])
        self.record: SubgraphRecord | None = None
        self.report: Report | None = None

    @property
    def progress(self) -> Progress | None:
        """What a checkpoint that is saved now carries; None where nothing is written."""
        output_dir = self._job.settings.output_dir
        if output_dir is None or self._max_subgraphs is not None:
            return None
        done = 0 if self.record is None else self.record.index + 1
        return Progress(self._job.fingerprints, done, str(output_dir.absolute()))

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """The training loop's: a checkpoint of this stage says nothing of training, and is loaded by that loop."""
        state: dict[str, Any] = self._training.state_dict(destination, prefix)
        return state

    def run(self) -> None:
        trainer = self.trainer
        names = [subgraph.name for subgraph in self._job.run.flow.subgraphs[: self._max_subgraphs]]
        compat.restart_timers(compat.callbacks(trainer))
        compat.call_callbacks(trainer, "on_train_start")
        compat.call_callbacks(trainer, "on_train_epoch_start")
        stop = False
        with _told_of_errors(run_job(self._job, self._max_subgraphs, self._continues)) as job:
            for index, name in enumerate(names):
                compat.describe_progress(trainer, f"Compressing {name}")
                compat.begin_step(trainer)
                compat.call_callbacks(trainer, "on_train_batch_start", None, index)
                with compat.profile(trainer, "subgraph.training_step"):  # by which profilers count steps
                    self.record = next(job)
                compat.count_step(self)
                compat.call_callbacks(trainer, "on_train_batch_end", None, None, index)
                compat.end_step(trainer, self)
                self._signals.answer()
                stop = trainer.should_stop or trainer.received_sigterm
                stop = any(self._job.run.collective.gather(stop, f"the decision to go on behind {name}"))
                if stop:
                    break
            compat.describe_progress(trainer, "Writing")
            with compat.profile(trainer, "export"):
                self.report = _finish(job, stop)
        compat.describe_progress(trainer, "Compressed")
        compat.call_callbacks(trainer, "on_train_epoch_end")
        compat.end_epoch(trainer)
        compat.call_callbacks(trainer, "on_train_end")


@contextmanager
def _told_of_errors(
    job: Generator[SubgraphRecord, bool | None, Report],
) -> Iterator[Generator[SubgraphRecord, bool | None, Report]]:
    """Within: errors of who is called between subgraphs reach the job, too, which adds what it has changed by then; it
    is closed afterwards."""
    with closing(job):
        try:
            yield job
        except Exception as error:
            job.throw(error)


def _finish(job: Generator[SubgraphRecord, bool | None, Report], stop: bool) -> Report:
    """Let the job write what it has, after its last subgraph or, told to stop, before."""
    try:
        job.send(stop)
    except StopIteration as finished:
        report: Report = finished.value
        return report
    raise AssertionError("the job has more subgraphs than the loop")
