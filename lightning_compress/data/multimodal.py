"""Text with images or sounds, as the model's processor makes batches of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, final

import datasets
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import ImageProcessingMixin, SequenceFeatureExtractor

from lightning_compress.data.config import MultimodalConfig
from lightning_compress.data.sounds import decoded, undecoded
from lightning_compress.data.sources import TOOLS, check_columns, is_chat, load_rows, rendered
from lightning_compress.errors import CalibrationDataError

_WORD = "image"
_BLANK = 336
"""Height and width of a blank image; processors make of it what the model takes."""


def multimodal_dataloader(config: MultimodalConfig, processor: Any) -> DataLoader[dict[str, Any]]:
    """`num_samples` rows drawn with `seed`, in batches, as the processor returns them.

    Strings become one message of a user, with images and sounds before it; chats say themselves where those are.

    Raises:
        CalibrationDataError: no processor of images or sounds, a column that is not there, or too few rows.
    """
    is_of_images = isinstance(processor, ImageProcessingMixin)
    if config.image_column is not None and not _reads_images(processor):
        raise CalibrationDataError(
            f"data=multimodal needs a processor of text with images, and {type(processor).__name__} is none: "
            "model.path has to hold a processor_config.json or preprocessor_config.json."
        )
    if is_of_images and config.text_column is not None:
        raise CalibrationDataError(
            f"data.text_column={config.text_column!r}: {type(processor).__name__} reads images alone. Give "
            "data.text_column=null."
        )
    if config.audio_column is not None and _sampling_rate(processor) is None:
        raise CalibrationDataError(
            f"data.audio_column={config.audio_column!r} needs a processor of sounds, and {type(processor).__name__} is "
            "none: model.path has to hold a processor_config.json or preprocessor_config.json."
        )
    rows = load_rows(config)
    columns = {key: getattr(config, key) for key in ("text_column", "image_column", "audio_column")}
    check_columns(rows, config, **columns)
    if config.audio_column is not None:
        rows = undecoded(rows, config.audio_column)
    if config.num_samples % config.batch_size:
        raise CalibrationDataError(
            f"data.batch_size={config.batch_size} does not divide data.num_samples={config.num_samples}: models that "
            "make a list of their images need as many rows in every batch."
        )
    if len(rows) < config.num_samples:
        raise CalibrationDataError(
            f"data ({config.origin}): {config.path!r} has {len(rows)} rows, and {config.num_samples} are needed. Lower "
            "data.num_samples."
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(config.seed))
    drawn = rows.select(order[: config.num_samples].tolist())
    return DataLoader(drawn, batch_size=config.batch_size, collate_fn=_Collate(config, processor))


def _reads_images(processor: Any) -> bool:
    """Whether it makes batches of images, with text or alone."""
    return isinstance(processor, ImageProcessingMixin) or getattr(processor, "image_processor", None) is not None


def takes_images(processor: Any) -> bool:
    """Whether it makes batches of images and text."""
    return getattr(processor, "image_processor", None) is not None and getattr(processor, "tokenizer", None) is not None


def blank_images(
    processor: Any, rows: int, num_images: int = 1, size: Sequence[int] | None = None, length: int | None = None
) -> dict[str, Any]:
    """A batch of black images and words in each row.

    Args:
        processor: of the model.
        rows: of the batch.
        num_images: in each row.
        size: height and width of each; None: 336 and 336.
        length: tokens of each row, as near below as whole words allow, images among them; None: with a single word.

    Raises:
        CalibrationDataError: the processor refuses them, or there is no room for them.
    """
    height, width = size or (_BLANK, _BLANK)
    images, collate = [Image.new("RGB", (width, height))] * num_images, _Collate(MultimodalConfig(path="."), processor)

    def made(num_words: int, rows: int = 1) -> dict[str, Any]:
        return collate([{"text": " ".join([_WORD] * num_words), "image": images}] * rows)

    if length is None:
        return made(1, rows)
    one, two = (made(num_words)["input_ids"].shape[1] for num_words in (1, 2))
    if one > length:
        raise CalibrationDataError(
            f"{num_images} images of {height} x {width} and a word are {one} tokens to {type(processor).__name__}, and "
            f"samples have {length}. Give longer samples, or fewer or smaller images."
        )
    return made(1 + (length - one) // max(two - one, 1), rows)


@final
@dataclass(frozen=True)
class _Collate:
    """Rows through the processor."""

    config: MultimodalConfig
    processor: Any

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        images = [self._images(row) for row in rows]
        sounds = [self._sounds(row) for row in rows]
        if self.config.text_column is None and not any(chain(images, sounds)):
            raise CalibrationDataError(
                f"{self.config.path!r} has rows without an image or a sound, which is all that is read "
                "(data.text_column=null): leave them out."
            )
        texts = [self._text(row, len(seen), len(heard)) for row, seen, heard in zip(rows, images, sounds, strict=True)]
        try:
            made = self._processed(texts, images, list(chain(*sounds)))
        except ValueError as error:
            raise CalibrationDataError(
                f"{type(self.processor).__name__} refuses {[text[:80] for text in texts]} with "
                f"{[len(each) for each in images]} images and {[len(each) for each in sounds]} sounds: {error}"
            ) from error
        lists = [key for key, value in made.items() if not isinstance(value, Tensor)]
        if lists:
            raise CalibrationDataError(
                f"{type(self.processor).__name__} makes no tensors of {', '.join(lists)} (images of several sizes in "
                "one batch?). Use data.batch_size=1, or data=custom with a collation of your own."
            )
        return dict(made)

    def _processed(self, texts: list[str], images: list[list[Any]], sounds: list[Any]) -> Any:
        if isinstance(self.processor, ImageProcessingMixin):
            read: Any = self.processor
            return read(list(chain(*images)), return_tensors="pt")
        given: dict[str, Any] = {"images": images} if any(images) else {}
        if sounds:  # their processors know best how to pad
            given["sampling_rate"] = _sampling_rate(self.processor)
        else:
            given["padding"] = len(texts) > 1
        beginning = getattr(getattr(self.processor, "tokenizer", self.processor), "bos_token", None)
        if beginning and all(text.startswith(beginning) for text in texts):  # by the chat template
            given["add_special_tokens"] = False
        if isinstance(self.processor, SequenceFeatureExtractor):
            extract: Any = self.processor
            return extract(sounds, **given, return_tensors="pt")
        heard = {"audio": sounds} if sounds else {}
        said = {} if self.config.text_column is None else {"text": texts}
        return self.processor(**said, **heard, **given, return_tensors="pt")

    def _sounds(self, row: Mapping[str, Any]) -> list[Any]:
        column, rate = self.config.audio_column, _sampling_rate(self.processor)
        if rate is None:
            return []
        found = self._found(row, column, "audio")
        try:
            return [decoded(sound, rate, Path(self.config.path).parent) for sound in found if sound is not None]
        except CalibrationDataError as error:
            raise CalibrationDataError(f"{self._where('audio_column')}: {error}") from error

    def _images(self, row: Mapping[str, Any]) -> list[Any]:
        found = [image for image in self._found(row, self.config.image_column, "image") if image is not None]
        if found and not _reads_images(self.processor):
            raise CalibrationDataError(
                f"{self._where('image_column')} has images, which {type(self.processor).__name__} does not read: "
                "model.path has to hold a processor_config.json or preprocessor_config.json. Or leave such rows out."
            )
        return [self._decoded(image) for image in found]

    def _found(self, row: Mapping[str, Any], column: str | None, kind: str) -> list[Any]:
        """What a column holds; without one, what a chat has beside its words ({type: image, image: ...}), in the order
        in which it has them."""
        if column is not None:
            return row[column] if isinstance(row[column], list) else [row[column]]
        chat = None if self.config.text_column is None else row[self.config.text_column]
        contents = [message.get("content") for message in chat or ()] if is_chat(chat) else []
        items = [item for content in contents if isinstance(content, list) for item in content]
        of_kind = [item for item in items if isinstance(item, Mapping) and item.get("type") == kind]
        return [next(filter(None, map(item.get, (kind, "path", "url"))), None) for item in of_kind]

    def _decoded(self, image: Any) -> Image.Image:
        """Paths, relative ones from where the data set is, and encoded bytes become images."""
        if isinstance(image, str):
            image = {"path": str(Path(self.config.path).parent / image), "bytes": None}
        if isinstance(image, bytes):
            image = {"path": None, "bytes": image}
        try:
            opened = datasets.Image().decode_example(image) if isinstance(image, dict) else image
        except (OSError, ValueError, KeyError) as error:
            raise CalibrationDataError(f"{self._where('image_column')}: {error}") from error
        if not isinstance(opened, Image.Image):
            raise CalibrationDataError(
                f"{self._where('image_column')} holds {type(image).__name__}; "
                "images are images, paths or encoded bytes, or lists of these."
            )
        return opened.convert("RGB")

    def _where(self, key: str) -> str:
        """A column by its key; the one of texts where that is null."""
        key = "text_column" if getattr(self.config, key) is None else key
        return f"data.{key}={getattr(self.config, key)!r} of {self.config.path!r}"

    def _text(self, row: Mapping[str, Any], num_images: int, num_sounds: int) -> str:
        if self.config.text_column is None:
            return ""
        text = row[self.config.text_column]
        where = self._where("text_column")
        if not isinstance(text, str) and not is_chat(text):
            raise CalibrationDataError(
                f"{where} holds {type(text).__name__} ({str(text)[:60]}); it has to be strings or chats (lists of "
                "{role, content})."
            )
        template = getattr(self.processor, "chat_template", None)
        if template is None and not isinstance(text, str):
            raise CalibrationDataError(f"{where} holds chats, and the processor has no chat template.")
        if template is None:
            tokens = [getattr(self.processor, "image_token", "")] * num_images
            tokens += [getattr(self.processor, "audio_token", "")] * num_sounds
            return " ".join([*(token for token in tokens if token), text])
        content = [{"type": "image"}] * num_images + [{"type": "audio"}] * num_sounds + [{"type": "text", "text": text}]
        if isinstance(text, str):
            return rendered([{"role": "user", "content": content}], self.processor)
        return rendered(text, self.processor, row.get(TOOLS))


def _sampling_rate(processor: Any) -> int | None:
    """Of the sounds that a processor takes; None: it takes none."""
    rate = getattr(getattr(processor, "feature_extractor", processor), "sampling_rate", None)
    return rate if isinstance(rate, int) else None
