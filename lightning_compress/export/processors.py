"""Tokenizers and processors, which go with a checkpoint, as a folder has them."""

from os import PathLike
from pathlib import Path
from typing import Any

import transformers

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
