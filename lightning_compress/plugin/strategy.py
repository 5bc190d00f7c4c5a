"""A strategy that leaves the model in host memory: the compression stage brings subgraphs to the device by itself.

What a plain strategy would do to a model that does not fit the device, and what this one does instead, is a line at
each method. Registered as "sequential_onload".
"""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeGuard, final

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_compress.errors import CommunicationError, CompressionError, UnsupportedModelError
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.memory.source import is_on_meta, parameters_on_meta
from lightning_compress.plugin import compat
from lightning_compress.plugin.callback import CompressionCallback
from lightning_compress.plugin.loop import CompressionLoop
from lightning_compress.plugin.module import compressed_module
from lightning_compress.plugin.offloaded import offloaded
from lightning_compress.plugin.progress import saved_progress

NAME = "sequential_onload"
_INTERACTIVE = ("bash", "interactive")  # see `SLURMEnvironment.detect`
_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


@final
class SequentialOnloadStrategy(DDPStrategy):
    """Weights in host memory or on disk, for `CompressionCallback(when="only")` and `Compressor`; it does not train.

    `validate`, `test` and `predict` bring a layer's weights to the device when it is called. Those of parameters on the
    meta device are read from `weights`; by default from what the Trainer's CompressionCallback has written, else from
    its `weights`. What `configure_model` builds is on the meta device where something says what to read.

    Launchers, rank arithmetic and checkpoint IO are DDP's. One process needs no process group, so none is made unless
    the environment started processes itself.

    Args:
        weights: folder of safetensors files, compressed or not, or a Lightning checkpoint.
        device_budget: how much of the weights may stay on the device between calls (bytes, "8GiB", or "80%" of
            all it has); by default half of the memory that is free there.
        options: of `DDPStrategy`.
    """

    def __init__(
        self, weights: str | Path | None = None, device_budget: int | str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._weights = None if weights is None else Path(weights)
        self._memory = MemoryConfig(device_budget=device_budget)
        self._evaluation = ExitStack()

    strategy_name = NAME

    def _configure_launcher(self) -> None:
        # one process on this machine needs no launcher; torchrun and SLURM set `creates_processes_externally`
        assert self.cluster_environment is not None
        if self.num_processes * self.num_nodes == 1 and not self.cluster_environment.creates_processes_externally:
            self._launcher = None
        else:
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        # called before data and model are prepared
        if self._needs_process_group:
            check_srun(self.cluster_environment, self.num_nodes)
            try:
                super().setup_distributed()
            except Exception:  # ranks that this one has started would wait for it
                if self.launcher is not None:
                    self.launcher.kill(signal.SIGKILL)
                raise
        else:
            self.set_world_ranks()

    def setup(self, trainer: pl.Trainer) -> None:
        # called after configure_model; DDP would convert every weight, move the model, wrap it and build optimizers
        assert self.accelerator is not None
        assert self.model is not None
        if trainer.state.fn == TrainerFn.FITTING and not any(
            _replaces_training(callback) for callback in compat.callbacks(trainer)
        ):
            raise UnsupportedModelError(
                f"Strategy {NAME!r} builds no optimizers, so it cannot train. Use it with "
                "CompressionCallback(when='only') or Compressor, and train with another strategy."
            )
        if any(isinstance(callback, StochasticWeightAveraging) for callback in compat.callbacks(trainer)):
            raise UnsupportedModelError(
                "StochasticWeightAveraging wants an optimizer, and nothing is trained here: leave it out of this "
                "Trainer's callbacks, or use Compressor, which leaves it out."
            )
        self.accelerator.setup(trainer)
        check_precision(self.precision_plugin.precision, self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        else:
            self.model_to_device()
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        # called by setup; the user's optimizer would be built for nothing
        self.optimizers = []
        self.lr_scheduler_configs = []

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # in `trainer.init_module` and around `configure_model`; DDP would allocate all weights on the device
        without_values = self._reads_weights() if empty_init is None else empty_init
        with parameters_on_meta() if without_values else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def _reads_weights(self) -> bool:
        """Whether the user has said what weights to read from disk; those made in `configure_model` would be lost."""
        module = self.lightning_module
        if module is None or not compat.is_running(module):
            return False
        if self._weights is not None and not compat.is_fitting(module):
            return True
        callbacks = compat.callbacks(module.trainer)
        return any(_replaces_training(one) and one.settings.weights is not None for one in callbacks)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        # in every checkpoint; during a compression that is written to shards, those hold the weights
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        if isinstance(loop, CompressionLoop) and loop.progress is not None:
            return {}
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # for `ckpt_path`, behind configure_model
        module, state = self.lightning_module, checkpoint["state_dict"]
        assert module is not None
        progress = saved_progress(checkpoint)
        if progress is not None and not state:
            if module.trainer.state.fn == TrainerFn.FITTING and any(
                map(_replaces_training, compat.callbacks(module.trainer))
            ):
                return  # the model keeps its weights, and the callback continues with the shards
            raise UnsupportedModelError(
                "The checkpoint in `ckpt_path` was saved during a compression, so it holds no weights: they are in "
                f"{progress.output_dir}. Continue it with CompressionCallback(when='only'), or use "
                "`load_compressed(module, folder)` once it is finished."
            )
        if is_on_meta(module) and any(
            isinstance(value, torch.Tensor) and not value.is_meta for value in state.values()
        ):
            raise UnsupportedModelError(
                f"Parameters of {type(compressed_module(module)).__name__} are on the meta device, where `ckpt_path` "
                "would load nothing. Give the checkpoint as weights= of the CompressionCallback, or to evaluate it of "
                "the SequentialOnloadStrategy, instead; it is read piece by piece."
            )
        super().load_model_state_dict(checkpoint, strict)

    def model_to_device(self) -> None:
        # called by setup for `validate`, `test` and `predict`; DDP would move the whole model
        module = self.lightning_module
        assert module is not None
        if self._weights is not None and not is_on_meta(module):
            raise UnsupportedModelError(
                f"SequentialOnloadStrategy(weights={str(self._weights)!r}) was given, but all parameters of "
                f"{type(compressed_module(module)).__name__} are in memory, and those would be evaluated. Leave "
                "`weights` out; or build the model without values, within `parameters_on_meta()` or in "
                "`configure_model`."
            )
        if self._needs_onloading(module):
            weights = self._evaluated_weights(module) if is_on_meta(module) else None
            budget = self._memory.num_bytes("device_budget", self.root_device)
            evaluation = offloaded(module, self.root_device, weights, budget)
            self._evaluation.enter_context(evaluation)

    def _needs_onloading(self, module: pl.LightningModule) -> bool:
        return is_on_meta(module) or self.root_device.type != "cpu"

    def _evaluated_weights(self, module: pl.LightningModule) -> Path:
        """Where the values of a model on the meta device are."""
        found = [self._weights]
        for callback in compat.callbacks(module.trainer):
            if isinstance(callback, CompressionCallback):
                report = callback.report
                written = None if report is None or report.is_partial else report.output_dir
                found += [None if written is None else Path(written), callback.settings.weights]
        for weights in found:
            if weights is not None:
                return weights
        raise UnsupportedModelError(
            f"Parameters of {type(compressed_module(module)).__name__} are on the meta device, and nothing says where "
            "their values are: use Trainer(strategy=SequentialOnloadStrategy(weights=FOLDER))."
        )

    def teardown(self) -> None:
        # at the end of every trainer function; DDP would move the module to the CPU, which meta parameters cannot be
        self._evaluation.close()
        if self.lightning_module is None or not is_on_meta(self.lightning_module):
            super().teardown()
            return
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._needs_process_group:
            with self._doing("a barrier"):
                super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self._needs_process_group:
            return obj
        with self._doing("a broadcast"):
            return super().broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return super().reduce_boolean_decision(decision, all) if self._needs_process_group else decision

    def reduce(self, tensor: torch.Tensor, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        if not self._needs_process_group:
            return tensor
        with self._doing("a reduction"):
            return super().reduce(tensor, group, reduce_op)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        # around Lightning's own operations, between two of the compression's
        try:
            yield
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"Rank {self.global_rank} of {self.world_size} could not go on with {what} of the Trainer: another "
                f"rank has ended (see what that says), did not come, or is cut off: {error}"
            ) from error

    @property
    def _needs_process_group(self) -> bool:
        assert self.cluster_environment is not None
        return self.num_processes * self.num_nodes > 1 or self.cluster_environment.creates_processes_externally


def register() -> None:
    """Make `Trainer(strategy="sequential_onload")` known; Lightning parses entry points too late for that."""
    if NAME not in StrategyRegistry:
        StrategyRegistry.register(
            NAME, SequentialOnloadStrategy, description="Weights stay in host memory while a model is compressed"
        )


def _replaces_training(callback: Callback) -> TypeGuard[CompressionCallback]:
    return isinstance(callback, CompressionCallback) and callback.when == "only"


def check_precision(precision: str, model: nn.Module) -> None:
    """
    Raises:
        UnsupportedModelError: it is another than the weights have.
    """
    wanted = _DTYPES.get(precision)
    present = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if wanted is not None and present - {wanted}:
        names = ", ".join(sorted(map(str, present)))
        raise UnsupportedModelError(
            f"Trainer(precision={precision!r}) contradicts the weights, which are {names}. This strategy never casts "
            f"weights: load the model in {wanted}, or leave `precision` out."
        )


def check_srun(environment: ClusterEnvironment | None, num_nodes: int) -> None:
    """Called before ranks look for one another.

    Args:
        environment: of the trainer.
        num_nodes: of the trainer.

    Raises:
        CompressionError: a SLURM job of several tasks, none of which srun has started: Lightning would wait for them.
            Or an interactive one, in which Lightning takes each process for one that starts the others of its node.
    """
    name = os.environ.get("SLURM_JOB_NAME")
    if isinstance(environment, LightningEnvironment) and name in _INTERACTIVE and "NODE_RANK" not in os.environ:
        number = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
        if number > 1 or num_nodes > 1:
            raise CompressionError(
                f"In an interactive SLURM job (SLURM_JOB_NAME={name}) Lightning does not see what srun starts, and "
                f"ranks would wait for others (tasks of srun: {number}; nodes of the Trainer: {num_nodes}). Put "
                "SLURM_JOB_NAME=compress srun before the command; for this node alone give the Trainer num_nodes=1."
            )
    if not isinstance(environment, SLURMEnvironment) or "SLURM_STEP_ID" in os.environ:
        return
    if (number := environment.world_size()) > 1:
        raise CompressionError(
            f"This SLURM job has {number} tasks, but srun did not start this process, so it would wait for "
            f"{number - 1} others. Put srun before the command, in the batch script too; for one process alone give "
            "the job --nodes=1 --ntasks-per-node=1."
        )
