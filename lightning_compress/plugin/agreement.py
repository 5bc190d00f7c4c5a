"""Whether all ranks are about to do the same: what they were given, and what they have read."""

import json
from collections.abc import Mapping

import torch

from lightning_compress.calibration.batches import CalibrationSet
from lightning_compress.calibration.resume import data_fingerprint
from lightning_compress.distributed.collective import Collective
from lightning_compress.errors import CompressionError
from lightning_compress.plugin.settings import Settings


def check_settings(settings: Settings, collective: Collective) -> None:
    """
    Raises:
        CompressionError: the ranks were not given the same; weights and budgets may differ.
    """
    what = "comparing what the ranks were given"
    check_same({"recipe": json.dumps(settings.recipe.to_dict(), default=str)}, collective, what)
    folder = None if settings.output_dir is None else str(settings.output_dir.absolute())
    given = {"output_dir": folder, **{name: getattr(settings, name) for name in _SAME_SETTINGS}}
    of_ranks = collective.gather(given, what)
    for name, value in of_ranks[0].items():
        for rank, theirs in enumerate(of_ranks):
            if theirs[name] != value:
                raise CompressionError(
                    f"{name} is {theirs[name]} on rank {rank}, and {value} on rank 0. Every rank has to be given the "
                    "same (a name with the time in it is another one on each)."
                )


_SAME_SETTINGS = ("schedule", "sequential_targets", "expert_parts", "verify", "resume", "keep_activations")


def check_data(data: CalibrationSet | None, collective: Collective) -> None:
    """
    Raises:
        CompressionError: the ranks have read different calibration sets, or cannot have.
    """
    if collective.size > 1:
        digest = data_fingerprint(() if data is None else data.batches)
        check_same({"data": digest}, collective, "comparing the calibration data")


def check_same(given: Mapping[str, str], collective: Collective, what: str) -> None:
    """All ranks are about to do the same.

    Args:
        given: of this rank, some of `calibration.resume.fingerprints`.
        collective: the ranks.
        what: is done, for errors.

    Raises:
        CompressionError: they are not.
    """
    of_ranks = collective.gather(given, what)
    for name, digest in of_ranks[0].items():
        others = [rank for rank, theirs in enumerate(of_ranks) if theirs[name] != digest]
        if others:
            raise CompressionError(
                f"{_SAME[name]} {', '.join(map(str, others))} as on rank 0. Every rank has to be given the same: it "
                "takes its own share of the batches by itself."
            )


def unlike_threads(collective: Collective, device: torch.device) -> list[str]:
    """A note where ranks on CPUs have different numbers of threads, on which the last bits of products depend."""
    if device.type != "cpu" or collective.size == 1:
        return []
    of_ranks = collective.gather({"threads": torch.get_num_threads()}, "comparing the numbers of threads")
    numbers = sorted({theirs["threads"] for theirs in of_ranks})
    if len(numbers) == 1:
        return []
    return [
        f"Ranks have {numbers[0]} to {numbers[-1]} threads each, on which the last bits of products depend: run again, "
        "or on another number of ranks, this may end in other codes. Set OMP_NUM_THREADS to the same on all of them."
    ]


_SAME = {
    "recipe": "The recipe is not the same on ranks",
    "layout": "The schedule, the sequential targets, the kind of device, or what is run of the model (does its code "
    "ask for the rank?) are not the same on ranks",
    "model": "The model's weights, its buffers, or what its code computes (does it ask for the rank?) are not the "
    "same on ranks",
    "data": "The batches (is there a DistributedSampler, a stream that gives each rank its share, or an unseeded "
    "order?) are not the same on ranks",
    "software": "The versions of torch, transformers or others are not the same on ranks",
}
