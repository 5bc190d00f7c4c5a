"""The commands `plan` and `probe`, and a `compress` that runs a plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_compress.data.config import CustomConfig
from lightning_compress.errors import CompressionError
from lightning_compress.foresight.compare import factors
from lightning_compress.foresight.generation_cost import Task
from lightning_compress.foresight.jobs import InferenceJob
from lightning_compress.foresight.machine import Machine, cache_file, load_machine, save_machine
from lightning_compress.foresight.plan import Plan
from lightning_compress.foresight.planned import Planned, Situation, load_planned, plan_of, tensors_on
from lightning_compress.memory.files import free_bytes, has_safetensors
from lightning_compress.memory.host import available_bytes
from lightning_compress.memory.tracker import resident_bytes
from lightning_compress.plugin.estimate import instantiated
from lightning_compress.plugin.generation import PlannedGeneration, plan_generation
from lightning_compress.plugin.models import load_config_only, memory_options, reads_from_disk
from lightning_compress.plugin.plan import Choices, device_kind, machine_for, plan_calibration, probed, size_of
from lightning_compress.plugin.samples import processor_for
from lightning_compress.recipe.load import load_recipe

_MOST_RANKS = 1 << 16


def run_plan(config: DictConfig) -> Planned:
    """The plan that `config` (of `configs/plan.yaml`) asks for.

    Raises:
        CompressionError: what cannot be planned, or does not fit.
    """
    check_ranks(config)
    only_for_fine_tuning(config)
    choices = _choices(config.choices)
    if "data.batch_size" in typed_keys():
        choices = replace(choices, batch_size=(config.data.batch_size,))
    sizes = {name: config[name] for name in ("device", "host", "disk")}
    card, host, disk = (None if size == "auto" else size_of(name, size) for name, size in sizes.items())
    folder = Path(config.output_dir)
    machine = machine_for(config.gpu, config.run_on, folder)
    if machine.device == "cpu" and card is not None:
        raise CompressionError(
            f"device={config.device} is memory of a GPU: name the one to plan for, e.g. gpu=rtx4090."
        )
    if config.device == "auto":
        card = machine.device_bytes
    situation = Situation(
        recipe=load_recipe(_plain(config.recipe)),
        num_samples=config.data.num_samples,
        max_length=_max_length(config),
        ranks=config.ranks,
        verify=config.verify,
        device=None if card is None else tensors_on(card),
        host=available_bytes() + resident_bytes() if config.host == "auto" else host,
        disk=free_bytes(folder) if config.disk == "auto" else disk,
        budgets=tuple(name for name, size in sizes.items() if size not in ("auto", None)),
        num_images=config.num_images,
        image_size=_plain_value(config, "image_size"),
    )
    processor = processor_for(config.model, config.num_images)
    return plan_calibration(load_config_only(config.model), situation, choices, machine, processor)


def check_ranks(config: DictConfig) -> None:
    """
    Raises:
        CompressionError: `ranks` is no number of them.
    """
    if type(config.ranks) is not int or config.ranks < 1:
        raise CompressionError(f"ranks={config.ranks} is no number of at least 1.")
    if config.ranks > _MOST_RANKS:
        raise CompressionError(f"ranks={config.ranks}: plans are for {_MOST_RANKS} ranks at most.")


def only_for_fine_tuning(config: DictConfig) -> None:
    """
    Raises:
        CompressionError: what plays a part in plans of fine-tuning only is given.
    """
    given = {"interconnect": config.interconnect, **{f"layout.{name}": value for name, value in config.layout.items()}}
    wrong = [f"{name}={value}" for name, value in given.items() if value is not None]
    if wrong:
        raise CompressionError(f"{', '.join(wrong)}: only plans of job=finetuning have these.")


def run_generation_plan(config: DictConfig) -> PlannedGeneration:
    """The plan of text generation that `config` (of `configs/plan.yaml`, with job=inference) asks for.

    Raises:
        CompressionError: what cannot be planned, or does not fit.
    """
    job = instantiated(config.job)
    if not isinstance(job, InferenceJob):
        raise CompressionError(
            "plan is for a calibration (without job), for job=inference and for job=finetuning; `lightning-compress "
            "estimate` says what other jobs take."
        )
    only_for_fine_tuning(config)
    if job.weight_bits is not None or config.ranks != 1 or job.num_images or config.num_images:
        raise CompressionError(
            "job=inference is planned for one rank, for prompts without images, and for weights as the model has them."
        )
    folder = Path(config.output_dir)
    machine = machine_for(config.gpu, config.run_on, folder)
    if machine.device == "cpu":
        raise CompressionError(
            "job=inference is planned for a GPU, and there is none here: name one, e.g. gpu=rtx4090."
        )
    card = machine.device_bytes if config.device == "auto" else size_of("device", config.device)
    host = available_bytes() if config.host == "auto" else size_of("host", config.host)
    disk = free_bytes(folder) if config.disk == "auto" else size_of("disk", config.disk)
    if card is None or host is None or disk is None:
        raise CompressionError("job=inference needs to know device, host and disk; give sizes, or auto.")
    model = load_config_only(config.model)
    return plan_generation(
        model.config,
        machine,
        Task(prompt_length=job.context, new_tokens=job.new_tokens),
        device_bytes=tensors_on(card),
        host_bytes=host,
        disk_bytes=disk,
        dtype=model.dtype,
    )


def run_probe(config: DictConfig) -> Machine:
    """Measure this machine, or correct what was measured by what runs took.

    Raises:
        CompressionError: no such device; a report that is none, or has no plan.
    """
    kind = device_kind(config.run_on)
    if not config.refit:
        return probed(kind, Path(config.output_dir))
    file = cache_file(kind)
    if not file.is_file():
        raise CompressionError("Nothing was measured yet that could be refitted; run `lightning-compress probe` first.")
    reports = [_report_of(Path(path), kind) for path in config.refit]
    known = load_machine(file)
    machine = known.refitted(factors(reports, {name: rate.value for name, rate in known.rates.items()}))
    save_machine(machine, file)
    return machine


def _report_of(path: Path, kind: str) -> tuple[Plan, list[dict[str, Any]]]:
    try:
        report = json.loads(path.read_text())
        plan, subgraphs = report["plan"], report["subgraphs"]
    except (OSError, ValueError, KeyError) as error:
        raise CompressionError(f"refit: {path} is no report of a run ({type(error).__name__}: {error}).") from error
    if plan is None or report["num_resumed"]:
        why = "no plan" if plan is None else "subgraphs of an earlier run, whose seconds are not this plan's"
        raise CompressionError(f"refit: {path} has {why}; compress with plan=auto or plan=FILE.")
    if (report["device"] == "cpu") != (kind == "cpu"):
        raise CompressionError(f"refit: {path} is of a run on {report['device']}, and run_on is {kind}.")
    return plan_of(plan), subgraphs


def plan_for_run(config: DictConfig, trainer: pl.Trainer, device: torch.device, output_dir: Path) -> Planned:
    """The plan that a compression is to follow: a file's, or a new one.

    Raises:
        CompressionError: a file that is for something else; a new plan on several ranks; nothing fits.
    """
    memory = memory_options(config.memory)
    model = load_config_only(config.model)
    typed = typed_keys()
    if config.plan != "auto":
        planned = load_planned(Path(config.plan))
        _check_plan(config.plan, planned.best)
        size = sum(parameter.numel() for parameter in model.parameters())
        _check_same(config, planned, size, device, trainer.world_size)
        _check_typed(config, planned, typed)
        return planned
    if trainer.world_size > 1:
        raise CompressionError(
            f"plan=auto is for one rank, and there are {trainer.world_size}, which might plan differently. Make the "
            f"plan first, `lightning-compress plan ... ranks={trainer.world_size} json=plan.json`, and give "
            "plan=plan.json."
        )
    on_device = memory.num_bytes("device_budget", device)
    if on_device is None and device.type == "cuda":
        on_device = tensors_on(torch.cuda.mem_get_info(device)[0])
    situation = Situation(
        recipe=load_recipe(_plain(config.recipe)),
        num_samples=config.data.num_samples,
        max_length=_max_length(config),
        verify=config.calibration.verify,
        device=on_device if device.type == "cuda" else None,
        host=memory.num_bytes("host_budget", device) or available_bytes() + resident_bytes(),
        disk=free_bytes(output_dir),
    )
    choices = _choices_left(config, typed)
    if config.model.load != "auto" or config.model.get("weights") is not None:
        choices = replace(choices, load=("disk" if reads_from_disk(config.model) else "memory",))
    if not has_safetensors(Path(config.model.path)):
        choices = replace(choices, load=("memory",))  # of other files, or of a name on the Hub
    machine = machine_for(None, device.type, output_dir)
    return plan_calibration(model, situation, choices, machine)


def _check_plan(file: str, plan: Plan) -> None:
    """A file may have been edited."""
    choice, budgets = plan.choice, (plan.waiting.device, plan.waiting.host)
    if any(size is not None and (type(size) is not int or size < 0) for size in budgets):
        raise CompressionError(f"plan={file}: waiting.device={budgets[0]} and waiting.host={budgets[1]} are no bytes.")
    names = ("batch_size", "schedule", "prefetch_depth", "load", "expert_parts")
    try:
        Choices(**{name: (getattr(choice, name),) for name in names})
    except CompressionError as error:
        raise CompressionError(f"plan={file}: {error}") from error


def with_plan(config: DictConfig, planned: Planned) -> DictConfig:
    """The configuration that runs a plan, within the budgets that were given for it unless it has its own."""
    choice, waiting = planned.best.choice, planned.best.waiting
    given = {f"{place}_budget": getattr(planned.situation.resources, place) for place in planned.situation.budgets}
    budgets = {name: size for name, size in given.items() if name in config.memory and config.memory[name] is None}
    targets = None if choice.sequential_targets is None else list(choice.sequential_targets)
    return cast(
        DictConfig,
        OmegaConf.merge(
            config,
            {
                "model": {"load": choice.load},
                "data": {"batch_size": choice.batch_size},
                "calibration": {
                    "schedule": choice.schedule,
                    "sequential_targets": targets,
                    "expert_parts": choice.expert_parts,
                },
                "memory": {
                    **budgets,
                    "prefetch_depth": choice.prefetch_depth,
                    "device_activation_budget": waiting.device,
                    "activation_budget": waiting.host,
                },
            },
        ),
    )


def typed_keys() -> set[str]:
    """The keys that the user gave on the command line."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return {override.partition("=")[0].lstrip("+") for override in given}


def _choices_left(config: DictConfig, typed: set[str]) -> Choices:
    """What a new plan may choose from: not what the user has chosen.

    Raises:
        CompressionError: a budget of activations, which is what the plan is about.
    """
    budgets = sorted(typed & {"memory.activation_budget", "memory.device_activation_budget"})
    if budgets:
        raise CompressionError(
            f"plan=auto chooses {', '.join(budgets)}; leave it out, or the plan. memory.host_budget and "
            "memory.device_budget are what it has to keep."
        )
    keys = {
        "data.batch_size": "batch_size",
        "calibration.schedule": "schedule",
        "memory.prefetch_depth": "prefetch_depth",
        "calibration.sequential_targets": "sequential_targets",
        "calibration.expert_parts": "expert_parts",
    }
    chosen = {name: (_plain_value(config, key),) for key, name in keys.items() if key in typed}
    if chosen.get("expert_parts") == (None,):
        del chosen["expert_parts"]
    return replace(Choices(), **chosen)


def _check_typed(config: DictConfig, planned: Planned, typed: set[str]) -> None:
    """What the user typed is what the plan says."""
    after = with_plan(config, planned)
    keys = [
        *("model.load", "data.batch_size", "calibration.schedule", "calibration.sequential_targets"),
        "calibration.expert_parts",
        *("memory.prefetch_depth", "memory.activation_budget", "memory.device_activation_budget"),
    ]
    pairs = [(key, _plain_value(config, key), _plain_value(after, key)) for key in keys if key in typed]
    left = ("calibration.expert_parts", None)  # to whoever chooses
    different = [
        f"{key}={here}, and the plan {there}" for key, here, there in pairs if here != there and (key, here) != left
    ]
    if different:
        raise CompressionError(
            f"plan={config.plan} and the command differ: the command says {'; '.join(different)}. Leave it out, or "
            "make a plan with it (choices.batch_size=[4] and the like)."
        )


def _plain_value(config: DictConfig, key: str) -> Any:
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _max_length(config: DictConfig) -> int:
    """Tokens of each sample."""
    if "max_length" not in config.data:
        raise CompressionError(
            f"data.source={config.data.source} does not say how long its samples are, so no plan can be made of it. "
            "Plan for samples like them, `lightning-compress plan data=docs data.max_length=... num_images=... "
            "json=plan.json`, and give plan=plan.json; or compress without a plan."
        )
    return int(config.data.max_length)


def _check_same(
    config: DictConfig, planned: Planned, num_parameters: int, device: torch.device, num_ranks: int
) -> None:
    situation = planned.situation
    pairs = {
        "parameters of the model": (planned.num_parameters, num_parameters),
        "data.num_samples": (situation.num_samples, config.data.num_samples),
        "data.max_length": (situation.max_length, config.data.get("max_length", situation.max_length)),
        "images in the data": (bool(situation.num_images), _has_images(config.data, bool(situation.num_images))),
        "recipe": (situation.recipe.to_dict(), load_recipe(_plain(config.recipe)).to_dict()),
        "ranks": (situation.ranks, num_ranks),
        "kind of device": (planned.machine.device, device.type),
    }
    different = [
        f"{name} {of_plan} in the plan, {here} here" for name, (of_plan, here) in pairs.items() if of_plan != here
    ]
    if different:
        raise CompressionError(
            f"plan={config.plan} is for something else: {'; '.join(different)}. Make a new one, or use plan=auto."
        )


def _has_images(data: DictConfig, planned: bool) -> bool:
    """Whether samples have images; what is planned, where nobody knows."""
    return planned if data.source == CustomConfig.source else data.get("image_column") is not None


def _choices(config: DictConfig) -> Choices:
    known = list(Choices.__dataclass_fields__)
    given = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True))
    unknown = [key for key in given if key not in known]
    if unknown:
        raise CompressionError(f"choices has no option {', '.join(unknown)}; known are {', '.join(known)}.")
    return Choices(**given)


def _plain(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=True)
