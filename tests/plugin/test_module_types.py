"""Modules that are no Linears, on their whole way: GPT-2's `Conv1D`, tables, convolutions."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from helpers import NEEDS_RECENT, VOCAB, compress, contents, modifier, ragged_batches, recipe, saved, tiny_llama
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from lightning_compress import CompressionError, load_compressed, parameters_on_meta
from lightning_compress.command.models import _in_memory
from lightning_compress.data.perplexity import perplexity
from lightning_compress.export.packed import checkpoint_source, unfolded_as_packed
from lightning_compress.export.verify import ReadBackWarning
from lightning_compress.graph.fallback import TraceFallbackWarning
from lightning_compress.memory.placement import MemoryConfig, placement

CPU = torch.device("cpu")
INT8_TENSOR = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
INT8_CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=32)).eval()


def stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


class Spelled(nn.Module):
    """A GPT-2 with Linears in place of its `Conv1D`s."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = deepcopy(model)
        for block in self.model.transformer.h:
            places = [(block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")]
            for parent, name in places:
                conv = getattr(parent, name)
                linear = nn.Linear(conv.nx, conv.nf)
                linear.load_state_dict({"weight": conv.weight.t(), "bias": conv.bias})
                setattr(parent, name, linear)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits


@NEEDS_RECENT
@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
def test_gpt2_is_what_it_is_with_linears(tmp_path: Path) -> None:
    """Packed as Linears are, which is how vLLM keeps them; what is ignored has its own form."""
    batches = ragged_batches()
    model, linears = gpt2(), Spelled(gpt2())
    given = recipe(4, group_size=16, ignore=["lm_head", "re:.*h.1.mlp.c_fc"])
    report = compress(model, batches, given, tmp_path / "out")
    compress(linears, batches, given, tmp_path / "linears")
    ours, theirs = stored(tmp_path / "out"), stored(tmp_path / "linears")
    packed = [key for key in ours if key.endswith(("_packed", "_scale", "_shape"))]
    assert len(packed) == 7 * 3
    for key in packed:
        assert torch.equal(ours[key], theirs[key]), key
    assert torch.equal(ours["transformer.h.1.mlp.c_fc.weight"], gpt2().transformer.h[1].mlp.c_fc.weight)
    assert report.verification is not None
    assert report.verification.passed
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    loaded = load_compressed(gpt2(), tmp_path / "out")
    assert torch.equal(loaded(**batches[0]).logits, model(**batches[0]).logits)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
def test_gpt2_from_disk(tmp_path: Path) -> None:
    """The same bytes as from memory; and perplexity of the checkpoint, a layer at a time, is that of the model."""
    batches = ragged_batches()
    model = gpt2()
    empty = saved(model, tmp_path / "weights")
    compress(empty, batches, recipe(4, group_size=16), tmp_path / "disk", weights=tmp_path / "weights")
    compress(model, batches, recipe(4, group_size=16), tmp_path / "memory")
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
    again = saved(gpt2(), tmp_path / "empty")
    with unfolded_as_packed(again, tmp_path / "disk"):
        place = placement(MemoryConfig(), CPU, checkpoint_source(again, tmp_path / "disk"))
        streamed = perplexity(again, batches, place)
    assert streamed == pytest.approx(perplexity(model, batches), rel=1e-6)


@NEEDS_RECENT
def test_gpt2_with_quantized_inputs(tmp_path: Path) -> None:
    batches = ragged_batches()
    model = gpt2()
    scheme = {"weights": INT8_CHANNEL, "input_activations": INT8_TENSOR}
    with pytest.warns(ReadBackWarning, match="load_compressed, for GPT2LMHeadModel.from_pretrained .* cannot"):
        compress(model, batches, recipe(scheme=scheme), tmp_path / "out")
    assert len(model.transformer.h[0].attn.c_attn._forward_pre_hooks) == 1
    loaded = load_compressed(gpt2(), tmp_path / "out")
    assert torch.equal(loaded(**batches[0]).logits, model(**batches[0]).logits)


REFUSED: dict[str, dict[str, Any]] = {
    "one scheme": recipe(4, group_size=16),
    "two": {"modifiers": [modifier(4, group_size=16), modifier(8, strategy="channel", targets=["re:.*mlp"])]},
    "inputs": recipe(scheme={"weights": INT8_CHANNEL, "input_activations": INT8_TENSOR}),
}


@NEEDS_RECENT
@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_transformers_refuses_what_it_would_initialize(given: dict[str, Any], tmp_path: Path) -> None:
    """It would take the matrices of this model for missing; ours reads them. Seen to fail: without `dequantize`."""
    torch.manual_seed(0)
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, n_positions=32))
    report = compress(model.eval(), ragged_batches(), given, tmp_path / "out")
    assert report.verification is not None
    assert report.verification.passed
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        OpenAIGPTLMHeadModel.from_pretrained(tmp_path / "out")


@NEEDS_RECENT
@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
def test_who_loads_gpt2_is_told_how(tmp_path: Path) -> None:
    """From memory transformers would have to; and nothing can be loaded into a model without values."""
    compress(gpt2(), ragged_batches(), recipe(4, group_size=16), tmp_path / "out")
    with pytest.raises(CompressionError, match=r"transformers cannot load it .*model.load=disk"):
        _in_memory(GPT2LMHeadModel, str(tmp_path / "out"))
    with parameters_on_meta():
        empty = GPT2LMHeadModel(gpt2().config)
    with pytest.raises(CompressionError, match="GPT2LMHeadModel are on the meta device"):
        load_compressed(empty, tmp_path / "out")


def gemma() -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


TABLES: dict[str, list[dict[str, Any]]] = {
    "one scheme": [modifier(4, group_size=16, targets=["Linear", "Embedding"], scale_search=False)],
    "8 bits beside 4": [modifier(4, group_size=16), modifier(8, "rtn", strategy="channel", targets=["Embedding"])],
    "alone": [modifier(5, "rtn", strategy="channel", symmetric=False, targets=["model.embed_tokens"])],
}


@NEEDS_RECENT
@pytest.mark.parametrize("modifiers", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("build", [tiny_llama, gemma], ids=["Embedding", "a subclass"])
def test_tables_are_read_by_transformers(modifiers: list[dict[str, Any]], build: Any, tmp_path: Path) -> None:
    """Weights and outputs; each row is rounded to nearest."""
    model = build()
    table = model.model.embed_tokens.weight.detach().clone()
    report = compress(model, ragged_batches(), {"modifiers": modifiers}, tmp_path / "out")
    assert report.verification is not None
    assert report.verification.passed
    assert report.verification.loaded_with.startswith("transformers")
    after = model.model.embed_tokens.weight.detach()
    args = QuantizationArgs.model_validate(modifiers[-1]["scheme"]["weights"])
    values = table.unflatten(1, (-1, args.group_size or 32))
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    width = 2 * torch.maximum(high, -low) if args.symmetric else high - low
    steps = (after - table).unflatten(1, (-1, args.group_size or 32)) / (width / (2**args.num_bits - 1))
    assert steps.nan_to_num().abs().max() <= 0.5 + 1e-3  # a row of padding is zero
    assert (after != table).any()


class Patches(nn.Module):
    """A convolution, written as a Linear of its patches."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = nn.Linear(conv.weight[0].numel(), conv.out_channels)
        self.conv.load_state_dict({"weight": conv.weight.flatten(1), "bias": conv.bias})
        self.options = {"kernel_size": conv.kernel_size, "stride": conv.stride, "padding": conv.padding}

    def forward(self, x: Tensor) -> Tensor:
        height, width = ((size + 2 - 3) // 2 + 1 for size in x.shape[2:])
        y: Tensor = self.conv(functional.unfold(x, **self.options).transpose(1, 2))
        return y.transpose(1, 2).reshape(x.shape[0], self.conv.out_features, height, width)


class Images(nn.Module):
    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.features = convolution
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.features(x)).mean((2, 3)))
        return out


@pytest.mark.parametrize("schedule", ["staged", "block"])
def test_convolutions_are_linears_of_their_patches(schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)
    model, linears = Images(conv).eval(), Images(Patches(conv)).eval()
    linears.head.load_state_dict(model.head.state_dict())
    batches = [torch.randn(size, 4, 9, 12) for size in (5, 5, 3)]
    report = compress(
        model, batches, recipe(4, group_size=4, targets=["Linear", "Conv2d"]), tmp_path / "out", schedule=schedule
    )
    compress(linears, batches, recipe(4, group_size=4), None, schedule=schedule)
    assert [(record.module, record.shape, record.num_tokens, record.num_calls) for record in report.modules] == [
        ("features", (8, 36), 13 * 5 * 6, 1), ("head", (4, 8), 13, 1),
    ]  # fmt: skip
    assert torch.equal(model.features.get_parameter("weight").flatten(1), linears.features.get_parameter("conv.weight"))
    torch.testing.assert_close(model.head.weight, linears.head.weight, rtol=1e-5, atol=1e-6)  # kernels round otherwise
    empty = Images(nn.Conv2d(4, 8, 3, stride=2, padding=1)).eval()
    assert torch.equal(load_compressed(empty, tmp_path / "out")(batches[0]), model(batches[0]))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["config_groups"]["group_0"]["targets"] == ["Conv2d", "Linear"]


class Sounds(nn.Module):
    """A convolution over time, or the same over images of height 1."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.features = convolution
        self.head = nn.Linear(8, 4)
        self.are_images = isinstance(convolution, nn.Conv2d)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x[:, :, None])[:, :, 0] if self.are_images else self.features(x)
        out: Tensor = self.head(torch.relu(features).transpose(1, 2))
        return out


def test_convolutions_of_sequences(tmp_path: Path) -> None:
    """By their class, and read back. Seen to fail: left alone, as no module that can be quantized."""
    torch.manual_seed(0)
    model = Sounds(nn.Conv1d(4, 8, 3, stride=2, padding=1)).eval()
    images = Sounds(nn.Conv2d(4, 8, (1, 3), stride=2, padding=(0, 1))).eval()
    images.load_state_dict(
        {key: value.view(images.state_dict()[key].shape) for key, value in model.state_dict().items()}
    )
    batches = [torch.randn(size, 4, 12) for size in (5, 5, 3)]
    report = compress(model, batches, recipe(4, group_size=4, targets=["Linear", "Conv1d"]), tmp_path / "out")
    compress(images, batches, recipe(4, group_size=4, targets=["Linear", "Conv2d"]), None)
    assert [(record.module, record.shape, record.num_tokens) for record in report.modules] == [
        ("features", (8, 12), 13 * 6), ("head", (4, 8), 13 * 6),
    ]  # fmt: skip
    for name, weight in model.named_parameters():
        assert torch.equal(weight.flatten(), images.get_parameter(name).flatten())
    empty = Sounds(nn.Conv1d(4, 8, 3, stride=2, padding=1)).eval()
    assert torch.equal(load_compressed(empty, tmp_path / "out")(batches[0]), model(batches[0]))
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["config_groups"]["group_0"]["targets"] == ["Conv1d", "Linear"]


class Linear(nn.Module):
    """Of a library's own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def test_linears_of_a_class_of_their_own(tmp_path: Path) -> None:
    """Are Linears in the checkpoint, and read back. Seen to fail: refused."""
    torch.manual_seed(0)
    model, empty = (nn.Sequential(Linear(8, 8), nn.ReLU(), Linear(8, 4)).eval() for _ in range(2))
    batches = [torch.randn(size, 8) for size in (5, 5, 3)]
    report = compress(model, batches, recipe(4, group_size=4, targets=["Linear"]), tmp_path / "out")
    assert [(record.module, record.num_tokens) for record in report.modules] == [("0", 13), ("2", 13)]
    assert torch.equal(load_compressed(empty, tmp_path / "out")(batches[0]), model(batches[0]))


def test_a_convolution_in_an_opaque_module() -> None:
    """Its patches are seen there, too."""

    class Opaque(Images):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if float(x.sum()) < 1e9 else x

    class Whole(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.tail = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.tail(self.inner(x))
            return out

    torch.manual_seed(0)
    inner = Opaque(nn.Conv2d(4, 8, 3, stride=2, padding=1))
    plain = Images(nn.Conv2d(4, 8, 3, stride=2, padding=1))
    plain.load_state_dict(inner.state_dict())
    batches = [torch.randn(5, 4, 9, 12) for _ in range(3)]
    given = recipe(4, group_size=4, targets=["Conv2d", "tail"])
    opaque, traced = Whole(inner).eval(), Whole(plain).eval()
    with pytest.warns(TraceFallbackWarning, match="inner"):
        report = compress(opaque, batches, given, None)
    compress(traced, batches, given, None)
    assert [record.num_tokens for record in report.modules] == [15 * 5 * 6, 15]
    assert torch.equal(inner.features.get_parameter("weight"), plain.features.get_parameter("weight"))


@pytest.mark.filterwarnings("ignore::lightning_compress.export.verify.ReadBackWarning")
def test_patch_embeddings(tmp_path: Path) -> None:
    """Of a vision model, from memory and from disk; an ignored one keeps its form in the checkpoint."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=16, patch_size=4)).eval()
    name = next(name for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    before = model.get_parameter(f"{name}.weight").detach().clone()
    batches = [{"pixel_values": torch.randn(2, 3, 16, 16)} for _ in range(3)]
    empty = saved(model, tmp_path / "weights")
    given = recipe(4, group_size=16, targets=["Linear", "Conv2d"])
    compress(empty, batches, given, tmp_path / "disk", weights=tmp_path / "weights")
    left = recipe(4, group_size=16, targets=["Linear", "Conv2d"], ignore=[name])
    compress(deepcopy(model), batches, left, tmp_path / "left")
    report = compress(model, batches, given, tmp_path / "memory")
    assert contents(tmp_path / "disk") == contents(tmp_path / "memory")
    assert next(record.num_tokens for record in report.modules if record.module == name) == 6 * 16
    assert report.verification is not None
    assert report.verification.passed
    tensors = stored(tmp_path / "left")
    assert torch.equal(next(value for key, value in tensors.items() if key.endswith("patch_embedding.weight")), before)
