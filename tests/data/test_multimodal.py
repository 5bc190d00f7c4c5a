"""Text with images through a processor, and data of the user's own making."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from helpers import NEEDS_RECENT, llava_processor
from PIL import Image
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from transformers import LlavaProcessor

from lightning_compress.data import calibration_batches, evaluation_dataloader, load_data_config
from lightning_compress.errors import CalibrationDataError

WORDS = ["<unk>", "<eos>", "<image>", "USER:", "a", "cat", "two", "dogs"]
PATCHES = 16


def processor(**options: Any) -> LlavaProcessor:
    return llava_processor(WORDS, **options)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Four captions with the paths of their images, of several sizes."""
    rows = []
    for number, text in enumerate(("a cat", "two dogs", "a", "two cat dogs")):
        Image.new("RGB", (40 + number, 50), (40 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append(json.dumps({"text": text, "image": f"{number}.png"}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    return tmp_path / "pairs.jsonl"


def batches(given: dict[str, Any], of: Any = None) -> list[dict[str, Tensor]]:
    return list(calibration_batches(load_data_config(given), of or processor()))


def test_images_go_through_the_processor(pairs: Path) -> None:
    given = {"source": "multimodal", "path": str(pairs), "num_samples": 4, "batch_size": 2}
    found = batches(given)
    assert [batch["pixel_values"].shape for batch in found] == [(2, 3, 32, 32)] * 2
    for batch in found:
        assert ((batch["input_ids"] == WORDS.index("<image>")).sum(1) == PATCHES).all()
        assert batch["attention_mask"].shape == batch["input_ids"].shape
    again, other = batches(given), batches({**given, "seed": 1})
    assert all(torch.equal(one["input_ids"], two["input_ids"]) for one, two in zip(found, again, strict=True))
    assert not all(torch.equal(one["pixel_values"], two["pixel_values"]) for one, two in zip(found, other, strict=True))


def test_chat_template(pairs: Path) -> None:
    """It says where the image is, for strings and for chats."""
    template = (
        "{% for m in messages %}USER: {% for c in m['content'] %}"
        "{{ '<image> ' if c['type'] == 'image' else c['text'] }}{% endfor %}{% endfor %}"
    )
    of = processor(chat_template=template)
    (batch,) = batches({"source": "multimodal", "path": str(pairs), "num_samples": 1, "batch_size": 1}, of)
    ids = batch["input_ids"][0].tolist()
    assert ids[: 1 + PATCHES] == [WORDS.index("USER:")] + [WORDS.index("<image>")] * PATCHES
    assert len(ids) > 1 + PATCHES


def test_chats_of_text_alone(tmp_path: Path) -> None:
    """The template is the processor's where its tokenizer has none, and the tokenizer is left as it was. Seen to fail:
    refused for want of a template."""
    path, of = (
        tmp_path / "chats.jsonl",
        processor(chat_template="{% for m in messages %}USER: {{ m.content }}{% endfor %}"),
    )
    path.write_text(json.dumps({"chat": [{"role": "user", "content": "a cat"}]}))
    given = {"source": "hf", "path": str(path), "column": "chat", "num_samples": 1, "max_length": 9, "packing": False}
    (batch,) = batches(given, of)
    assert batch["input_ids"][0, :3].tolist() == [WORDS.index(word) for word in ("USER:", "a", "cat")]
    assert of.tokenizer.chat_template is None


def test_tools_of_chats_with_images(pairs: Path) -> None:
    """Seen to fail: the template was not given them."""
    of = processor(chat_template="{% if tools %}USER: {% endif %}<image> {{ messages[0].content[1].text }}")
    chats = pairs.with_name("chats.jsonl")
    content = [{"type": "image", "path": str(pairs.with_name("0.png"))}, {"type": "text", "text": "a cat"}]
    chats.write_text(json.dumps({"chat": [{"role": "user", "content": content}], "tools": [{"name": "clock"}]}))
    given = {"source": "multimodal", "path": str(chats), "text_column": "chat", "image_column": None}
    (batch,) = batches({**given, "num_samples": 1, "batch_size": 1}, of)
    assert WORDS.index("USER:") in batch["input_ids"][0].tolist()


def test_the_beginning_is_not_said_twice(pairs: Path) -> None:
    """A template that renders it, and a tokenizer that adds it. Seen to fail: with special tokens added."""
    of = processor(chat_template="<eos>{% for c in messages[0]['content'] %}{{ c['text'] or '<image> ' }}{% endfor %}")
    of.tokenizer.bos_token = "<eos>"
    of.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    (batch,) = batches({"source": "multimodal", "path": str(pairs), "num_samples": 1, "batch_size": 1}, of)
    assert batch["input_ids"][0].tolist().count(WORDS.index("<eos>")) == 1


def test_images_of_every_form(pairs: Path, tmp_path: Path) -> None:
    """Images, bytes and lists of paths, as data sets hold them."""
    opened = [Image.open(pairs.parent / f"{number}.png").convert("L") for number in range(2)]
    encoded = [(pairs.parent / f"{number}.png").read_bytes() for number in range(2)]
    paths = [[str(pairs.parent / f"{number}.png")] for number in range(2)]
    for number, column in enumerate((opened, encoded, paths)):
        features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
        rows = datasets.Dataset.from_dict({"text": ["a", "a cat"], "image": column}, None if number else features)
        rows.save_to_disk(tmp_path / str(number))
        given = {"source": "multimodal", "path": str(tmp_path / str(number)), "num_samples": 2, "batch_size": 1}
        assert [batch["pixel_values"].shape for batch in batches(given)] == [(1, 3, 32, 32)] * 2


@NEEDS_RECENT
def test_what_cannot_be_read_is_named(pairs: Path) -> None:
    given = {"source": "multimodal", "path": str(pairs), "num_samples": 4, "batch_size": 2}
    with pytest.raises(CalibrationDataError, match=r"is none: model.path has to hold a processor_config.json"):
        batches(given, processor().tokenizer)
    with pytest.raises(CalibrationDataError, match=r"data.image_column='picture': .* has the columns text, image"):
        batches({**given, "image_column": "picture"})
    with pytest.raises(CalibrationDataError, match="has 4 rows, and 9 are needed"):
        batches({**given, "num_samples": 9, "batch_size": 1})
    with pytest.raises(CalibrationDataError, match=r"data.batch_size=3 does not divide data.num_samples=4"):
        batches({**given, "batch_size": 3})
    rows = [
        {"text": "a cat", "image": "0.png"},
        {"text": None, "image": "0.png"},
        {"text": "a <image>", "image": "0.png"},
    ]
    rows += [{"text": "a cat", "image": "pairs.jsonl"}]
    for row, message in zip(rows[1:], ("holds NoneType", "LlavaProcessor refuses", "pairs.jsonl"), strict=True):
        bad = pairs.with_name("bad.jsonl")
        bad.write_text(f"{json.dumps(rows[0])}\n{json.dumps(row)}")
        with pytest.raises(CalibrationDataError, match=message):
            batches({**given, "path": str(bad), "num_samples": 2, "batch_size": 1})
    with pytest.raises(CalibrationDataError, match=r"perplexity is of text, not of data.source='multimodal'"):
        evaluation_dataloader(load_data_config(given), processor().tokenizer)


def test_image_processors_alone(pairs: Path) -> None:
    """As of models that read no text. Seen to fail: refused as no processor of images."""
    given = {"source": "multimodal", "path": str(pairs), "num_samples": 4, "batch_size": 2, "text_column": None}
    of = processor().image_processor
    found = batches(given, of)
    assert [{key: value.shape for key, value in batch.items()} for batch in found] == [
        {"pixel_values": (2, 3, 32, 32)}
    ] * 2
    with pytest.raises(CalibrationDataError, match=r"reads images alone\. Give data\.text_column=null"):
        batches({**given, "text_column": "text"}, of)
    pairs.write_text(json.dumps({"image": "0.png"}) + "\n" + json.dumps({"image": None}))
    with pytest.raises(CalibrationDataError, match=r"rows without an image or a sound, .*: leave them out"):
        batches({**given, "num_samples": 2, "batch_size": 1}, of)


def test_rows_without_an_image(pairs: Path) -> None:
    """Text alone, beside others that have one; null and an empty list mean the same. Seen to fail: refused."""
    for rows in (
        [{"text": "a cat", "image": "0.png"}, {"text": "two dogs", "image": None}],
        [{"text": "a cat", "image": ["0.png"]}, {"text": "two dogs", "image": []}],
    ):
        some = pairs.with_name("some.jsonl")
        some.write_text("\n".join(map(json.dumps, rows)))
        given = {"source": "multimodal", "path": str(some), "num_samples": 2}
        (both,) = batches({**given, "batch_size": 2})
        assert both["pixel_values"].shape == (1, 3, 32, 32)
        assert sorted((both["input_ids"] == WORDS.index("<image>")).sum(1).tolist()) == [0, PATCHES]
        alone = batches({**given, "batch_size": 1})
        assert sorted("pixel_values" in batch for batch in alone) == [False, True]


class Numbers(Dataset[dict[str, Tensor]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([index, index])}


def stream(size: int) -> Iterator[dict[str, Tensor]]:
    yield from ({"input_ids": torch.full((1, 2), number)} for number in range(size))


class SizedStream(IterableDataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return stream(3)


def of_tokenizer(tokenizer: Any, text: str) -> list[Any]:
    return [tokenizer(text=text, return_tensors="pt")]


def test_a_loader_of_ones_own() -> None:
    """A data set is drawn from and collated; an iterable is taken as it is; a function gets the processor."""
    here = {"source": "custom", "num_samples": 5, "batch_size": 2}
    drawn = batches({**here, "loader": {"_target_": f"{__name__}.Numbers", "size": 9}})
    assert [batch["input_ids"].shape for batch in drawn] == [(2, 2), (2, 2), (1, 2)]
    assert len({int(ids[0]) for batch in drawn for ids in batch["input_ids"]}) == 5
    assert len(batches({**here, "loader": {"_target_": f"{__name__}.stream", "size": 3}})) == 3
    assert len(batches({**here, "loader": {"_target_": f"{__name__}.SizedStream"}})) == 3
    partial = {"_target_": f"{__name__}.of_tokenizer", "_partial_": True, "text": "a cat"}
    (batch,) = batches({**here, "loader": partial})
    assert batch["input_ids"].tolist() == [[WORDS.index("a"), WORDS.index("cat")]]


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ({}, r"data.loader._target_ is missing"),
        ({"_target_": "no_such.thing"}, r"data.loader: no_such.thing: (?!.*HYDRA).*No module named 'no_such'"),
        ({"_target_": "builtins.int"}, "made a int: neither a data set nor an iterable"),
        ({"_target_": "builtins.dict", "input_ids": [1]}, "made a dict: one batch, it seems"),
        ({"_target_": f"{__name__}.of_tokenizer", "_partial_": True, "size": 3}, "data.loader: .*unexpected keyword"),
    ],
)
def test_loaders_that_are_none(loader: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationDataError, match=message):
        batches({"source": "custom", "loader": loader})


def test_images_in_chats(pairs: Path) -> None:
    """Without a column of images they are those that the messages name, as `apply_chat_template` has them. Seen to
    fail: a template's image had none, and the processor refused it."""
    chats = pairs.with_name("chats.jsonl")
    images = [{"type": "image", "image": "1.png"}, {"type": "image", "path": "2.png"}]
    content = [images[0], {"type": "text", "text": "a cat"}, images[1]]
    chats.write_text(json.dumps({"chat": [{"role": "user", "content": content}]}))
    template = (
        "{% for m in messages %}USER: {% for c in m['content'] %}"
        "{{ '<image> ' if c['type'] == 'image' else c['text'] }}{% endfor %}{% endfor %}"
    )
    of = processor(chat_template=template)
    given = {"source": "multimodal", "path": str(chats), "text_column": "chat", "image_column": None}
    (batch,) = batches({**given, "num_samples": 1, "batch_size": 1}, of)
    seen = [Image.open(pairs.with_name(f"{number}.png")) for number in (1, 2)]
    assert torch.equal(batch["pixel_values"], of.image_processor(seen, return_tensors="pt")["pixel_values"])
    of.tokenizer.chat_template = template
    with pytest.raises(CalibrationDataError, match=r"text_column='chat' .* has images, which .* does not read"):
        batches({**given, "num_samples": 1, "batch_size": 1}, of.tokenizer)
