"""Text with images, as the model's processor makes batches of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_compress.data.config import MultimodalConfig
from lightning_compress.data.sources import check_columns, is_chat, load_rows
from lightning_compress.errors import CalibrationDataError


def multimodal_dataloader(config: MultimodalConfig, processor: Any) -> DataLoader[dict[str, Any]]:
    """`num_samples` rows drawn with `seed`, in batches, as the processor returns them.

    Strings become one message of a user, with the images before it; chats say themselves where images are.

    Raises:
        CalibrationDataError: no processor of images, a column that is not there, or too few rows.
    """
    if config.image_column is not None and getattr(processor, "image_processor", None) is None:
        raise CalibrationDataError(
            f"data=multimodal needs the model's processor, and {type(processor).__name__} takes no images: model.path "
            "has to hold a processor_config.json or preprocessor_config.json."
        )
    rows = load_rows(config)
    check_columns(rows, config, text_column=config.text_column, image_column=config.image_column)
    if len(rows) < config.num_samples:
        raise CalibrationDataError(
            f"data (multimodal): {config.path!r} has {len(rows)} rows, and {config.num_samples} are needed. Lower "
            "data.num_samples."
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(config.seed))
    drawn = rows.select(order[: config.num_samples].tolist())
    return DataLoader(drawn, batch_size=config.batch_size, collate_fn=_Collate(config, processor))


@final
@dataclass(frozen=True)
class _Collate:
    """Rows through the processor."""

    config: MultimodalConfig
    processor: Any

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        images = [self._images(row) for row in rows]
        texts = [self._text(row[self.config.text_column], len(each)) for row, each in zip(rows, images, strict=True)]
        given = {"images": images} if any(images) else {}
        made = self.processor(text=texts, **given, padding=len(rows) > 1, return_tensors="pt")
        return {key: value for key, value in made.items() if isinstance(value, Tensor)}

    def _images(self, row: Mapping[str, Any]) -> list[Any]:
        found = row[self.config.image_column] if self.config.image_column is not None else []
        return [self._decoded(image) for image in (found if isinstance(found, list) else [found]) if image is not None]

    def _decoded(self, image: Any) -> Any:
        """Paths, relative ones from where the data set is, and encoded bytes become images."""
        if isinstance(image, str):
            image = {"path": str(Path(self.config.path).parent / image), "bytes": None}
        return datasets.Image().decode_example(image).convert("RGB") if isinstance(image, dict) else image

    def _text(self, text: Any, num_images: int) -> str:
        template = getattr(self.processor, "chat_template", None)
        if is_chat(text) or template is not None:
            content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
            chat = text if is_chat(text) else [{"role": "user", "content": content}]
            if template is None:
                raise CalibrationDataError(
                    f"data.text_column={self.config.text_column!r} holds chats, and the processor has no chat template."
                )
            rendered: str = self.processor.apply_chat_template(chat, tokenize=False)
            return rendered
        return f"{getattr(self.processor, 'image_token', '')} " * num_images + str(text)
