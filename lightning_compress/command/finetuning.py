"""`lightning-compress plan job=finetuning`: how ranks fine-tune a model together, and how long a step will take.

The model is built from its configuration, without weights; every micro-batch is run on fake tensors, once with and once
without gradient checkpointing, and `foresight.finetuning_plan` chooses.
"""

import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

import torch
from omegaconf import DictConfig
from transformers import PreTrainedModel

from lightning_compress.command.chosen import check_idle, chosen_keys
from lightning_compress.command.estimate import check_unquantized, foreseeing, instantiated
from lightning_compress.command.models import load_config_only
from lightning_compress.command.plan import machine_for, size_of
from lightning_compress.command.planning import CALIBRATIONS, IMAGES, check_ranks
from lightning_compress.errors import CompressionError
from lightning_compress.foresight.adapters import saved_by_packing
from lightning_compress.foresight.finetuning_cost import CPU_OPTIMIZER, FineTuningTask, MicroBatch
from lightning_compress.foresight.finetuning_plan import (
    GIB,
    Budget,
    PlannedFineTuning,
    fastest,
    fits,
    layouts,
    micro_batch_sizes,
    rehearsed,
    ways,
)
from lightning_compress.foresight.inputs import beyond_positions, check_takes_tokens
from lightning_compress.foresight.jobs import FineTuningJob
from lightning_compress.foresight.layouts import Layout
from lightning_compress.foresight.machine import Machine, Rate
from lightning_compress.foresight.planned import tensors_on
from lightning_compress.foresight.shares import dividing_heads, largest_layer, largest_stage
from lightning_compress.foresight.training import rehearse
from lightning_compress.graph.configs import size_in
from lightning_compress.memory.host import available_bytes
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.work import WorkMeter


def run_finetuning_plan(config: DictConfig) -> PlannedFineTuning:
    """The plan of fine-tuning that `config` (of `configs/plan.yaml`, with job=finetuning) asks for.

    Raises:
        CompressionError: what cannot be planned, or does not fit.
    """
    job = instantiated(config.job)
    assert isinstance(job, FineTuningJob)
    check_ranks(config)
    check_idle(
        config,
        (*CALIBRATIONS, *IMAGES),
        "The samples of job=finetuning are job.length and job.batch_size; layout.data, layout.zero, layout.offload, "
        "layout.tensor, layout.pipeline and job.gradient_checkpointing fix what else is given.",
    )
    check_idle(config, ["disk"], "Fine-tuning offloads to host memory, and to no disk.", of="other plans")
    fixed = {str(name): value for name, value in config.layout.items() if value is not None}
    kind = "cuda" if config.run_on == "auto" else config.run_on
    machine = machine_for(config.gpu, kind, Path(config.output_dir))
    card = machine.device_bytes if config.device == "auto" else size_of("device", config.device)
    host = available_bytes() if config.host == "auto" else size_of("host", config.host)
    model = load_config_only(config.model)
    check_unquantized(model, config.model)
    return plan_finetuning(
        model,
        machine,
        job,
        config.ranks,
        budgets={"device": None if card is None else tensors_on(card), "host": host},
        interconnect=size_of("interconnect", config.interconnect),
        fixed=fixed,
        fixes_checkpointing="job.gradient_checkpointing" in chosen_keys(config),
    )


def plan_finetuning(
    model: PreTrainedModel,
    machine: Machine,
    job: FineTuningJob,
    ranks: int = 1,
    *,
    budgets: Budget,
    interconnect: int | None = None,
    fixed: Mapping[str, int | bool] | None = None,
    fixes_checkpointing: bool = False,
) -> PlannedFineTuning:
    """The fastest way to fine-tune within what there is.

    Args:
        model: a causal language model with its parameters on the meta device.
        machine: how fast it is; with a GPU.
        job: a step has `batch_size * accumulate * ranks` sequences of it, however they are divided.
        ranks: that share it, all on one host.
        budgets: bytes of the device for tensors (of a card: `foresight.planned.tensors_on`), and of host memory for all
            ranks.
        interconnect: bytes per second between ranks; None: over the card's link to the host.
        fixed: fields of the layout that are not to be chosen.
        fixes_checkpointing: nor is gradient checkpointing, which is as the job has it.

    Raises:
        BudgetError: nothing fits; says the smallest budgets that would do.
        CompressionError: a machine without a GPU; no such layout; a model that does not run as a causal language model.
    """
    start = time.perf_counter()
    check_takes_tokens(model, job)
    machine = _with_ranks(machine, interconnect)
    task = _task(model, job, ranks)
    among = _layouts(model, ranks, job, fixed or {})
    checkpoints = [job.gradient_checkpointing] if fixes_checkpointing else _checkpoints(model)

    def run(size: int, checkpointing: bool, accumulate: int) -> MicroBatch:
        micro = replace(job, batch_size=size, accumulate=accumulate, gradient_checkpointing=checkpointing)
        with foreseeing(model, job.length, on_cuda=True):
            return MicroBatch(size, checkpointing, rehearse(model, micro, LiveMemory(on_cuda=True), WorkMeter()))

    room = None if budgets["device"] is None else budgets["device"] + GIB
    found = rehearsed(micro_batch_sizes(task.batch, among), checkpoints, among, task, room, run)
    steps = ways(task, found, among, machine)
    best, runners_up, saved_s = fastest(steps, budgets)
    return PlannedFineTuning(
        model=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        itemsize=model.dtype.itemsize,
        job=job,
        task=task,
        machine=machine,
        budgets=budgets,
        best=best,
        runners_up=runners_up,
        saved_s=saved_s,
        num_ways=len(steps),
        num_fitting=sum(fits(step, budgets) for step in steps),
        planning_s=time.perf_counter() - start,
        note=beyond_positions(model, job.length),
    )


def _checkpoints(model: PreTrainedModel) -> list[bool]:
    """With and without gradient checkpointing, where there is such."""
    return [False, True] if getattr(model, "supports_gradient_checkpointing", False) else [False]


def _with_ranks(machine: Machine, interconnect: int | None) -> Machine:
    """With the rates that no probe measures.

    Raises:
        CompressionError: it has no GPU; a rate of nothing.
    """
    if machine.device != "cuda":
        raise CompressionError(
            f"Fine-tuning is planned for a GPU, and {machine.name} is planned for as a {machine.device}; name a card, "
            "e.g. gpu=rtx4090."
        )
    if interconnect == 0:
        raise CompressionError("interconnect=0 is no rate; null is the card's link to the host.")
    added = {"cpu_optimizer": Rate(CPU_OPTIMIZER, "assumed")}
    if interconnect is not None:
        added["between_ranks"] = Rate(float(interconnect), "given")
    return replace(machine, rates={**machine.rates, **added})


def _task(model: PreTrainedModel, job: FineTuningJob, ranks: int) -> FineTuningTask:
    text = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    saved = saved_by_packing(model, job.method)
    stages = [2**power for power in range(ranks.bit_length())]
    return FineTuningTask(
        batch=job.batch_size * job.accumulate * ranks,
        length=job.length,
        ranks=ranks,
        layers=size_in(text, "num_hidden_layers") or 0,
        hidden=size_in(text, "hidden_size") or 0,
        itemsize=torch.bfloat16.itemsize if job.precision == "bf16-mixed" else model.dtype.itemsize,
        largest_layer=largest_layer(model, saved),
        head=0 if head is None else head.weight.numel(),
        stages={number: largest_stage(model, number, saved) for number in stages},
    )


def _layouts(model: PreTrainedModel, ranks: int, job: FineTuningJob, fixed: Mapping[str, int | bool]) -> list[Layout]:
    """
    Raises:
        CompressionError: there are none.
    """
    sizes = dividing_heads(model), size_in(model.config.get_text_config(decoder=True), "num_hidden_layers")
    found = layouts(ranks, *sizes, job, fixed)
    if found:
        return found
    said = ", ".join(f"layout.{name}={value}" for name, value in fixed.items())
    known = [field.name for field in fields(Layout)]
    possible = {name: sorted({getattr(each, name) for each in layouts(ranks, *sizes, job, {})}) for name in known}
    listed = "; ".join(f"layout.{name}: {', '.join(map(str, values))}" for name, values in possible.items())
    raise CompressionError(
        f"ranks={ranks} cannot be laid out with {said} for this model and job. What there is, by field: {listed}."
    )
