"""`lightning-compress estimate`: what a job will take of memory, from a model's configuration alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, cast

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from transformers import PreTrainedModel, pytorch_utils

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.calibration.target import find_target
from lightning_compress.command.chosen import check_idle
from lightning_compress.command.measure import READING, measured
from lightning_compress.command.samples import processor_for, prompts
from lightning_compress.errors import CompressionError, check_options
from lightning_compress.foresight.adapters import num_trainable, saved_by_packing, targets_of
from lightning_compress.foresight.allocator import replay, reserved_by_calibration
from lightning_compress.foresight.closed_form import (
    Decoder,
    calibration_forms,
    decoder_of,
    deepspeed,
    finetuning_phases,
    inference_phases,
    llmem,
    rules_of_thumb,
)
from lightning_compress.foresight.estimate import Estimate, Row
from lightning_compress.foresight.finetuning_plan import nobody_has
from lightning_compress.foresight.inputs import beyond_positions, check_takes_tokens, images_left_out
from lightning_compress.foresight.jobs import (
    CalibrationJob,
    FineTuningJob,
    InferenceJob,
    Phase,
    infer,
    on_fakes,
    parts_of,
)
from lightning_compress.foresight.layouts import HALF_PRECISION, Layout, is_halved, worst_shares
from lightning_compress.foresight.shares import check_shares, largest_layer, largest_stage
from lightning_compress.foresight.training import finetune
from lightning_compress.graph.experts import stack_of
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.unfold import unfolded
from lightning_compress.memory.budget import TITLES, Peak, Place, Spare, fit, gib, peaks
from lightning_compress.memory.needs import Waiting
from lightning_compress.memory.placement import MemoryConfig
from lightning_compress.memory.tracker import LiveMemory, held_bytes
from lightning_compress.memory.workspaces import cublas_workspace_bytes
from lightning_compress.plugin.budget import budgets_of
from lightning_compress.recipe.load import load_recipe
from lightning_compress.recipe.resolve import ResolvedRecipe, named_by, resolve

GROUP = 128
_CUDA = torch.device("cuda")
_OF_ONE_RANK = "Host memory is what one rank takes of it; ranks of one host take as much each."
_FAKES = (
    "Counted on fake tensors of the CPU, with attention and dropout as CUDA has them where that is meant; other "
    "operators may keep more or less there. Not included: the device's context (0.3 to 0.6 GiB on CUDA)."
)
_RESERVES = "On a card with less than the allocator reserves it gives unused segments back, which takes time."


def estimate(model: PreTrainedModel, config: DictConfig, memory: MemoryConfig, from_disk: bool) -> Estimate:
    """What `config.job` will take.

    Args:
        model: with its parameters on the meta device.
        config: composed from `configs/estimate.yaml`.
        memory: the `memory` of it, read.
        from_disk: whether a calibration reads weights during the run.

    Raises:
        CompressionError: an unknown option; a job that cannot be prepared, or not within the budgets.
    """
    job, layout = instantiated(config.job), cast(Layout, instantiated(config.layout))
    if not isinstance(job, CalibrationJob):
        quantized = "job.weight_bits=4 is of quantized weights in job=inference, job.method=qlora in job=finetuning."
        check_idle(config, ["recipe"], quantized)
        check_idle(config, ["memory"], "An estimate of another job says what it takes, whatever there is.")
        check_unquantized(model, config.model)
        check_takes_tokens(model, job)
        if memory != MemoryConfig():  # not by the command
            raise CompressionError("memory is for job=calibration.")
        place: Place = "device" if config.device == "cuda" else "host"
        return _of_one_rank_or_shared(model, job, layout, place, config.model)
    if layout != Layout():
        raise CompressionError("layout is for inference and fine-tuning; a calibration has job.ranks.")
    return _calibration(model, job, config, memory, from_disk)


def check_unquantized(model: PreTrainedModel, where: DictConfig) -> None:
    """
    Raises:
        CompressionError: the configuration is of quantized weights, which the model on the meta device does not have.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        key = "model.path" if where.get("config") is None else "model.config"
        raise CompressionError(
            f"{key}={where.path} is quantized, and its weights would be counted as if it was not. Give the "
            "original model; for `estimate job=inference` with job.weight_bits=4 or the like."
        )


def _of_one_rank_or_shared(
    model: PreTrainedModel, job: InferenceJob | FineTuningJob, layout: Layout, place: Place, where: DictConfig
) -> Estimate:
    check_shares(model, job, layout)
    if isinstance(job, FineTuningJob) and (reason := nobody_has(layout, job)):
        raise CompressionError(f"{layout}: {reason}.")
    num_parameters, sizes = sum(parameter.numel() for parameter in model.parameters()), decoder_of(model)
    followed = LiveMemory(on_cuda=place == "device")
    phases, forms = _on_fakes(model, job, followed, where, place), list[Phase]()
    writes = sizes is not None and place == "device" and sizes.writes_scores and not _is_mixed(job)
    drops = isinstance(job, FineTuningJob) and place == "host" and getattr(model.config, "attention_dropout", 0) > 0
    if sizes is not None and not writes and not drops:
        forms = inference_phases(sizes, job) if isinstance(job, InferenceJob) else finetuning_phases(sizes, job)
    notes = [_FAKES]
    if writes:
        notes.append("There is no closed form with scores, which CUDA writes down in float32 where heads share keys.")
    elif sizes is not None and drops:
        notes.append("There is no closed form with attention's dropout, for which a CPU writes scores down.")
    elif sizes is not None and not forms:
        notes.append("There is no closed form for adapters beside some linear layers only, or under autocast.")
    notes += filter(None, [images_left_out(model, _num_images(job))])
    if sizes is None:
        kind = "plain decoder of gated layers with RMS norms"
        notes.append(f"There is no closed form for {type(model).__name__}: it is no {kind}.")
    num_bits = job.weight_bits if isinstance(job, InferenceJob) else None
    saved = saved_by_packing(model, "full" if isinstance(job, InferenceJob) else job.method)
    if num_bits is not None:
        saved = _saved_by_packing(model, num_bits)
        less = sum(saved.values())
        phases, forms = ([replace(each, weights=each.weights - less) for each in of] for of in (phases, forms))
        notes.append(
            f"Linear layers but the last, and experts, have {num_bits} bits in groups of {GROUP}, and kernels that "
            "read them packed; transformers unpacks them and then takes what the model takes unpacked."
        )
    notes.extend(_about_training(model, job, layout))
    if beyond := beyond_positions(model, _length(job)):
        notes.append(beyond)
    if layout != Layout():
        notes.append(f"{layout}: shares in closed form of what one rank would take.")
    if layout.offload:
        notes.append(_OF_ONE_RANK)
    parts = largest_layer(model, saved), largest_stage(model, layout.pipeline, saved)
    threads = 1 if isinstance(job, InferenceJob) else 2  # a backward runs in one of its own
    workspaces = threads * [cublas_workspace_bytes(_CUDA)] if place == "device" else []
    blocks = None
    if layout == Layout() and num_bits is None and place == "device":
        blocks = replay([*((-1 - number, size) for number, size in enumerate(workspaces)), *followed.events])
    return Estimate(
        model=type(model).__name__,
        num_parameters=num_parameters,
        job=_described(job, model),
        rows=tuple(_rows(phases, forms, layout, parts, place, sum(workspaces))),
        allocated=None if blocks is None else blocks.allocated,
        reserved=None if blocks is None else blocks.reserved,
        others=_others(model, sizes, job, layout),
        notes=tuple(notes),
    )


def _about_training(model: PreTrainedModel, job: InferenceJob | FineTuningJob, layout: Layout) -> list[str]:
    """What is trained, and what is assumed of the libraries that do it."""
    if isinstance(job, InferenceJob):
        return []
    notes = []
    if job.method != "full":
        count, layers = num_trainable(model, job.lora_rank, job.lora_targets), targets_of(model, job.lora_targets)
        notes.append(
            f"{job.method}: {count:,} parameters are trained, in adapters of rank {job.lora_rank} beside "
            f"{len(layers)} linear layers; in float32, without dropout, as PEFT has them unless told otherwise."
        )
    if job.method == "qlora":
        notes.append(
            "Linear layers but the output embedding have 4 bits with double quantization, as bitsandbytes has them, "
            "and are unpacked one at a time; everything else stays in the model's own type."
        )
        if stacks := _stacks(model):
            size = gib(sum(weights.nbytes for weights in stacks))
            notes.append(f"Stacked experts ({size}) are no linear layers to bitsandbytes and stay as they are, too.")
    if is_halved(job, model.dtype.itemsize, [layout]):
        notes.append(HALF_PRECISION)
    if job.optimizer == "adamw_8bit":
        notes.append("8-bit AdamW as bitsandbytes has it, not paged; its step is taken to need no temporaries.")
    return notes


def _length(job: InferenceJob | FineTuningJob) -> int:
    return job.context + job.new_tokens if isinstance(job, InferenceJob) else job.length


def _num_images(job: object) -> int:
    return job.num_images if isinstance(job, InferenceJob | CalibrationJob) else 0


def _on_fakes(
    model: PreTrainedModel, job: InferenceJob | FineTuningJob, followed: LiveMemory, where: DictConfig, place: Place
) -> list[Phase]:
    prompt = None
    if isinstance(job, InferenceJob):
        prompt = prompts(model, job, processor_for(where, job.num_images))
    with foreseeing(model, _length(job), on_cuda=place == "device") as fake:
        if not isinstance(job, InferenceJob):
            return finetune(model, job, followed)
        given = None if prompt is None else {name: fake(tensor) for name, tensor in prompt.items()}
        return infer(model, job, followed, given)


@contextmanager
def foreseeing(model: PreTrainedModel, length: int, *, on_cuda: bool) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within: the model is on fake tensors, as on a CPU or on CUDA (see `on_fakes`), and may be given so many tokens.

    Raises:
        CompressionError: its own code fails there, called as a causal language model.
    """
    try:
        with on_fakes(model, on_cuda=on_cuda) as fake:
            yield fake
    except CompressionError:
        raise
    except Exception as error:
        said = str(error).rstrip(".")
        raise CompressionError(
            f"What {type(model).__name__} takes cannot be foreseen, because it does not run as a causal language model "
            f"on fake tensors: {type(error).__name__}: {said}. {beyond_positions(model, length)}".rstrip()
        ) from error


def _rows(
    phases: Sequence[Phase],
    forms: Sequence[Phase],
    layout: Layout,
    parts: tuple[int, float],
    place: Place,
    workspaces: int,
) -> list[Row]:
    """The worst moment of each part of the job on a rank's device, with its libraries' workspaces, and what of it waits
    in host memory; `parts` are the largest layer's bytes, and the largest stage's part of all."""
    by_form = worst_shares(forms, layout, *parts)
    rows: list[Row] = []
    for name, (share, on_host) in worst_shares(phases, layout, *parts).items():
        form = by_form.get(name)
        of_all = {**parts_of(share), TITLES["libraries"]: workspaces}
        rows.append(Row(name, place, of_all, None if form is None else form[0].peak + workspaces))
        if on_host.peak:
            rows.append(Row(name, "host", {"offloaded": on_host.peak}))
    return rows


def _is_mixed(job: InferenceJob | FineTuningJob) -> bool:
    return isinstance(job, FineTuningJob) and job.precision != "true"


def _others(
    model: PreTrainedModel, sizes: Decoder | None, job: InferenceJob | FineTuningJob, layout: Layout
) -> Mapping[str, int]:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if isinstance(job, FineTuningJob) and job.method != "full":
        return {}  # they are for all parameters
    kind = "inference" if isinstance(job, InferenceJob) else "fine-tuning"
    found = {f"rule of thumb, {name}": size for name, size in rules_of_thumb(num_parameters).items() if kind in name}
    if isinstance(job, FineTuningJob) and sizes is not None:
        found["LLMem's formula, without the base that it measures"] = llmem(sizes, job)
    if is_halved(job, model.dtype.itemsize, [layout]):
        rule = deepspeed(num_parameters, layout, largest_layer(model, {}) // model.dtype.itemsize)
        found |= {f"DeepSpeed's rule for {name}, without activations": size for name, size in rule.items()}
    return found


def _saved_by_packing(model: PreTrainedModel, num_bits: int) -> dict[Tensor, int]:
    """Bytes that linear weights, but the last one, and stacked experts have less of when they are packed, with a
    half-precision scale per group."""
    last = model.get_output_embeddings()
    kinds = nn.Linear | pytorch_utils.Conv1D
    weights = [module.weight for module in model.modules() if isinstance(module, kinds) and module is not last]
    weights += _stacks(model)
    packed = {weight: weight.numel() * num_bits // 8 + 2 * (weight.numel() // GROUP) for weight in weights}
    return {weight: weight.nbytes - size for weight, size in packed.items()}


def _stacks(model: nn.Module) -> list[nn.Parameter]:
    """The weights of stacked experts."""
    found = ((module, stack_of(module)) for module in model.modules())
    return [getattr(module, name) for module, stack in found if stack is not None for name in stack.names[:2]]


def _calibration(
    model: PreTrainedModel, job: CalibrationJob, config: DictConfig, memory: MemoryConfig, from_disk: bool
) -> Estimate:
    device = torch.device(config.device)
    target = find_target(model)
    recipe = load_recipe(cast(Any, OmegaConf.to_container(config.recipe, resolve=True)))
    with unfolded(target.root, named_by(recipe), job.expert_parts):
        resolved = resolve(recipe, target.root)
        verifies, processor = job.verify and not from_disk, processor_for(config.model, job.num_images)
        found = measured(target, resolved, job, device, verifies=verifies, memory=memory, processor=processor)
        forms = _calibration_forms(model, job, resolved, memory)
    table = [*found.table, *found.end]
    in_memory = sum(parameter.nbytes for parameter in model.parameters())
    if not from_disk and device.type == "cpu":
        table = [replace(row, weights=0) for row in table]  # they are where they are used
    held = held_bytes(device) + READING + (0 if from_disk else in_memory)
    budgets = budgets_of(memory, device, held, has_weights=not from_disk)
    fitted = fit(table, device, budgets)
    places: Sequence[Place] = ("host",) if device.type == "cpu" else ("device", "host")
    known = device.type == "cuda" and fitted.waiting.device == 0
    how: tuple[int, Waiting, Spare] = (fitted.depth, fitted.waiting, "least" if budgets.is_lean else "kept")
    found_peaks = {place: peaks(table, device, budgets, place, *how) for place in places}
    rows = [row for place, each in found_peaks.items() for row in _worst(each, place, forms) if row.total]
    return Estimate(
        model=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        job=_described(job, model),
        rows=tuple(rows),
        allocated=None,
        reserved=reserved_by_calibration(found.table, fitted.depth) + budgets.libraries if known else None,
        others={},
        notes=(
            _FAKES,
            *([_RESERVES] if known else []),
            f"Weights are {'on disk' if from_disk else 'in host memory'} before the run.",
            *([_OF_ONE_RANK] if job.ranks > 1 else []),
            *filter(None, [images_left_out(model, job.num_images)]),
            *fitted.notes,
        ),
    )


def _calibration_forms(
    model: PreTrainedModel, job: CalibrationJob, resolved: ResolvedRecipe, memory: MemoryConfig
) -> Mapping[str, int]:
    """By kind of moment what the closed form has of a device; empty where there is none."""
    sizes = decoder_of(model)
    whole = sizes is not None and len(resolved.assignments) == 7 * sizes.layers
    ways = {(each.algorithm, each.scheme.input_activations is None) for each in resolved.assignments.values()}
    plain = (job.schedule, job.sequential_targets, memory.device_activation_budget, memory.device_budget)
    if sizes is None or not whole or len(ways) != 1 or plain != (Schedule.STAGED, None, 0, None):
        return {}
    ((algorithm, reads_as_is),) = ways
    if not isinstance(algorithm, Gptq) or (algorithm.correct, algorithm.refit) != ("none", 0) or not reads_as_is:
        return {}
    return calibration_forms(sizes, job, memory.prefetch_depth)


def _worst(found: Sequence[Peak], place: Place, forms: Mapping[str, int]) -> list[Row]:
    """Of each kind of moment the worst."""
    rows = []
    for what in dict.fromkeys(peak.moment.what for peak in found):
        peak = max((peak for peak in found if peak.moment.what == what), key=lambda peak: peak.num_bytes)
        parts = {TITLES[part]: size for part, size in peak.parts.items()}
        modules = dict.fromkeys(name.rpartition(".")[2] for name in peak.moment.of.split(", ") if name)
        at = ": ".join(filter(None, (peak.row.name, ", ".join(modules))))
        form = forms.get(what) if place == "device" else None
        rows.append(Row(what, place, parts, None if form is None else form + peak.parts["libraries"], at))
    return rows


def _described(job: Any, model: PreTrainedModel) -> str:
    adapts = isinstance(job, FineTuningJob) and job.method != "full"
    names = [field.name for field in fields(job) if adapts or not field.name.startswith("lora_")]
    names = [name for name in names if _num_images(job) or name not in ("num_images", "image_size")]
    options = ", ".join(f"{name}={getattr(job, name)}" for name in names)
    return f"{type(job).__name__.removesuffix('Job').lower()} in {str(model.dtype).removeprefix('torch.')}, {options}"


def instantiated(config: DictConfig) -> Any:
    """The job or layout that a node describes.

    Raises:
        CompressionError: an unknown key, or a value that makes no sense.
    """
    kind = get_class(config["_target_"])
    given = {str(key): value for key, value in config.items() if key != "_target_"}
    words = {field.name for field in fields(kind) if isinstance(field.default, str)}  # Hydra reads true as a bool
    given |= {key: str(value).lower() for key, value in given.items() if key in words and isinstance(value, bool)}
    check_options(kind.__name__, given, [field.name for field in fields(kind)])
    return kind(**given)
