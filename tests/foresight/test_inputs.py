"""What models take, as far as their configurations say."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BertConfig,
    LlamaConfig,
    T5Config,
    ViTConfig,
    Wav2Vec2Config,
    WhisperConfig,
)

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.inputs import beyond_positions, check_takes_tokens, inputs_of
from lightning_compress.foresight.jobs import FineTuningJob, InferenceJob
from lightning_compress.memory.source import parameters_on_meta

WIDE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = BertConfig(**WIDE, vocab_size=100, max_position_embeddings=16)
VIT = ViTConfig(**WIDE, image_size=[32, 64], patch_size=16, num_channels=1)
WHISPER = WhisperConfig(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=100, num_mel_bins=8, max_source_positions=20,
    max_target_positions=6, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
T5 = T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=100)
LLAMA = LlamaConfig(**WIDE, vocab_size=100)
WAV2VEC2 = Wav2Vec2Config(**WIDE, conv_dim=[8], conv_stride=[4], conv_kernel=[4], num_feat_extract_layers=1)


@pytest.mark.parametrize(
    ("auto", "config", "shapes"),
    [
        (AutoModelForCausalLM, LLAMA, {"input_ids": (3, 8)}),
        (AutoModelForMaskedLM, BERT, {"input_ids": (3, 8)}),
        (AutoModelForSeq2SeqLM, T5, {"input_ids": (3, 8), "decoder_input_ids": (3, 8)}),
        (AutoModelForImageClassification, VIT, {"pixel_values": (3, 1, 32, 64)}),
        (AutoModelForSpeechSeq2Seq, WHISPER, {"input_features": (3, 8, 40), "decoder_input_ids": (3, 6)}),
    ],
    ids=["llama", "bert", "t5", "vit", "whisper"],
)
def test_models_run_on_them(auto: Any, config: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    model = auto.from_config(config, dtype=torch.bfloat16).eval()
    batch = inputs_of(model, 3, 8)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
    assert len(model(**batch).logits) == 3


def test_sizes_that_nobody_knows() -> None:
    with parameters_on_meta():
        model = AutoModel.from_config(WAV2VEC2)
    with pytest.raises(CompressionError, match=r"Wav2Vec2Model takes input_values, .*MemoryReportCallback"):
        inputs_of(model, 3, 8)
    with pytest.raises(CompressionError, match=r"job=finetuning is of models that read tokens, and Wav2Vec2Model"):
        check_takes_tokens(model, FineTuningJob())


def test_encoders_do_not_continue_a_prompt() -> None:
    with parameters_on_meta():
        model = AutoModelForSeq2SeqLM.from_config(T5)
    check_takes_tokens(model, FineTuningJob())
    with pytest.raises(CompressionError, match=r"T5ForConditionalGeneration has an encoder for it"):
        check_takes_tokens(model, InferenceJob())


def test_more_tokens_than_positions() -> None:
    with parameters_on_meta():
        model = AutoModelForMaskedLM.from_config(BERT)
    assert beyond_positions(model, 16) == ""
    assert beyond_positions(model, 17) == "17 tokens are more than the 16 positions that BertForMaskedLM is made for."
