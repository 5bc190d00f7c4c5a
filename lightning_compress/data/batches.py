"""From documents to batches of token ids.

Method: documents are drawn in a seeded order and tokenized only as far as needed (at least `num_samples` documents,
so that a few long ones do not make up the whole sample). Packed (default): they are joined, cut into windows of equal
length, and the sample is drawn from the windows. Ragged: one document is one sample, padded on the right, with a mask.
Of an encoder-decoder a sample is twice as long: the encoder reads the first half, the decoder goes on with the second.
Batches are formed here, once and globally, and handed to ranks whole: a sampler that strides samples over ranks would
make the statistics depend on how many ranks there are (docs/multi_node.md).
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain, islice, product
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_compress.data.config import CustomConfig, DataConfig, MultimodalConfig, TokensConfig
from lightning_compress.data.custom import custom_batches
from lightning_compress.data.multimodal import multimodal_dataloader
from lightning_compress.data.sources import Document, WithTools, is_chat, load_documents, rendered
from lightning_compress.errors import CalibrationDataError

Batch = dict[str, Tensor]

log = logging.getLogger(__name__)

_DOCUMENTS_AT_A_TIME = 64
_CHARACTERS_AT_A_TIME = 2**20  # a tokenizer takes some 150 bytes for each
_SHORTEST_DOCUMENT = 2  # tokens: one to read and one to predict


def calibration_batches(config: DataConfig, processor: Any, model: nn.Module | None = None) -> Iterable[Any]:
    """What `config` names, in batches as the model takes them.

    Args:
        config: of any source.
        processor: the model's tokenizer, or its processor, which holds one.
        model: that takes them; None: no encoder-decoder.

    Raises:
        CalibrationDataError: see `calibration_dataloader`, `multimodal_dataloader` and `custom_batches`.
    """
    match config:
        case TokensConfig():
            return calibration_dataloader(config, tokenizer_of(processor), None if model is None else _decoder(model))
        case MultimodalConfig():
            return multimodal_dataloader(config, processor)
        case CustomConfig():
            return custom_batches(config, processor)
        case _:
            raise TypeError(f"{type(config).__name__} is no source of data.")


def _title(processor: Any) -> str:
    return "model.tokenizer=null" if processor is None else f"its processor is a {type(processor).__name__}"


def tokenizer_of(processor: Any) -> PreTrainedTokenizerBase:
    """A processor's tokenizer, with the processor's chat template where it has none; a tokenizer itself.

    Raises:
        CalibrationDataError: the model reads no text.
    """
    tokenizer: Any = getattr(processor, "tokenizer", processor)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise CalibrationDataError(
            f"this data is text, and the model has no tokenizer ({_title(processor)}): name one with model.tokenizer=; "
            "or, to calibrate, use data=custom with batches that the model takes."
        )
    if tokenizer.chat_template is None and getattr(processor, "chat_template", None) is not None:
        tokenizer = copy(tokenizer)  # what is saved with a checkpoint stays as it is
        tokenizer.chat_template = processor.chat_template
    return cast(PreTrainedTokenizerBase, tokenizer)


@final
@dataclass(frozen=True)
class Decoder:
    """One that has tokens of its own beside an encoder's, and begins with `start_token_ids`: one, or none."""

    start_token_ids: tuple[int, ...]


def _decoder(model: nn.Module) -> Decoder | None:
    if not isinstance(model, PreTrainedModel) or "decoder_input_ids" not in signature(model.forward).parameters:
        return None
    keys = ("decoder_start_token_id", "bos_token_id")  # as in `generate`
    configs = (getattr(model, "generation_config", None), model.config)
    found = (getattr(config, key, None) for key, config in product(keys, configs))
    return Decoder(tuple(islice((token for token in found if token is not None), 1)))


def calibration_dataloader(
    config: TokensConfig, tokenizer: PreTrainedTokenizerBase, decoder: Decoder | None = None
) -> DataLoader[Batch]:
    """`num_samples` samples of text drawn with `seed`, in batches.

    Yields {"input_ids": [B, L]} int64, and "attention_mask" [B, L] int64 (1: token, 0: padding) in every batch where
    any batch has padding. L is `max_length` when packed, else the longest of the batch. With a `decoder`, samples are
    twice as long; theirs is the second half, behind the start token and without the last, as "decoder_input_ids" and
    "decoder_attention_mask".

    Raises CalibrationDataError where there is too little text (with the numbers), no chat template, or no token to pad
    with.
    """
    if decoder is not None:
        config = replace(config, max_length=2 * config.max_length)
    documents = load_documents(config)
    generator = torch.Generator().manual_seed(config.seed)
    order = torch.randperm(len(documents), generator=generator).tolist()
    encoded = _encode((documents[i] for i in order), tokenizer)
    if config.packing:
        windows = _windows(encoded, config, least_documents=config.num_samples)
        drawn = torch.randperm(len(windows), generator=generator)[: config.num_samples].tolist()
        samples = [windows[i] for i in drawn]
    else:
        samples = _beginnings(encoded, config)
    if len(samples) < config.num_samples:
        raise CalibrationDataError(_too_little(config, samples, len(documents)))
    return _dataloader(samples, config, tokenizer, decoder)


def evaluation_dataloader(config: DataConfig, processor: Any) -> DataLoader[Batch]:
    """The first `num_samples` samples in the order of the text (all there are, where there are fewer), in batches.

    Packed windows follow one another without overlap. Shapes and errors as in `calibration_dataloader`; `seed` has
    no effect.
    """
    if not isinstance(config, TokensConfig):
        raise CalibrationDataError(
            f"perplexity is of text, not of data.source={config.source!r}: use docs, text or hf."
        )
    tokenizer = tokenizer_of(processor)
    documents = load_documents(config)
    encoded = _encode((documents[i] for i in range(len(documents))), tokenizer)
    if config.packing:
        samples = _windows(encoded, config, least_documents=1)[: config.num_samples]
    else:
        samples = _beginnings(encoded, config)
    if not samples:
        raise CalibrationDataError(
            f"data ({config.source}): the text is shorter than one window of {config.max_length} tokens."
        )
    return _dataloader(samples, config, tokenizer)


def _encode(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[Tensor]:
    """Each document's token ids [T]: with the tokenizer's special tokens or, where it adds none, eos at the end.

    Rows without a document (an empty cell of a table, an empty line) are left out.
    """
    remaining = (document for document in documents if not _is_empty(document))
    adds_special = bool(tokenizer("")["input_ids"])
    ending = [] if adds_special or tokenizer.eos_token_id is None else [cast(int, tokenizer.eos_token_id)]
    first = next(remaining, None)
    if first is None:
        return
    are_chats = not isinstance(first, str)
    for texts in _at_a_time(_render(document, tokenizer) for document in chain([first], remaining)):
        encoded = tokenizer(texts, add_special_tokens=not are_chats, verbose=False)["input_ids"]
        for ids in cast(list[list[int]], encoded):
            yield torch.tensor(ids if are_chats else ids + ending, dtype=torch.int64)


def _is_empty(document: Document | None) -> bool:
    text = document.chat if isinstance(document, WithTools) else document
    return text is None or text == ""


def _at_a_time(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in groups of at most so many, and so many characters in all unless one alone has more."""
    group: list[str] = []
    for text in texts:
        num_characters = sum(map(len, group))
        if group and (len(group) == _DOCUMENTS_AT_A_TIME or num_characters + len(text) > _CHARACTERS_AT_A_TIME):
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def _render(document: Document, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(document, str):
        return document
    chat, tools = (document.chat, document.tools) if isinstance(document, WithTools) else (document, None)
    if not is_chat(chat):
        raise CalibrationDataError(
            f"the data holds {str(chat)[:50]!r} ({type(chat).__name__}) where strings or chats (lists of "
            "{role, content}, not empty) are to be: leave such rows out."
        )
    if tokenizer.chat_template is None:
        raise CalibrationDataError(
            f"the data holds chats, and the tokenizer {tokenizer.name_or_path!r} has no chat template: use the "
            "instruction-tuned model's tokenizer, set tokenizer.chat_template, or choose a column of strings."
        )
    return rendered(chat, tokenizer, tools)


def _windows(encoded: Iterator[Tensor], config: TokensConfig, least_documents: int) -> list[Tensor]:
    """Consecutive windows [max_length] of the joined documents: `num_samples`, or more where documents are long."""
    pieces: list[Tensor] = []
    num_tokens = 0
    for ids in encoded:
        pieces.append(ids)
        num_tokens += len(ids)
        if num_tokens >= config.num_samples * config.max_length and len(pieces) >= least_documents:
            break
    joined = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
    num_windows = num_tokens // config.max_length
    return list(joined[: num_windows * config.max_length].view(num_windows, config.max_length))


def _beginnings(encoded: Iterator[Tensor], config: TokensConfig) -> list[Tensor]:
    """The first `max_length` tokens of `num_samples` documents (those with too few tokens to predict one left out)."""
    long_enough = (ids[: config.max_length] for ids in encoded if len(ids) >= _SHORTEST_DOCUMENT)
    return list(islice(long_enough, config.num_samples))


def _too_little(config: TokensConfig, samples: Sequence[Tensor], num_documents: int) -> str:
    if config.packing:
        there = f"{len(samples) * config.max_length} tokens in whole windows, from {num_documents} documents"
        needed = f"{config.num_samples * config.max_length} ({config.num_samples} x {config.max_length})"
    else:
        there = f"{len(samples)} documents of {_SHORTEST_DOCUMENT} tokens or more, of {num_documents}"
        needed = f"{config.num_samples}"
    return (
        f"data ({config.origin}): too little text: there are {there}, and {needed} are needed. "
        "Lower data.num_samples or data.max_length, or give more text."
    )


@final
@dataclass(frozen=True)
class _Collate:
    """Stacks samples [L_i] to a batch; `pad_token_id` is None where no batch of the run has padding."""

    pad_token_id: int | None

    def __call__(self, samples: Sequence[Tensor]) -> Batch:
        if self.pad_token_id is None:
            return {"input_ids": torch.stack(list(samples))}
        lengths = torch.tensor([len(ids) for ids in samples])
        padded = torch.nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=self.pad_token_id)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return {"input_ids": padded, "attention_mask": mask.long()}


@final
@dataclass(frozen=True)
class _CollateHalves:
    """Samples [L_i] as what an encoder reads and, behind it, what a decoder does."""

    collate: _Collate
    decoder: Decoder

    def __call__(self, samples: Sequence[Tensor]) -> Batch:
        read, said = zip(*(ids.tensor_split([-(-len(ids) // 2)]) for ids in samples), strict=True)
        start = torch.tensor(self.decoder.start_token_ids, dtype=torch.int64)
        shifted = [torch.cat([start, ids])[: len(ids)] for ids in said]
        return {**self.collate(read), **{f"decoder_{key}": value for key, value in self.collate(shifted).items()}}


def _dataloader(
    samples: Sequence[Tensor], config: DataConfig, tokenizer: PreTrainedTokenizerBase, decoder: Decoder | None = None
) -> DataLoader[Batch]:
    size = config.batch_size
    starts = range(0, len(samples), size)
    ragged = any(len({len(ids) for ids in samples[start : start + size]}) > 1 for start in starts)
    whole = _Collate(_pad_token_id(tokenizer) if ragged else None)
    collate = whole if decoder is None else _CollateHalves(whole, decoder)
    # A list of tensors serves as a dataset, and the collation makes dicts of them, which DataLoader's type cannot say.
    loader: DataLoader[Any] = DataLoader(list(samples), batch_size=size, collate_fn=collate)  # type: ignore[arg-type]
    return cast(DataLoader[Batch], loader)


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.pad_token_id is not None:
        return cast(int, tokenizer.pad_token_id)
    if tokenizer.eos_token_id is None:
        raise CalibrationDataError(
            f"the samples differ in length, and the tokenizer {tokenizer.name_or_path!r} has neither a pad nor an eos "
            "token: set tokenizer.pad_token, or use data.packing=true."
        )
    log.warning("The tokenizer has no pad token: padding with its eos token %r (masked).", tokenizer.eos_token)
    return cast(int, tokenizer.eos_token_id)
