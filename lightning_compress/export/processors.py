"""Tokenizers and processors, which go with a checkpoint, as a folder has them."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, final

import transformers

from lightning_compress.export.checkpoint import SavesPretrained

_LICENCE = re.compile(r"(LICEN[SC]E|NOTICE|COPYING|USE_POLICY)\b", re.IGNORECASE)
_CONFIGS = ("processor_config.json", "preprocessor_config.json")


def has_processor(folder: str | PathLike[str]) -> bool:
    """Whether there is more than a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _CONFIGS)


def load_processor(folder: str | PathLike[str], trust_remote_code: bool = False) -> Any:
    """The folder's processor or tokenizer, or what it has of one: sounds without a word.

    Raises OSError, ValueError, ImportError or TypeError: transformers cannot make it.
    """
    auto_class: Any = transformers.AutoProcessor if has_processor(folder) else transformers.AutoTokenizer
    try:
        return auto_class.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except TypeError:  # a processor whose tokenizer is not there
        return transformers.AutoFeatureExtractor.from_pretrained(folder)


def with_other_files(processor: SavesPretrained | None, folder: Path) -> SavesPretrained | None:
    """A model's processor, saved along with what its folder has beside a model, if anything:

    - its licence and notices, which most ask to be passed on with what is made of it (its README is about another);
    - how sentence-transformers goes on from the model (pooling, prompts): without it another pooling would be taken,
      and vectors be others.
    """
    files = (*_licences(folder), *_later_modules(folder))
    return _WithFiles(processor, folder, files) if files else processor


def _licences(folder: Path) -> Iterator[Path]:
    """The files, relative to the folder."""
    if folder.is_dir():
        found = (path for path in sorted(folder.iterdir()) if _LICENCE.match(path.name) and path.is_file())
        yield from (path.relative_to(folder) for path in found)


def _later_modules(folder: Path) -> Iterator[Path]:
    """The files, relative to the folder."""
    listed = folder / "modules.json"
    if not listed.is_file():
        return
    places = [str(module.get("path", "")) for module in json.loads(listed.read_text(encoding="utf-8"))]
    if "" not in places:  # the model is in a folder of its own, not this one
        return
    of_all = [listed, *folder.glob("config_sentence_transformers.json"), *folder.glob("sentence_*_config.json")]
    inside = [path for place in places if place for path in sorted((folder / place).rglob("*")) if path.is_file()]
    yield from (path.relative_to(folder) for path in (*of_all, *inside))


@final
@dataclass(frozen=True)
class _WithFiles:
    """A processor, if any, and files of the folder that it is from."""

    processor: SavesPretrained | None
    folder: Path
    files: tuple[Path, ...]

    def save_pretrained(self, save_directory: str, /) -> None:
        for file in self.files:
            (Path(save_directory) / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / file, Path(save_directory) / file)
        if self.processor is not None:
            self.processor.save_pretrained(save_directory)
