"""The commands `plan` and `probe`."""

import json
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from lightning_compress.command.chosen import CHOICES, check_idle, chosen_keys
from lightning_compress.command.estimate import check_unquantized, instantiated
from lightning_compress.command.generation import PlannedGeneration, plan_generation
from lightning_compress.command.models import load_config_only, reads_from_disk
from lightning_compress.command.plan import (
    Choices,
    device_kind,
    machine_for,
    plan_calibration,
    probed,
    record_of,
    size_of,
)
from lightning_compress.command.samples import processor_for
from lightning_compress.errors import CompressionError, check_options, reason
from lightning_compress.foresight.compare import factors
from lightning_compress.foresight.generation_cost import Task
from lightning_compress.foresight.jobs import InferenceJob
from lightning_compress.foresight.machine import Machine, load_machine, save_machine
from lightning_compress.foresight.plan import Plan
from lightning_compress.foresight.planned import Planned, Situation, plan_of, tensors_on
from lightning_compress.memory.files import free_bytes
from lightning_compress.memory.host import available_bytes
from lightning_compress.memory.tracker import resident_bytes
from lightning_compress.recipe.load import load_recipe

CALIBRATIONS = ("choices", "data", "recipe", "verify")
"""Groups of keys that play no part in plans of other jobs."""
IMAGES = ("num_images", "image_size")
"""Keys that say what images a calibration's samples have."""
_MOST_RANKS = 1 << 16


def run_plan(config: DictConfig) -> Planned:
    """The plan that `config` (of `configs/plan.yaml`) asks for.

    Raises:
        CompressionError: what cannot be planned, or does not fit.
    """
    check_ranks(config)
    only_for_fine_tuning(config)
    choices = choices_left(config, _choices(config.choices), chosen_keys(config))
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
        recipe=load_recipe(plain(config.recipe)),
        num_samples=config.data.num_samples,
        max_length=max_length(config),
        ranks=config.ranks,
        nodes=config.nodes,
        verify=config.verify,
        device=None if card is None else tensors_on(card),
        host=available_bytes() + resident_bytes() if config.host == "auto" else host,
        disk=free_bytes(folder) if config.disk == "auto" else disk,
        budgets=tuple(name for name, size in sizes.items() if size not in ("auto", None)),
        num_images=config.num_images,
        image_size=plain_value(config, "image_size"),
    )
    processor = processor_for(config.model, config.num_images)
    return plan_calibration(load_config_only(config.model), situation, choices, machine, processor)


def check_ranks(config: DictConfig) -> None:
    """
    Raises:
        CompressionError: `ranks` and `nodes` are no numbers of them.
    """
    if type(config.ranks) is not int or config.ranks < 1:
        raise CompressionError(f"ranks={config.ranks} is no number of at least 1.")
    if config.ranks > _MOST_RANKS:
        raise CompressionError(f"ranks={config.ranks}: plans are for {_MOST_RANKS} ranks at most.")
    if type(config.nodes) is not int or config.nodes < 1 or config.ranks % config.nodes:
        raise CompressionError(
            f"nodes={config.nodes} is no number of nodes with as many of the ranks={config.ranks} on each."
        )
    if config.nodes > 1 and config.get("job") is not None:
        raise CompressionError(f"nodes={config.nodes}: only calibrations are planned for more than one.")


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
    check_ranks(config)
    only_for_fine_tuning(config)
    remedy = "Prompts of job=inference are job.context, job.new_tokens and job.batch_size; the rest is chosen."
    check_idle(config, (*CALIBRATIONS, *IMAGES), remedy)
    if job.weight_bits is not None or config.ranks != 1 or job.num_images or job.image_size:
        raise CompressionError(
            "job=inference is planned for one rank, for prompts without images, and for weights as the model has them."
        )
    folder = Path(config.output_dir)
    machine = machine_for(config.gpu, "cuda" if config.run_on == "auto" else config.run_on, folder)
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
    check_unquantized(model, config.model)
    return plan_generation(
        model,
        machine,
        Task(
            job.context, job.new_tokens, num_prompts=job.batch_size if "job.batch_size" in chosen_keys(config) else None
        ),
        device_bytes=tensors_on(card),
        host_bytes=host,
        disk_bytes=disk,
    )


def run_probe(config: DictConfig) -> tuple[Machine, list[str]]:
    """Measure this machine, or correct what was measured by what runs took; and the phases of these that took too
    little to learn from.

    Raises:
        CompressionError: no such device; a report that is none, or has no plan.
    """
    kind = device_kind(config.run_on)
    if not config.refit:
        return probed(kind, Path(config.output_dir)), []
    file = record_of(kind)
    if not file.is_file():
        raise CompressionError("Nothing was measured yet that could be refitted; run `lightning-compress probe` first.")
    reports = [
        _report_of(Path(path), kind) for path in ([config.refit] if isinstance(config.refit, str) else config.refit)
    ]
    known = load_machine(file)
    found, left = factors(reports, {name: rate.value for name, rate in known.rates.items()})
    machine = known.refitted(found)
    save_machine(machine, file)
    return machine, left


def _report_of(path: Path, kind: str) -> tuple[Plan, list[dict[str, Any]]]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        plan = None if report["plan"] is None else plan_of(report["plan"])
        subgraphs, num_resumed, device = report["subgraphs"], report["num_resumed"], report["device"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CompressionError(f"refit: {path} is no report of a run of this version: {reason(error)}.") from error
    if plan is None or num_resumed:
        why = "no plan" if plan is None else "subgraphs of an earlier run, whose seconds are not this plan's"
        raise CompressionError(f"refit: {path} has {why}; compress with plan=auto or plan=FILE.")
    if (device == "cpu") != (kind == "cpu"):
        raise CompressionError(f"refit: {path} is of a run on {device}, and run_on is {kind}.")
    return plan, subgraphs


def choices_left(config: DictConfig, among: Choices, given: Set[str]) -> Choices:
    """What a plan may choose from: not what the user has chosen.

    Args:
        config: of a compression, or of its plan.
        among: what there is.
        given: keys that the user gave.

    Raises:
        CompressionError: what was chosen is not among those that the user lets a plan choose from.
    """
    chosen = {key: (name, plain_value(config, key)) for key, name in CHOICES.items() if key in given}
    if chosen.get("calibration.expert_parts", ("", None))[1] is None:  # whoever chooses
        chosen.pop("calibration.expert_parts", None)
    if config.model.load != "auto" or config.model.get("weights") is not None:
        chosen["model.load"] = ("load", "disk" if reads_from_disk(config.model) else "memory")
    for key, (name, value) in chosen.items():
        if f"choices.{name}" in given and value not in getattr(among, name):
            raise CompressionError(
                f"{key}={value} is not among choices.{name}={list(getattr(among, name))}; leave one of them out."
            )
    return replace(among, **{name: (value,) for name, value in chosen.values()})


def plain_value(config: DictConfig, key: str) -> Any:
    """A value of a configuration as plain data."""
    value = OmegaConf.select(config, key)
    return plain(value) if OmegaConf.is_config(value) else value


def max_length(config: DictConfig) -> int:
    """Tokens of each sample, as they are given.

    Raises:
        CompressionError: the source does not say.
    """
    if "max_length" not in config.data:
        are_sounds = config.data.get("audio_column") is not None
        like = "choices.batch_size=[1]" if are_sounds else "num_images=..."
        raise CompressionError(
            f"data.source={config.data.source} does not say how long its samples are, so no plan can be made of it. "
            f"Plan for samples like them, `lightning-compress plan data=docs data.max_length=... {like} "
            "json=plan.json`, and give plan=plan.json; or compress without a plan."
        )
    return cast(int, config.data.max_length)


def _choices(config: DictConfig) -> Choices:
    given = cast(dict[str, Any], plain(config))
    check_options("choices", given, list(Choices.__dataclass_fields__))
    return Choices(**given)


def plain(config: Any) -> Any:
    """A configuration as plain data."""
    return OmegaConf.to_container(config, resolve=True)
