"""`lightning-compress inspect`: how a model is cut, without a calibration."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import compress_in_memory
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    MllamaConfig,
    MllamaForConditionalGeneration,
    MllamaImageProcessorPil,
    MllamaProcessor,
    PreTrainedTokenizerFast,
)

from lightning_compress.memory.store import WeightStore
from lightning_compress.memory.transfer import Lane, Sent

from .conftest import Command, refused

TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "cross_attention_layers": [1], "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "attention_heads": 4, "num_global_layers": 1,
    "image_size": 16, "patch_size": 4, "max_num_tiles": 2, "vision_output_dim": 64, "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1], [1, 2]],
}  # fmt: skip
CHANNELS = "recipe.modifiers.0.scheme={weights:{num_bits:4,strategy:channel}}"


def mllama_batches() -> list[dict[str, torch.Tensor]]:
    """A row of tokens with an image of two tiles."""
    torch.manual_seed(0)
    return [
        {
            "input_ids": torch.randint(1, 90, (1, length)),
            "pixel_values": torch.randn(1, 1, 2, 3, 16, 16),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
            "cross_attention_mask": torch.ones(1, length, 1, 2, dtype=torch.long),
        }
        for length in (9, 12)
    ]


def test_a_model_by_its_configuration(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    """Layers that are alike are one; the picture is where it is asked for. Weights are not read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    text = command("inspect", f"model.path={folder}", "--graph", str(tmp_path / "graph.svg"))
    assert "model.layers.0 ... model.layers.1  LlamaDecoderLayer x 2" in text
    cuts = [line for line in text.splitlines() if "- cut -" in line]
    assert [line.partition("- cut - ")[2] for line in cuts] == [
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj  [384 x 128]",
        "self_attn.o_proj  [128 x 128]",
        "mlp.gate_proj, mlp.up_proj  [256 x 128]",
        "mlp.down_proj  [128 x 128]",
    ]
    longer = command("inspect", f"model.path={folder}", "rows=3", "length=256")
    for sizes, said in (((2, 64), text), ((3, 256), longer)):
        assert f"traced on input_ids {list(sizes)}" in said
        least = 4 * sizes[0] * sizes[1] * 128  # hidden states of float32; and what is known of positions
        assert least / 1e6 < float(said.partition(" values, ")[2].split()[0]) < 2 * least / 1e6
    assert "<svg" in (tmp_path / "graph.svg").read_text()
    text = command("inspect", f"model.path={folder}", "schedule=block")
    assert len([line for line in text.splitlines() if "- cut -" in line]) == 1


@pytest.mark.slow
def test_layers_of_text_and_of_cross_attention(command: Command, checkpoint: Path, tmp_path: Path) -> None:
    """A Llama 3.2 Vision: each is onloaded by itself, and the tower is left alone."""
    model = MllamaForConditionalGeneration(MllamaConfig(vision_config=VISION, text_config=TEXT, image_token_index=98))
    model.save_pretrained(tmp_path / "model")
    for file in checkpoint.glob("tokenizer*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    text = command(
        "inspect", f"model.path={tmp_path / 'model'}", "model.auto_class=AutoModelForImageTextToText", CHANNELS,
        "data=custom", f"+data.loader._target_={__name__}.mllama_batches",
    )  # fmt: skip
    layers = [line.split("  ")[0] for line in text.splitlines() if line.startswith("model.language_model.layers.")]
    assert layers == [f"model.language_model.layers.{number}" for number in range(3)]
    cuts = text[text.index("MllamaCrossAttentionDecoderLayer") :].splitlines()[1:3]
    assert [line.partition("- cut - ")[2] for line in cuts] == [
        "cross_attn.q_proj  [32 x 32]", "cross_attn.k_proj, cross_attn.v_proj  [32 x 32]"
    ]  # fmt: skip
    assert "MllamaVisionEncoderLayer x 2" in text
    text = command(
        "inspect", f"model.path={tmp_path / 'model'}", "model.auto_class=AutoModelForImageTextToText", CHANNELS
    )
    assert "7 modules that the recipe targets are not reached by this batch" in text
    mllama_processor().save_pretrained(tmp_path / "model")
    text = command(
        "inspect", f"model.path={tmp_path / 'model'}", "model.auto_class=AutoModelForImageTextToText", CHANNELS
    )
    assert ", pixel_values [" in text
    assert [
        line.split("  ")[0] for line in text.splitlines() if line.startswith("model.language_model.layers.")
    ] == layers
    assert "not reached" not in text
    assert "could not be recorded" not in text
    mllama_processor(size=24).save_pretrained(tmp_path / "model")
    text = command(
        "inspect", f"model.path={tmp_path / 'model'}", "model.auto_class=AutoModelForImageTextToText", CHANNELS
    )
    assert "traced on input_ids [" in text
    assert "It could not be recorded on an image and a word: " in text


@pytest.mark.slow
def test_all_that_it_was_tried_on(command: Command, tmp_path: Path) -> None:
    """Seen to fail: with the last reason alone."""
    model = MllamaForConditionalGeneration(MllamaConfig(vision_config=VISION, text_config=TEXT, image_token_index=98))
    model.config.text_config.num_key_value_heads = 3
    model.config.save_pretrained(tmp_path)
    mllama_processor(size=24).save_pretrained(tmp_path)
    text = refused(
        command, "inspect", f"model.path={tmp_path}", "model.auto_class=AutoModelForImageTextToText", CHANNELS
    )
    assert "It could not be recorded on an image and a word: " in text
    assert "cannot record model.language_model.layers.0.self_attn" in text


@pytest.mark.slow
def test_a_run_onloads_layers_of_text_and_of_cross_attention_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Onloading copies, as to a device: what is not where it was is there. Seen to fail: with weights that stay, and
    with sequential targets that hold all layers."""
    torch.manual_seed(0)
    model = MllamaForConditionalGeneration(MllamaConfig(vision_config=VISION, text_config=TEXT, image_token_index=98))
    layers = model.model.language_model.layers
    homes = {name: (parameter, parameter.data_ptr()) for name, parameter in layers.named_parameters()}
    onload, onloaded = WeightStore.onload, []

    @contextmanager
    def watched(store: WeightStore, *given: Any, **options: Any) -> Iterator[None]:
        with onload(store, *given, **options):
            onloaded.append(sorted({name[0] for name, (tensor, at) in homes.items() if tensor.data_ptr() != at}))
            yield

    monkeypatch.setattr(WeightStore, "onload", watched)
    monkeypatch.setattr(Lane, "is_away", lambda *_: True)
    monkeypatch.setattr(Lane, "send", lambda _, tensor: Sent(tensor.clone()))
    scheme = {"num_bits": 4, "strategy": "channel"}
    report = compress_in_memory(
        model, mllama_batches(), {"modifiers": [{"algorithm": "gptq", "scheme": {"weights": scheme}}]}
    )
    assert [there for there, _ in groupby(onloaded) if there] == [["0"], ["1"], ["2"]]
    of_cross_attention = [each.module for each in report.modules if ".cross_attn." in each.module]
    assert [name.rpartition(".")[2] for name in of_cross_attention] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def mllama_processor(size: int = 16) -> MllamaProcessor:
    """Of images of `size` x `size` in one or two tiles; the vocabulary is 99 words."""
    vocabulary = Tokenizer(models.WordLevel({f"w{number}": number for number in range(98)} | {"<|image|>": 98}, "w0"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, bos_token="w1", unk_token="w0", pad_token="w0",
        additional_special_tokens=["<|image|>"],
    )  # fmt: skip
    images = MllamaImageProcessorPil(size={"height": size, "width": size}, max_image_tiles=2)
    return MllamaProcessor(images, tokenizer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["graph=out.xyz"], "graph=out.xyz: Format 'xyz' is not supported"),
        (["schedule=stagd"], "schedules are staged, recompute, block, basic, datafree"),
        (["schedule=datafree"], "With schedule=datafree nothing runs"),
        (["graph=/dev/null/out.svg"], "graph=/dev/null/out.svg cannot be written"),
        (["rows=two"], "rows=two"),
        (["sequential_targets=[NoSuchLayer]"], "No module matches sequential_targets"),
    ],
)
def test_wrong_inputs(given: list[str], message: str, command: Command, checkpoint: Path) -> None:
    assert message in refused(command, "inspect", f"model.path={checkpoint}", *given)
