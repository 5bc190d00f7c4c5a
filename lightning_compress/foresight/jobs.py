"""Jobs on fake tensors: what inference (here) and fine-tuning (`training`) have alive at their worst moments.

Method: the job itself runs, two rounds of it, on tensors without values, while every storage is followed. On one kind
of device the same code gives the same peaks on real tensors (`tests/foresight` compares them). What it cannot see is
memory that no tensor owns: the context, workspaces of libraries, and the allocator's rounding (see `allocator`).

Fake tensors are of the CPU, so the CPU's operators say what they return; of CUDA's, attention and dropout are known to
keep something else (see `graph.cuda`).
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from lightning_compress.errors import CompressionError
from lightning_compress.graph.compat import traceable_transformers
from lightning_compress.graph.cuda import as_on_cuda
from lightning_compress.graph.fakes import fake_like, new_fake_mode, replace_by_fakes
from lightning_compress.graph.restore import assigned, attributes_restored
from lightning_compress.graph.stages import Schedule
from lightning_compress.graph.trees import storage_bytes
from lightning_compress.memory.tracker import LiveMemory

_SWITCH = "TRANSFORMERS_DISABLE_TORCH_CHECK"
_TOGETHER = 128
"""So many of the tokens between the first and the last one that are generated run at a time."""
Optimizer = Literal["sgd", "sgd_momentum", "adamw", "adamw_8bit"]
Method = Literal["full", "lora", "qlora"]
Implementation = Literal["single", "foreach", "fused"]
Precision = Literal["true", "bf16-mixed"]


@final
@dataclass(frozen=True)
class Phase:
    """A worst moment of a part of a job, in bytes. A part may have several, which differ in what they consist of.

    Attributes:
        name: of the part.
        weights: parameters and buffers.
        gradients: of parameters.
        optimizer: the optimizer's state.
        cache: keys and values of attention, at the end of the part.
        undivided_cache: of the cache, what all heads share: a single head's, or latents that keys and values are made
            of. Tensor ranks have all of it each.
        working: activations and temporaries.
        stepping: the optimizer's temporaries.
    """

    name: str
    weights: int
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    working: int = 0
    stepping: int = 0
    undivided_cache: int = 0

    @property
    def peak(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.cache + self.working + self.stepping


PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "cache": "keys and values",
    "working": "activations, temporaries",
    "stepping": "optimizer's temporaries",
}
"""What a phase consists of, in words."""


def parts_of(phase: Phase) -> dict[str, int]:
    """Bytes of a phase by part, in words."""
    return {title: getattr(phase, part) for part, title in PARTS.items()}


@final
@dataclass(frozen=True)
class InferenceJob:
    """Text is generated from a prompt, greedily.

    Attributes:
        batch_size: prompts at a time.
        context: tokens of each prompt.
        new_tokens: tokens that are generated for each; the last one is not read again.
        weight_bits: of linear layers that are packed, 1 to 8; None: as the model has them.
        num_images: in each prompt; their tokens are among `context`.
        image_size: as of `CalibrationJob`.
    """

    batch_size: int = 1
    context: int = 2048
    new_tokens: int = 128
    weight_bits: int | None = None
    num_images: int = 0
    image_size: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "batch_size", "context", "new_tokens")
        check_images("job.", self.num_images, self.image_size)
        if self.weight_bits is not None and (type(self.weight_bits) is not int or self.weight_bits not in range(1, 9)):
            raise CompressionError(f"job.weight_bits={self.weight_bits} is neither null nor 1 to 8.")


@final
@dataclass(frozen=True)
class FineTuningJob:
    """Parameters are trained with the causal language model's loss.

    Attributes:
        batch_size: samples per forward.
        length: tokens of each.
        accumulate: forwards and backwards per step of the optimizer.
        optimizer: `adamw` has two states per parameter, `sgd_momentum` one, `sgd` none; `adamw_8bit` is that of
            bitsandbytes, two of a byte.
        implementation: of torch's optimizers; torch takes `foreach` on CUDA unless told otherwise.
        precision: `true` computes in the parameters' own type, `bf16-mixed` in bfloat16 by autocast.
        gradient_checkpointing: layers keep their inputs only, and run again in the backward.
        method: what is trained: `full` all parameters, `lora` adapters beside linear layers, `qlora` the same beside
            linear layers of 4 bits (see `adapters`).
        lora_rank: of adapters.
        lora_targets: linear layers that have one, as PEFT's `target_modules`; None: all but the output embedding.
    """

    batch_size: int = 1
    length: int = 2048
    accumulate: int = 1
    optimizer: Optimizer = "adamw"
    implementation: Implementation = "foreach"
    precision: Precision = "true"
    gradient_checkpointing: bool = False
    method: Method = "full"
    lora_rank: int = 16
    lora_targets: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "batch_size", "length", "accumulate", "lora_rank")
        literals = {"optimizer": Optimizer, "implementation": Implementation, "precision": Precision, "method": Method}
        for name, known in literals.items():
            if getattr(self, name) not in get_args(known):
                raise CompressionError(f"job.{name}={getattr(self, name)} is none of {', '.join(get_args(known))}.")
        if self.method == "full" and self.lora_targets is not None:
            raise CompressionError(
                f"job.lora_targets={self.lora_targets} is of adapters, and job.method=full trains all parameters: give "
                "job.method=lora or qlora."
            )


@final
@dataclass(frozen=True)
class CalibrationJob:
    """A compression, from its first subgraph to the checkpoint.

    Attributes:
        num_samples: of all ranks.
        max_length: tokens of each, those of its images among them.
        batch_size: samples per forward.
        schedule: as of `compress`.
        sequential_targets: likewise.
        expert_parts: in how many parts the experts of a layer are onloaded and solved.
        ranks: processes that share the batches.
        verify: a checkpoint whose model is in memory is loaded a second time at the end.
        num_images: in each sample.
        image_size: height and width that the processor is given; None: some size of its own.
    """

    num_samples: int = 512
    max_length: int = 2048
    batch_size: int = 8
    schedule: str = "staged"
    sequential_targets: Sequence[str] | None = None
    expert_parts: int = 1
    ranks: int = 1
    verify: bool = True
    num_images: int = 0
    image_size: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "num_samples", "max_length", "batch_size", "expert_parts", "ranks")
        check_images("job.", self.num_images, self.image_size)
        if self.schedule not in list(Schedule):
            raise CompressionError(f"job.schedule={self.schedule} is none of {', '.join(Schedule)}.")


def _check_positive(job: object, *names: str) -> None:
    for name in names:
        value = getattr(job, name)
        if type(value) is not int or value < 1:
            raise CompressionError(f"job.{name}={value} is no number of at least 1.")


def check_images(prefix: str, number: object, size: object) -> None:
    """
    Raises:
        CompressionError: `num_images` or `image_size`, behind `prefix`, is none.
    """
    if type(number) is not int or number < 0:
        raise CompressionError(f"{prefix}num_images={number} is no number of images.")
    sides = list(size) if isinstance(size, Sequence) and not isinstance(size, str) else []
    if size is not None and (len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides)):
        raise CompressionError(f"{prefix}image_size={size} is no height and width, as in [336, 336].")


@contextmanager
def on_fakes(model: nn.Module, *, on_cuda: bool = False) -> Iterator[Callable[[Tensor], Tensor]]:
    """Within: the model has fake parameters and buffers, tensors that are made are fake, and transformers takes the
    paths that it takes on unpadded sequences, without checking values (are there as many image tokens as features?).
    Yields what makes fakes of tensors from outside.

    Args:
        model: on any tensors.
        on_cuda: operators are to make what they make there (see `graph.cuda`).
    """
    mode = new_fake_mode(symbolic=False)
    with attributes_restored(model):
        replace_by_fakes(model, mode)
        # it logs a failure at length before raising it
        quiet = assigned(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)
        there = as_on_cuda() if on_cuda else nullcontext()
        with quiet, _unchecked(), traceable_transformers(model, packed_sequences=False), there, mode:
            yield partial(fake_like, mode)


@contextmanager
def _unchecked() -> Iterator[None]:
    """Within: transformers leaves its checks of values out, by its own switch."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        yield
    finally:
        del os.environ[_SWITCH]
        if before is not None:
            os.environ[_SWITCH] = before


def infer(
    model: nn.Module, job: InferenceJob, memory: LiveMemory, prompt: Mapping[str, Tensor] | None = None
) -> list[Phase]:
    """Run the prompt, and the last of the tokens that are generated, as `generate` does.

    Args:
        model: a causal language model of transformers; on real or on fake tensors.
        job: what to run.
        memory: follows it.
        prompt: all that the model takes of it, with images; None: `job.context` tokens.

    Raises:
        CompressionError: the model takes no token ids, or gives no cache.
    """
    model.eval()
    device = next(model.parameters()).device
    named = signature(model.forward).parameters
    keep: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in named else {}
    cache_name = "cache" if "cache" in named else "past_key_values"  # of transformers 5.24, and before
    with torch.no_grad(), memory:
        weights = follow(model, memory)

        def run(given: Mapping[str, Tensor], cache: Any = None) -> Any:
            return getattr(model(**given, **{cache_name: cache}, use_cache=True, **keep), cache_name, None)

        def cached(length: int, cache: Any = None) -> Any:
            return run({"input_ids": torch.zeros(job.batch_size, length, dtype=torch.long, device=device)}, cache)

        if cached(1) is None:
            raise CompressionError(f"{type(model).__name__} gives no cache: inference is not foreseen.")
        for tensor in (prompt or {}).values():  # whoever generates keeps them to the end
            memory.track(tensor)
        memory.reset_peak()
        cache = cached(job.context) if prompt is None else run(prompt)
        phases = [_phase("prefill", memory, weights, _cached(cache))]
        done = 0
        while (left := job.new_tokens - 3 - done) > 0:  # some at a time, and one alone
            together = min(job.context + done, _TOGETHER, left)
            cache = cached(together, cache)
            done += together
        if job.new_tokens > 2:
            cache = cached(1, cache)
        memory.reset_peak()
        cache = cached(1, cache)
        phases.append(_phase("decode", memory, weights, _cached(cache)))
    return phases


def follow(model: nn.Module, memory: LiveMemory) -> int:
    """Count parameters and buffers from now on; their bytes."""
    for tensor in (*model.parameters(), *model.buffers()):
        memory.track(tensor)
    return memory.live_bytes


def _phase(name: str, memory: LiveMemory, weights: int, cached: Sequence[object]) -> Phase:
    size = storage_bytes(cached)
    of_all_heads = [tensor for tensor in cached if isinstance(tensor, Tensor) and tensor.dim() == 4]
    undivided = storage_bytes([tensor for tensor in of_all_heads if tensor.shape[1] == 1])  # [B, heads, T, channels]
    working = memory.peak_bytes - weights - size
    return Phase(name, weights, cache=size, working=working, undivided_cache=undivided)


def _cached(cache: Any) -> list[object]:
    """Keys and values; states, where a layer has such instead."""
    return [value for layer in cache.layers for value in vars(layer).values()]
