"""Fine-tuning on fake tensors: what it has alive at its worst moments, to the byte, and what there is to compute.

Method: as `jobs` has it for inference; two steps of the training itself run. A step with several micro-batches begins
as one with a single one does, so one run of it tells of both.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_compress.foresight.adapters import adapt
from lightning_compress.foresight.jobs import FineTuningJob, Phase, follow
from lightning_compress.foresight.optimizers import AdamW8bitMemory, step_bytes
from lightning_compress.graph.trees import storage_bytes
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.work import Work, WorkMeter


@final
@dataclass(frozen=True)
class Rehearsal:
    """Two steps of training that were run through; the moments are the worst ones.

    Attributes:
        alone: moments where a step has one forward and backward.
        accumulated: where it has several; empty if one only was run.
        trained: bytes of the parameters that are trained.
        work: of the second step, by `forward`, `backward`, `accumulate` (a backward after the step's first) and `step`;
            empty if it was not metered.
    """

    alone: tuple[Phase, ...]
    accumulated: tuple[Phase, ...]
    trained: int
    work: Mapping[str, Work]

    def phases(self, accumulate: int) -> tuple[Phase, ...]:
        """The moments of a job with so many forwards and backwards per step."""
        return self.accumulated if accumulate > 1 else self.alone


def finetune(model: nn.Module, job: FineTuningJob, memory: LiveMemory) -> list[Phase]:
    """Train for two steps, the second of which has the optimizer's state from the start.

    The backward has moments with many activations and few gradients, and the other way round, of which ranks that share
    gradients have another worst one.

    Args:
        model: a causal language model of transformers; on real or on fake tensors.
        job: what to run. The adapters of LoRA are put into the model, which has no values in packed layers then.
        memory: follows it.

    Raises:
        CompressionError: `job.lora_targets` means no layer of the model.
    """
    return list(rehearse(model, job, memory).phases(job.accumulate))


def rehearse(model: nn.Module, job: FineTuningJob, memory: LiveMemory, meter: WorkMeter | None = None) -> Rehearsal:
    """As `finetune`; a job that accumulates also says what one that does not would take, as its first forward and
    backward are that one's.

    Args:
        meter: counts what is computed.
    """
    model.train()
    device = next(model.parameters()).device
    if job.gradient_checkpointing:
        # the name of transformers 5.23, and that of the versions before
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()  # type: ignore[operator]
    parameters = _trained(model, job)
    with memory, meter or nullcontext():
        observed = _Observed(model, parameters, job, memory, meter)
        hooks = [each.register_post_accumulate_grad_hook(observed.during_backward) for each in parameters]
        for num_backwards in (1, min(job.accumulate, 2)):  # later ones are like the second; the states are there then
            observed.begin_step()
            for number in range(num_backwards):
                observed.is_later = number > 0
                ids = torch.zeros(job.batch_size, job.length, dtype=torch.long, device=device)
                with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16-mixed"):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                observed.note("forward")
                loss.backward()
                observed.note("backward")
                del loss, ids
            observed.is_later = False
            memory.reset_peak()  # the step begins without the graph of the loss
            observed.optimizer.step()
            observed.note("step")
            observed.optimizer.zero_grad()
        for hook in hooks:
            hook.remove()
    return observed.rehearsal()


@final
class _Gradients:
    """Bytes of the storages of gradients: what two parameters share counts once. Looking at all parameters whenever
    one has its gradient would take the square of their number.

    Attributes:
        num_bytes: so far.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._storages: dict[int, int] = {}
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def add(self, parameter: Tensor) -> None:
        """Its gradient is new, or has been added to."""
        assert parameter.grad is not None
        storage = parameter.grad.untyped_storage()
        key, before = storage._cdata, self._storages.get(id(parameter))
        if key == before:
            return
        if before is not None:
            self._users[before] -= 1
            self.num_bytes -= 0 if self._users[before] else self._sizes.pop(before)
        self._storages[id(parameter)] = key
        self._users[key] += 1
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.num_bytes += self._sizes[key]


@final
class _Observed:
    """What has been seen of a training.

    Attributes:
        optimizer: of the parameters that are trained.
        is_later: the forward and backward at hand are not the step's first.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        job: FineTuningJob,
        memory: LiveMemory,
        meter: WorkMeter | None,
    ) -> None:
        self._parameters, self._memory, self._meter, self._accumulates = parameters, memory, meter, job.accumulate > 1
        self._weights, self._states = follow(model, memory), 0
        self._gradients, self._noted_gradients = _Gradients(), 0
        self._found: list[tuple[Phase, bool]] = []
        self._works: dict[tuple[str, bool], Counter[str]] = {}
        self.optimizer, self.is_later = _optimizer(parameters, job), False

    def begin_step(self) -> None:
        """Called before the first forward of a step; work is that of the last step."""
        self._works.clear()
        self._gradients, self._noted_gradients = _Gradients(), 0
        self._memory.reset_peak()

    def during_backward(self, parameter: Tensor) -> None:
        """Called when a parameter has its gradient."""
        self._gradients.add(parameter)
        self.note("backward")

    def note(self, name: str) -> None:
        """Keep the worst moment since the last one, as one of a part of the job. A gradient made since then is working
        memory in it: at the worst it may not be there yet, and ranks that share gradients have it whole at first."""
        before, self._noted_gradients = self._noted_gradients, self._gradients.num_bytes
        gradients = min(before, self._noted_gradients)
        if name == "step":
            self._states = storage_bytes([dict(state) for state in self.optimizer.state.values()])
        phase = Phase(name, self._weights, gradients, self._states)
        rest = self._memory.peak_bytes - phase.peak
        phase = replace(phase, stepping=rest) if name == "step" else replace(phase, working=rest)
        self._found.append((phase, self.is_later))
        if self._meter is not None:
            self._works.setdefault((name, self.is_later), Counter()).update(self._meter.work)
            self._meter.work.clear()
        self._memory.reset_peak()

    def rehearsal(self) -> Rehearsal:
        """All of it."""
        works: dict[tuple[str, bool], Work] = dict(self._works)
        trained = storage_bytes(self._parameters)
        if works and isinstance(self.optimizer, AdamW8bitMemory):  # which has no arithmetic
            size = step_bytes(trained, self._found[-1][0].gradients, self._states)
            works["step", False] = {"elementwise": size, "call": len(self._parameters)}
        return Rehearsal(
            alone=_undominated([phase for phase, is_later in self._found if not is_later]),
            accumulated=_undominated([phase for phase, _ in self._found]) if self._accumulates else (),
            trained=trained,
            work={_WORKS[key]: work for key, work in works.items() if key in _WORKS},
        )


_WORKS = {
    ("forward", False): "forward",
    ("backward", False): "backward",
    ("backward", True): "accumulate",
    ("step", False): "step",
}


def _undominated(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Those that no other of the same part exceeds in everything."""
    kept: list[Phase] = []
    for phase in sorted(set(phases), key=lambda each: each.peak, reverse=True):
        others = [other for other in kept if other.name == phase.name]
        if not any(_exceeds(other, phase) for other in others):
            kept.append(phase)
    return tuple(sorted(kept, key=lambda each: ("forward", "backward", "step").index(each.name)))


def _exceeds(one: Phase, other: Phase) -> bool:
    names = ("gradients", "optimizer", "working", "stepping")
    return all(getattr(one, name) >= getattr(other, name) for name in names)


def _trained(model: nn.Module, job: FineTuningJob) -> list[nn.Parameter]:
    """What the method trains, once the model is as the method has it."""
    if job.method == "full":
        model.requires_grad_()
    else:
        adapt(model, job.lora_rank, job.lora_targets, packs=job.method == "qlora")
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _optimizer(parameters: Sequence[nn.Parameter], job: FineTuningJob) -> torch.optim.Optimizer:
    if job.optimizer == "adamw_8bit":
        return AdamW8bitMemory(parameters)
    how: dict[str, Any] = {"foreach": job.implementation == "foreach", "fused": job.implementation == "fused"}
    if job.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-5, **how)
    return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9 if job.optimizer == "sgd_momentum" else 0.0, **how)
