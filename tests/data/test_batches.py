"""Batches of token ids: determinism, packing, padding, and what the errors say."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from lightning_compress.data import (
    DataConfig,
    DocsConfig,
    HfConfig,
    TextConfig,
    calibration_batches,
    calibration_dataloader,
    evaluation_dataloader,
)
from lightning_compress.data.batches import Batch
from lightning_compress.errors import CalibrationDataError

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture
def documents(tmp_path: Path) -> tuple[str, ...]:
    """Ten files; file i has 10 + i characters, all of them the i-th letter."""
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("abcdefghij"[i] * (10 + i))
    return tuple(str(tmp_path / f"{i}.txt") for i in range(10))


def batches(config: DataConfig, tokenizer: PreTrainedTokenizerFast) -> list[Batch]:
    return list(calibration_dataloader(config, tokenizer))


def text_of(batch: Batch, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(row) for row in batch["input_ids"]]


@pytest.mark.slow
def test_the_same_configuration_gives_the_same_batches(tokenizer: PreTrainedTokenizerFast) -> None:
    config = DocsConfig(num_samples=10, max_length=32, batch_size=4)
    first, again = batches(config, tokenizer), batches(config, tokenizer)
    assert [tuple(b["input_ids"].shape) for b in first] == [(4, 32), (4, 32), (2, 32)]
    assert all(set(b) == {"input_ids"} and b["input_ids"].dtype == torch.int64 for b in first)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))
    other = batches(replace(config, seed=1), tokenizer)
    assert not any(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, other, strict=True))


def test_iterating_twice_gives_the_same_batches(tokenizer: PreTrainedTokenizerFast) -> None:
    """Calibration may pass over the loader more than once; a shuffling loader would change the samples."""
    loader = calibration_dataloader(DocsConfig(num_samples=6, max_length=16, batch_size=4), tokenizer)
    first, again = list(loader), list(loader)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("packing", [True, False])
def test_a_decoder_goes_on_where_its_encoder_ends(
    packing: bool, documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Behind its start token, which T5 has from its own configuration. Each as long as a window."""
    sizes = {"vocab_size": 257, "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=3))
    config = TextConfig(files=documents, num_samples=4, max_length=7, batch_size=4, packing=packing)
    (batch,) = calibration_batches(config, tokenizer, model)
    assert all(ids.shape == (4, 7) for ids in batch.values())
    assert set(batch) - {"attention_mask", "decoder_attention_mask"} == {"input_ids", "decoder_input_ids"}
    assert ("decoder_attention_mask" in batch) == (not packing)
    assert batch["decoder_input_ids"][:, 0].tolist() == [3] * 4
    longer = replace(config, max_length=14)
    (whole,) = batches(longer, tokenizer)
    is_read = whole.get("attention_mask", torch.ones_like(whole["input_ids"]))
    for ids, mask, read, said in zip(
        whole["input_ids"], is_read, batch["input_ids"], batch["decoder_input_ids"], strict=True
    ):
        tokens = ids[mask.bool()]
        half = -(-len(tokens) // 2)
        assert torch.equal(read[:half], tokens[:half])
        assert torch.equal(said[1 : len(tokens) - half], tokens[half:-1])


def test_a_packed_window_is_consecutive_text_with_eos_between_documents(
    documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast
) -> None:
    config = TextConfig(files=documents, num_samples=10, max_length=15, batch_size=10)
    (batch,) = batches(config, tokenizer)
    windows = text_of(batch, tokenizer)
    assert len(set(windows)) == 10
    joined = {"abcdefghij"[i] * (10 + i) for i in range(10)}
    # 155 tokens (145 letters and 10 eos) make 10 whole windows; every inner run of letters is a whole document.
    assert sum(len(w.replace("<eos>", ".")) for w in windows) == 150
    assert all(run in joined for w in windows for run in w.split("<eos>")[1:-1] if run)


def test_evaluation_windows_are_the_text_in_order(
    documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast
) -> None:
    config = TextConfig(files=documents, num_samples=10_000, max_length=15, batch_size=4)
    windows = [row for batch in evaluation_dataloader(config, tokenizer) for row in text_of(batch, tokenizer)]
    whole = "".join("abcdefghij"[i] * (10 + i) + "." for i in range(10))
    assert "".join(windows).replace("<eos>", ".") == whole[:150]
    two = list(evaluation_dataloader(replace(config, num_samples=2), tokenizer))
    assert [text_of(b, tokenizer) for b in two] == [windows[:2]]


def test_ragged_samples_are_padded_and_masked(
    documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    config = TextConfig(files=documents, num_samples=10, max_length=14, batch_size=4, packing=False)
    with caplog.at_level(logging.WARNING):
        loaded = batches(config, tokenizer)
    assert "no pad token: padding with its eos token '<eos>'" in caplog.text
    assert all(set(b) == {"input_ids", "attention_mask"} for b in loaded)
    seen = []
    for batch in loaded:
        lengths = batch["attention_mask"].sum(1)
        assert batch["input_ids"].shape[1] == lengths.max()
        for ids, length in zip(batch["input_ids"], lengths.tolist(), strict=True):
            letter = tokenizer.decode(ids[:1])
            seen.append(letter)
            with_eos = letter * (10 + "abcdefghij".index(letter)) + "."
            assert tokenizer.decode(ids[:length]).replace("<eos>", ".") == with_eos[:14]
            assert (ids[length:] == tokenizer.eos_token_id).all()
    assert sorted(seen) == list("abcdefghij")
    assert seen != sorted(seen)


def test_without_padding_there_is_no_mask(documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast) -> None:
    """A mask of ones would cost the attention its fast path."""
    tokenizer.eos_token = None
    config = TextConfig(files=documents, num_samples=10, max_length=10, batch_size=4, packing=False)
    assert all(set(batch) == {"input_ids"} for batch in batches(config, tokenizer))


def test_the_pad_token_is_used_where_there_is_one(
    documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.pad_token = "Z"
    config = TextConfig(files=documents, num_samples=10, max_length=20, batch_size=10, packing=False)
    (batch,) = batches(config, tokenizer)
    assert (batch["input_ids"][batch["attention_mask"] == 0] == tokenizer.convert_tokens_to_ids("Z")).all()
    assert not caplog.text


def test_windows_are_drawn_from_the_whole_of_a_long_document(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Fails when the first windows are taken instead of drawn ones: every seed would calibrate on the book's start."""
    (tmp_path / "book.txt").write_text("".join(f"{i:04}" for i in range(100)))
    config = TextConfig(files=(str(tmp_path / "book.txt"),), num_samples=2, max_length=4)
    drawn = {row for s in range(20) for row in text_of(batches(replace(config, seed=s), tokenizer)[0], tokenizer)}
    assert len(drawn) > 20
    assert max(drawn) > "0080"


def test_every_document_is_read_where_few_are_long(
    documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast
) -> None:
    """The first document alone has enough tokens; two are read for two samples."""
    config = TextConfig(files=documents, num_samples=2, max_length=4, batch_size=2)
    letters = [set("".join(text_of(batches(replace(config, seed=s), tokenizer)[0], tokenizer))) for s in range(20)]
    assert any(len(seen & set("abcdfghij")) > 1 for seen in letters)


def test_a_tokenizer_reads_no_more_at_a_time_than_so_many_characters(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 150 bytes of memory for each of them."""
    rows = ["w" * 600_000, "x" * 500_000, "y" * 1_100_000, *["z"] * 100]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    sizes: list[tuple[int, int]] = []
    whole = PreTrainedTokenizerFast.__call__

    def counted(self: PreTrainedTokenizerFast, text: Any, **options: Any) -> Any:
        sizes.append((len(text), sum(map(len, text))))
        return whole(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    evaluation_dataloader(HfConfig(path=str(path), num_samples=10**6), tokenizer)
    assert sizes[1:] == [(1, 600_000), (1, 500_000), (1, 1_100_000), (64, 64), (36, 36)]


def test_chats_go_through_the_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    datasets.Dataset.from_dict({"chat": [[{"role": "user", "content": "hello"}]] * 3}).save_to_disk(tmp_path / "d")
    config = HfConfig(path=str(tmp_path / "d"), column="chat", num_samples=3, max_length=30, packing=False)
    with pytest.raises(CalibrationDataError, match="has no chat template"):
        batches(config, tokenizer)
    tokenizer.chat_template = TEMPLATE
    (batch,) = batches(config, tokenizer)
    assert text_of(batch, tokenizer) == ["[user]hello"] * 3
    # columns of structs have every key in every row; transformers before 5.23 gives templates those without a value
    calls = "{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
    tokenizer.chat_template = TEMPLATE.replace("[", f"{calls}[", 1)
    rows = [[{"role": "user", "content": "hello", "tool_calls": None}]] * 3
    datasets.Dataset.from_dict({"chat": rows}).save_to_disk(tmp_path / "nulls")
    (batch,) = batches(replace(config, path=str(tmp_path / "nulls")), tokenizer)
    assert text_of(batch, tokenizer) == ["[user]hello"] * 3
    path = tmp_path / "rows.jsonl"
    path.write_text('{"chat": [{"role": "user", "content": "hello"}]}\n{"chat": []}\n')
    config = HfConfig(path=str(path), column="chat", num_samples=2, max_length=30, packing=False)
    with pytest.raises(CalibrationDataError, match=r"the data holds '\[\]' \(list\) where strings or chats"):
        batches(config, tokenizer)


def test_messages_that_call_tools_alone(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Seen to fail: taken for no chats."""
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content or m.tool_calls[0].name }}{% endfor %}"
    path = tmp_path / "calls.jsonl"
    chat = [{"role": "user", "content": "now?"}, {"role": "assistant", "tool_calls": [{"name": "clock"}]}]
    path.write_text(f"{json.dumps({'chat': chat})}\n")
    config = HfConfig(path=str(path), column="chat", num_samples=1, max_length=40, packing=False)
    (batch,) = batches(config, tokenizer)
    assert text_of(batch, tokenizer) == ["[user]now?[assistant]clock"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_rows_without_text_are_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, suffix: str) -> None:
    """Seen to fail: they were taken for chats, and empty strings for documents, with an end of their own."""
    rows = datasets.Dataset.from_dict({"id": [1, 2, 3, 4, 5], "text": [None, "abc", None, "", "def"]})
    path = str(tmp_path / f"rows.{suffix}")
    {"jsonl": rows.to_json, "csv": rows.to_csv}[suffix](path)
    (batch,) = batches(HfConfig(path=path, num_samples=2, max_length=30, packing=False), tokenizer)
    assert sorted(text_of(batch, tokenizer)) == ["abc<eos>", "def<eos>"]
    (window,) = evaluation_dataloader(HfConfig(path=path, num_samples=1, max_length=8), tokenizer)
    assert text_of(window, tokenizer) == ["abc<eos>def<eos>"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            TextConfig(files=("-",), num_samples=11, max_length=15),
            "there are 150 tokens in whole windows, from 10 documents, and 165",
        ),
        (
            TextConfig(files=("-",), num_samples=11, packing=False),
            "there are 10 documents of 2 tokens or more, of 10, and 11 are",
        ),
    ],
)
def test_too_little_text_says_how_much(
    config: TextConfig, message: str, documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(CalibrationDataError) as error:
        batches(replace(config, files=documents), tokenizer)
    assert message in str(error.value)


def test_too_little_text_to_evaluate(documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(CalibrationDataError, match="shorter than one window of 256 tokens"):
        evaluation_dataloader(TextConfig(files=documents), tokenizer)


def test_padding_without_any_token_to_pad_with(documents: tuple[str, ...], tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.eos_token = None
    config = TextConfig(files=documents, num_samples=10, max_length=20, packing=False)
    with pytest.raises(CalibrationDataError, match=r"neither a pad nor an eos token.*data.packing=true"):
        batches(config, tokenizer)


def test_a_template_that_refuses_a_chat(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Such as one without a role for the system. Seen to fail: jinja's own error came, of no row and no remedy."""
    (tmp_path / "chats.jsonl").write_text(json.dumps({"chat": [{"role": "system", "content": "be kind"}]}))
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    config = HfConfig(path=str(tmp_path / "chats.jsonl"), column="chat", num_samples=1, max_length=4)
    with pytest.raises(CalibrationDataError, match=r"refuses .*be kind.* roles system: System role not supported"):
        batches(config, tokenizer)


TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"zone": "string"}}}, {"type": "retrieval"}]


@pytest.mark.parametrize("given", [TOOLS, json.dumps(TOOLS)], ids=["list", "json"])
def test_tools_of_chats(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, given: object) -> None:
    """A template writes what the row's column `tools` has, without the keys that only other rows have. Seen to fail:
    the model was calibrated on prompts without the tools that it always sees."""
    names = "{% for tool in tools or [] %}<{{ tool.keys() | list | length }} {{ tool.type }}>{% endfor %}"
    tokenizer.chat_template = f"{names}{{{{ messages[0].content }}}}"
    chat = [{"role": "user", "content": "now?"}]
    rows = [{"chat": chat, "tools": tools} for tools in (given, None)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = HfConfig(path=str(path), column="chat", num_samples=2, max_length=60, packing=False, batch_size=1)
    texts = {tokenizer.decode(batch["input_ids"][0]) for batch in calibration_dataloader(config, tokenizer)}
    assert texts == {"<2 function><1 retrieval>now?", "now?"}


@pytest.mark.parametrize("given", ["a hammer", "{}x", '{"name": "clock"}', '["clock"]'])
def test_tools_that_are_none(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, given: str) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"chat": [{"role": "user", "content": "now?"}], "tools": given}))
    config = HfConfig(path=str(path), column="chat", num_samples=1, max_length=4)
    with pytest.raises(
        CalibrationDataError, match=r"the column 'tools' beside the chats holds .* \(str\) where a list"
    ):
        calibration_dataloader(config, tokenizer)
