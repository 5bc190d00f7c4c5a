"""The callback that adds a compression stage to a Trainer run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from omegaconf import MISSING
from torch import nn

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.prepare import calibrating, may_need_data, needs_data
from lightning_compress.calibration.quantized import already_quantized
from lightning_compress.distributed.bars import bars_of_first
from lightning_compress.distributed.buffers import share_buffers
from lightning_compress.distributed.collective import closing_all
from lightning_compress.errors import (
    CalibrationDataError,
    CompressionError,
    ComputedWeightError,
    UnsupportedModelError,
)
from lightning_compress.export.checkpoint import SavesPretrained, check_output_dir, is_unfinished
from lightning_compress.graph.restore import assigned
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.targets import as_patterns
from lightning_compress.memory.pickled import QUANTIZED_KEY, UNFINISHED_KEY, said_of_quantized
from lightning_compress.memory.placement import MemoryConfig, memory_config
from lightning_compress.memory.source import is_on_meta
from lightning_compress.plugin import compat
from lightning_compress.plugin.agreement import check_data, check_settings
from lightning_compress.plugin.beforehand import (
    check_apart,
    check_foldable,
    check_ranks,
    check_unmasked,
    meta_under,
    try_step,
    undo_earlier,
    warn_of_later,
    warn_of_loaded,
    warn_of_skipped,
)
from lightning_compress.plugin.data import calibration_set, check_data_given
from lightning_compress.plugin.job import Job, plan_recipe, prepare_job
from lightning_compress.plugin.loop import CompressionLoop, bystanders
from lightning_compress.plugin.module import compressed_module, onload_device, onloads
from lightning_compress.plugin.progress import STATE_KEY, Progress, from_state
from lightning_compress.plugin.requeue import TRAINED_KEY, replace_run
from lightning_compress.plugin.rng import rng_kept
from lightning_compress.plugin.settings import Settings, as_folder, as_processor, check_number
from lightning_compress.plugin.warned import warned_by_first
from lightning_compress.recipe.load import RecipeLike, load_recipe
from lightning_compress.recipe.refused import adapters
from lightning_compress.report.report import Report, partial_line


class CompressionCallback(Callback):
    """Quantize the model after training, or instead of it, and write a `compressed-tensors` checkpoint.

    What runs on a calibration batch: the module's `calibration_step(batch)` if it has one, else the transformers model
    it wraps, called with the batch's fields, else `forward(batch)`.

    After the run the module holds the quantized weights (dequantized, in its own dtype), so
    `trainer.test(module, datamodule)` measures what was exported, and `report` tells what happened. Without the module
    `trainer.test` loads the best checkpoint of the training instead, which is said. The optimizers are freed. A
    training that is interrupted or fails is not followed by a compression.

    Args:
        recipe: a shipped name (`w4a16_gptq`), a path, a mapping, or a `Recipe`.
        output_dir: folder of the checkpoint and the report, and of nothing that the Trainer writes; None changes the
            module in memory only. One of them has to be given.
        when: `after_train`, when all `on_train_end` hooks have run; or `only`: `fit` compresses and does not train.
        calibration: a DataLoader, a collection of them, or any iterable of batches. Without it:
            `calibration_dataloader()` of the module or datamodule, else the training data.
        max_samples: calibration samples, rounded up to whole batches; by default 512.
            `Trainer(limit_train_batches=...)` holds too.
        schedule: `staged`, `recompute`, `block`, `basic` or `datafree`.
        sequential_targets: class names, module names or `re:` patterns of what is onloaded at a time; by default the
            layers.
        expert_parts: in how many parts the experts of a layer are onloaded and solved, one after the other, where all
            at once take too much memory; by default one, or as many as `memory`'s budgets demand.
        memory: options of `MemoryConfig` (a mapping will do): budgets, where activations wait, prefetch depth.
        verify: read the checkpoint back and compare it with the module.
        tokenizer: saved with the checkpoint; a tokenizer or processor, or the folder of one.
        weights: what parameters on the meta device are read from, a subgraph at a time: a folder of safetensors files
            (of the module, or of the transformers model in it), or a Lightning checkpoint (`.ckpt`: one file, or the
            folder of a sharded one), of which only the `state_dict` is read. Needs `when="only"`,
            `strategy="sequential_onload"` and a model built within
            `parameters_on_meta()`, `trainer.init_module(empty_init=True)` or `configure_model`. Such parameters are not
            changed; others, which are in memory, are compressed as ever.
        resume: `auto` continues an interrupted run with the same recipe, model and data that `output_dir` holds;
            `never` starts over.
        keep_activations: write the activations to `output_dir` after each subgraph (they are removed at the end), so
            that a continued run reads them instead of running the finished subgraphs once more.
        seed: for shuffling calibration loaders.

    Raises:
        CompressionError: a subclass that says what is wrong, before training starts where that can be known.
    """

    def __init__(
        self,
        recipe: RecipeLike,
        output_dir: str | Path | None = MISSING,
        when: Literal["after_train", "only"] = "after_train",
        calibration: Iterable[Any] | None = None,
        max_samples: int | None = None,
        schedule: Literal["staged", "recompute", "block", "basic", "datafree"] = "staged",
        sequential_targets: Sequence[str] | None = None,
        expert_parts: int | None = None,
        memory: MemoryConfig | Mapping[str, Any] | None = None,
        verify: bool = True,
        tokenizer: SavesPretrained | str | Path | None = None,
        weights: str | Path | None = None,
        resume: Literal["auto", "never"] = "auto",
        keep_activations: bool = False,
        seed: int = 0,
    ) -> None:
        if when not in ("after_train", "only"):
            raise CompressionError(f"when={when!r} is not known; use 'after_train' or 'only'.")
        if weights is not None and when != "only":
            raise CompressionError("weights= is read in place of a training; use when='only' with it.")
        if resume not in ("auto", "never"):
            raise CompressionError(f"resume={resume!r} is not known; use 'auto' or 'never'.")
        if schedule not in tuple(Schedule):
            raise CompressionError(f"schedule={schedule!r} is not known; use {', '.join(Schedule)}.")
        check_number("max_samples", max_samples, 1)
        check_number("seed", seed, 0, 2**32 - 1)  # what NumPy takes
        check_data_given(calibration)
        self.settings = Settings(
            recipe=load_recipe(recipe),
            output_dir=as_folder("output_dir", output_dir),
            schedule=Schedule(schedule),
            sequential_targets=as_patterns(sequential_targets),
            expert_parts=expert_parts,
            memory=memory_config(memory),
            verify=verify,
            weights=as_folder("weights", weights),
            resume=resume == "auto",
            keep_activations=keep_activations,
            tokenizer=as_processor(tokenizer),
        )
        self.when = when
        self.calibration = calibration
        self.max_samples = max_samples
        self.seed = seed
        self.report: Report | None = None
        self._data: CalibrationSet | None = None
        self._num_sanity_val_steps: int | float | None = None
        self._is_pending = self._has_run_step = self._has_ended = False
        self._is_trained = self._is_unfinished = False
        self._was_compressed = False
        self._continues: Progress | None = None
        self._example: Any = None

    @property
    def state_key(self) -> str:
        """The name of this callback's state in checkpoints."""
        return STATE_KEY

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called when a checkpoint is saved: one without weights carries how far the compression is."""
        # not in `state_dict`, since Lightning refuses two callbacks that have one before `setup` can say why
        loop = trainer.fit_loop
        if self._is_unfinished and checkpoint.get("state_dict"):
            checkpoint[UNFINISHED_KEY] = True
            rank_zero_warn(
                "A checkpoint is saved in which some weights are quantized and others are not, because the compression "
                "did not finish: neither train nor compress what it holds."
            )
        elif checkpoint.get("state_dict") and already_quantized(compressed_module(pl_module)):
            checkpoint[QUANTIZED_KEY] = True
        if isinstance(loop, CompressionLoop) and loop.progress is not None and onloads(trainer):
            checkpoint["callbacks"][STATE_KEY] = loop.progress.to_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called for `ckpt_path`, before `on_fit_start`: the run that it was saved in is the one to be continued."""
        self._continues = from_state(state_dict)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called when `ckpt_path` is loaded; in `fit` before `on_fit_start`: the end of a training is not repeated."""
        if self._was_compressed and not compat.is_fitting(pl_module):
            warn_of_loaded(trainer, compressed_module(pl_module))
        if UNFINISHED_KEY in checkpoint:
            raise UnsupportedModelError(
                f"The checkpoint {trainer.ckpt_path} was saved when a compression had not finished: some of its "
                "weights are quantized and others are not. Load one of the training, and start the compression again; "
                "it continues with the subgraphs that are in its output_dir."
            )
        if QUANTIZED_KEY in checkpoint and compat.is_fitting(pl_module):
            rank_zero_warn(said_of_quantized(trainer.ckpt_path))
        self._is_trained = TRAINED_KEY in checkpoint

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Called before the model is configured; refuses what cannot work whatever the model."""
        compat.check_lightning()
        compat.check_class_tree(trainer)
        self._was_compressed = bool(already_quantized(compressed_module(pl_module)))
        if sum(isinstance(callback, CompressionCallback) for callback in compat.callbacks(trainer)) > 1:
            raise UnsupportedModelError(
                "This Trainer has several CompressionCallbacks, and the second would quantize quantized weights. Keep "
                "one; for several recipes load the trained checkpoint anew for each, with when='only'."
            )
        if stage == "fit" and trainer.world_size > 1:
            check_ranks(trainer)
        if stage == "fit" and onloads(trainer) and (self.settings.weights is not None or is_on_meta(pl_module)):
            self._example = compat.exchange_example(pl_module, None)
        if stage == "fit" and is_on_meta(pl_module) and self._would_be_moved(trainer):
            raise UnsupportedModelError(meta_under(trainer, pl_module))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called when model and data exist, before training: checks the recipe and reads the calibration set."""
        self.report, self._is_unfinished = None, False
        undo_earlier(compressed_module(pl_module))
        with closing_all(compat.collective(trainer)) as collective, warned_by_first(collective.rank):
            check_settings(self.settings, collective)
            check_apart(trainer, self.settings.output_dir, trains=self.when == "after_train")
            self._prepare(trainer, compressed_module(pl_module))
            check_data(self._data, collective)
        self._num_sanity_val_steps = trainer.num_sanity_val_steps
        if self.when == "only":
            trainer.num_sanity_val_steps = 0
            compat.restore_weights_only(trainer)
        elif self.settings.resume and not self._is_trained and is_unfinished(self.settings.output_dir):
            rank_zero_warn(
                f"{self.settings.output_dir} holds an unfinished compression, which is continued if this training ends "
                "in the very same weights and refused otherwise. To compress what comes of this training, give another "
                "output_dir or resume='never'."
            )
        if self.when == "after_train":
            warn_of_later(trainer, pl_module, self.settings.output_dir)
        replace_run(trainer, self, self.compress, self.when == "after_train", self._is_trained)
        self._is_pending = True

    def _prepare(self, trainer: pl.Trainer, module: nn.Module) -> None:
        """Check the recipe, and read the calibration set."""
        if self.when == "after_train" and adapters(module):  # they are merged at its end: the model is not there yet
            if self.settings.output_dir is not None:
                check_output_dir(self.settings.output_dir)
            needs = may_need_data(self.settings.recipe)
        else:
            try:
                target, resolved = plan_recipe(module, self.settings)
                needs = needs_data(resolved)
                if self.when == "after_train":
                    check_unmasked(trainer, target.root, resolved.assignments)
            except ComputedWeightError as error:
                if self.when == "only":
                    raise
                check_foldable(trainer, trainer.lightning_module, error)
                needs = may_need_data(self.settings.recipe)
        if needs:
            trains = self.when == "after_train"
            self._data = calibration_set(trainer, module, self.calibration, self.max_samples, self.seed, trains=trains)
            if self._data is None:
                raise CalibrationDataError(
                    "This recipe needs calibration data and there is none: pass `calibration=` or `dataloaders=`, "
                    "define `calibration_dataloader()` or `train_dataloader()`, or use a data-free recipe such as "
                    "w4a16_rtn."
                )

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Called before every training batch: before the first, what calibration will run is tried on one batch."""
        is_first, self._has_run_step = not self._has_run_step, True
        if self.when == "after_train" and is_first and self._data is not None:
            try_step(compressed_module(pl_module), self._data, str(trainer.precision))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Called after every training batch, where it does nothing, and after every subgraph, whose record it logs."""
        loop = trainer.fit_loop
        if isinstance(loop, CompressionLoop) and loop.record is not None:
            record = loop.record
            pl_module.log_dict(
                {
                    "compress/error": record.mean_error,
                    "compress/tokens": float(record.num_tokens),
                    "compress/onload_s": record.onload_s,
                    "compress/run_s": record.run_s,
                    "compress/solve_s": record.solve_s,
                    "compress/peak_memory_bytes": float(record.peak_bytes),
                },
                batch_size=1,
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called when a training ends that was begun, with or without a step."""
        self._has_ended = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Called when `fit` ends by an exception, an interrupt or SIGTERM."""
        if is_on_meta(pl_module) and not onloads(trainer):
            compat.detach_model(trainer)
            if isinstance(exception, NotImplementedError):  # of a model that `configure_model` built, behind `setup`
                exception.add_note(meta_under(trainer, pl_module))
        if self._is_pending:
            rank_zero_warn(
                f"`fit` ended by {type(exception).__name__} before the compression stage: nothing was compressed or "
                "written."
            )
        self._restore(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Called at the end of every trainer function."""
        self._restore(trainer)

    def compress(self, trainer: pl.Trainer) -> None:
        """Run the compression stage now; called in place of, or after, the fit loop's own run."""
        self._is_pending = False
        training_loop, pl_module = trainer.fit_loop, trainer.lightning_module
        every = compat.callbacks(trainer)
        if trainer.ckpt_path is not None and not self._has_run_step and not is_on_meta(pl_module):
            compat.take_averages(every, pl_module)
            if self.when == "after_train" and not self._is_trained and not self._has_ended:
                warn_of_skipped(trainer, pl_module)
        # all of the module: a `calibration_step` may run dropout that is not the model's
        with (
            rng_kept(),
            calibrating(pl_module),
            closing_all(compat.collective(trainer)) as collective,
            bars_of_first(collective.rank),
            warned_by_first(collective.rank),
            compat.HeldSignals(trainer, collective) as signals,
        ):
            with compat.profile(trainer, "prepare"):
                module, device = compressed_module(pl_module), onload_device(trainer)
                if self.when == "after_train":
                    share_buffers(module, collective)
                job = prepare_job(module, self._data, self.settings, device, collective)
            is_trial = bool(trainer.fast_dev_run)  # type: ignore[attr-defined]
            trial_length = _first_quantizing(job) if is_trial else None
            loop = CompressionLoop(trainer, job, signals, trial_length, self._continues)
            compat.set_logged_steps(loop, compat.logged_steps(training_loop))
            saves = self.when == "only" and onloads(trainer) and loop.progress is not None
            present = bystanders(every, self, checkpoints=saves)
            stage = assigned(trainer, fit_loop=loop, callbacks=present, log_every_n_steps=1, should_stop=False)
            with stage, compat.own_steps(present):
                try:
                    loop.run()
                except KeyboardInterrupt:  # at once, not behind the subgraph, so without a report
                    rank_zero_info(partial_line(None if is_trial else self.settings.output_dir))
                    raise
                finally:
                    is_whole = loop.report is not None and not loop.report.is_partial
                    self._is_unfinished = job.run.flow.store.has_written and not is_whole
                    compat.forget_averages(every)
                    compat.set_logged_steps(training_loop, compat.logged_steps(loop))
        self.report = loop.report
        if self.report is not None:
            rank_zero_info(self.report.summary())

    def _would_be_moved(self, trainer: pl.Trainer) -> bool:
        """Whether the strategy treats parameters without values as others; sharded training gives them some."""
        plain = isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy)
        return not onloads(trainer) and (plain or self.when == "only")

    def _restore(self, trainer: pl.Trainer) -> None:
        if self._example is not None:
            self._example = compat.exchange_example(trainer.lightning_module, self._example)
        trainer.fit_loop.__dict__.pop("run", None)
        self._data = None
        self._is_pending = self._has_run_step = self._has_ended = self._is_trained = False
        self._continues = None
        if self._num_sanity_val_steps is not None:
            trainer.num_sanity_val_steps = cast(int, self._num_sanity_val_steps)
            self._num_sanity_val_steps = None


def _first_quantizing(job: Job) -> int:
    """How many subgraphs it takes to reach one that quantizes something: the embeddings come before the layers."""
    return next(number for number, subgraph in enumerate(job.run.flow.subgraphs, 1) if subgraph.solved)
