"""Perplexity against a direct computation in float64."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.text import Perplexity
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_compress.data import perplexity
from lightning_compress.errors import CalibrationDataError, UnsupportedModelError
from lightning_compress.memory.placement import Placement


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(20)  # away from the uniform distribution, where any indexing error goes unseen
    return model


def reference(model: LlamaForCausalLM, rows: list[Tensor]) -> float:
    """exp of the mean over all predicted tokens of all rows, one row at a time, unpadded."""
    losses = []
    with torch.no_grad():
        for row in rows:
            log_probabilities = model(input_ids=row[None]).logits[0].double().log_softmax(-1)
            losses += [-log_probabilities[i, row[i + 1]] for i in range(len(row) - 1)]
    return float(torch.stack(losses).mean().exp())


def test_it_is_the_mean_over_tokens_not_over_batches(model: LlamaForCausalLM) -> None:
    rows = list(torch.randint(50, (6, 12), generator=torch.Generator().manual_seed(1)))
    batches = [{"input_ids": torch.stack(rows[:5])}, {"input_ids": torch.stack(rows[5:])}]
    assert perplexity(model, batches) == pytest.approx(reference(model, rows), rel=1e-4)


def test_padding_is_not_predicted(model: LlamaForCausalLM) -> None:
    """Fails when the mask is ignored: the padding would enter the mean."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(50, (length,), generator=generator) for length in (12, 7, 3)]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    mask = (torch.arange(12) < torch.tensor([[12], [7], [3]])).long()
    measured = perplexity(model, [{"input_ids": padded, "attention_mask": mask}])
    assert measured == pytest.approx(reference(model, rows), rel=1e-4)


def test_padding_on_the_left(model: LlamaForCausalLM) -> None:
    """Seen to fail: the first token of a row was predicted from the padding before it."""
    rows = [torch.arange(1, 9), torch.arange(20, 25)]
    padded = torch.stack([rows[0], nn.functional.pad(rows[1], (3, 0))])
    mask = (torch.arange(8) >= torch.tensor([[0], [3]])).long()
    measured = perplexity(model, [{"input_ids": padded, "attention_mask": mask}])
    assert measured == pytest.approx(reference(model, rows), rel=1e-4)


def test_a_token_far_below_the_likeliest(model: LlamaForCausalLM) -> None:
    """As damaged models have them. Seen to fail: infinite, for a float32 softmax there is 0."""
    model.lm_head.weight.data.mul_(80)
    row = torch.arange(12)
    assert 1e60 < reference(model, [row]) < 1e300
    assert perplexity(model, [{"input_ids": row[None]}]) == pytest.approx(reference(model, [row]), rel=1e-2)


@pytest.mark.parametrize("num_positions", [1, 4, 100])
def test_the_metric_gets_some_positions_at_a_time(
    model: LlamaForCausalLM, num_positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Size] = []
    update = Perplexity.update

    def watched(self: Perplexity, preds: Tensor, target: Tensor) -> None:
        given.append(preds.shape)
        update(self, preds, target)

    monkeypatch.setattr(Perplexity, "update", watched)
    monkeypatch.setattr(sys.modules[perplexity.__module__], "_NUMBERS", num_positions * 50 + 49)
    rows = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(1))
    assert perplexity(model, [{"input_ids": rows}]) == pytest.approx(reference(model, list(rows)), rel=1e-4)
    assert max(batch * length for batch, length, _ in given) == min(num_positions, 11)


def test_modes_are_restored(model: LlamaForCausalLM) -> None:
    model.train()
    model.model.layers[0].eval()
    perplexity(model, [{"input_ids": torch.arange(8)[None]}])
    assert model.training
    assert model.model.layers[1].training
    assert not model.model.layers[0].training


@pytest.mark.parametrize("batches", [[], [{"input_ids": torch.zeros(2, 1, dtype=torch.int64)}]])
def test_nothing_to_predict_is_an_error(model: LlamaForCausalLM, batches: list[dict[str, Tensor]]) -> None:
    with pytest.raises(CalibrationDataError, match="no token to predict"):
        perplexity(model, batches)


@pytest.mark.parametrize("placement", [None, Placement(torch.device("cpu"))])
def test_more_tokens_than_positions_is_an_error_that_names_the_table(placement: Placement | None) -> None:
    config = GPT2Config(n_positions=8, n_embd=16, n_layer=1, n_head=2, vocab_size=50)
    batches = [{"input_ids": torch.randint(50, (2, 12))}]
    with pytest.raises(CalibrationDataError, match=r"transformer\.wpe.* has 8.*shorter samples"):
        perplexity(GPT2LMHeadModel(config), batches, placement)


def test_a_model_without_logits_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaModel returns no logits but last_hidden_state"):
        perplexity(model.model, [{"input_ids": torch.arange(8)[None]}])


@pytest.mark.parametrize("placement", [None, Placement(torch.device("cpu"))])
@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        (BartForConditionalGeneration, BartConfig, "is an encoder-decoder"),
        (T5ForConditionalGeneration, T5Config, "is an encoder-decoder"),
        (BertForMaskedLM, BertConfig, "predicts masked tokens"),
        (BertLMHeadModel, BertConfig, "predicts masked tokens"),
    ],
)
def test_logits_of_other_tokens_are_refused(kind: Any, config: Any, said: str, placement: Placement | None) -> None:
    """Seen to fail: a number of no meaning, and T5's own error."""
    with torch.device("meta"):
        model = kind(config(num_hidden_layers=1, encoder_layers=1, decoder_layers=1, num_layers=1))
    with pytest.raises(UnsupportedModelError, match=f"^{kind.__name__} .*{said}.*no perplexity"):
        perplexity(model, [{"input_ids": torch.ones(1, 4, dtype=torch.long)}], placement)


def test_an_encoder_that_is_a_decoder() -> None:
    config = BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, is_decoder=True
    )
    assert perplexity(BertLMHeadModel(config), [{"input_ids": torch.ones(1, 4, dtype=torch.long)}]) > 1
