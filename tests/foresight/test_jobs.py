"""A job on fake tensors has the peaks that it has on real ones, to the byte, phase by phase."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import IS_RECENT, NEEDS_RECENT
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.jobs import FineTuningJob, InferenceJob, Phase, infer, on_fakes
from lightning_compress.foresight.training import finetune, rehearse
from lightning_compress.graph.trees import storage_bytes
from lightning_compress.memory.tracker import LiveMemory
from lightning_compress.memory.work import WorkMeter

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
}
SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 97}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gpt2": SMALL,
    "gpt_neox": SIZES,
    "gemma2": {**SIZES, "head_dim": 8},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3": {**SIZES, "head_dim": 8},
}
JOBS: dict[str, FineTuningJob] = {
    "foreach": FineTuningJob(3, 12),
    "fused": FineTuningJob(3, 12, implementation="fused"),
    "single": FineTuningJob(3, 12, implementation="single", gradient_checkpointing=True),
    "accumulate": FineTuningJob(2, 12, accumulate=2, optimizer="sgd_momentum", implementation="single"),
    "mixed": FineTuningJob(3, 12, precision="bf16-mixed", gradient_checkpointing=True),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def both(model: Callable[[], nn.Module], run: Callable[[nn.Module, LiveMemory], list[Phase]]) -> list[list[Phase]]:
    real = run(model(), LiveMemory())
    fake = model()
    with on_fakes(fake):
        return [run(fake, LiveMemory()), real]


@pytest.mark.parametrize("family", [family for family in FAMILIES if IS_RECENT or family != "opt"])
def test_inference(family: str) -> None:
    job = InferenceJob(batch_size=3, context=12, new_tokens=4)
    fake, real = both(lambda: build(family), lambda model, memory: infer(model, job, memory))
    assert fake == real
    prefill, decode = fake
    assert 0 < prefill.cache < decode.cache
    assert all(phase.working > 0 for phase in fake)
    weights = build(family)
    assert prefill.weights == sum(t.nbytes for t in (*weights.parameters(), *weights.buffers()))


LATENTS = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize(
    ("family", "options", "shared"),
    [
        ("llama", {}, 0.0),
        ("falcon", {"multi_query": True}, 1.0),
        pytest.param("deepseek_v3", LATENTS, 1.0, marks=NEEDS_RECENT),
    ],
)
def test_what_all_heads_share_of_a_cache(family: str, options: dict[str, Any], shared: float) -> None:
    """A single head's keys and values, and the latents of DeepSeek, which tensor ranks cannot divide. Seen to fail:
    without it, by which eight ranks were taken to have an eighth of the latents each."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **options}))
    with on_fakes(model):
        for phase in infer(model, InferenceJob(batch_size=3, context=12, new_tokens=4), LiveMemory()):
            assert phase.undivided_cache == shared * phase.cache


def test_a_short_prompt_takes_few_steps() -> None:
    """Of ever more tokens. Seen to fail: one for each new token."""
    model, calls = build("llama"), list[None]()
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    with on_fakes(model):
        prefill, decode = infer(model, InferenceJob(batch_size=1, context=1, new_tokens=256), LiveMemory())
    assert len(calls) < 16
    assert decode.cache == 256 * prefill.cache


@pytest.mark.sampled(7)
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if IS_RECENT or family != "opt"])
def test_fine_tuning(family: str, job: str) -> None:
    fake, real = both(lambda: build(family), lambda model, memory: finetune(model, JOBS[job], memory))
    assert fake == real
    assert list(dict.fromkeys(phase.name for phase in fake)) == ["forward", "backward", "step"]
    parameters = sum(parameter.nbytes for parameter in build(family).parameters())
    gradients = [phase.gradients for phase in fake if phase.name == "backward"]
    assert max(gradients) == parameters
    if JOBS[job].accumulate == 1:  # else all are there before the last backward
        assert min(gradients) < parameters / 2, "at the backward's begin"


def test_what_the_optimizers_take() -> None:
    """AdamW has two states per parameter, and a copy of all while it steps in the `foreach` way."""

    def step(name: str) -> Phase:
        model = build("llama", torch.bfloat16)
        with on_fakes(model):
            return finetune(model, JOBS[name], LiveMemory())[-1]

    parameters = sum(parameter.nbytes for parameter in build("llama", torch.bfloat16).parameters())
    foreach, fused, momentum = step("foreach"), step("fused"), step("accumulate")
    assert foreach.gradients == fused.gradients == parameters
    assert foreach.optimizer == pytest.approx(2 * parameters, rel=0.01), "and counters of steps"
    assert momentum.optimizer == parameters
    assert foreach.stepping == pytest.approx(parameters, rel=0.01)
    assert fused.stepping < 0.01 * parameters


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_momentum"])
def test_weights_that_no_machine_has(optimizer: Any) -> None:
    """Terabytes each. Seen to fail: with torch's own way with the fused SGD, which it runs on real tensors."""
    sizes = {**SIZES, "hidden_size": 1 << 20, "intermediate_size": 1 << 20, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    with on_fakes(model):
        found = finetune(model, FineTuningJob(1, 8, optimizer=optimizer, implementation="fused"), LiveMemory())
    assert found[-1].stepping == 0
    assert (found[-1].optimizer > 1 << 42) == (optimizer == "sgd_momentum")


def test_the_model_is_as_before() -> None:
    model = build("llama").eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with on_fakes(model):
        finetune(model, JOBS["single"], LiveMemory())
    assert not model.training
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("job", [InferenceJob(4, 256, 8), FineTuningJob(4, 128)])
def test_an_independent_witness(job: InferenceJob | FineTuningJob) -> None:
    """The allocations and frees that torch's profiler records, in a size at which temporaries inside operators no
    longer matter."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 2000, "max_position_embeddings": 512}
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))

    def run() -> list[Phase]:
        memory = LiveMemory()
        return infer(model, job, memory) if isinstance(job, InferenceJob) else finetune(model, job, memory)

    with on_fakes(model):
        foreseen = max(phase.peak for phase in run())
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    changes = [size for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")]
    assert len(changes) > 100
    assert foreseen == pytest.approx(held + max(accumulate(changes)), rel=0.02)


def test_without_a_cache() -> None:
    class Bag(nn.Linear):
        def forward(self, input_ids: torch.Tensor, past_key_values: object, use_cache: bool) -> torch.Tensor:  # type: ignore[override]
            return input_ids

    with pytest.raises(CompressionError, match="Bag gives no cache"):
        infer(Bag(1, 1), InferenceJob(context=2), LiveMemory())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("job", ["foreach", "single", "mixed"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_rehearsal_tells_of_steps_with_and_without_accumulation(family: str, job: str) -> None:
    """And counting work changes nothing. Seen to fail: with the later forward's moments among those of a step alone."""

    def run(accumulate: int, meter: WorkMeter | None) -> Any:
        model = build(family)
        with on_fakes(model):
            return rehearse(model, replace(JOBS[job], accumulate=accumulate), LiveMemory(), meter)

    both = run(2, WorkMeter())
    assert list(both.phases(1)) == list(run(1, None).phases(1))
    assert list(both.phases(2)) == list(both.phases(7)) == list(run(5, None).phases(5))
    assert both.phases(1) != both.phases(2)


@NEEDS_RECENT
def test_work_of_a_step() -> None:
    """Two products for each of the forward's, and with checkpointing the layers' once more but for each one's last,
    which no backward needs; five of attention for two. A gradient that is added to another is read twice, written once.

    Seen to fail: with work of both steps together; without what the backward computes again.
    """

    def work(job: FineTuningJob) -> Any:
        model = build("llama")
        with on_fakes(model):
            return rehearse(model, job, LiveMemory(), WorkMeter()).work

    plain, again = work(FineTuningJob(3, 12, accumulate=2)), work(FineTuningJob(3, 12, gradient_checkpointing=True))
    parameters = [parameter for name, parameter in build("llama").named_parameters() if "embed" not in name]
    products = 2 * 3 * 12 * sum(parameter.numel() for parameter in parameters if parameter.dim() == 2)
    not_again = 2 * 3 * 12 * (97 * 32 + 2 * 48 * 32)
    attention = 2 * 4 * 3 * 4 * 12 * 12 * 8 / 2
    for name, factor in (("forward", 1), ("backward", 2), ("accumulate", 2)):
        assert plain[name]["product float32"] == factor * products
    assert again["backward"]["product float32"] == 3 * products - not_again
    assert (plain["forward"]["attention float32"], plain["backward"]["attention float32"]) == (
        attention,
        2.5 * attention,
    )
    assert again["backward"]["attention float32"] == 3.5 * attention
    size = sum(parameter.nbytes for parameter in build("llama").parameters())
    added = plain["accumulate"]["elementwise"] - plain["backward"]["elementwise"]
    assert added == pytest.approx(3 * size, rel=0.01)
    fused = work(FineTuningJob(3, 12, implementation="fused"))["step"]["elementwise"]
    assert 7 * size <= fused < plain["step"]["elementwise"], "all is read, all but gradients is written"
    packed = work(FineTuningJob(3, 12, optimizer="adamw_8bit"))["step"]["elementwise"]
    assert 3 * size < packed < fused


class Joined(nn.Module):
    """Two parameters that are joined, whose gradients are views of one; and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(8, size)) for size in (4, 4, 2))

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(loss=torch.cat([self.first, self.second]).square().sum() + self.third.square().sum())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_share_memory_count_once(accumulate: int) -> None:
    """Seen to fail: with the storages of all gradients."""
    phases = finetune(Joined(), FineTuningJob(1, 4, accumulate, "sgd"), LiveMemory())
    model = Joined()
    for _ in range(accumulate):
        model(torch.zeros(1), torch.zeros(1), use_cache=False).loss.backward()
    wanted = storage_bytes([parameter.grad for parameter in model.parameters()])
    assert max(phase.gradients for phase in phases) == wanted
