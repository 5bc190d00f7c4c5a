"""A tiny trained BPE tokenizer and a word-level one: real tokenizers, no download."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens (id of a character = its place in the byte alphabet), eos `<eos>`, no pad, no added tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=257, special_tokens=["<eos>"], initial_alphabet=alphabet)
    core.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
