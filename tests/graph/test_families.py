"""The traced graph computes what the model computes: for every family, with padding, for sizes other than the traced.

Equality is exact: leaves are the model's own modules and the operations between them are recorded before anything is
decomposed. The only exception is named at its place. Seen to fail when the executor changes one constant.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import BASE, CAUSAL_LM, VOCAB, causal_lm, executed, randomized, token_batch, traced
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from lightning_compress.graph.fallback import OF_ONE_SIZE, TraceFallbackWarning
from lightning_compress.graph.leaf import Leaf
from lightning_compress.graph.trace import violated_guards

SHAPES = ((2, 13), (4, 21), (1, 6), (2, 1))
"""Rows and lengths: like the traced batch, larger, smaller, of one token."""

SINGLE_CALLS = {
    "bamba": {"model.layers.0.mamba"},
    "falcon_h1": {"model.layers.0.mamba", "model.layers.1.mamba"},
    "falcon_mamba": {"backbone.layers.0.mixer", "backbone.layers.1.mixer"},
    "granitemoehybrid": {"model.layers.0.mamba"},
    "jamba": {"model.layers.0.mamba"},
    "mamba": {"backbone.layers.0.mixer", "backbone.layers.1.mixer"},
    "mamba2": {"backbone.layers.0.mixer", "backbone.layers.1.mixer"},
    "qwen3_next": {"model.layers.0.linear_attn"},
    "rwkv": {"rwkv.blocks.0.attention", "rwkv.blocks.1.attention"},
    "zamba2": {"model.layers.0.mamba", "model.layers.1.mamba_decoder.mamba"},
}
"""Families with modules that loop over the sequence: those become single calls, the rest of the layer does not."""

SHAPE_RUNS = {
    "jetmoe": "model.layers.0.self_attention.experts.input_linear",
    "recurrent_gemma": "model.layers.0.temporal_block.rg_lru",
    "xlstm": "backbone.blocks.0.mlstm_layer.mlstm_backend",
}
"""Families with a module (no target, nor any inside) whose body cannot run on symbolic sizes."""
if Version(transformers.__version__) < Version("5.20"):
    SHAPE_RUNS["aria_text"] = "model.layers.0.mlp.experts"


@pytest.mark.sampled(9)
@pytest.mark.parametrize("family", sorted(CAUSAL_LM))
def test_causal_language_models(family: str) -> None:
    """Equal logits for four shapes; and targets hidden only where the family is known to need it."""
    model = causal_lm(family)
    expected = pytest.warns(TraceFallbackWarning) if family in SINGLE_CALLS else contextlib.nullcontext()
    with expected:
        graph = traced(model, token_batch(2, 13))
    assert {fallback.module for fallback in graph.fallbacks if fallback.hidden} == SINGLE_CALLS.get(family, set())
    others = [fallback.module for fallback in graph.fallbacks if not fallback.hidden]
    assert others == ([SHAPE_RUNS[family]] if family in SHAPE_RUNS else [])
    assert {span.name.rpartition(".")[2] for span in graph.spans} == {"0", "1"}
    for shape in SHAPES:
        assert_equal(graph, model, token_batch(*shape), use_cache=False)


def assert_equal(graph: Any, model: nn.Module, batch: dict[str, Tensor], **arguments: Any) -> None:
    assert violated_guards(graph, batch) == []
    with torch.no_grad():
        expected = model(**batch, **arguments).logits
    logits = executed(graph, model, batch)["logits"]
    if logits.shape[1] == 1:
        # transformers skips the mask of a single token, so attention may take another kernel
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(logits, expected), f"{tuple(logits.shape)}: {(logits - expected).abs().max()}"


VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
IMAGE = VOCAB - 1


def with_image(rows: int, length: int, num_image_tokens: int, dims: tuple[int, ...] = (3, 16, 16)) -> dict[str, Tensor]:
    """A padded batch of tokens with an image in each row."""
    batch = token_batch(rows, length + num_image_tokens, padding="right")
    batch["input_ids"][:, 1 : 1 + num_image_tokens] = IMAGE
    return {**batch, "pixel_values": torch.randn(rows, *dims)}


def bert() -> tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]:
    return BertForMaskedLM(BertConfig(**BASE)), token_batch


def vit() -> tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]:
    return ViTForImageClassification(ViTConfig(**VISION)), lambda rows, _: {
        "pixel_values": torch.randn(rows, 3, 16, 16)
    }


def t5() -> tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}

    def batch(rows: int, length: int) -> dict[str, Tensor]:
        decoder = token_batch(rows, length + 2)
        return {**token_batch(rows, length), **{f"decoder_{key}": value for key, value in decoder.items()}}

    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)), batch


def whisper() -> tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]:
    config = WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCAB, num_mel_bins=8, max_source_positions=20,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), lambda rows, length: {
        "input_features": torch.randn(rows, 8, 40),
        "decoder_input_ids": token_batch(rows, length)["input_ids"],
    }


def gemma3() -> tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]:
    config = Gemma3Config(
        text_config={**BASE, "head_dim": 8, "sliding_window": 8, "model_type": "gemma3_text"},
        vision_config={**VISION, "model_type": "siglip_vision_model"},
        image_token_index=IMAGE, boi_token_index=IMAGE - 1, eoi_token_index=IMAGE - 2, mm_tokens_per_image=4,
    )  # fmt: skip

    def batch(rows: int, length: int) -> dict[str, Tensor]:
        made = with_image(rows, length, 4)
        return {**made, "token_type_ids": (made["input_ids"] == IMAGE).long()}

    return Gemma3ForConditionalGeneration(config), batch


def mllama() -> tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]:
    config = MllamaConfig(
        vision_config={
            **VISION, "num_global_layers": 1, "attention_heads": 4, "max_num_tiles": 2, "vision_output_dim": 64,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2]],
        },
        text_config={**BASE, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_scaling": None},
        image_token_index=IMAGE,
    )  # fmt: skip

    def batch(rows: int, length: int) -> dict[str, Tensor]:
        return {
            **with_image(rows, length, 0, dims=(1, 2, 3, 16, 16)),
            "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(rows, 1, 2, dtype=torch.long),
            "cross_attention_mask": torch.ones(rows, length, 1, 2, dtype=torch.long),
        }

    return MllamaForConditionalGeneration(config), batch


def llava() -> tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]:
    config = LlavaConfig(
        text_config={**BASE, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=IMAGE, image_seq_length=16,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config), lambda rows, length: with_image(rows, length, 16)


def qwen2_vl() -> tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        text_config={**BASE, "model_type": "qwen2_vl_text", "rope_parameters": rope},
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 1, "mlp_ratio": 2,
        },
        image_token_id=IMAGE, video_token_id=IMAGE - 1, vision_start_token_id=IMAGE - 2,
    )  # fmt: skip

    return Qwen2VLForConditionalGeneration(config), qwen2_vl_batch


def qwen2_vl_batch(rows: int, length: int, height: int = 4) -> dict[str, Tensor]:
    """Images of `height` x 4 patches, four of which make a token."""
    made = with_image(rows, length, height)
    return {
        **made,
        "pixel_values": torch.randn(rows * height * 4, 3 * 16),
        "image_grid_thw": torch.tensor([[1, height, 4]] * rows),
        "mm_token_type_ids": (made["input_ids"] == IMAGE).int(),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [bert, vit, t5, whisper, gemma3, mllama], ids=lambda build: build.__name__)
def test_other_architectures(build: Callable[[], tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]]) -> None:
    """Encoders, encoder-decoders and vision-language models: equal logits for four shapes, nothing falls back."""
    torch.manual_seed(0)
    model, batch = build()
    randomized(model)
    graph = traced(model, batch(2, 13))
    assert graph.fallbacks == ()
    for shape in SHAPES:
        cache = {} if build in (bert, vit) else {"use_cache": False}
        assert_equal(graph, model, batch(*shape), **cache)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [llava, qwen2_vl], ids=lambda build: build.__name__)
def test_unrolled_images(build: Callable[[], tuple[nn.Module, Callable[[int, int], dict[str, Tensor]]]]) -> None:
    """Models that make a Python list of the images: a graph serves as many rows as it was traced with, and says so."""
    torch.manual_seed(0)
    model, batch = build()
    randomized(model)
    vision = [f"model.visual.{part}" for part in ("patch_embed", "merger.mlp.0")]
    expected = pytest.warns(TraceFallbackWarning) if build is qwen2_vl else contextlib.nullcontext()
    with expected:
        graph = traced(model, batch(2, 13))
    reasons = {fallback.module: fallback.reason for fallback in graph.fallbacks}
    assert {fallback.how for fallback in graph.fallbacks if fallback.module == "model"} == {OF_ONE_SIZE}
    assert "batches of one size only" in reasons["model"]
    assert ("model.visual" in reasons) == (build is qwen2_vl), vision
    for shape in ((2, 13), (2, 9), (2, 4)):
        assert_equal(graph, model, batch(*shape), use_cache=False)
    assert any("size 0 is 3, not 2" in problem for problem in violated_guards(graph, batch(3, 13)))


@pytest.mark.slow
def test_images_of_several_sizes() -> None:
    """What reads where images are, and how large, are single calls; the graph serves sizes that it has not seen. Seen
    to fail: with sizes taken from one batch (the number of image tokens is a constant then)."""
    torch.manual_seed(0)
    model, _ = qwen2_vl()
    randomized(model)
    seen = [qwen2_vl_batch(2, 13, height) for height in (8, 4)]
    with pytest.warns(TraceFallbackWarning):
        graph = traced(model, seen[0], others=seen)
    (method,) = [node.target for node in graph.graph.nodes if isinstance(node.target, Leaf) and node.target.within]
    assert method.name == "model.get_rope_index"
    for batch in (*seen, qwen2_vl_batch(2, 7, 12)):
        assert_equal(graph, model, batch, use_cache=False)
