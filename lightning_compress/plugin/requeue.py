"""The compression stage in place of the fit loop's run, and what a job goes on from that SLURM requeues during it.

Lightning's answer to the requeue signal saves a checkpoint, which the requeued job loads by itself. During this stage
its weights would be half quantized, and be quantized again. So nothing is saved then: finished subgraphs are in the
shards of `output_dir`, and the original weights are where this job has them from. Where that is a training, its end is
saved before the stage changes anything, and left to the requeued job, which does not train again.

Alternatives not taken: a second copy of the weights in memory, to be saved at the signal; and saving the training's end
under Lightning's own name from the start, since any job that starts in that folder meanwhile would take it for its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.nn.parallel import DistributedDataParallel

from lightning_compress.graph.restore import owning
from lightning_compress.plugin import compat

TRAINED_KEY = "lightning_compress.trained"
"""In checkpoints of a training's end, at which the compression was about to start."""


def replace_run(
    trainer: pl.Trainer, own: Callback, compress: Callable[[pl.Trainer], None], trains: bool, is_trained: bool
) -> None:
    """Let the fit loop's run compress: after its training (behind all `on_train_end`, before any teardown), or instead.

    Args:
        trainer: which is about to fit.
        own: the callback that this is for. Without it among the trainer's, the run is no `fit`'s, but a few steps of
            one that searches for a learning rate or a batch size, maybe in mid-training.
        compress: runs the stage.
        trains: whether it follows a training.
        is_trained: whether a checkpoint of that training's end was loaded.
    """
    train = trainer.fit_loop.run

    def run() -> None:
        if own not in compat.callbacks(trainer):
            train()
            return
        if trains and not is_trained:
            train()
            if trainer.received_sigterm:
                raise SIGTERMException
        elif trains:
            rank_zero_info(f"The training had ended when {trainer.ckpt_path} was saved, and is not repeated.")
        compat.free_optimizers(trainer)  # before saving: its checkpoint is of the weights
        if isinstance(trainer.strategy.model, DistributedDataParallel):  # which has a copy of all gradients
            trainer.strategy.model = trainer.strategy.lightning_module
        trained = None
        if trains:
            trained = compat.found_checkpoint(trainer) if is_trained else _save_end(trainer)
        with _left_to_requeued(trainer, trained):
            compress(trainer)
        if trainer.received_sigterm:
            raise SIGTERMException

    trainer.fit_loop.__dict__["run"] = run


def _save_end(trainer: pl.Trainer) -> str | None:
    """Save the training's end, if the job may be requeued; returns where."""
    if not compat.requeues(trainer):
        return None
    try:
        return compat.save_beside(trainer, {TRAINED_KEY: True})
    except OSError as error:
        rank_zero_warn(
            f"The end of the training could not be saved in {trainer.default_root_dir} ({error}). If SLURM requeues "
            "this job during the compression, it trains again."
        )
        return None


@contextmanager
def _left_to_requeued(trainer: pl.Trainer, trained: str | None) -> Iterator[None]:
    """Inside, a requeued job is left the checkpoint `trained`, if any, which is removed when the stage is finished."""
    is_requeued = False

    def leave(path: str) -> None:
        nonlocal is_requeued, trained
        is_requeued = True
        kept = "" if trained is None else f" and the trained weights in {path}"
        rank_zero_info(f"No half quantized weights are saved: a requeued job goes on from the output_dir{kept}.")
        if trained is not None:
            _rename(trainer, trained, path)
            trained = path

    try:
        with _saving_instead(trainer, leave):
            yield
    except BaseException as error:
        if trained is not None:
            error.add_note(f"The end of the training is in {trained}: ckpt_path= goes on from there.")
        raise
    if trained is not None and not is_requeued and not trainer.received_sigterm:
        trainer.strategy.remove_checkpoint(trained)


def _rename(trainer: pl.Trainer, path: str, to: str) -> None:
    """Called by all ranks, of which the first does it."""
    if trainer.is_global_zero:
        get_filesystem(path).mv(path, to)


@contextmanager
def _saving_instead(trainer: pl.Trainer, save: Callable[[str], None]) -> Iterator[None]:
    """Inside, Lightning calls `save` with the path of the checkpoint that it would save for a requeued job."""
    save_checkpoint = trainer.save_checkpoint

    def save_other(filepath: str | Path, *args: Any, **options: Any) -> None:
        if Path(filepath).name.startswith("hpc_ckpt_"):
            save(str(filepath))
        else:
            save_checkpoint(filepath, *args, **options)

    with owning(trainer, {"save_checkpoint": save_other}):
        yield
