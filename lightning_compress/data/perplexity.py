"""Perplexity of a causal language model on batches of tokens (torchmetrics' `Perplexity`)."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torchmetrics.text import Perplexity

from lightning_compress.errors import CalibrationDataError

_IGNORED = -100


def perplexity(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """exp of the mean negative log-likelihood (natural, per predicted token) over all batches together.

    model: called as `model(**batch)`, returning logits [B, L, V] or an object that has them as `.logits`. Runs where
        its parameters are, in eval mode; every module's mode is restored.
    batches: with "input_ids" [B, L], and where padded "attention_mask" [B, L]. Every token but the first of its row
        is predicted; padding is not.

    Raises CalibrationDataError where there is not one token to predict.
    """
    device = next(model.parameters()).device
    metric = Perplexity(ignore_index=_IGNORED).to(device)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                on_device = {name: value.to(device) for name, value in batch.items()}
                output = model(**on_device)
                logits = output if isinstance(output, Tensor) else output.logits
                metric.update(logits[:, :-1].float(), _targets(on_device))
    finally:
        for module, mode in modes.items():
            module.training = mode
    if metric.count == 0:
        raise CalibrationDataError(
            "perplexity: the batches hold no token to predict (are they empty, or one token long?)."
        )
    return float(metric.compute())


def _targets(batch: Mapping[str, Tensor]) -> Tensor:
    """The token after each position [B, L-1], ignored where it is padding."""
    targets = batch["input_ids"][:, 1:]
    if "attention_mask" not in batch:
        return targets
    return targets.masked_fill(batch["attention_mask"][:, 1:] == 0, _IGNORED)
