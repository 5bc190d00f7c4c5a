"""What the model in memory and the one read back from its checkpoint give for a batch, compared."""

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_compress.calibration.target import Target, in_its_place
from lightning_compress.errors import CompressionError
from lightning_compress.graph.products import in_float32, slow_dtypes
from lightning_compress.graph.trees import tensors_in

FEW = 128
"""Tokens on which outputs are compared."""
_TOKENS = ("input_ids", "attention_mask")
_OF_TOKENS = {*_TOKENS, *(f"decoder_{name}" for name in _TOKENS), "token_type_ids", "labels"}
ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Of the largest output: so much may outputs of equal weights differ; for those of 16 bits this is nothing."""
_CPU = torch.device("cpu")


def output_difference(target: Target, reloaded: nn.Module, batch: Any | None) -> tuple[float | None, float]:
    """Largest difference of any floating-point output, and how large one rounding may explain; None where there is no
    batch that the model takes. Both draw the same random numbers."""
    if batch is None or (target.takes_fields and not isinstance(batch, Mapping | Tensor)):
        return None, 0.0
    with _generators_restored(), in_float32(slow_dtypes(_CPU)):
        batch, mine = _run(target, batch)
    called: list[bool] = []
    handles = [module.register_forward_pre_hook(lambda *_: called.append(True)) for module in reloaded.modules()]
    try:
        with _generators_restored(), in_float32(slow_dtypes(_CPU)), in_its_place(target, reloaded) as step:
            other = step(copy.deepcopy(batch))
    finally:
        for handle in handles:
            handle.remove()
    if not called:  # the step has another way to the model in memory
        return None, 0.0
    largest = tolerance = 0.0
    for left, right in zip(_outputs(mine), _outputs(other), strict=True):
        if torch.isfinite(left).all() and not torch.isfinite(right).all():
            raise CompressionError(
                "The model read back from the checkpoint gives NaN or Inf where the one in memory does not."
            )
        largest = max(largest, float((left.float() - right.float()).abs().nan_to_num().max()))
        scale = float(left.float().abs().nan_to_num(posinf=0.0).max())
        tolerance = max(tolerance, ROUNDING * scale)
    return largest, tolerance


@contextmanager
def _generators_restored() -> Iterator[None]:
    """Within: the global ones may be drawn from; they are as before afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _run(target: Target, batch: Any) -> tuple[Any, object]:
    """What of a batch is compared, and what the model in memory gives: of tokens a few, where it takes those."""
    few = few_tokens(batch) if target.takes_fields else batch
    try:
        return few, target.step(copy.deepcopy(few))
    except Exception:  # it takes rows together, as many as the batch has
        if few is batch:
            raise
        return batch, target.step(copy.deepcopy(batch))


def few_tokens(batch: Any) -> Any:
    """Of a batch of nothing but tokens the beginning of the row that has most of them: both models run on the CPU."""
    fields = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    tokens = fields.get("input_ids")
    if not fields.keys() <= _OF_TOKENS or not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return batch
    if any(not isinstance(value, Tensor) or value.shape != tokens.shape for value in fields.values()):
        return batch
    mask = fields.get("attention_mask")
    row = 0 if mask is None else int(mask.bool().sum(1).argmax())
    begin = 0 if mask is None else int(mask[row].bool().int().argmax())
    few = {key: value[row : row + 1, begin : begin + FEW] for key, value in fields.items()}
    return few if isinstance(batch, Mapping) else few["input_ids"]


def _outputs(value: object) -> list[Tensor]:
    """Logits where there are any (past key values and hidden states follow from the same weights), else every
    output."""
    logits = getattr(value, "logits", None)
    if isinstance(logits, Tensor):
        return [logits]
    value = dict(value) if isinstance(value, Mapping) else value
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point() and tensor.numel()]
