"""Tiny models, batches and recipes for every folder's tests, and the engine without Lightning around it."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CLIPImageProcessorPil,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaProcessor,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from lightning_compress.calibration import solve as solving
from lightning_compress.calibration.batches import collect
from lightning_compress.calibration.resume import MANIFEST
from lightning_compress.graph.shared_inputs import Group
from lightning_compress.graph.stages import Schedule
from lightning_compress.memory.source import is_on_meta, parameters_on_meta
from lightning_compress.plugin.job import Job, prepare_job
from lightning_compress.plugin.run import run_job
from lightning_compress.plugin.settings import Settings
from lightning_compress.recipe.load import RecipeLike, load_recipe
from lightning_compress.report.report import Report
from lightning_compress.statistics import InputGram, Statistic

IS_RECENT = Version(transformers.__version__) >= Version("5.23")
NEEDS_RECENT = pytest.mark.skipif(not IS_RECENT, reason="transformers before 5.23 reads or computes this otherwise")

UNREAD_BY_OLDER = pytest.mark.filterwarnings(
    f"{'error' if IS_RECENT else 'ignore'}::lightning_compress.export.verify.ReadBackWarning"
)
"""Of a checkpoint that transformers before 5.23 cannot read, which is said."""
NEEDS_FLOAT6 = pytest.mark.skipif(
    "MXFP6A16" not in PRESET_SCHEMES, reason="compressed-tensors before 0.20 has no 6 bits"
)

CPU = torch.device("cpu")
VOCAB = 64
PAD = 0


def tiny_llama(
    num_layers: int = 2, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> LlamaForCausalLM:
    """Weights large enough for a layer to matter, embeddings of low rank so that inputs are correlated."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "pad_token_id": PAD,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides}))
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        low_rank = torch.randn(len(embedding), 6) @ torch.randn(6, embedding.shape[1])
        embedding.copy_(low_rank + 0.3 * torch.randn_like(embedding))
    for parameter in model.parameters():  # not buffers: a loader makes rotary frequencies in float32
        parameter.data = parameter.data.to(dtype)
    return model.eval()


class Skipping(nn.Module):
    """Two blocks (`layers`), the second of which reads also what the first has computed behind a Linear."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_First(width), _Second(width)])

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.layers[0](x)
        return cast(Tensor, self.layers[1](y, h))


class _First(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x).relu()
        return self.down(h), h


class _Second(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.skip, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, y: Tensor, h: Tensor) -> Tensor:
        return cast(Tensor, self.out((self.skip(h) + y).relu()))


class ViewsBlock(nn.Module):
    """Reads a value by other names after it was changed: by a part, and by a view that was made while it waited."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e, self.f = (nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        part = h[:, :2]
        h.add_(0.2 * self.b(h))
        y = self.c(h)
        flat = h.view(-1, h.shape[-1])
        y = self.d(y)
        h.mul_(0.5)
        return cast(Tensor, x + y + self.e(flat).view_as(y) + self.f(part).mean(1, keepdim=True))


class Counting(nn.Module):
    """Writes to its buffers in eval mode too: a count, and a running mean that it subtracts and, layers later, adds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.count += 1
        self.mean.mul_(0.5).add_(x.mean((0, 1)) * self.count)
        y: Tensor = self.norm((x - self.mean).mT).mT
        return cast(Tensor, self.out(torch.relu(self.last(y)) + self.mean))


def tiny_mixtral(num_layers: int, num_experts: int) -> MixtralForCausalLM:
    """Experts of 32 x 32 that its checkpoints store one by one and the module as one parameter."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": num_layers}
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **heads, **experts)).eval()


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.relu(self.up(x)))
        return down


class _Mixture(nn.Module):
    """As checkpoints with code of their own write it: a list of experts, of which those that are hit are called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 6)
        self.experts = nn.ModuleList([_Expert() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                result.index_add_(0, token, expert(tokens[token]) * weights[token, place, None])
        return result.view_as(x)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.out = _Mixture(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(x)
        return x + cast(Tensor, self.out(x))


class ListMixture(nn.Module):
    """Two layers with experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_Layer() for _ in range(2)])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def shun(self, layer: int, expert: int) -> None:
        """No token shall be routed there."""
        with torch.no_grad():
            cast(Any, self.layers[layer]).mlp.gate.bias[expert] = -1e4


def tiny_qwen2_vl(width: int, depth: int) -> Qwen2VLForConditionalGeneration:
    """Hidden states `width` wide, a tower of `depth` layers, patches of 4 x 4 of which four are a token."""
    heads = max(width // 32, 2)
    half = width // heads // 2
    section = [half // 4, 3 * half // 8, 3 * half // 8]
    rope = {"rope_type": "default", "mrope_section": section, "rope_theta": 10000.0}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
    config = Qwen2VLConfig(
        text_config={
            **sizes, "num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": 97,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": depth, "embed_dim": max(width // 2, 32), "hidden_size": width, "num_heads": 4, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 1, "mlp_ratio": 2,
        },
        image_token_id=96, video_token_id=95, vision_start_token_id=94, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(config).eval()


def image_batch(length: int, height: int, width: int) -> dict[str, Tensor]:
    """For `tiny_qwen2_vl`: a row of so many tokens, the first of which are an image's of so many patches."""
    tokens = height * width // 4
    ids = torch.randint(3, 90, (1, length))
    ids[:, 1 : 1 + tokens] = 96
    return {
        "input_ids": ids, "pixel_values": torch.randn(height * width, 3 * 16),
        "image_grid_thw": torch.tensor([[1, height, width]]), "mm_token_type_ids": (ids == 96).int(),
    }  # fmt: skip


def llava_processor(words: Sequence[str], **options: Any) -> LlavaProcessor:
    """Of text in these words (unknown, end and image first) with images of 32 x 32 in patches of 8: 16 tokens each."""
    vocabulary = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary,
        eos_token=words[1],
        unk_token=words[0],
        pad_token=words[1],
        additional_special_tokens=[words[2]],
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        **options,
    )


class Harmful:
    """Runs code when a careless reader unpickles it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def saved(model: nn.Module, folder: Path, **options: Any) -> nn.Module:
    """The model written to `folder`, and its like on the meta device."""
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    with parameters_on_meta():
        empty = type(model)._from_config(model.config, dtype=model.dtype)  # type: ignore[attr-defined]
    assert is_on_meta(empty)
    return empty.eval()


def manifest(folder: Path) -> list[Any]:
    """The manifest apart from what a run took: seconds, and the bytes that it held and moved."""

    def told(value: Any) -> Any:
        if isinstance(value, list):
            return [told(each) for each in value]
        if not isinstance(value, dict):
            return value
        took = {"activation_bytes", "peak_bytes", "moved_bytes"}
        return {key: told(each) for key, each in value.items() if not key.endswith("_s") and key not in took}

    return [told(json.loads(line)) for line in (folder / MANIFEST).read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    """What has to be equal in two output folders: everything but timings."""
    timed = {MANIFEST, "report.json", "report.html"}
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in timed}


def token_batches(
    num_batches: int = 4, rows: int = 2, length: int = 16, seed: int = 0, vocab: int = VOCAB
) -> list[dict[str, Tensor]]:
    """Batches without padding."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(1, vocab, (rows, length), generator=generator)} for _ in range(num_batches)]


def padded(batches: Iterable[Mapping[str, Tensor]], extra: int = 5, left: bool = False) -> list[dict[str, Tensor]]:
    """The same tokens with `extra` positions of padding and a mask that marks them."""
    result = []
    for batch in batches:
        ids = batch["input_ids"]
        padding = ids.new_full((len(ids), extra), PAD)
        mask = torch.cat([torch.ones_like(ids), torch.zeros_like(padding)], 1)
        padded_ids = torch.cat([ids, padding], 1)
        if left:
            padded_ids, mask = padded_ids.roll(extra, 1), mask.roll(extra, 1)
        result.append({"input_ids": padded_ids, "attention_mask": mask})
    return result


def ragged_batches(
    lengths: Sequence[Sequence[int]] = ((9, 4), (16, 11), (7, 7)), seed: int = 0
) -> list[dict[str, Tensor]]:
    """Batches of several lengths, padded on the right to the longest of their own rows."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for batch in lengths:
        ids = torch.randint(1, VOCAB, (len(batch), max(batch)), generator=generator)
        mask = (torch.arange(max(batch)) < torch.tensor(batch)[:, None]).long()
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


def weights(
    num_bits: int = 4, *, symmetric: bool = True, strategy: str = "group", group_size: int = 16
) -> dict[str, Any]:
    """The weights' part of a scheme."""
    group = {"group_size": group_size} if strategy == "group" else {}
    return {"num_bits": num_bits, "type": "int", "symmetric": symmetric, "strategy": strategy, **group}


def modifier(
    num_bits: int = 4,
    algorithm: str = "gptq",
    *,
    scheme: Any = None,
    targets: Any = None,
    ignore: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """One modifier as a mapping; options are those of `weights` and of the algorithm."""
    of_weights = {key: options.pop(key) for key in ("symmetric", "strategy", "group_size") if key in options}
    entry = {"algorithm": algorithm, "scheme": scheme or {"weights": weights(num_bits, **of_weights)}, **options}
    if targets is not None:
        entry["targets"] = targets
    if ignore is not None:
        entry["ignore"] = ignore
    return entry


def recipe(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """A recipe of one `modifier`."""
    return {"modifiers": [modifier(*args, **kwargs)]}


def prepare(
    model: nn.Module, batches: Iterable[Any] | None, recipe: RecipeLike, output_dir: Path | None = None, **settings: Any
) -> Job:
    """A job on the CPU; `settings` are those of `plugin.settings.Settings`."""
    if "schedule" in settings:
        settings["schedule"] = Schedule(settings["schedule"])
    data = None if batches is None else collect(batches)
    return prepare_job(model, data, Settings(load_recipe(recipe), output_dir, **settings), CPU)


def run(job: Job) -> Report:
    """Drive a job to its end."""
    generator = run_job(job)
    try:
        while True:
            next(generator)
    except StopIteration as stop:
        return stop.value


def compress(
    model: nn.Module, batches: Iterable[Any] | None, recipe: RecipeLike, output_dir: Path | None, **settings: Any
) -> Report:
    """Compress `model` and write the checkpoint."""
    return run(prepare(model, batches, recipe, output_dir, **settings))


def compress_in_memory(model: nn.Module, batches: Iterable[Any] | None, recipe: RecipeLike, **settings: Any) -> Report:
    """Compress `model` without writing anything."""
    return compress(model, batches, recipe, None, **settings)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def input_grams(model: nn.Module, batches: Iterable[Any], call: Any = None) -> dict[str, Tensor]:
    """Sum of x xᵀ, float64, of every linear's input, by plain forward hooks; padding positions are left out."""
    grams: dict[str, Tensor] = {}
    keep: list[Tensor | None] = []

    def hook(name: str) -> Any:
        def observe(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            flat = x.detach().double().reshape(-1, x.shape[-1])
            if keep[-1] is not None and len(keep[-1]) == len(flat):
                flat = flat[keep[-1]]
            grams[name] = grams.get(name, 0) + flat.T @ flat

        return observe

    handles = [
        module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in linears(model).items()
    ]
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        keep.append(None if mask is None else mask.reshape(-1).bool())
        with torch.no_grad():
            call(batch) if call else model(**batch)
    for handle in handles:
        handle.remove()
    return grams


def seen_statistics(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[type[Statistic], Statistic]]:
    """What each module is solved with, filled while the engine runs."""
    seen: dict[str, dict[type[Statistic], Statistic]] = {}
    stacked = solving._stacked

    def stack(
        group: Group, root: Any, resolved: Any, statistics: Mapping[type[Statistic], Statistic]
    ) -> solving._Stacked:
        seen.update({name: dict(statistics) for name in group.members})
        return stacked(group, root, resolved, statistics)

    monkeypatch.setattr(solving, "_stacked", stack)
    return seen


def gram_sum(statistics: Mapping[type[Statistic], Statistic]) -> Tensor:
    """Sum of x xᵀ in float64 of an `InputGram`."""
    gram = statistics[InputGram]
    assert isinstance(gram, InputGram)
    return gram.matrix().double() * gram.num_tokens


def make_representable(model: nn.Module) -> nn.Module:
    """Round all linear weights to 8-bit asymmetric grids that min-max scales find again, so that quantizing changes
    nothing.

    Every row holds the smallest and the largest code, and scales are powers of two.
    """
    with torch.no_grad():
        for linear in linears(model).values():
            codes = (linear.weight / 2**-9).round().clamp(-128, 127)
            codes[:, 0], codes[:, 1] = -128, 127
            linear.weight.copy_(codes * 2**-9)
    return model


UNCHANGING = {"num_bits": 8, "symmetric": False, "strategy": "channel", "scale_search": False}
"""Options of `recipe` under which `make_representable` models stay as they are."""


CHANGES_NOTHING = recipe(num_bits=8, symmetric=False, strategy="channel", scale_search=False)
"""Of weights that `make_representable` has put on its grid."""


def check_inputs(model: nn.Module, batches: Iterable[Any], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Report:
    """All linears are solved with what plain hooks see, where quantizing changes nothing."""
    make_representable(model.eval())
    expected = input_grams(model, batches, model)
    seen = seen_statistics(monkeypatch)
    report = compress_in_memory(model, batches, CHANGES_NOTHING, **settings)
    assert seen.keys() == expected.keys()
    for name, statistics in seen.items():
        torch.testing.assert_close(gram_sum(statistics), expected[name], rtol=1e-5, atol=1e-4)
    return report
