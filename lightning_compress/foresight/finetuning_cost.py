"""What a step of fine-tuning takes on several ranks: seconds per part of the step and lane, bytes per place.

Memory is that of `estimate`: a micro-batch was run on fake tensors (`training`), and `layouts` says what a rank has of
it. Work was metered in the same run, so it has what checkpointing computes again; a machine's rates make seconds of it.
What travels, per rank, with V bytes of gradients, P of trained parameters and W of all weights, N replicas and T ranks
per layer, by rings, in which a collective sends (N - 1) / N of its bytes and receives as many:

    plain, per step           all-reduce of gradients                2 (N - 1) / N V / T     (beside the last backward)
    ZeRO-1, per step          reduce-scatter, then all-gather          (N - 1) / N (V + P) / T
    ZeRO-2, per micro-batch   reduce-scatter                           (N - 1) / N V / T     (and P / T per step)
    ZeRO-3, per micro-batch   all-gather twice, reduce-scatter         (N - 1) / N (2 W + V) / T
    tensor, per micro-batch   two all-reduces per layer, forward and backward, and again where the forward runs again
    pipeline, per micro-batch a layer's output to the next stage, and its gradient to the one before; 1 / T of each
    offload, per micro-batch  gradients of a rank's share to the host; from the second on the sum so far comes back for
                              the addition; ZeRO-1 sends them once per step; parameters come back after the step

After ZeRO (arXiv 1910.02054, section 7), Megatron (arXiv 2104.04473, section 3.2: 8 b s h (t - 1) / t numbers a layer)
and DeepSpeed's `async_accumulate_grad_in_cpu_via_gpu`. Assumed: in each forward and each backward the lanes work at the
same time, so it takes as long as the longest; but products wait for the tensor ranks' all-reduces, so those add to
computing. The optimizer's step begins after the last backward, and what follows it is waited for, one after the other.
Operators are divided among tensor ranks, the number of calls is not. Without a rate between ranks they talk over each
card's link to the host, which offloading uses too. All ranks are on one host, and the CPU's steps share its memory.

A pipeline of p stages does m micro-batches in the time of m + p - 1 of them on its busiest stage, whether all forwards
come first (GPipe, arXiv 1811.06965) or one forward and one backward take turns (PipeDream-Flush; arXiv 2104.04473,
section 2.2): the bubble is (p - 1) / (m + p - 1) of the time. Busiest is the last stage, which has the output embedding
beside its layers: of a forward's FLOP those of that product, and so much of all else. Micro-batches are waited for
between stages. Memory is that of the largest stage, with the activations of p micro-batches on the way (1F1B).

Left out: losses and embeddings that are divided among tensor ranks; the gradients of tied embeddings, that the first
and the last stage add up; start-up times of collectives; a slowest rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, final

from lightning_compress.foresight.jobs import parts_of
from lightning_compress.foresight.layouts import Layout, worst_shares
from lightning_compress.foresight.machine import Machine
from lightning_compress.foresight.optimizers import step_bytes
from lightning_compress.foresight.training import Rehearsal
from lightning_compress.memory.budget import Place
from lightning_compress.memory.work import Work

Lane = Literal["compute", "cpu", "ranks", "to_device", "to_host", "duplex"]
CPU_OPTIMIZER = 1.09e11
"""B/s at which the CPU's optimizer is assumed to go over its tensors, as nothing measures it: CPU-Adam takes 2.57 s for
10 billion parameters of 28 bytes on a host with twelve channels of memory (arXiv 2101.06840, table 4)."""
_REDUCES = 2
"""All-reduces of a layer's activations in a forward, and in a backward."""


@final
@dataclass(frozen=True)
class FineTuningTask:
    """What is the same however it is done.

    Attributes:
        batch: sequences per step, of all replicas and micro-batches.
        length: tokens of each.
        ranks: that share it.
        layers, hidden: of the model; tensor ranks exchange a number per token and channel twice per layer.
        itemsize: bytes of such a number.
        largest_layer: bytes of its weights.
        head: numbers of the output embedding, that each token is multiplied with.
        stages: of the weights, the part of the largest stage of a pipeline, by how many there are.
    """

    batch: int
    length: int
    ranks: int
    layers: int
    hidden: int
    itemsize: int
    largest_layer: int
    head: int = 0
    stages: Mapping[int, float] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class MicroBatch:
    """What a rank computes at a time, as it would take alone.

    Attributes:
        size: sequences.
        checkpoints: layers keep their inputs only (gradient checkpointing).
        rehearsal: what that took on fake tensors, with its work.
    """

    size: int
    checkpoints: bool
    rehearsal: Rehearsal


@final
@dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
        name: of it.
        count: how often it comes in a step.
        compute_s, cpu_s: seconds of the device's and the CPU's computing.
        waited_bytes: that go between ranks before computing goes on.
        ranks_bytes: that go between ranks meanwhile.
        to_device, to_host: bytes on the link.
        idle_s: seconds in which nothing is done.
    """

    name: str
    count: int = 1
    compute_s: float = 0.0
    cpu_s: float = 0.0
    waited_bytes: float = 0.0
    ranks_bytes: float = 0.0
    to_device: float = 0.0
    to_host: float = 0.0
    idle_s: float = 0.0

    def lanes(self, machine: Machine) -> dict[Lane, float]:
        """Seconds of each lane, once."""
        return {
            "compute": self.compute_s,
            "cpu": self.cpu_s,
            **_exchange(machine, self.waited_bytes + self.ranks_bytes, self.to_device, self.to_host),
        }

    def seconds(self, machine: Machine) -> float:
        """Of all `count` of them."""
        waited = max(_exchange(machine, self.waited_bytes).values())
        return self.count * (self.idle_s + max(self.compute_s + waited, *self.lanes(machine).values()))


@final
@dataclass(frozen=True)
class Step:
    """What a step of the optimizer takes, done in one way.

    Attributes:
        layout: of the ranks.
        micro_batch: sequences that a replica computes at a time.
        accumulate: such micro-batches per step and replica.
        checkpoints: with gradient checkpointing.
        seconds: of the step.
        tokens_per_s: of all replicas.
        parts: seconds of the step's parts, which add up to it.
        lanes: seconds that each lane is busy.
        peaks: bytes of a rank's device, and of host memory for all ranks.
        device_parts, host_parts: what those consist of, in words.
        phase: of the job, in which the device has most.
    """

    layout: Layout
    micro_batch: int
    accumulate: int
    checkpoints: bool
    seconds: float
    tokens_per_s: float
    parts: Mapping[str, float]
    lanes: Mapping[Lane, float]
    peaks: Mapping[Place, int]
    device_parts: Mapping[str, int]
    host_parts: Mapping[str, int]
    phase: str

    @property
    def bottleneck(self) -> Lane:
        """The lane that is busy longest."""
        return max(self.lanes, key=lambda lane: self.lanes[lane])


def foreseen(task: FineTuningTask, micro: MicroBatch, layout: Layout, machine: Machine) -> Step:
    """A step with these micro-batches on ranks that are laid out so; `layout.data * micro.size` divides the batch."""
    accumulate = task.batch // (layout.data * micro.size)
    seconds: dict[str, float] = {}
    busy: dict[Lane, float] = {}
    for part in step_parts(task, micro, layout, machine):
        seconds[part.name] = seconds.get(part.name, 0.0) + part.seconds(machine)
        for lane, lane_s in part.lanes(machine).items():
            busy[lane] = busy.get(lane, 0.0) + part.count * lane_s
    phases = micro.rehearsal.phases(accumulate)
    shares = worst_shares(phases, layout, task.largest_layer, task.stages.get(layout.pipeline))
    fullest, _ = max(shares.values(), key=lambda share: share[0].peak)
    on_host = max((there for _, there in shares.values()), key=lambda there: there.peak)
    return Step(
        layout=layout,
        micro_batch=micro.size,
        accumulate=accumulate,
        checkpoints=micro.checkpoints,
        seconds=sum(seconds.values()),
        tokens_per_s=task.batch * task.length / sum(seconds.values()),
        parts=seconds,
        lanes={lane: lane_s for lane, lane_s in busy.items() if lane_s},
        peaks={"device": fullest.peak, "host": task.ranks * on_host.peak},
        device_parts=parts_of(fullest),
        host_parts={name: task.ranks * size for name, size in parts_of(on_host).items() if size},
        phase=fullest.name,
    )


def step_parts(task: FineTuningTask, micro: MicroBatch, layout: Layout, machine: Machine) -> list[Part]:
    """The parts of a step, in order, on every rank."""
    accumulate, work = task.batch // (layout.data * micro.size), micro.rehearsal.work
    ring, tensor, zero, stages = (layout.data - 1) / layout.data, layout.tensor, layout.zero, layout.pipeline
    busiest, stage = _busiest(task, micro, stages), task.stages.get(stages, 1 / stages)
    compute = {name: machine.seconds(_divided(each, tensor, busiest)) for name, each in work.items()}
    sizes = _sizes(micro.rehearsal)
    trained, gradients, _, weights = (stage * size for size in sizes)
    offloads = layout.offload and zero >= 1
    own = gradients / (tensor * layout.data) if offloads else 0.0  # a rank's share
    exchanged = _exchanged_by_tensor_ranks(task, micro, tensor) / stages
    passed = _activations(task, micro) / tensor if stages > 1 else 0.0
    forward = Part(
        name="forward",
        count=accumulate,
        compute_s=compute["forward"],
        waited_bytes=exchanged + passed,
        ranks_bytes=ring * weights / tensor if zero >= 3 else 0.0,
    )
    every = Part(
        name="backward",
        compute_s=compute["backward"],
        waited_bytes=exchanged * (2 if micro.checkpoints else 1) + passed,
        ranks_bytes=ring * ((weights if zero >= 3 else 0) + (gradients if zero >= 2 else 0)) / tensor,
        to_host=own if zero >= 2 else 0.0,
    )
    later = replace(every, compute_s=compute.get("accumulate", 0.0), to_device=own if zero >= 2 else 0.0)
    last = later if accumulate > 1 else every
    last = replace(
        last,
        ranks_bytes=last.ranks_bytes + ring * {0: 2, 1: 1}.get(zero, 0) * gradients / tensor,
        to_host=own,
    )
    before = [every, replace(later, count=accumulate - 2)] if accumulate > 1 else []
    stepping = machine.seconds(_divided(work["step"], tensor * (layout.data if zero >= 1 else 1), stage))
    update = Part("optimizer", compute_s=stepping)
    if offloads:
        update = Part("optimizer", cpu_s=step_bytes(*sizes[:3]) / machine.rate("cpu_optimizer"))
    once = replace(forward, count=1).seconds(machine) + every.seconds(machine)
    bubble = Part("bubble", count=stages - 1, idle_s=once)
    back = Part("parameters back", to_device=trained / (tensor * layout.data) if offloads else 0.0)
    gather = Part("parameters gathered", ranks_bytes=ring * trained / tensor if zero in (1, 2) else 0.0)
    return [forward, *before, last, bubble, update, back, gather]


def _busiest(task: FineTuningTask, micro: MicroBatch, stages: int) -> float:
    """Of a micro-batch's work, the part of the stage that has most."""
    if stages == 1:
        return 1.0
    forward = micro.rehearsal.work["forward"]
    flops = sum(amount for kind, amount in forward.items() if kind.startswith(("product", "attention")))
    head = 2 * micro.size * task.length * task.head / flops
    return head + (1 - head) / stages


def _exchanged_by_tensor_ranks(task: FineTuningTask, micro: MicroBatch, tensor: int) -> float:
    """Bytes that a rank sends in a forward for all-reduces of activations."""
    return task.layers * _REDUCES * 2 * (tensor - 1) / tensor * _activations(task, micro)


def _activations(task: FineTuningTask, micro: MicroBatch) -> int:
    """Bytes of a layer's output."""
    return micro.size * task.length * task.hidden * task.itemsize


def _sizes(rehearsal: Rehearsal) -> tuple[int, int, int, int]:
    """Bytes of trained parameters, of gradients, of the optimizer's states, and of all weights."""
    step = next(phase for phase in rehearsal.alone if phase.name == "step")
    return rehearsal.trained, step.gradients, step.optimizer, step.weights


def _divided(work: Work, ranks: int, stage: float) -> Work:
    """Of a stage with such a part of it, divided among ranks that make as many calls each."""
    return {kind: stage * (amount if kind == "call" else amount / ranks) for kind, amount in work.items()}


def _exchange(machine: Machine, sent: float, to_device: float = 0.0, to_host: float = 0.0) -> dict[Lane, float]:
    """Seconds in which a rank sends and receives so many bytes, beside what goes over its link to the host."""
    lanes: dict[Lane, float] = {}
    if "between_ranks" in machine.rates:
        lanes["ranks"] = sent / machine.rate("between_ranks")
    else:
        to_device, to_host = to_device + sent, to_host + sent
    lanes["to_device"] = to_device / machine.rate("to_device")
    lanes["to_host"] = to_host / machine.rate("to_host")
    lanes["duplex"] = (to_device + to_host) / machine.rate("duplex")
    return lanes
