"""Where text comes from: a configuration -> a sequence of documents.

Method: every source is read into a sequence that is indexed lazily where it can be (a data set's rows stay on disk
until they are drawn). Documents are strings, or chats (lists of messages) for `hf` columns that hold them.
"""

import ast
import bz2
import glob
import gzip
import inspect
import json
import lzma
import os
import sysconfig
import tokenize
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, cast, final

import datasets
from datasets.exceptions import DatasetGenerationError

from lightning_compress.data.config import DocsConfig, HfConfig, MultimodalConfig, TextConfig, TokensConfig
from lightning_compress.errors import CalibrationDataError

Chat = list[dict[str, Any]]
TOOLS = "tools"
"""The column beside chats with the tools that they may call, as trl has it."""


@final
@dataclass(frozen=True)
class WithTools:
    """A chat, and the tools that its row has: a list of their descriptions, or that as JSON."""

    chat: Any
    tools: Any


Document = str | Chat | WithTools

_Scope = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_Statement = ast.stmt | ast.excepthandler | ast.match_case

# Every 20th document is held out.
_TEST_EVERY = 20
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Characters of a document that is part of a text file: a tokenizer takes some 150 bytes for each of those it reads.
_LONGEST = 2**16
_CONVERT = "Convert it, as with iconv -f LATIN1 -t UTF-8, or -f UTF-16."
_PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_LOADERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv"}


def load_documents(config: TokensConfig) -> Sequence[Document]:
    """The documents of a source, in a fixed order.

    Raises FileNotFoundError or CalibrationDataError naming the file, split or column that is missing, and those there
    are.
    """
    match config:
        case DocsConfig():
            documents = docs_documents()
            if config.split == "all":
                return documents
            held_out = config.split == "test"
            return [text for i, text in enumerate(documents) if (i % _TEST_EVERY == _TEST_EVERY - 1) == held_out]
        case TextConfig():
            return [part for path in _named(config.files) for part in _parts(_read_text(path))]
        case HfConfig():
            return _column(load_rows(config), config)
        case _:
            raise TypeError(f"{type(config).__name__} is no source of text; known: DocsConfig, TextConfig, HfConfig.")


@cache
def docs_documents() -> tuple[str, ...]:
    """Python's documentation as shipped with this interpreter: one document per help topic and per module.

    A docstring that occurs twice is kept once, so that held-out text is not a copy of training text. About 2 MB,
    read in about 3 s; the order is fixed (topics by name, then modules by path), the text that of this Python.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    documents = [topics[name].strip() for name in sorted(topics)]
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if _SKIPPED_FOLDERS.isdisjoint(relative.parts):
            sections = []
            for name, text in _docstrings(path, ".".join(relative.with_suffix("").parts).removesuffix(".__init__")):
                if text not in seen:
                    seen.add(text)
                    sections.append(f"{name}\n\n{text}")
            if sections:
                documents.append("\n\n".join(sections))
    return tuple(documents)


def _docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    """(qualified name, docstring) of a source file, in source order; nothing where this Python cannot parse it."""
    try:
        with tokenize.open(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(file.read())
    except (SyntaxError, UnicodeDecodeError):
        return
    yield from _visit(tree, module)


def _visit(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | _Scope):
        text = ast.get_docstring(node, clean=False)
        if text and text.strip():
            yield name, inspect.cleandoc(text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Statement):  # an expression, of which there are more, holds no definition
            yield from _visit(child, f"{name}.{child.name}" if isinstance(child, _Scope) else name)


def _named(files: Sequence[str]) -> Iterator[str]:
    """The files, and by their names those that a pattern matches."""
    for path in files:
        found = [path]
        if glob.has_magic(path) and not os.path.exists(path):
            found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
            if not found:
                raise FileNotFoundError(f"data.files: no file matches {path!r} (looked in {os.getcwd()}).")
        if os.path.isdir(path):
            raise CalibrationDataError(
                f"data.files: {path!r} is a folder; name its files, as in data.files=[{os.path.join(path, '*.txt')}]."
            )
        yield from found


def _read_text(path: str) -> str:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"data.files: {path!r} is not a file (looked in {os.getcwd()}).")
    try:
        with _PACKED.get(Path(path).suffix.lower(), open)(path, "rt", encoding="utf-8-sig") as file:
            return cast(str, file.read())  # without a byte order mark, which is no text
    except UnicodeDecodeError as error:
        raise CalibrationDataError(f"data.files: {path!r} is not text in UTF-8 ({error}). {_CONVERT}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        if Path(path).suffix.lower() not in _PACKED:
            raise
        raise CalibrationDataError(f"data.files: {path!r} cannot be unpacked: {error}") from error


def _parts(text: str) -> Iterator[str]:
    """A text as documents of at most `_LONGEST` characters: behind an empty line, else a line, else anywhere."""
    begin = 0
    while len(text) - begin > _LONGEST:
        most = begin + _LONGEST
        borders = (text.rfind(border, begin, most) + len(border) for border in ("\n\n", "\n"))
        end = next((each for each in borders if each > begin + len("\n\n")), most)
        yield text[begin:end]
        begin = end
    yield text[begin:]


def load_rows(config: HfConfig | MultimodalConfig) -> datasets.Dataset:
    """The rows of a data set.

    Raises FileNotFoundError or CalibrationDataError naming the file or split that is missing, and those there are.
    """
    path = Path(config.path)
    kind = _LOADERS.get((path.with_suffix("") if path.suffix.lower() in _PACKED else path).suffix.lower())
    is_saved = any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json"))
    saved = datasets.load_from_disk(config.path) if is_saved else None
    if kind is not None and not path.is_file():
        raise FileNotFoundError(f"data.path: {config.path!r} is not a file (looked in {os.getcwd()}).")
    if kind is None and path.is_file():
        raise CalibrationDataError(
            f"data.path: {config.path!r} ends with {path.suffix!r}; files that end with {', '.join(_LOADERS)} are "
            f"read, packed ({', '.join(_PACKED)}) or not (and plain text, by data=text data.files=[...])."
        )
    try:
        if saved is not None:
            return _split(saved, config.split)
        if kind is not None:
            return datasets.load_dataset(kind, data_files=glob.escape(config.path), split=config.split)
        return datasets.load_dataset(config.path, config.name, split=config.split)
    except StopIteration:  # what it says of an empty file
        raise CalibrationDataError(f"data.path={config.path!r} has no rows.") from None
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        remedy = f". {_CONVERT}" if isinstance(cause, UnicodeDecodeError) else ""
        raise CalibrationDataError(f"data.path={config.path!r} cannot be read: {cause}{remedy}") from error
    except ValueError as error:
        if type(error) is not ValueError:  # pyarrow's, of what a file holds
            raise CalibrationDataError(f"data.path={config.path!r} cannot be read: {error}") from error
        raise CalibrationDataError(f"data.split={config.split!r} of {config.path!r}: {error}") from error


def _split(saved: datasets.Dataset | datasets.DatasetDict, split: str) -> datasets.Dataset:
    """As `load_dataset` takes it. A data set that was saved alone says of which split it is, or is "train"."""
    if isinstance(saved, datasets.Dataset):
        saved = datasets.DatasetDict({str(saved.split or "train").partition("[")[0]: saved})
    if split in saved:
        return saved[split]
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(saved.num_rows)
    rows = [saved[part.splitname].select(range(part.from_, part.to)) for part in parts if part.from_ < part.to]
    if not rows:
        raise ValueError(f"there are no such rows; it has {dict(saved.num_rows)}.")
    return datasets.concatenate_datasets(rows)


def _column(dataset: datasets.Dataset, config: HfConfig) -> Sequence[Document]:
    check_columns(dataset, config, column=config.column)
    rows = (dataset[number][config.column] for number in range(len(dataset)))
    first = next((row for row in rows if row is not None), None)
    if not isinstance(first, str) and not is_chat(first):
        raise CalibrationDataError(
            f"data.column={config.column!r} of {config.path!r} holds {type(first).__name__} ({str(first)[:60]}); "
            "calibration reads strings or chats (lists of {role, content})."
        )
    if isinstance(first, str) or TOOLS not in dataset.column_names:
        return cast(Sequence[Document], dataset[config.column])
    return _ChatsWithTools(dataset, config.column)


@final
class _ChatsWithTools(Sequence[Document]):
    """Chats of a column, each with its row's tools; rows are read when they are asked for."""

    def __init__(self, dataset: datasets.Dataset, column: str) -> None:
        self._rows = dataset.select_columns([column, TOOLS])
        self._column = column

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        row = self._rows[number]
        return WithTools(row[self._column], row[TOOLS])


def check_columns(dataset: datasets.Dataset, config: HfConfig | MultimodalConfig, **wanted: str | None) -> None:
    """Raises CalibrationDataError where a column is not there, or no rows are; `wanted`: fields that name columns."""
    for key, column in wanted.items():
        if column is not None and column not in dataset.column_names:
            raise CalibrationDataError(
                f"data.{key}={column!r}: {config.path!r} has the columns {', '.join(dataset.column_names)}."
            )
    if len(dataset) == 0:
        raise CalibrationDataError(f"data.path={config.path!r} (split {config.split!r}) has no rows.")


def is_chat(value: object) -> bool:
    """Whether it is a list of {role, content}; what calls tools need not say a word."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(m, dict) and "role" in m and not m.keys().isdisjoint(("content", "tool_calls")) for m in value
        )
    )


def rendered(chat: Chat, reader: Any, tools: Any = None) -> str:
    """A chat as the template of a tokenizer or processor writes it, with the descriptions of the tools that it may
    call (a list, or that as JSON), if any.

    Raises CalibrationDataError where the template, which is code of the model's makers, refuses it, or the tools are
    no list of descriptions.
    """
    messages = without_nulls(chat)
    described = _tools(tools)
    try:
        return cast(str, reader.apply_chat_template(messages, tokenize=False, **described))
    except Exception as error:
        raise CalibrationDataError(
            f"the chat template of {type(reader).__name__} refuses {str(messages)[:100]} with the roles "
            f"{', '.join(str(message['role']) for message in messages)}: {error} ({type(error).__name__}). Leave such "
            "rows out, or give them the roles that it knows."
        ) from error


def _tools(given: Any) -> dict[str, Any]:
    """The argument of a template that they are, if there are any."""
    try:
        tools = json.loads(given or "[]") if isinstance(given, str) else given
    except ValueError as error:
        raise _no_tools(given) from error
    if not tools:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise _no_tools(given)
    return {"tools": without_nulls(tools)}


def _no_tools(given: Any) -> CalibrationDataError:
    return CalibrationDataError(
        f"the column {TOOLS!r} beside the chats holds {str(given)[:60]!r} ({type(given).__name__}) where a list of the "
        "tools' JSON schemas is to be, which the chat template writes. Rename the column if it is something else."
    )


def without_nulls(value: Any) -> Any:
    """Columns of structs have every key in every row."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value
