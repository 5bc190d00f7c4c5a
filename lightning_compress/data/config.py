"""What a calibration or an evaluation reads, as typed configuration.

Method: one frozen dataclass per source (`docs`, `text` and `hf` of text, `multimodal` of text with images or sounds)
over the fields that all share. They hold plain values only, so they serialize, hash into a fingerprint and compose in
Hydra (`data=docs data.num_samples=64`). Alternative not taken: Hydra's `_target_` in the YAML, which reports a mistyped
value where it is first used and an unknown key as a `TypeError` of some constructor; it is there for what no source
knows (`custom`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, final

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_compress.errors import CalibrationDataError, listed, nearest


@dataclass(frozen=True)
class DataConfig:
    """The fields every source shares.

    num_samples: samples that are drawn.
    batch_size: samples per batch; the last batch may be smaller.
    seed: of the draw. The same configuration and tokenizer give the same batches.
    """

    source: ClassVar[str] = ""

    num_samples: int = 128
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_least(num_samples=1, batch_size=1, seed=0)
        if self.seed >= 2**63:
            raise CalibrationDataError(f"data.seed={self.seed}: must be below 2**63.")

    def _check_path(self, path: str) -> None:
        if not path:
            raise CalibrationDataError(
                "data.path is missing: a data set's name on the Hub, a saved folder or a local file."
            )

    def _check_least(self, **least: int) -> None:
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise CalibrationDataError(f"data.{name}={getattr(self, name)}: must be at least {smallest}.")


@dataclass(frozen=True)
class TokensConfig(DataConfig):
    """The fields that sources of text share: a sample is a window (packed) or a document (ragged).

    max_length: tokens per window; a ragged document is cut there.
    packing: documents are joined and cut into windows of exactly `max_length` tokens. Otherwise a sample is the
        beginning of one document, padded to the longest of its batch and masked.
    """

    max_length: int = 256
    packing: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_least(max_length=2)

    @property
    def origin(self) -> str:
        """Where the text is from, for messages."""
        return self.source


@final
@dataclass(frozen=True)
class DocsConfig(TokensConfig):
    """Python's own documentation: `pydoc_data.topics` and the standard library's docstrings, about 2 MB of English.

    split: "train", "test" (every 20th document, held out) or "all".
    """

    source: ClassVar[str] = "docs"

    split: str = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in ("train", "test", "all"):
            raise CalibrationDataError(f"data.split={self.split!r}: the splits are 'train', 'test' and 'all'.")


@final
@dataclass(frozen=True)
class TextConfig(TokensConfig):
    """Plain text files in UTF-8, one document each; a file of more than 65536 characters is several, cut between lines.

    files: their paths, or patterns of them (`texts/*.txt`, `**` for folders at any depth), packed (.gz, .bz2, .xz) or
        not.
    """

    source: ClassVar[str] = "text"

    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            raise CalibrationDataError(
                "data.files is empty: name at least one text file, as in data.files=[a.txt,b.txt]."
            )

    @property
    def origin(self) -> str:
        """The first files, and how many more."""
        return f"{self.source}: {listed(self.files, 3)}"


@final
@dataclass(frozen=True)
class HfConfig(TokensConfig):
    """A data set of the `datasets` library; one row is one document.

    path: a name on the Hub, a folder written by `save_to_disk`, or a local .json, .jsonl, .parquet or .csv file, packed
        (.gz, .bz2, .xz) or not.
    name: the data set's configuration, where it has several.
    split: e.g. "train" or "train[:1000]".
    column: a string, or a chat (list of {role, content}), which goes through the tokenizer's chat template; a column
        `tools` beside it has the tools that the chat may call, as a list of JSON schemas or as JSON.
    """

    source: ClassVar[str] = "hf"

    path: str = ""
    name: str | None = None
    split: str = "train"
    column: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_path(self.path)


@final
@dataclass(frozen=True)
class MultimodalConfig(DataConfig):
    """A data set whose rows hold text, images and sounds; they go through the model's processor.

    path, name, split: as of `HfConfig`.
    text_column: strings, or chats (lists of {role, content}); null: none, as for models of images or sounds alone.
    image_column: an image, a list of them, or paths; null: none. A row's may be null, or empty.
    audio_column: likewise sounds, but all rows have some, or none has; they go through the processor one at a time.
    """

    source: ClassVar[str] = "multimodal"

    batch_size: int = 1
    path: str = ""
    name: str | None = None
    split: str = "train"
    text_column: str | None = "text"
    image_column: str | None = "image"
    audio_column: str | None = None

    @property
    def origin(self) -> str:
        """The group that names such data, for messages."""
        return self.source if self.audio_column is None else "audio"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_path(self.path)
        if self.text_column is self.image_column is self.audio_column is None:
            raise CalibrationDataError("data names no column: text_column, image_column and audio_column are all null.")
        if self.audio_column is not None and self.batch_size > 1:
            raise CalibrationDataError(
                f"data.batch_size={self.batch_size}: sounds of several lengths make no batch that all models read. Use "
                "data.batch_size=1."
            )


@final
@dataclass(frozen=True)
class CustomConfig(DataConfig):
    """Batches of the user's own making.

    loader: what Hydra instantiates (`_target_` and arguments): a DataLoader, a map-style data set or an iterable of
        batches; with `_partial_: true` it is called with the model's tokenizer or processor.
    """

    source: ClassVar[str] = "custom"

    loader: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "_target_" not in self.loader:
            raise CalibrationDataError(
                "data.loader._target_ is missing: the dotted name of what makes the data, as in "
                "+data.loader._target_=my_package.calibration_loader."
            )


SOURCES: dict[str, type[DataConfig]] = {
    config.source: config for config in (DocsConfig, TextConfig, HfConfig, MultimodalConfig, CustomConfig)
}


def load_data_config(values: Mapping[str, Any] | DictConfig) -> DataConfig:
    """The typed configuration of plain values such as a Hydra group's.

    values: the fields of the source's dataclass, and `source` ("docs" where it is missing).
    Raises CalibrationDataError naming the field, for an unknown source or key (with the nearest known one), a wrong
    type or a field that must be given.

    >>> load_data_config({"source": "docs", "num_samples": 16})
    DocsConfig(num_samples=16, batch_size=8, seed=0, max_length=256, packing=True, split='train')
    """
    try:
        resolved = OmegaConf.to_container(values, resolve=True) if isinstance(values, DictConfig) else values
        assert isinstance(resolved, Mapping)
        plain = {str(key): value for key, value in resolved.items()}
        missing = [f"data.{key}=..." for key, value in plain.items() if value == "???"]
        if missing:
            raise CalibrationDataError(f"{' '.join(missing)} has to be given.")
    except OmegaConfBaseException as error:
        raise CalibrationDataError(f"data: {_first_line(error)}") from error
    source = plain.pop("source", DocsConfig.source)
    if source not in SOURCES:
        raise CalibrationDataError(f"data.source={source!r} is unknown{nearest(str(source), list(SOURCES))}")
    config = SOURCES[source]
    known = [each.name for each in fields(config)]
    for key in plain:
        if key not in known:
            raise CalibrationDataError(f"data.{key} is not a field of the source {source!r}{nearest(key, known)}")
    schema = OmegaConf.structured(config)
    OmegaConf.set_readonly(schema, False)
    try:
        typed = OmegaConf.to_container(OmegaConf.merge(schema, plain))
    except OmegaConfBaseException as error:
        value = plain.get(str(error.full_key))
        of_list = isinstance(value, str) and isinstance(getattr(schema, str(error.full_key), None), ListConfig)
        remedy = f"; give a list, as data.{error.full_key}=[{value}]" if of_list else ""
        if isinstance(value, list):
            remedy = "; give one, not a list"
        raise CalibrationDataError(f"data.{error.full_key}: {_first_line(error)}{remedy}") from error
    assert isinstance(typed, dict)
    arguments: dict[str, Any] = {str(key): tuple(v) if isinstance(v, list) else v for key, v in typed.items()}
    return config(**arguments)


def _first_line(error: OmegaConfBaseException) -> str:
    return str(error).splitlines()[0]
