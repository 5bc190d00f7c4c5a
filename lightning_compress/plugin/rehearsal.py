"""A LightningModule's training step on fake tensors, as the Trainer would run it: what it will have alive.

Method: two steps of the optimizer run on tensors without values, in the order of Lightning's automatic optimization
(`lightning/pytorch/loops/optimization/automatic.py`): the optimizer's `step` calls a closure, which runs
`training_step`, sets gradients to None, and runs the backward; so the forward of the second step still has the
gradients of the first. Every storage is followed. Running Lightning's own loop instead would call everybody's hooks on
tensors without values, and leave traces in progress, logs and checkpoints.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.jobs import Phase
from lightning_compress.graph.compat import FakeTensor, traceable_transformers
from lightning_compress.graph.fakes import fake_like, new_fake_mode, replace_by_fakes
from lightning_compress.graph.restore import (
    attributes_restored,
    caches_restored,
    containers_restored,
    contents_restored,
    state_restored,
)
from lightning_compress.graph.trees import storage_bytes
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.workspaces import cublas_workspace_bytes
from lightning_compress.plugin.compat import batch_on_device, callbacks
from lightning_compress.plugin.data import begins_once
from lightning_compress.plugin.rng import rng_kept

STEPS = 2
"""The second one has the optimizer's state, and gradients, from the start."""
_THREADS = 2  # one is autograd's


def rehearse(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Phase]:
    """What the phases of training will have alive at most, in bytes, by their names: forward, backward, step.

    The module, its optimizers, the dataloader and the random number generators are as before afterwards; what a dataset
    keeps itself (a place in a stream) moves on by one batch.

    Raises:
        CompressionError: it cannot be foreseen, and why.
    """
    _check(trainer, module)
    try:
        with rng_kept():
            return _rehearsed(trainer, module, first_batch(trainer))
    except CompressionError:
        raise
    except Exception as error:  # the user's own code, on tensors without values
        raise CompressionError(
            f"training does not run on tensors without values: {type(error).__name__}: " + str(error).partition("\n")[0]
        ) from error


def _check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy) and type(strategy) is not DDPStrategy:
        raise CompressionError(f"{type(strategy).__name__} is neither of a single device nor DDP.")
    if getattr(strategy.model, "gradient_as_bucket_view", False):
        raise CompressionError(
            "with gradient_as_bucket_view gradients live in DDP's buckets, whether there are any or not."
        )
    if not module.automatic_optimization:
        raise CompressionError("with manual optimization, and with several optimizers, the steps are the module's own.")
    if len(trainer.optimizers) != 1:
        raise CompressionError(f"there are {len(trainer.optimizers)} optimizers.")
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise CompressionError("training_step takes dataloader_iter, whose batches it reads itself.")


def first_batch(trainer: pl.Trainer) -> Any:
    """Of the training dataloader, on the device; the run itself will see it again.

    Read without workers, and with what the data and its hooks keep put back.

    Raises:
        CompressionError: there are several loaders, or one that cannot be begun twice.
    """
    loader: Any = trainer.train_dataloader
    if isinstance(loader, (Mapping, list, tuple)):
        raise CompressionError("there are several training dataloaders.")
    if begins_once(loader):
        raise CompressionError("the training dataloader cannot be begun twice.")
    module: pl.LightningModule = trainer.lightning_module
    owners = (loader, module, getattr(trainer, "datamodule", None))
    with state_restored(owners), attributes_restored(module), contents_restored(module):  # which hooks may change
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)
            loader.num_workers, loader.timeout = 0, 0
        batch = next(iter(loader), None)
        if batch is None:
            raise CompressionError("the training dataloader has no batch.")
        return batch_on_device(trainer, batch)


def _rehearsed(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> dict[str, Phase]:
    mode = new_fake_mode(symbolic=False)
    before = {id(parameter): name for name, parameter in module.named_parameters(remove_duplicate=False)}
    trainable = [parameter.requires_grad for parameter in module.parameters()]
    with attributes_restored(module), containers_restored(module), caches_restored(module):
        replace_by_fakes(module, mode, module.device)
        for parameter, is_trainable in zip(module.parameters(), trainable, strict=True):
            if not isinstance(parameter, FakeTensor):
                raise CompressionError(f"its parameters are of {type(parameter).__name__}, a class of their own.")
            parameter.requires_grad_(is_trainable)
        for name in ("log", "log_dict", "print"):
            module.__dict__[name] = lambda *args, **kwargs: None
        after = dict(module.named_parameters(remove_duplicate=False))
        optimizer = _on_fakes(trainer.optimizers[0], {key: after[name] for key, name in before.items()})
        # anomalies are NaNs, and there are no values
        with traceable_transformers(module, packed_sequences=False), mode, torch.autograd.set_detect_anomaly(False):
            fakes = apply_to_collection(batch, Tensor, lambda tensor: fake_like(mode, tensor, tensor.device))
            rehearsal = _Rehearsal(trainer, module, optimizer)
            return rehearsal.run(fakes)


def _on_fakes(optimizer: torch.optim.Optimizer, fakes: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the same class and groups over fake parameters, without state.

    `fakes` are those by the ids of the parameters they stand for.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    # schedulers put a `step` on the instance that is bound to the original
    twin.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    twin.state = defaultdict(dict)
    groups = [group["params"] for group in optimizer.param_groups]
    if any(id(parameter) not in fakes for group in groups for parameter in group):
        raise CompressionError("the optimizer has parameters that the module does not have.")
    twin.param_groups = [
        {**group, **_as_torch_chooses(group), "params": [fakes[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return twin


def _as_torch_chooses(group: Mapping[str, Any]) -> dict[str, Any]:
    """On CUDA, where nothing is said, all tensors together; torch would not know fake parameters for what they are."""
    is_open = (
        "foreach" in group and group["foreach"] is None and not (group.get("fused") or group.get("differentiable"))
    )
    return {"foreach": True} if is_open and all(each.is_cuda for each in group["params"]) else {}


@final
class _Rehearsal:
    """The loop over two steps, and what was found."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        self.trainer, self.module, self.optimizer = trainer, module, optimizer
        self.memory = LiveMemory(on_cuda=module.device.type == "cuda")
        self.worst: dict[str, Phase] = {}
        self.weights = 0
        self.outside = _buckets(trainer, module)  # of what is followed: and the batch
        self.accumulated = _accumulated(trainer)

    def run(self, batch: Any) -> dict[str, Phase]:
        """Of the worst moment of each phase."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _: self._close("backward"))
            for parameter in self.module.parameters()
            if parameter.requires_grad
        ]
        self.outside += num_bytes(batch) + _THREADS * cublas_workspace_bytes(self.module.device)
        with self.memory:
            self.weights = track(self.memory, [*self.module.parameters(), *self.module.buffers()])
            self.memory.ignore(*leaves(batch))
            self.memory.reset_peak()
            for _ in range(STEPS):
                self._step(batch)
        for hook in hooks:
            hook.remove()
        return self.worst

    def _step(self, batch: Any) -> None:
        batches = min(self.accumulated, 2)  # the later ones are like the second
        for number in range(batches - 1):
            self._closure(batch, number)
        kept: list[object] = []  # as in Lightning, until the step is done

        def closure() -> Tensor | None:
            loss, *rest = self._closure(batch, batches - 1)
            kept.extend((loss, *rest))
            self.module.configure_gradient_clipping(
                self.optimizer, self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
            )
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self._close("step")

    @torch.enable_grad()
    def _closure(self, batch: Any, number: int) -> tuple[Tensor | None, object, object]:
        """The loss, and what else outlives the backward."""
        self._close(None)
        scaled, extra = self._forward(batch, number)
        kept = None if scaled is None else scaled.detach().clone()
        if number == 0:
            gradients = _gradients(self.module)
            self.module.optimizer_zero_grad(self.trainer.current_epoch, number, self.optimizer)
            self._close("forward", gradients)
        else:
            self._close("forward")
        if scaled is not None:
            self.module.backward(scaled)
            self._close("backward")
        return kept, scaled, extra

    def _forward(self, batch: Any, number: int) -> tuple[Tensor | None, object]:
        step = self.module.training_step
        batch = apply_to_collection(batch, Tensor, lambda tensor: tensor)  # a step may take out what it has read
        arguments = (batch, number) if _takes_index(step) else (batch,)
        with self.trainer.precision_plugin.train_step_context():
            output: Any = step(*arguments)
        loss = output["loss"] if isinstance(output, Mapping) else output
        extra = {name: value for name, value in output.items() if name != "loss"} if output is not loss else None
        return None if loss is None else loss / self.accumulated, extra

    def _close(self, name: str | None, gradients: int | None = None) -> None:
        """Note the peak since the last call as one of a phase."""
        if name is not None:
            gradients = _gradients(self.module) if gradients is None else gradients
            states = track(self.memory, list(self.optimizer.state.values()))
            rest = self.memory.peak_bytes - self.weights - gradients - states
            working, stepping = (0, rest) if name == "step" else (rest, 0)
            found = Phase(name, self.weights, gradients, states, working=working + self.outside, stepping=stepping)
            self.worst[name] = max(self.worst.get(name, found), found, key=lambda phase: phase.peak)
        self.memory.reset_peak()


def _accumulated(trainer: pl.Trainer) -> int:
    """Over how many batches the first steps have their gradients."""
    for callback in callbacks(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(trainer.current_epoch)
    return trainer.accumulate_grad_batches


def _takes_index(step: Callable[..., Any]) -> bool:
    parameters = inspect.signature(step).parameters.values()
    return len(parameters) > 1 or any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def _buckets(trainer: pl.Trainer, module: nn.Module) -> int:
    """Bytes in which DistributedDataParallel gathers gradients."""
    if not isinstance(trainer.strategy, DDPStrategy):
        return 0
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


def _gradients(module: nn.Module) -> int:
    return num_bytes([parameter.grad for parameter in module.parameters()])


def track(memory: LiveMemory, tensors: Any) -> int:
    """Count tensors in a structure from now on; their bytes."""
    for tensor in leaves(tensors):
        memory.track(tensor)
    return num_bytes(tensors)


def num_bytes(tensors: Any) -> int:
    """Of the storages of tensors in a structure; one that two share counts once."""
    return storage_bytes(leaves(tensors))


def leaves(tensors: Any) -> list[Tensor]:
    """The tensors of a structure."""
    found: list[Tensor] = []
    apply_to_collection(tensors, Tensor, found.append)
    return found
