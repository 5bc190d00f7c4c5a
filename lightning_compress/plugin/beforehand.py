"""What is told before a training, at whose end it would be late."""

from collections.abc import Container
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.prepare import evaluating
from lightning_compress.calibration.quantized import already_quantized, read_whole
from lightning_compress.calibration.target import find_target
from lightning_compress.errors import ComputedWeightError, OutputDirectoryError, UnsupportedModelError, listed
from lightning_compress.export.checkpoint import is_ours
from lightning_compress.graph.execute import rows_checked
from lightning_compress.graph.restore import attributes_restored, contents_restored
from lightning_compress.graph.synthesize import flatten_batch
from lightning_compress.memory.source import is_on_meta
from lightning_compress.plugin import compat
from lightning_compress.plugin.module import compressed_module
from lightning_compress.plugin.rng import rng_kept
from lightning_compress.recipe.refused import adapters

_OURS = ("lightning.", "lightning_compress.")


def undo_earlier(module: nn.Module) -> None:
    """Let a module that was compressed before read its inputs as they are; says so, and where its weights are still
    those that came of it."""
    inputs, weights = read_whole(module), already_quantized(module)
    if inputs:
        rank_zero_warn(
            f"An earlier compression made {len(inputs)} modules ({inputs[0]}, ...) quantize their inputs. They read "
            "them as they are again, from now on."
        )
    if weights:
        rank_zero_warn(
            f"{len(weights)} weights ({weights[0]}, ...) are as an earlier compression left them, so this "
            "run starts from those, not from the original's. To compare recipes load the original's again for each."
        )


def warn_of_loaded(trainer: pl.Trainer, module: nn.Module) -> None:
    """Called when a checkpoint was loaded to test a module that was compressed: what quantizes the inputs of compressed
    weights goes with them."""
    if already_quantized(module):
        return  # the checkpoint holds none of them
    read_whole(module)
    function = "" if trainer.state.fn is None else trainer.state.fn.value
    rank_zero_warn(
        f"`trainer.{function}` has loaded {trainer.ckpt_path} over the compressed weights, and measures what that "
        f"holds. To measure what was exported, give the module, as trainer.{function}(module, datamodule), right "
        "behind the compression; by now the exported checkpoint has to be loaded into it first."
    )


def check_ranks(trainer: pl.Trainer) -> None:
    """Every rank has to hold the whole model, or to read from the whole checkpoint.

    Raises:
        UnsupportedModelError: the strategy splits it.
    """
    if not isinstance(trainer.strategy, DDPStrategy):
        raise UnsupportedModelError(
            f"{type(trainer.strategy).__name__} splits the model over {trainer.world_size} ranks, and compressing "
            "it needs all of it on each. Train with strategy='ddp', or save a full checkpoint and compress that "
            "in a second run with when='only' and strategy='sequential_onload'."
        )


def check_apart(trainer: pl.Trainer, output_dir: Path | None, trains: bool) -> None:
    """Called when loggers and callbacks know where they write.

    Args:
        trainer: which has them.
        output_dir: of the compression.
        trains: whether that follows a training, with the checkpoints of which the folder would be somebody else's.

    Raises:
        OutputDirectoryError: one of them writes into what is no folder of ours yet.
    """
    if output_dir is None or is_ours(output_dir):
        return
    places = [(type(each).__name__, each.log_dir or each.save_dir) for each in trainer.loggers]
    if trains:
        savers = [each for each in compat.callbacks(trainer) if isinstance(each, Checkpoint)]
        places += [(type(each).__name__, getattr(each, "dirpath", None)) for each in savers]
        places += [("Trainer(default_root_dir=...)", trainer.default_root_dir)] * compat.requeues(trainer)
    for name, place in places:
        if place is not None and Path(place).resolve().is_relative_to(output_dir.resolve()):
            raise OutputDirectoryError(
                f"{name} writes to {place}, which is in output_dir {output_dir}: with such files in it that would be "
                f"refused as a folder of somebody else's. Give a folder for the checkpoint alone, such as "
                f"{output_dir / 'compressed'}."
            )


def try_step(module: nn.Module, data: CalibrationSet, precision: str) -> None:
    """Run a calibration batch before the training, at whose end it would be late to find that it cannot be run.

    Raises:
        UnsupportedModelError: it cannot.
    """
    target = find_target(module)
    if is_on_meta(module) or adapters(module):
        return
    device = next((parameter.device for parameter in target.root.parameters()), torch.device("cpu"))
    tensors, structure = flatten_batch(data.batches[0])
    batch = structure.build([tensor.to(device, copy=True) for tensor in tensors])  # a step may change it
    with (
        rng_kept(),
        evaluating(module),
        contents_restored(module),
        attributes_restored(module),
        rows_checked(module),
    ):
        try:
            target.step(batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # an error of the device is one of this step
        except torch.OutOfMemoryError as error:
            error.add_note("This was a calibration batch, tried before the training: give a smaller batch size for it.")
            raise
        except Exception as error:
            advice = (
                f" The method `calibration_step(self, batch)` of {type(module).__name__} has to run the model on a "
                f"batch, as its `training_step` does{_alone(precision)}."
            )
            if isinstance(error, KeyError):
                advice += " Of several loaders a batch is what one of them gives, not what training combines."
            advice = "" if isinstance(error, UnsupportedModelError) else advice  # says it itself
            raise UnsupportedModelError(
                f"{target.step_name} fails on the first calibration batch, so nothing could be compressed after the "
                f"training: {type(error).__name__}: {str(error).rstrip('.')}.{advice}"
            ) from error


def _alone(precision: str) -> str:
    """What a step that fails may miss."""
    return "" if "true" in precision and "16" not in precision else f", and without what precision={precision!r} sets"


def meta_under(trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
    """What to do about a model without values under a strategy that wants them."""
    return (
        f"Parameters of {type(compressed_module(pl_module)).__name__} are on the meta device, and "
        f"{type(trainer.strategy).__name__} puts the whole model, with values, on its device. Use "
        "Trainer(strategy='sequential_onload'), and say with weights= where the values are; or build the model with "
        "values."
    )


def _ending(trainer: pl.Trainer, pl_module: pl.LightningModule) -> list[str]:
    """The classes that may change the module in `on_train_end`."""
    others = [each for each in compat.callbacks(trainer) if not type(each).__module__.startswith(_OURS)]
    others = [each for each in others if is_overridden("on_train_end", each, Callback)]
    others += [each for each in compat.callbacks(trainer) if isinstance(each, StochasticWeightAveraging)]
    names = [type(each).__name__ for each in others]
    return names + [type(pl_module).__name__] * is_overridden("on_train_end", pl_module, pl.LightningModule)


def check_unmasked(trainer: pl.Trainer, root: nn.Module, quantized: Container[str]) -> None:
    """Called before a training.

    Raises:
        ComputedWeightError: pruning leaves masks at its end, on weights that are to be quantized.
    """
    masked = set(map(id, compat.left_masked(compat.callbacks(trainer))))
    found = [name for name, module in root.named_modules() if name in quantized and id(module) in masked]
    if found:
        raise ComputedWeightError(
            f"ModelPruning(make_pruning_permanent=False) leaves the weights of {listed(found, 3)} computed from others "
            "and masks when the training ends, and such cannot be quantized. Let it make the pruning permanent, which "
            "is its default, or add the modules to `ignore`."
        )


def check_foldable(trainer: pl.Trainer, pl_module: pl.LightningModule, error: ComputedWeightError) -> None:
    """Called before a training where a weight that is to be quantized is computed of others (weight_norm).

    Raises:
        ComputedWeightError: the given one, if nobody may fold it when the training ends.
    """
    names = _ending(trainer, pl_module)
    if not names:
        raise error
    rank_zero_warn(
        f"As the module is now it will not be compressed: {error} This is looked at again when the training has ended, "
        f"behind the `on_train_end` of {', '.join(names)}."
    )


def warn_of_skipped(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Called where a checkpoint was loaded of which no step was left to train: Lightning ends no training that it has
    not started. Averages of `WeightAveraging` are taken, whatever else is done at the end is not."""
    names = _ending(trainer, pl_module)
    if names:
        rank_zero_warn(
            f"The training had ended when {trainer.ckpt_path} was saved, so Lightning does not call the `on_train_end` "
            f"of {', '.join(names)} again: the weights are compressed as they are in the checkpoint. If a module is "
            "to be merged, averaged or removed there, do it before `fit`, or train for another step."
        )


def warn_of_later(trainer: pl.Trainer, pl_module: pl.LightningModule, output_dir: object) -> None:
    """Of what will be refused, or missed, when the training has ended."""
    found = adapters(compressed_module(pl_module))
    if found and not is_overridden("on_train_end", pl_module, pl.LightningModule):
        rank_zero_warn(
            f"{len(found)} modules carry adapters ({found[0]}, ...), and compressing them is refused unless they are "
            f"merged when the training ends: define `on_train_end` in {type(pl_module).__name__}, with "
            "`self.model = self.model.merge_and_unload()`, if no callback does so."
        )
    if compat.spawns(trainer):
        where = "" if output_dir is None else f" To use the model here, load {output_dir} into it."
        rank_zero_warn(
            f"{type(trainer.strategy).__name__} runs in processes of its own, where the callback's `report` stays. The "
            f"model of this script gets the quantized weights, but neither what quantizes the inputs of modules nor "
            f"the mark by which another compression would know them.{where}"
        )
