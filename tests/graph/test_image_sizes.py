"""Batches whose images have other sizes, or of which they have another number; sounds of several lengths.

The graph is recorded on some of the batches, and serves others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from families import VOCAB, executed, randomized, traced
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from lightning_compress.graph.trace import violated_guards

IMAGE = VOCAB - 1
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
Batch = dict[str, Tensor]


def with_image_tokens(number: int, **others: Tensor) -> Batch:
    ids = torch.randint(1, VOCAB - 1, (1, number + 9))
    ids[:, 2 : 2 + number] = IMAGE
    return {"input_ids": ids, **others}


def idefics3() -> tuple[nn.Module, list[Batch]]:
    """Tiles of 32 x 32, of which each gives four tokens."""
    config = Idefics3Config(
        text_config={"model_type": "llama", **TEXT}, vision_config=VISION, image_token_id=IMAGE, scale_factor=2
    )
    numbers = (1, 3, 2, 5)
    batches = [with_image_tokens(4 * tiles, pixel_values=torch.randn(1, tiles, 3, 32, 32)) for tiles in numbers]
    return Idefics3ForConditionalGeneration(config), batches


def mistral3() -> tuple[nn.Module, list[Batch]]:
    """Images of patches of 8 x 8, of which four give a token."""
    config = Mistral3Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={"model_type": "pixtral", "head_dim": 16, **VISION, "image_size": 96},
        image_token_index=IMAGE,
        spatial_merge_size=2,
    )
    sizes = ((32, 32), (64, 32), (32, 96), (64, 64))
    batches = [
        with_image_tokens(h * w // 256, pixel_values=torch.randn(1, 3, h, w), image_sizes=torch.tensor([[h, w]]))
        for h, w in sizes
    ]
    return Mistral3ForConditionalGeneration(config), batches


def wav2vec2() -> tuple[nn.Module, list[Batch]]:
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = Wav2Vec2Config(vocab_size=32, **sizes, **convolutions, **positions)
    return Wav2Vec2ForCTC(config), [{"input_values": torch.randn(2, length)} for length in (400, 560, 401, 777)]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.*recorded as a single call", "ignore:.*output shape is taken from a run")
@pytest.mark.parametrize("build", [idefics3, mistral3, wav2vec2], ids=lambda build: build.__name__)
def test_sizes_that_differ_among_batches_are_free(build: Callable[[], tuple[Any, Sequence[Batch]]]) -> None:
    """Seen to fail: with sizes of images that are constants, which refused the second batch."""
    torch.manual_seed(0)
    model, batches = build()
    randomized(model.eval())
    graph = traced(model, batches[1], others=batches[:3])
    for batch in batches:
        assert violated_guards(graph, batch) == []
        with torch.no_grad():
            expected = model(**batch).logits
        assert torch.equal(executed(graph, model, batch)["logits"], expected)


@pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 13), reason="torch 2.11 decides by a size that values give")
def test_layers_of_a_tower_that_chooses_its_images() -> None:
    """Tiles of zeros are padding and left out, so how many its layers see follows from values, and is no size of the
    batch that they could fix. Seen to fail: attention and layers that were single calls."""
    torch.manual_seed(0)
    model, batches = idefics3()
    randomized(model.eval())
    padded = with_image_tokens(8, pixel_values=torch.randn(1, 3, 3, 32, 32))
    padded["pixel_values"][:, 1] = 0
    graph = traced(model, batches[1], others=[*batches[:3], padded])
    assert graph.fallbacks == ()
    for batch in (*batches, padded):
        with torch.no_grad():
            expected = model(**batch).logits
        assert torch.equal(executed(graph, model, batch)["logits"], expected)


@pytest.mark.filterwarnings("ignore:.*recorded as a single call")
def test_sizes_that_are_the_same_in_all_batches_are_constants() -> None:
    torch.manual_seed(0)
    model, batches = mistral3()
    randomized(model.eval())
    graph = traced(model, batches[0], others=[batches[0]])
    assert any("pixel_values: size 2 is 64, not 32" in problem for problem in violated_guards(graph, batches[1]))
