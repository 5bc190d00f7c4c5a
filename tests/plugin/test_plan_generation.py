"""Plans of generation from configurations of transformers, in words."""

import re
from typing import Any

import pytest
import torch
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AriaTextConfig,
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    NanoChatConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
)

from lightning_compress.command.generation import (
    check_layers,
    generation_lines,
    hardware_of,
    plan_generation,
    transformer_of,
)
from lightning_compress.errors import BudgetError, CompressionError, UnsupportedModelError
from lightning_compress.foresight.closed_form import decoder
from lightning_compress.foresight.generation_cost import Task
from lightning_compress.foresight.machine import Machine, Rate, named_gpu
from lightning_compress.foresight.planned import tensors_on
from lightning_compress.graph.configs import size_in
from lightning_compress.memory.source import parameters_on_meta

GIB = 1 << 30
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**SIZES, "intermediate_size": 640, "num_key_value_heads": 2}
DECODERS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "llama, tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=64),
    "gemma2": Gemma2Config(**GROUPED, head_dim=64),
    "cohere": CohereConfig(**GROUPED),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=1024),
    "opt": OPTConfig(**SIZES, ffn_dim=1024, word_embed_proj_dim=256, max_position_embeddings=8),
}
_LLAMA_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
)
with parameters_on_meta():
    LLAMA_70B: Any = AutoModelForCausalLM.from_config(_LLAMA_70B, dtype=torch.bfloat16)
TASK = Task(prompt_length=512, new_tokens=64, num_prompts=256)


@pytest.mark.parametrize("name", DECODERS)
def test_sizes_are_those_of_the_model(name: str) -> None:
    """All but norms, biases and positions. Seen to fail: with two matrices for all; with as many heads of keys as of
    queries; with tied embeddings counted twice."""
    config = DECODERS[name]
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    sizes = transformer_of(config, 4)
    check_layers(model, sizes)
    counted = sizes.layers * sizes.layer_bytes + sizes.outside_bytes
    assert counted == pytest.approx(4 * sum(parameter.numel() for parameter in model.parameters()), rel=0.01)
    assert sizes.cache_bytes == 4 * 2 * sizes.keys


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (T5Config(), "no ffn_dim or intermediate_size"),
        (GPT2Config(), "no ffn_dim or intermediate_size"),
        (MambaConfig(), "no num_attention_heads"),
        (MixtralConfig(), "num_local_experts"),
        (DeepseekV3Config(), "kv_lora_rank"),
        (Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]), "layers of conv"),
    ],
)
def test_what_is_no_such_decoder_is_refused(config: PretrainedConfig, why: str) -> None:
    """Seen to fail: without the list of what makes layers unlike."""
    with pytest.raises(UnsupportedModelError, match=why):
        transformer_of(config, 2)


def test_what_each_layer_has_a_value_of_its_own_of_is_refused() -> None:
    """As of Gemma 4, whose configuration raises when it is asked for one. Seen to fail: with what it raises, and with
    a head's channels taken from those of all."""

    class Varying(LlamaConfig):
        def __getattribute__(self, key: str) -> Any:
            if key == "head_dim":
                raise RuntimeError("'head_dim' is a per-layer attribute and may vary across layers.")
            return super().__getattribute__(key)

    config = LlamaConfig(**GROUPED)
    config.__class__ = Varying
    assert size_in(config, "head_dim") is None
    assert decoder(config, 1, 2) is None
    with pytest.raises(UnsupportedModelError, match="a head_dim for each layer"):
        transformer_of(config, 2)


@pytest.mark.parametrize(
    "config",
    [
        ArceeConfig(**GROUPED),  # two matrices
        ApertusConfig(**GROUPED),
        NanoChatConfig(**GROUPED),
        AriaTextConfig(**GROUPED, moe_num_experts=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_layers_of_other_sizes_are_refused(config: PretrainedConfig) -> None:
    """Seen to fail: without the look at the model."""
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedModelError, match=r"one of its 3 layers has [\d,]+ parameters where"):
        check_layers(model, transformer_of(config, 2))


def test_rates_of_a_machine() -> None:
    """Seen to fail: with the rate of another dtype."""
    machine = named_gpu("rtx4090", None)
    hardware = hardware_of(machine, torch.float32, GIB, 2 * GIB, 3 * GIB)
    assert hardware.budgets == {"device": GIB, "host": 2 * GIB, "disk": 3 * GIB}
    assert hardware.prefill_products == machine.rate("product float32") < machine.rate("product bfloat16")
    assert hardware.to_device == machine.rate("to_device")
    assert hardware.disk_write == machine.rate("disk_write") < hardware.disk_read
    with pytest.raises(CompressionError, match="is planned for a GPU"):
        hardware_of(Machine("host", "cpu", {"call": Rate(1e5, "assumed")}), torch.float32, GIB, GIB, GIB)


def test_a_plan_in_words() -> None:
    """Of a model three times as large as the card and the memory that is given, so that all three places are used.

    Seen to fail: with lines of the row-by-row policy; with the places' names exchanged.
    """
    machine = named_gpu("rtx4090", None)
    assert machine.device_bytes is not None
    planned = plan_generation(
        LLAMA_70B,
        machine,
        TASK,
        device_bytes=tensors_on(machine.device_bytes),
        host_bytes=48 * GIB,
        disk_bytes=500 * GIB,
    )
    assert planned.usual is not None
    assert planned.best.fractions["wd"] > 0.3
    assert planned.best.schedule.block_size <= 256
    plan, foreseen, peaks, bottleneck, usual, _ = generation_lines(planned)
    schedule = planned.best.schedule
    assert f"{schedule.num_gpu_batches} batches of {schedule.gpu_batch_size} sequences; weights " in plan
    assert f"{planned.best.fractions['wd']:.0%} disk; cache " in plan
    assert f"{planned.best.tokens_per_s:.3g} tokens/s" in foreseen
    assert "of 21.24 GiB, host 48.00 GiB of 48.00 GiB, disk " in peaks
    assert bottleneck.startswith("bottleneck: disk_read; lanes are busy for (s): disk_read ")
    assert f"{planned.usual.tokens_per_s:.3g} tokens/s" in usual
    assert "times as fast" in usual


def test_what_does_not_fit() -> None:
    """Nothing does; or row by row alone does not, whose cache must be on the device.

    Seen to fail: with the error of the usual way raised, and with bytes of tensors told for those of a card.
    """
    machine, room = named_gpu("t4", None), {"host_bytes": 300 * GIB, "disk_bytes": 0}
    with pytest.raises(BudgetError) as refused:
        plan_generation(LLAMA_70B, machine, TASK, device_bytes=4 * GIB, **room)
    said = re.search(
        r"The smallest that could do, with what is not named as it is: device=(\d+) \(", str(refused.value)
    )
    assert said is not None
    assert plan_generation(LLAMA_70B, machine, TASK, device_bytes=tensors_on(int(said[1])), **room)
    with pytest.raises(BudgetError):
        plan_generation(LLAMA_70B, machine, TASK, device_bytes=tensors_on(int(said[1]) - (1 << 20)), **room)
    long = Task(prompt_length=512, new_tokens=40000)
    planned = plan_generation(LLAMA_70B, machine, long, device_bytes=14 * GIB, **room)
    assert planned.usual is None
    assert "does not fit" in generation_lines(planned)[4]
