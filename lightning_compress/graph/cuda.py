"""What operators make on CUDA, of fake tensors of a CPU: attention above all, whose scores are written down or not.

After the choice that PyTorch makes (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), on cards of compute
capability 8.0 or more: FlashAttention (or cuDNN's, which returns the same) for 16-bit tensors without a mask, else the
memory-efficient kernel, which knows no groups of heads that share keys, else the formula, which writes scores down.

Alternative not taken: fake tensors of a CUDA device. On a build of PyTorch without CUDA some calls on them end the
process, and attention takes the formula always.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from lightning_compress.graph.restore import assigned

_ATTENTION = (scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
_HALVES = (torch.bfloat16, torch.float16)
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_MOST_FLASH_WIDTH = 256
_MASK_ALIGNMENT = 16


@final
class AsOnCuda(TorchFunctionMode):
    """Within: tensors say that they are on CUDA, and attention is computed as there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == _IS_CUDA:  # a wrapper that is made anew each time
            return True
        if func in _ATTENTION:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def as_on_cuda() -> AbstractContextManager[None]:
    """Within: attention and dropout are computed as on CUDA where they are called by their full names; in a backward,
    too, in which there are no modes."""
    return assigned(functional, scaled_dot_product_attention=_attention, dropout=_dropout)


def temporary_bytes(function: Any, args: Sequence[Any]) -> int:
    """What an operator has on CUDA beside its arguments and its result, as far as that is known: the product of a
    softmax's gradient and itself; which scores are masked."""
    if function is torch.ops.aten._softmax_backward_data.default:
        return int(args[0].nbytes)
    return int(args[0].numel()) if function is torch.ops.aten._safe_softmax.default else 0


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As `dropout`, which keeps a mask of bytes there."""
    if inplace or not training or not 0 < p < 1:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    return torch.native_dropout(input, p, training)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `scaled_dot_product_attention`."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        added = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = added.masked_fill_(attn_mask.logical_not(), -math.inf)
    inputs = (query, key, value)
    keeps = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if attn_mask is None and _suits_flash(query, key, value, is_causal, enable_gqa):
        width = query.shape[-1]
        padded = [pad(each, (0, -width % 8)) if width % 8 else each for each in inputs]
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale or 1 / math.sqrt(width)
        )
        return cast(Tensor, found[0][..., :width])
    if _suits_efficient(query, key, value):
        if attn_mask is not None:
            size = attn_mask.shape[-1]
            if size % _MASK_ALIGNMENT:
                attn_mask = pad(attn_mask, (0, -size % _MASK_ALIGNMENT))[..., :size]
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            *inputs, attn_mask, keeps, dropout_p, is_causal, scale=scale
        )
        return cast(Tensor, found[0])
    found = torch.ops.aten._scaled_dot_product_attention_math(
        *inputs, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return cast(Tensor, found[0])


def _suits_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> bool:
    widths = {each.shape[-1] for each in (query, key, value)}
    is_square = query.shape[-2] == key.shape[-2]
    shares = enable_gqa and key.shape[-3] == value.shape[-3]
    return (
        query.ndim == 4
        and query.dtype in _HALVES
        and len(widths) == 1
        and max(widths) <= _MOST_FLASH_WIDTH
        and (shares or _has_as_many_heads(query, key, value))
        and (is_square or not is_causal)
    )


def _suits_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    alignment = 8 if query.dtype in _HALVES else 4
    return (
        query.ndim == 4
        and query.dtype in (*_HALVES, torch.float32)
        and query.shape[-1] == key.shape[-1]
        and not any(each.shape[-1] % alignment for each in (query, value))
        and _has_as_many_heads(query, key, value)
    )


def _has_as_many_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.ndim == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
