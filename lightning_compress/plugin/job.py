"""A compression that is resolved, traced, laid out and checked; `plugin.run` runs it."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.layout import added_to_state
from lightning_compress.calibration.prepare import calibrating, check_layout, evaluating
from lightning_compress.calibration.resume import fingerprints
from lightning_compress.calibration.target import Target, find_target
from lightning_compress.distributed.collective import Collective, SingleProcess
from lightning_compress.errors import UnsupportedModelError, listed
from lightning_compress.export.beside import check_exported
from lightning_compress.export.checkpoint import check_output_dir
from lightning_compress.export.verify import ReadBackWarning, why_unreadable
from lightning_compress.graph.restore import contents_restored
from lightning_compress.graph.unfold import unfolded
from lightning_compress.memory.source import is_on_meta
from lightning_compress.plugin.agreement import check_same
from lightning_compress.plugin.layout import LaidOut, in_parts
from lightning_compress.plugin.rng import rng_kept
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.resolve import ResolvedRecipe, named_by, resolve


@dataclass(frozen=True, kw_only=True)
class Job(LaidOut):
    """A compression that is prepared and checked, and has not changed anything yet.

    Attributes:
        target: the model, and how it is called.
        resolved: what happens to each module that it calls.
        data: the calibration set.
        settings: what the user chose.
        fingerprints: of everything that decides the result, where it is written; see `calibration.resume`.
        prepare_s: seconds that all this took.
    """

    target: Target
    resolved: ResolvedRecipe
    data: CalibrationSet | None
    settings: Settings
    fingerprints: Mapping[str, str]
    prepare_s: float


def plan_recipe(module: nn.Module, settings: Settings) -> tuple[Target, ResolvedRecipe]:
    """Everything that can be checked without data: the recipe against the model, where the weights are, and the
    output folder."""
    target = find_target(module)
    _check_weights(target.root, settings)
    if settings.output_dir is not None:
        check_output_dir(settings.output_dir)
    # weights may be computed when they are read, by code that counts or draws, and forwards of Linears are tried
    kept = contents_restored(target.module)
    with rng_kept(), kept, evaluating(target.root), unfolded(target.root, named_by(settings.recipe)):
        resolved = resolve(settings.recipe, target.root)
        check_layout(target, resolved, settings.schedule, settings.sequential_targets)
        reason = why_unreadable(target.root, resolved) if settings.output_dir is not None else None
        lost = added_to_state(target.root, target.root.state_dict(keep_vars=True))
        if settings.output_dir is not None:
            check_exported(target.root)
    if lost and settings.output_dir is not None:
        warnings.warn(
            f"{listed(lost, 3)} of the model's state (`get_extra_state`) is no parameter or buffer, so the "
            "checkpoint will not hold it: set it anew where the checkpoint is loaded.",
            ReadBackWarning,
            stacklevel=1,  # one place for both callers: said once
        )
    if reason is not None:
        warnings.warn(
            "transformers' from_pretrained will not read the checkpoint as it is, but draw modules at random, misread "
            f"them or fail: {reason}. Read it with lightning_compress.load_compressed(model, folder), "
            "which is what `lightning-compress evaluate model.load=disk` does.",
            ReadBackWarning,
            stacklevel=1,  # one place for both callers: said once
        )
    return target, resolved


def prepare_job(
    module: nn.Module,
    data: CalibrationSet | None,
    settings: Settings,
    device: torch.device,
    collective: Collective | None = None,
) -> Job:
    """Resolve, trace and lay out. The model is moved to host memory, its gradients are dropped.

    Args:
        module: what is compressed, or holds it.
        data: the calibration set, all of it on every rank.
        settings: what the user chose.
        device: where this rank's subgraphs run.
        collective: the ranks; None: this process is the only one.

    Raises:
        CompressionError: one of its kinds, for anything in the recipe, model, data or output folder that cannot work.
    """
    start = time.perf_counter()
    target, resolved = plan_recipe(module, settings)
    if settings.weights is None:
        module.to("cpu")
        torch.cuda.empty_cache()  # of what was trained there; copies have a pool of their own
    place = next((name for name, part in module.named_modules() if part is target.root), "")
    laid_out = in_parts(target, resolved, data, settings, device, place, collective or SingleProcess())
    ranks = laid_out.run.collective
    given: Mapping[str, str] = {}
    with calibrating(target.root), laid_out.modules.in_place():
        if settings.output_dir is not None or ranks.size > 1:
            given = _fingerprints(target, data, laid_out)
            check_same(given, ranks, "comparing recipe, model and data")
    return Job(
        **vars(laid_out),
        target=target,
        resolved=laid_out.run.resolved,  # without what the model never calls
        data=data,
        settings=settings,
        fingerprints=given,
        prepare_s=time.perf_counter() - start,
    )


def _check_weights(root: nn.Module, settings: Settings) -> None:
    """Every weight is to be read, or is there."""
    if is_on_meta(root):
        if settings.weights is None or settings.output_dir is None:
            missing = (
                "weights=, a folder or checkpoint to read them from (values that they were given within "
                "`parameters_on_meta()`, also by `from_pretrained`, are not kept)"
                if settings.weights is None
                else "an output_dir"
            )
            raise UnsupportedModelError(
                f"Parameters of {type(root).__name__} are on the meta device, so compressing it needs {missing}."
            )
    elif settings.weights is not None:
        raise UnsupportedModelError(
            f"weights={settings.weights} was given, but all parameters of {type(root).__name__} are in memory, and "
            "those would be compressed. Leave `weights` out; or build the model without values, within "
            "`parameters_on_meta()` or, under strategy='sequential_onload', in `configure_model`."
        )


def _fingerprints(target: Target, data: CalibrationSet | None, laid_out: LaidOut) -> dict[str, str]:
    flow, source = laid_out.run.flow, laid_out.source
    layout = {
        "schedule": laid_out.schedule.value,
        "subgraphs": [(part.name, part.solved) for part in flow.subgraphs],
        "device": flow.device.type,
    }
    batches = data.batches if data is not None else ()
    weights = "" if source is None else source.fingerprint
    recipe = laid_out.run.resolved.recipe.to_dict()
    return fingerprints(recipe, layout, target.root, weights, batches, flow.traced)
