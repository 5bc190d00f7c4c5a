"""Sources of text: what is read, in which order, and what the errors say."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import pytest

from lightning_compress.data import DocsConfig, HfConfig, TextConfig, docs_documents
from lightning_compress.data.config import DataConfig
from lightning_compress.data.sources import load_documents
from lightning_compress.errors import CalibrationDataError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture(autouse=True)
def _dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_docs_are_topics_and_docstrings() -> None:
    documents = docs_documents()
    assert documents[0] == topics[min(topics)].strip()
    (inspection,) = [text for text in documents if text.startswith("inspect\n\n")]
    assert "inspect.cleandoc\n\nClean up indentation from docstrings." in inspection
    assert sum(map(len, documents)) > 1_500_000


def test_docs_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated docstring is kept once; tests and files that this Python cannot parse are left out."""
    module = '"""Of {name}."""\n\nclass A:\n    def f(self):\n        """The same.\n\n        Indented.\n        """\n'
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(module.format(name=name))
    (tmp_path / "broken.py").write_text('"""Broken."""\nprint "python 2"\n')
    (tmp_path / "package" / "test").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text('"""A package with a bad escape: \\d."""\n')
    (tmp_path / "package" / "test" / "test_it.py").write_text('"""A test."""\n')
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert docs_documents.__wrapped__()[len(topics) :] == (
        "one\n\nOf one.\n\none.A.f\n\nThe same.\n\nIndented.",
        "package\n\nA package with a bad escape: \\d.",
        "two\n\nOf two.",
    )


def test_docs_splits_are_disjoint_and_complete() -> None:
    train, test, everything = (load_documents(DocsConfig(split=split)) for split in ("train", "test", "all"))
    assert set(train).isdisjoint(test)
    assert len(train) + len(test) == len(everything)
    assert len(test) == len(everything) // 20


def test_text_files_are_documents_in_the_order_given(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("b.txt", "a.txt")]
    for path in paths:
        path.write_text(f"tëxt of {path.name}", encoding="utf-8")
    assert load_documents(TextConfig(files=tuple(map(str, paths)))) == ["tëxt of b.txt", "tëxt of a.txt"]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("x" * 70_000 + "\n\n", [65536, 4466]),  # nowhere else to cut
        ("a line\n" * 20_000, [7 * 9362, 7 * 9362, 7 * 1276]),
        (("a line\n" * 300 + "\n") * 40, [2101 * 31, 2101 * 9]),  # between paragraphs
        ("\n" * 65537, [65536, 1]),
        ("x" * 65536, [65536]),
        ("", [0]),
    ],
)
def test_a_long_text_file_is_several_documents(tmp_path: Path, text: str, lengths: list[int]) -> None:
    """So that no tokenizer has to hold what it knows of all of it at once."""
    (tmp_path / "long.txt").write_text(text)
    documents = load_documents(TextConfig(files=(str(tmp_path / "long.txt"),)))
    assert list(map(len, documents)) == lengths
    assert "".join(map(str, documents)) == text


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8-sig")
    assert load_documents(TextConfig(files=(str(tmp_path / "a.txt"),))) == ["text"]


def test_text_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data.files: '/no/such.txt' is not a file"):
        load_documents(TextConfig(files=("/no/such.txt",)))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationDataError, match=r"binary' is not text in UTF-8 .* Convert it, as with iconv"):
        load_documents(TextConfig(files=(str(binary),)))
    with pytest.raises(CalibrationDataError, match=r"is a folder; name its files, as in data.files=\[.*/\*.txt\]"):
        load_documents(TextConfig(files=(str(tmp_path),)))
    with pytest.raises(FileNotFoundError, match=r"data.files: no file matches '.*/\*.md'"):
        load_documents(TextConfig(files=(f"{tmp_path}/*.md",)))
    (tmp_path / "none.gz").write_text("text")
    with pytest.raises(CalibrationDataError, match=r"none.gz' cannot be unpacked: Not a gzipped file"):
        load_documents(TextConfig(files=(f"{tmp_path}/none.gz",)))


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_packed_text_that_is_damaged(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    """Seen to fail: of bz2 the library's own error was all that was said."""
    content = bytearray(pack(bytes(range(97, 123)) * 50))
    content[12:30] = bytes(18)
    path = tmp_path / f"damaged.{suffix}"
    path.write_bytes(content)
    with pytest.raises(CalibrationDataError, match=rf"damaged.{suffix}' cannot be unpacked"):
        load_documents(TextConfig(files=(str(path),)))


def test_text_files_by_a_pattern(tmp_path: Path) -> None:
    """In the order of their names; a file whose own name is a pattern is that file."""
    for name in ("b.txt", "a.txt", "[ab].txt", "deep/er/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def found(*patterns: str) -> list[object]:
        return list(load_documents(TextConfig(files=tuple(f"{tmp_path}/{each}" for each in patterns))))

    assert found("*.txt") == ["[ab].txt", "a.txt", "b.txt"]
    assert found("d.md", "**/[bc].txt") == ["d.md", "b.txt", "deep/er/c.txt"]
    assert found("[ab].txt") == ["[ab].txt"]


@pytest.mark.parametrize("suffix", ["gz", "bz2", "XZ"])
def test_packed_text_files(tmp_path: Path, suffix: str) -> None:
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "XZ": lzma.compress}[suffix]
    (tmp_path / f"a.txt.{suffix}").write_bytes(pack("tëxt\r\nof two lines".encode()))
    assert load_documents(TextConfig(files=(f"{tmp_path}/a.txt.{suffix}",))) == ["tëxt\nof two lines"]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_packed_files_of_datasets(tmp_path: Path, suffix: str) -> None:
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    {"csv": rows.to_csv, "jsonl": rows.to_json}[suffix](tmp_path / f"rows.{suffix}")
    packed = tmp_path / f"rows.{suffix}.gz"
    packed.write_bytes(gzip.compress((tmp_path / f"rows.{suffix}").read_bytes()))
    assert list(load_documents(HfConfig(path=str(packed)))) == ["one", "two"]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "JSONL", "parquet", "csv"])
def test_local_files_of_datasets(tmp_path: Path, suffix: str) -> None:
    rows = datasets.Dataset.from_dict({"id": [1, 2, 3], "story": ["one", "two", "three"]})
    path = str(tmp_path / f"rows [v1]*.{suffix}")
    {"parquet": rows.to_parquet, "csv": rows.to_csv}.get(suffix, rows.to_json)(path)
    assert list(load_documents(HfConfig(path=path, column="story"))) == ["one", "two", "three"]
    assert list(load_documents(HfConfig(path=path, column="story", split="train[1:]"))) == ["two", "three"]


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    train = datasets.Dataset.from_dict({"text": ["a"]})
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": datasets.Dataset.from_dict({"text": ["b"]})}).save_to_disk(
        tmp_path / "two"
    )
    assert list(load_documents(HfConfig(path=str(tmp_path / "one")))) == ["a"]
    assert list(load_documents(HfConfig(path=str(tmp_path / "two"), split="test"))) == ["b"]
    with pytest.raises(CalibrationDataError, match=r"split='valid' of .*two': .*'train', 'test'\]"):
        load_documents(HfConfig(path=str(tmp_path / "two"), split="valid"))


@pytest.mark.parametrize(
    ("given", "split", "texts"),
    [
        (None, "train", "abcd"),
        (None, "train[50%:]", "cd"),
        (None, "train[:1]+train[-1:]", "ad"),
        (None, "test", None),
        ("test", "test[:1]", "a"),
        ("test", "train", None),
        ("train[:4]", "train[1:]", "bcd"),
        ("train+test", "train+test", "abcd"),
    ],
)
def test_splits_of_a_data_set_that_was_saved_alone(
    tmp_path: Path, given: str | None, split: str, texts: str | None
) -> None:
    """Seen to fail: all rows, whatever split was asked for."""
    rows = {"text": list("abcd")}
    datasets.Dataset.from_dict(rows, split=None if given is None else datasets.Split(given)).save_to_disk(tmp_path)
    config = HfConfig(path=str(tmp_path), split=split)
    if texts is not None:
        assert list(load_documents(config)) == list(texts)
        return
    with pytest.raises(CalibrationDataError, match=f'data.split={split!r} of .*Unknown split "{split}"'):
        load_documents(config)


@pytest.mark.parametrize("split", ["train[100:]", "train[2:2]"])
def test_slices_without_rows(tmp_path: Path, split: str) -> None:
    """Seen to fail: an IndexError."""
    datasets.Dataset.from_dict({"text": list("abcd")}).save_to_disk(tmp_path)
    with pytest.raises(CalibrationDataError, match=r"there are no such rows; it has {'train': 4}"):
        load_documents(HfConfig(path=str(tmp_path), split=split))


def test_chats_stay_lists_of_messages(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    assert load_documents(HfConfig(path=str(path), column="messages"))[0] == CHAT


def test_columns_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "story": "one"}\n')
    with pytest.raises(CalibrationDataError, match=r"data.column='text': .* has the columns id, story\."):
        load_documents(HfConfig(path=str(path)))
    with pytest.raises(CalibrationDataError, match=r"data.column='id' of .* holds int \(1\)"):
        load_documents(HfConfig(path=str(path), column="id"))
    path.write_text('{"id": 1, "story": null}\n' * 3)
    with pytest.raises(CalibrationDataError, match=r"data.column='story' of .* holds NoneType"):
        load_documents(HfConfig(path=str(path), column="story"))
    with pytest.raises(CalibrationDataError, match=r"data.split='train\[:0\]' of .*corresponds to no data"):
        load_documents(HfConfig(path=str(path), column="story", split="train[:0]"))
    with pytest.raises(CalibrationDataError, match=r"data.split='valid' of .*Unknown split"):
        load_documents(HfConfig(path=str(path), column="story", split="valid"))
    path.write_text('{"story": "one"}\n{"story": \n')
    with pytest.raises(CalibrationDataError, match=r"data.path='.*rows.jsonl' cannot be read: .*JSON"):
        load_documents(HfConfig(path=str(path), column="story"))
    with pytest.raises(FileNotFoundError, match=r"data.path: '/no/such.csv' is not a file"):
        load_documents(HfConfig(path="/no/such.csv"))
    (tmp_path / "rows.tsv").touch()
    with pytest.raises(CalibrationDataError, match=r"ends with '.tsv'; files that end with .json, .jsonl, .* are read"):
        load_documents(HfConfig(path=str(tmp_path / "rows.tsv")))


def test_a_configuration_that_is_no_source() -> None:
    with pytest.raises(TypeError, match="DataConfig is no source of text"):
        load_documents(DataConfig())


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_file_without_anything(suffix: str, tmp_path: Path) -> None:
    """Seen to fail: with a StopIteration, which says nothing."""
    (tmp_path / f"rows.{suffix}").touch()
    with pytest.raises(CalibrationDataError, match=r"data.path='.*' has no rows"):
        load_documents(HfConfig(path=str(tmp_path / f"rows.{suffix}")))


def test_a_file_that_is_no_parquet(tmp_path: Path) -> None:
    """Seen to fail: the split was named as what is wrong."""
    path = tmp_path / "rows.parquet"
    path.write_text("text\n" * 9)
    with pytest.raises(CalibrationDataError, match=r"data.path='.*rows.parquet' cannot be read: Parquet magic bytes"):
        load_documents(HfConfig(path=str(path)))


def test_a_table_that_is_not_utf8(tmp_path: Path) -> None:
    """Seen to fail: without what to do."""
    path = tmp_path / "rows.csv"
    path.write_bytes("text\ngrün\n".encode("latin1"))
    with pytest.raises(CalibrationDataError, match=r"rows.csv' cannot be read: .*utf-8.*Convert it, as with iconv"):
        load_documents(HfConfig(path=str(path)))
