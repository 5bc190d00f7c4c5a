"""Every private part of Lightning that this package touches, in one place.

Written and tested against Lightning 2.6; `check_lightning` refuses other minors early instead of failing inside a run.
"""

import inspect
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from types import FrameType
from typing import Any, Self, cast, final

import lightning
import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.data import _update_dataloader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelPruning,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_compress.distributed.collective import Collective, ProcessGroup, SingleProcess
from lightning_compress.errors import CalibrationDataError

TESTED_MINOR = (2, 6)
FitLoop = _FitLoop


def check_lightning() -> None:
    """Raise ImportError if the installed Lightning is of a minor release that was not tested."""
    if tuple(map(int, lightning.__version__.split(".")[:2])) != TESTED_MINOR:
        tested = ".".join(map(str, TESTED_MINOR))
        raise ImportError(
            f"lightning_compress is tested with lightning {tested}.*, but {lightning.__version__} is installed: "
            f"pip install 'lightning=={tested}.*'"
        )


def check_class_tree(obj: object) -> None:
    """Raise TypeError for a Trainer, module or datamodule of the separate `pytorch_lightning` package."""
    if any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in type(obj).__mro__):
        raise TypeError(
            f"{type(obj).__name__} comes from the `pytorch_lightning` package, a class tree of its own that "
            "lightning_compress does not work with. Import Trainer, LightningModule and LightningDataModule from "
            "`lightning.pytorch`."
        )


def take_averages(callbacks: list[Callback], module: pl.LightningModule) -> None:
    """Where a checkpoint was loaded and no step followed: the averages that it holds as the module's state. To train on
    `WeightAveraging` has loaded what it had averaged, and puts the averages in place at the end of training only."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            callback._copy_average_to_current(module)


def forget_averages(callbacks: list[Callback]) -> None:
    """Averages of weights that were compressed meanwhile: `WeightAveraging` would put them back to validate or save."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            callback._average_model = None


def left_masked(callbacks: list[Callback]) -> list[nn.Module]:
    """Modules whose weights a `ModelPruning` computes of others and masks, and leaves so when the training ends."""
    keeping = [each for each in callbacks if isinstance(each, ModelPruning) and not each._make_pruning_permanent]
    return [module for each in keeping for module, name in each._parameters_to_prune if name == "weight"]


def is_running(module: pl.LightningModule) -> bool:
    """Whether a Trainer's function is running with this module."""
    return module._trainer is not None and module.trainer.state.status == TrainerStatus.RUNNING


def is_fitting(module: pl.LightningModule) -> bool:
    """Whether that is `fit`."""
    return is_running(module) and module.trainer.state.fn == TrainerFn.FITTING


def call_callbacks(trainer: pl.Trainer, hook: str, *args: Any) -> None:
    """Call a hook of the trainer's callbacks, with Lightning's profiling and logging context."""
    call._call_callback_hooks(trainer, hook, *args)


def unwrapped(model: nn.Module) -> nn.Module:
    """A model without what was put around it to compile it or to share it out, and into the names of its parameters."""
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel | _FabricModule):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def exchange_example(module: pl.LightningModule, value: Any) -> Any:
    """Give a module another example, which summaries and loggers run it on; returns what it was. One that a property of
    the user's own computes stays."""
    kind = inspect.getattr_static(type(module), "example_input_array")
    if isinstance(kind, property) and kind.fset is None:
        return None
    before = module.example_input_array
    module.example_input_array = value
    return before


def batch_on_device(trainer: pl.Trainer, batch: Any) -> Any:
    """A batch of the training dataloader as the training loop hands it to `training_step`."""
    module = trainer.lightning_module
    batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def collective(trainer: pl.Trainer) -> Collective:
    """The trainer's ranks. A strategy of several has made their process group, with its timeout."""
    if trainer.world_size == 1:
        return SingleProcess()
    assert isinstance(trainer.strategy, DDPStrategy)
    return ProcessGroup(trainer.strategy._timeout or default_pg_timeout)


@final
class _Held(_HandlersCompose):
    """What Lightning answers to a signal, kept for later."""

    def __init__(self, handlers: list[Any]) -> None:
        super().__init__(handlers)
        self.is_received = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.is_received = True


@final
class HeldSignals:
    """Inside, what ranks get of the signals that Lightning answers to waits until all are at the same place.

    Lightning's handler of SIGTERM meets the other ranks, at once; where those wait for this rank in another operation,
    none would go on. That of SLURM's requeue signal does something on rank 0 only, whichever rank got it, and SLURM
    ends the job then: what waits is not computed in vain.
    """

    def __init__(self, trainer: pl.Trainer, collective: Collective) -> None:
        found = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
        self._handlers = {signum: of for signum, of in found.items() if isinstance(of, _HandlersCompose)}
        self._held = {
            signum: of if isinstance(of, _Held) else _Held(cast(list[Any], of.signal_handlers))
            for signum, of in self._handlers.items()
        }
        self._connector, self._collective = trainer._signal_connector, collective

    def __enter__(self) -> Self:
        for signum, held in self._held.items():
            self._connector._register_signal(signum, held)  # does nothing in other threads than the main one
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.answer(requeues=False)  # what is finished needs no continuing
        finally:
            for signum, handler in self._handlers.items():
                self._connector._register_signal(signum, handler)
            held = self._held.get(signal.SIGTERM)
            self._connector.received_sigterm |= held is not None and held.is_received

    def answer(self, *, requeues: bool = True) -> None:
        """Called by all ranks together; what one of them got, all answer, or of it only SIGTERM."""
        received = [signum for signum, held in self._held.items() if held.is_received]
        for signum in received:
            self._held[signum].is_received = False
        for signum in sorted(set(chain(*self._collective.gather(received, "the signals that they got")))):
            if not requeues and signum != signal.SIGTERM:
                continue
            self._connector.received_sigterm |= signum == signal.SIGTERM
            handlers = self._held[signum].signal_handlers
            others = [handler for handler in handlers if handler != self._connector._sigterm_notifier_fn]
            _HandlersCompose(others)(signum, sys._getframe())


@contextmanager
def holding_requeue(trainer: pl.Trainer) -> Iterator[None]:
    """Inside, SLURM's requeue signal waits for a subgraph that is finished, where a run goes on from; if none follows,
    it is forgotten. Outside of the trainer's functions, nothing would handle it, so that it would end the process."""
    environment, connector = trainer._accelerator_connector.cluster_environment, trainer._signal_connector
    signum = environment.requeue_signal if isinstance(environment, SLURMEnvironment) else None
    if signum is None or not requeues(trainer) or connector._has_already_handler(signum):
        yield
        return
    connector._register_signal(signum, _Held([connector._slurm_sigusr_handler_fn]))
    try:
        yield
    finally:
        connector._register_signal(signum, signal.SIG_DFL)


def requeues(trainer: pl.Trainer) -> bool:
    """Whether Lightning has SLURM requeue the job when it gets the signal for that."""
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def found_checkpoint(trainer: pl.Trainer) -> str | None:
    """The checkpoint that was loaded, if it is one that a requeued job loads by itself."""
    found = trainer._checkpoint_connector._hpc_resume_path
    return found if found is not None and found == trainer.ckpt_path else None


def save_beside(trainer: pl.Trainer, added: Mapping[str, Any]) -> str:
    """Save a checkpoint, with `added`, that no job loads by itself; returns where. Ranks do not wait for the first."""
    path = os.path.join(trainer.default_root_dir, f"trained_by_job_{os.environ['SLURM_JOB_ID']}.ckpt")
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False) | dict(added)
    trainer.strategy.save_checkpoint(checkpoint, path)
    return path


def restore_weights_only(trainer: pl.Trainer) -> None:
    """Called in `on_fit_start`: of the checkpoint in `ckpt_path`, loops, optimizers and schedulers are not restored."""
    trainer._checkpoint_connector._loaded_checkpoint = {}


def starts_scripts(trainer: pl.Trainer) -> bool:
    """Whether the strategy starts the script anew for each further rank."""
    launcher = trainer.strategy.launcher
    if trainer.world_size == 1 or not isinstance(launcher, _SubprocessScriptLauncher):
        return False
    return not launcher.cluster_environment.creates_processes_externally


def spawns(trainer: pl.Trainer) -> bool:
    """Whether the ranks are processes without a script of their own, so that this one is none of them."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def of_all_ranks(loader: Any) -> Any:
    """A loader, without the share-out that the user's own DistributedSampler does: as it is for one rank alone.

    Raises:
        CalibrationDataError: a class of the user's own that cannot be made anew with another sampler.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(loader, DataLoader) or type(sampler) is not DistributedSampler or sampler.num_replicas == 1:
        return loader
    alone: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )
    alone.set_epoch(sampler.epoch)
    try:
        return _update_dataloader(loader, alone)
    except (MisconfigurationException, TypeError) as error:
        raise CalibrationDataError(
            f"{type(loader).__name__} has a DistributedSampler, and every rank has to read all of its data. It "
            f"cannot be made without: {error}. Give another loader, as `calibration=` or `calibration_dataloader()`."
        ) from error


def train_dataloaders(trainer: pl.Trainer) -> Any:
    """What the user gave as training data (one loader or a collection), as `fit` would request it; None if nothing."""
    source = trainer.fit_loop._data_source
    return _request_dataloader(source) if source.is_defined() else None


def prepare_batch(trainer: pl.Trainer, batch: Any) -> Any:
    """Precision conversion and the user's batch transfer hooks, as in training, but to host memory."""
    module = trainer.lightning_module
    batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=torch.device("cpu"), dataloader_idx=0)


def begin_step(trainer: pl.Trainer) -> None:
    """Open a step for `self.log`."""
    trainer._logger_connector.on_batch_start(None)


def count_step(loop: FitLoop) -> None:
    """Advance `global_step`, as an optimizer's step would: before `on_train_batch_end`."""
    loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()
    loop.epoch_loop.manual_optimization.optim_step_progress.increment_completed()


def end_step(trainer: pl.Trainer, loop: FitLoop) -> None:
    """Close the step: hand what was logged to the loggers."""
    trainer._logger_connector.on_batch_end()
    trainer._logger_connector.update_train_step_metrics()
    loop.epoch_loop._batches_that_stepped += 1


def saves_between_steps(callback: Callback) -> bool:
    """Whether a callback saves whole checkpoints at steps or times, not only behind epochs or validation."""
    return (
        isinstance(callback, ModelCheckpoint)
        and not callback.save_weights_only
        and (callback._every_n_train_steps > 0 or callback._train_time_interval is not None)
    )


def end_epoch(trainer: pl.Trainer) -> None:
    """Close the epoch for the logging machinery."""
    trainer._logger_connector.epoch_end_reached()
    trainer._logger_connector.on_epoch_end()
    trainer._logger_connector.reset_results()


def logged_steps(loop: FitLoop) -> int:
    """The step that loggers have reached."""
    return int(loop.epoch_loop._batches_that_stepped)


def set_logged_steps(loop: FitLoop, steps: int) -> None:
    """Let loggers go on from `steps`, since most of them refuse to go back."""
    loop.epoch_loop._batches_that_stepped = steps


def describe_progress(trainer: pl.Trainer, text: str) -> None:
    """Put `text` in front of the progress bar, in place of Lightning's `Epoch k`."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        bar.train_progress_bar.set_description(text)
    elif isinstance(bar, RichProgressBar) and bar.progress is not None and bar.train_progress_bar_id is not None:
        bar.progress.update(bar.train_progress_bar_id, description=text)


def callbacks(trainer: pl.Trainer) -> list[Callback]:
    """The trainer's callbacks."""
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def profile(trainer: pl.Trainer, section: str) -> AbstractContextManager[None]:
    """A section of this package in the trainer's profile."""
    measured: AbstractContextManager[None] = trainer.profiler.profile(f"[lightning_compress]{section}")  # type: ignore[attr-defined]
    return measured


@contextmanager
def own_steps(callbacks: list[Callback]) -> Iterator[None]:
    """Inside, checkpoint callbacks count from 0; afterwards they know again which of training's steps they saved."""
    savers = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    before = [callback._last_global_step_saved for callback in savers]
    for callback in savers:
        callback._last_global_step_saved = 0
    try:
        yield
    finally:
        for callback, step in zip(savers, before, strict=True):
            callback._last_global_step_saved = step


def restart_timers(callbacks: list[Callback]) -> None:
    """Called when a stage begins: Timers forget when an earlier training ended, and how long it took."""
    for callback in callbacks:
        if isinstance(callback, Timer):
            callback._end_time[RunningStage.TRAINING], callback._offset = None, 0


def module_device(module: pl.LightningModule) -> torch.device:
    """What `module.device` says."""
    return module._device


def set_module_device(module: pl.LightningModule, device: torch.device) -> None:
    """What `module.device` shall say, of it and of LightningModules inside."""
    for child in module.modules():
        if isinstance(child, pl.LightningModule):
            child._device = device


def detach_model(trainer: pl.Trainer) -> None:
    """Spare a model that cannot be moved the strategy's teardown, which would fail on it and hide an earlier error."""
    trainer.strategy._lightning_module = None


def free_optimizers(trainer: pl.Trainer) -> None:
    """Drop the optimizers and their state: training is over, and the memory is needed."""
    for optimizer in trainer.strategy.optimizers:
        optimizer.state.clear()
    trainer.strategy.optimizers = []
    trainer.strategy.lr_scheduler_configs = []
