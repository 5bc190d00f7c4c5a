"""Perplexity of a causal language model on batches of tokens (torchmetrics' `Perplexity`).

Ranks share out whole batches, as a calibration does; the sum over batches is exact (`math.fsum`), so that the number is
the same on any number of ranks. Alternative not taken: the metric's own sum over ranks, whose last bits depend on them.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn
from torchmetrics.text import Perplexity
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PreTrainedModel

from lightning_compress.calibration.batches import collect, num_elements
from lightning_compress.calibration.evaluate import outputs, prepare_evaluation
from lightning_compress.calibration.prepare import evaluating
from lightning_compress.calibration.target import find_target
from lightning_compress.distributed.collective import Collective, SingleProcess
from lightning_compress.distributed.share import assign
from lightning_compress.errors import CalibrationDataError, UnsupportedModelError
from lightning_compress.graph.restore import contents_restored
from lightning_compress.memory.placement import Placement

_IGNORED = -100
_NUMBERS = 2**24
"""Of the logits that the metric gets at a time."""

_REMEDY = "Measure it at its own task, and leave data@held_out out."

Batch = Mapping[str, Tensor]


def perplexity(
    model: nn.Module,
    batches: Iterable[Batch],
    placement: Placement | None = None,
    collective: Collective | None = None,
) -> float:
    """exp of the mean negative log-likelihood (natural, per predicted token) over all batches together.

    Args:
        model: called as `model(**batch)`, returning logits [B, L, V] or an object that has them as `.logits`. It runs
            in eval mode; every module's mode is restored.
        batches: with "input_ids" [B, L], and where padded "attention_mask" [B, L]. Every token but the first of its row
            is predicted; padding is not.
        placement: run all batches through one layer after the other, with weights and activations where this says.
            None: the model runs as it is, where its parameters are.
        collective: the ranks, which give the same model and all batches, and get the same number. None: this process is
            the only one.

    Raises:
        CalibrationDataError: there is not one token to predict; or token ids or positions that an embedding has no row
            for (found on a CPU).
        UnsupportedModelError: a model that returns no logits, or whose logits are not of the next token: an
            encoder-decoder, one of masked tokens.
        UntraceableModelError: with `placement`, a model that cannot be recorded.
    """
    _check_predicts_next(model)
    device = next(model.parameters()).device if placement is None else placement.device
    metric = Perplexity(ignore_index=_IGNORED, sync_on_compute=False).to(device)  # type: ignore[arg-type]
    collective = collective or SingleProcess()
    kept = [dict(batch) for batch in batches]
    share = assign([num_elements(batch) for batch in kept], collective.size)[collective.rank]
    mine = [kept[number] for number in share]
    sums: list[tuple[float, int]] = []  # of each batch, which is of one shape wherever it is run
    with evaluating(model), contents_restored(model) if placement is None else nullcontext():
        found = _logits(model, mine, device) if placement is None else _logits_by_layer(model, kept, share, placement)
        with closing(found):
            for batch, logits in zip(mine, found, strict=True):
                metric.reset()
                for some, targets in _parts(logits, _targets(batch).to(device)):
                    metric.update(some.double(), targets)  # whose softmax of a logit 104 below the largest is not 0
                sums.append((float(metric.total_log_probs), int(metric.count)))
    of_all = list(chain(*collective.gather(sums, "the sums for the perplexity")))
    count = sum(number for _, number in of_all)
    if count == 0:
        raise CalibrationDataError(
            "perplexity: the batches hold no token to predict (are they empty, or one token long?)."
        )
    return math.exp(math.fsum(total for total, _ in of_all) / count)


def _logits(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Generator[Tensor, None, None]:
    for batch in batches:
        try:
            output = model(**{name: value.to(device) for name, value in batch.items()})
        except IndexError as error:
            tables = (named for named in model.named_modules() if isinstance(named[1], nn.Embedding))
            sizes = ", ".join(f"{name} has {table.num_embeddings}" for name, table in tables)
            raise CalibrationDataError(
                f"A batch asks an embedding for a row that it does not have ({sizes}). For positions, give shorter "
                "samples (data.max_length); for tokens, the model's own tokenizer."
            ) from error
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise _without_logits(model, output.keys() if isinstance(output, Mapping) else [type(output).__name__])
        yield logits


def _logits_by_layer(
    model: nn.Module, batches: Sequence[Batch], share: Sequence[int], placement: Placement
) -> Generator[Tensor, None, None]:
    evaluation = prepare_evaluation(find_target(model), collect(batches), placement, share=share)
    found = {"logits", ""} & evaluation.results.keys()
    if not found:
        raise _without_logits(model, evaluation.results)
    (path,) = found
    for output in outputs(evaluation):
        logits = output[path]
        assert isinstance(logits, Tensor)
        yield logits


def _check_predicts_next(model: nn.Module) -> None:
    config = model.config if isinstance(model, PreTrainedModel) else None
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder: what it says of a text depends on another, so it has no "
            f"perplexity of one. {_REMEDY}"
        )
    is_causal = getattr(config, "is_decoder", False) or getattr(config, "causal", False)  # the latter is XLM's
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not is_causal:
        raise UnsupportedModelError(
            f"{type(model).__name__} reads a text in both directions and predicts masked tokens, not the next one, so "
            f"it has no perplexity. {_REMEDY}"
        )


def _without_logits(model: nn.Module, results: Iterable[str]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} returns no logits but {', '.join(results)}, so it has no perplexity."
    )


def _parts(logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some positions of one row at a time [1, l, V] and their targets [1, l]: the metric makes copies of what it is
    given, and a batch's logits are among the largest tensors there are."""
    at_once = max(_NUMBERS // max(logits.shape[-1], 1), 1)
    for row, wanted in zip(logits[:, :-1], targets, strict=True):
        yield from zip(row[None].split(at_once, dim=1), wanted[None].split(at_once, dim=1), strict=True)


def _targets(batch: Batch) -> Tensor:
    """The token after each position [B, L-1], ignored where that, or the position, is padding."""
    targets = batch["input_ids"][:, 1:]
    if "attention_mask" not in batch:
        return targets
    is_token = batch["attention_mask"] != 0
    return targets.masked_fill(~(is_token[:, 1:] & is_token[:, :-1]), _IGNORED)
