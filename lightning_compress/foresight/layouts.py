"""What one rank of many holds of a job: data parallelism, ZeRO, tensor and pipeline parallelism, in closed form.

After ZeRO (arXiv 1910.02054) and Megatron (arXiv 2104.04473, 2205.05198); replicas without ZeRO are
`DistributedDataParallel`, whose buckets are counted among gradients. Assumed: everything divides evenly (but for what
all heads share of a cache), tensor parallelism splits activations too (sequence parallelism). A pipeline's stages have
fewer layers (the first and the last the embeddings beside them), but more micro-batches on the way (1F1B), and the last
one the loss: so activations are not divided by their number, which is the most that it can be.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.jobs import FineTuningJob, InferenceJob, Phase

HALF_PRECISION = (
    "ZeRO is counted with gradients and states of the optimizer in the parameters' own 16 bits, as torch has them. "
    "DeepSpeed keeps weights, gradients and states in full precision beside them, which is not counted: by its rule "
    "18 bytes per parameter are divided among replicas. model.dtype=float32 job.precision=bf16-mixed is nearer to that."
)
"""Said where it is so (see `is_halved`)."""
GATHERED = 2
"""Layers whose parameters ZeRO-3 has gathered at a time: the one that runs and the next."""


@final
@dataclass(frozen=True)
class Layout:
    """How ranks share a job.

    Attributes:
        data: replicas, among which ZeRO divides.
        zero: stage; 1 divides the optimizer's state, 2 gradients too, 3 weights too.
        offload: what ZeRO divides is in host memory, but for weights; those that the CPU's optimizer updates are there,
            too.
        tensor: ranks that share each layer.
        pipeline: ranks that share the layers.
    """

    data: int = 1
    zero: int = 0
    offload: bool = False
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        ranks = (self.data, self.tensor, self.pipeline)
        if not all(type(each) is int for each in (*ranks, self.zero)) or min(ranks) < 1 or self.zero not in range(4):
            raise CompressionError(f"{self}: numbers of ranks are at least 1, and ZeRO's stages are 0 to 3.")
        if self.offload and self.zero == 0:
            raise CompressionError("layout.offload is of what ZeRO divides: give layout.zero=1, 2 or 3.")


def is_halved(job: InferenceJob | FineTuningJob, itemsize: int, layouts: Iterable[Layout]) -> bool:
    """Whether ZeRO divides AdamW's states of parameters of 2 bytes, which are as small."""
    trains = isinstance(job, FineTuningJob) and (job.method, job.optimizer) == ("full", "adamw")
    return trains and itemsize == 2 and any(layout.zero for layout in layouts)


def per_rank(
    phase: Phase, layout: Layout, largest_layer: int, stage: float | None = None, trained: int = 0
) -> tuple[Phase, Phase]:
    """What one rank has on its device in a phase, and what it has in host memory for it.

    Args:
        phase: of the job on one rank, with one replica's batch.
        layout: of the ranks.
        largest_layer: bytes of the weights of the largest layer or embedding.
        stage: of the weights, what the largest stage of the pipeline has; None: as much as all others.
        trained: bytes of all gradients, and so of what is trained. Replicas without ZeRO have them a second time at all
            times: in the buckets in which `DistributedDataParallel` exchanges them. Beside an offloaded optimizer are
            the parameters.
    """
    shared = (stage or 1 / layout.pipeline) / layout.tensor
    parts, divided = layout.tensor * layout.pipeline, layout.data if layout.zero >= 1 else 1
    sharing_gradients = layout.data if layout.zero >= 2 else 1
    weights = int(phase.weights * shared)
    if layout.zero >= 3:
        weights = min(weights, weights // layout.data + GATHERED * largest_layer // layout.tensor)
    buckets = trained if layout.data > 1 and layout.zero == 0 else 0
    gradients = int((phase.gradients + buckets) * shared) // sharing_gradients
    optimizer, stepping = (int(size * shared) // divided for size in (phase.optimizer, phase.stepping))
    on_host = Phase(phase.name, 0)
    if layout.offload and layout.zero >= 1:
        updated, sent = (int(size * shared) // layout.data for size in (trained, phase.gradients))
        on_host = Phase(phase.name, updated, sent, optimizer, stepping=stepping)
        optimizer = stepping = 0
        gradients = 0 if layout.zero >= 2 else gradients
    share = Phase(
        phase.name,
        weights,
        gradients,
        optimizer,
        cache=(phase.cache - phase.undivided_cache) // parts + phase.undivided_cache // layout.pipeline,
        working=phase.working // layout.tensor,
        stepping=stepping,
    )
    return share, on_host


def worst_shares(
    phases: Iterable[Phase], layout: Layout, largest_layer: int, stage: float | None = None
) -> dict[str, tuple[Phase, Phase]]:
    """By part of the job, of its moments the one with most on a rank's device, as `per_rank` has it."""
    found: dict[str, tuple[Phase, Phase]] = {}
    moments = list(phases)
    trained = max((phase.gradients for phase in moments), default=0)
    for phase in moments:
        share = per_rank(phase, layout, largest_layer, stage, trained)
        if phase.name not in found or share[0].peak > found[phase.name][0].peak:
            found[phase.name] = share
    return found
