"""How to generate with a model that may not fit on the GPU: from its configuration and a machine's rates, in words.

`foresight.generation` searches; here are the sizes that transformers' configurations have, the rates that a probe or a
data sheet has, and what is printed. No weights are read; of the model, built on the meta device, it is seen whether its
layers have the sizes that the configuration was taken to say.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lightning_compress.errors import BudgetError, CompressionError, UnsupportedModelError
from lightning_compress.foresight.generation import Policy, best_policy, row_by_row
from lightning_compress.foresight.generation_cost import Hardware, Task, Transformer
from lightning_compress.foresight.inputs import beyond_positions
from lightning_compress.foresight.machine import Machine
from lightning_compress.graph.configs import size_in, varies
from lightning_compress.memory.budget import gib
from lightning_compress.report.plan import minutes

CPU_ATTENTION = 12.3e9
"""FLOP/s of attention on the CPU that are assumed, as nothing measures them: FlexGen's fit for a Xeon of 2 GHz."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_INTERMEDIATE = ("ffn_dim", "intermediate_size")
_NOT_ALIKE = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "kv_lora_rank",
    "layers_block_type",
    "linear_num_key_heads",
)
"""What makes layers other than the cost model takes them to be: experts, compressed keys, layers without attention."""
_PER_HEAD = ("head_dim", "num_key_value_heads")
_ATTENTIONS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
_GATES = ("silu", "swish")
_OFF = 0.05
"""By how much a layer's parameters may differ from what is counted, which leaves out norms, biases and the like."""


@final
@dataclass(frozen=True)
class PlannedGeneration:
    """A policy, and what it is for.

    Attributes:
        machine: whose rates were used.
        best: the fastest policy that fits.
        usual: row by row; None: that does not fit.
        note: what else there is to say.
    """

    machine: Machine
    model: Transformer
    hardware: Hardware
    task: Task
    best: Policy
    usual: Policy | None
    note: str = ""


def plan_generation(
    model: PreTrainedModel,
    machine: Machine,
    task: Task,
    *,
    device_bytes: int,
    host_bytes: int,
    disk_bytes: int,
) -> PlannedGeneration:
    """The fastest way to generate within what there is, beside the usual one.

    Args:
        model: a decoder with its parameters on the meta device.
        machine: how fast it is; with a GPU.
        task: what is generated.
        device_bytes, host_bytes, disk_bytes: that tensors may take (of a card: `foresight.planned.tensors_on`).

    Raises:
        BudgetError: nothing fits; says the smallest budgets that would do.
        CompressionError: no such decoder; a machine without a GPU.
    """
    sizes = transformer_of(model.config, model.dtype.itemsize)
    check_layers(model, sizes)
    hardware = hardware_of(machine, model.dtype, device_bytes, host_bytes, disk_bytes)
    best = best_policy(sizes, hardware, task)
    try:
        usual = row_by_row(sizes, hardware, task)
    except BudgetError:  # its cache must be on the GPU
        usual = None
    note = beyond_positions(model, task.prompt_length + task.new_tokens)
    return PlannedGeneration(machine, sizes, hardware, task, best, usual, note)


def check_layers(model: PreTrainedModel, sizes: Transformer) -> None:
    """
    Raises:
        UnsupportedModelError: the model's layers have more or fewer parameters than its configuration was taken to say.
    """
    stacks = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == sizes.layers]
    counts = [[sum(each.numel() for each in layer.parameters()) for layer in stack] for stack in stacks]
    layers = max(counts, key=sum, default=[])
    most = max(layers, key=lambda count: abs(count - sizes.layer_parameters), default=0)
    if abs(most - sizes.layer_parameters) > _OFF * sizes.layer_parameters:
        raise UnsupportedModelError(
            f"Generation cannot be planned for a {type(model).__name__}: one of its {sizes.layers} layers has "
            f"{most:,} parameters where its configuration is taken to say {sizes.layer_parameters:,}. A plan counts "
            "plain attention and feed-forward blocks, e.g. of OPT, Llama, Qwen or Mistral; `estimate job=inference` "
            "says what this one takes."
        )


def transformer_of(config: PretrainedConfig, itemsize: int) -> Transformer:
    """The sizes of a decoder; feed-forward layers are taken to be gated where norms are RMS norms or SiLU is used.

    Raises:
        UnsupportedModelError: a configuration without these sizes, or of layers that are not alike.
    """
    name, text = type(config).__name__, config.get_text_config(decoder=True)
    sizes: dict[str, int | None] = {size: size_in(text, size) for size in _SIZES}
    intermediate = next((size for each in _INTERMEDIATE if (size := size_in(text, each)) is not None), None)
    sizes[" or ".join(_INTERMEDIATE)] = intermediate
    missing = [size for size, number in sizes.items() if number is None]
    if missing or getattr(config, "is_encoder_decoder", False):
        why = f"it has no {', '.join(missing)}" if missing else "it has an encoder"
        raise UnsupportedModelError(
            f"Generation cannot be planned for a {name}: {why}. Plans are for decoders whose layers are one attention "
            "and one feed-forward block, e.g. OPT, Llama, Qwen or Mistral."
        )
    unlike = [f"a {each} for each layer" for each in _PER_HEAD if varies(text, each)]
    unlike += [each for each in _NOT_ALIKE if varies(text, each) or getattr(text, each, None)]
    kinds = dict.fromkeys(kind for kind in getattr(text, "layer_types", None) or () if kind not in _ATTENTIONS)
    unlike += [f"layers of {kind}" for kind in kinds]
    if unlike:
        raise UnsupportedModelError(
            f"Generation cannot be planned for a {name}: it has {', '.join(unlike)}, and a plan counts the bytes and "
            "products of plain attention and feed-forward blocks. Plan for OPT, Llama, Qwen, Mistral and the like."
        )
    hidden, layers, heads, vocabulary, channels = (number for number in sizes.values() if number is not None)
    gated = size_in(text, "ffn_dim") is None and (
        getattr(text, "rms_norm_eps", None) is not None or getattr(text, "hidden_act", None) in _GATES
    )
    return Transformer(
        layers=layers,
        hidden=hidden,
        intermediate=channels,
        heads=heads,
        kv_heads=size_in(text, "num_key_value_heads") or heads,
        head_dim=size_in(text, "head_dim") or hidden // heads,
        num_matrices=3 if gated else 2,
        weight_itemsize=itemsize,
        cache_itemsize=itemsize,
        activation_itemsize=itemsize,
        outside_bytes=vocabulary * hidden * itemsize * (1 if getattr(text, "tie_word_embeddings", True) else 2),
    )


def hardware_of(machine: Machine, dtype: torch.dtype, device_bytes: int, host_bytes: int, disk_bytes: int) -> Hardware:
    """A machine's rates as the cost model names them, and what tensors may take.

    Raises:
        CompressionError: it has no GPU.
    """
    if machine.device != "cuda":
        raise CompressionError(
            f"Generation is planned for a GPU, and {machine.name} is planned for as a {machine.device}; name a card, "
            "e.g. gpu=rtx4090."
        )
    name = str(dtype).removeprefix("torch.")
    products, attention = machine.rate(f"product {name}"), machine.rate(f"attention {name}")
    to_host = machine.rate("to_host")
    return Hardware(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        to_device=machine.rate("to_device"),
        to_host=to_host,
        cache_to_host=to_host,
        disk_read=machine.rate("disk_read"),
        disk_write=machine.rate("disk_write"),
        prefill_products=products,
        decode_products=products,
        prefill_attention=attention,
        decode_attention=attention,
        gpu_memory=machine.rate("elementwise"),
        cpu_attention=CPU_ATTENTION,
    )


def generation_lines(planned: PlannedGeneration) -> list[str]:
    """The plan in words: what to do, how long it takes, what the usual way takes."""
    best, task = planned.best, planned.task
    most = ", ".join(
        f"{tier} {gib(size)} of {gib(planned.hardware.budgets[tier])}" for tier, size in best.peaks.items()
    )
    lanes = ", ".join(f"{lane} {seconds:.1f}" for lane, seconds in sorted(best.lanes.items(), key=lambda x: -x[1]))
    usual = "row by row, with the cache on the device, it does not fit"
    if planned.usual is not None:
        usual = (
            f"row by row, as offloading usually is: {planned.usual.tokens_per_s:.3g} tokens/s with batches of "
            f"{planned.usual.schedule.gpu_batch_size} ({placement(planned.usual)}); the plan is "
            f"{best.tokens_per_s / planned.usual.tokens_per_s:.1f} times as fast"
        )
    return [
        f"plan: blocks of {best.schedule.num_gpu_batches} batches of {best.schedule.gpu_batch_size} sequences; "
        f"{placement(best)}",
        f"foreseen: {best.tokens_per_s:.3g} tokens/s; a block of {best.schedule.block_size} sequences of "
        f"{task.prompt_length} + {task.new_tokens} tokens takes {minutes(best.prefill_s)} for the prompts and "
        f"{minutes(best.decode_s)} for new tokens",
        f"peaks: {most}",
        f"bottleneck: {best.bottleneck}; lanes are busy for (s): {lanes}",
        usual,
        "Not foreseen: launches of kernels, embeddings and logits, prompts shorter than the longest. The CPU's "
        f"attention is assumed to reach {CPU_ATTENTION / 1e9:.1f} GFLOP/s.",
        *filter(None, [planned.note]),
    ]


def placement(policy: Policy) -> str:
    """Where things are, in percent.

    >>> from lightning_compress.foresight.generation_cost import Schedule
    >>> here = {"wg": 0.2, "wc": 0.8, "wd": 0.0, "cg": 0.0, "cc": 1.0, "cd": 0.0, "hg": 1.0, "hc": 0.0, "hd": 0.0}
    >>> placement(Policy(Schedule(48, 3, True), here, 1.0, 1.0, 1.0, {}, {}))
    'weights 20% device, 80% host; cache 100% host, with its attention on the CPU; hidden states 100% device'
    """
    parts = []
    for kind, what in (("w", "weights"), ("c", "cache"), ("h", "hidden states")):
        shares = [(policy.fractions[kind + tier], where) for tier, where in _WHERE]
        parts.append(f"{what} " + ", ".join(f"{share:.0%} {where}" for share, where in shares if share >= 0.005))
    if policy.schedule.cpu_attention and policy.fractions["cg"] < 0.995:
        parts[1] += ", with its attention on the CPU"
    return "; ".join(parts)


_WHERE = (("g", "device"), ("c", "host"), ("d", "disk"))
