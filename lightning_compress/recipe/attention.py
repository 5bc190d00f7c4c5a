"""`nn.MultiheadAttention` as the Linears that it is made of.

It keeps what queries, keys and values are multiplied by as one parameter, and calls no module for any of its products.
Within `graph.unfold.unfolded` an `Attention` is in its place, whose Linears are views of the same memory.
"""

import math
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_compress.recipe.forms import attribute_of_either, has_forward_of, share_hooks

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_STACKS = ("in_proj_weight", *(f"{name}_weight" for name in _PROJECTIONS), "in_proj_bias")


@final
class Attention(nn.Module):
    """In place of an `nn.MultiheadAttention`: the same function, of the Linears `q_proj`, `k_proj`, `v_proj` and
    `out_proj`."""

    folded: nn.MultiheadAttention

    def __init__(self, folded: nn.MultiheadAttention) -> None:
        super().__init__()
        for key in _stacks_of(folded):
            stack = folded.get_parameter(key)
            for path, part in self.split(key, stack.detach()).items():
                name, _, local = path.partition(".")
                if local == "weight":
                    has_bias = folded.in_proj_bias is not None
                    linear = nn.Linear(part.shape[1], part.shape[0], bias=has_bias, device="meta")
                    self.add_module(name, linear)
                self.get_submodule(name).register_parameter(local, nn.Parameter(part, stack.requires_grad))
        self.out_proj = folded.out_proj
        self.bias_k, self.bias_v = folded.bias_k, folded.bias_v
        self._qkv_same_embed_dim = False  # else torch's layers read the weights, and call nothing
        self.__dict__.update(folded=folded)  # not a child
        share_hooks(self, folded)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Names of the parameters that have another form in the module that this replaces, weights first."""
        return _stacks_of(self.folded)

    def split(self, key: str, stack: Tensor, first: int = 0) -> dict[str, Tensor]:
        """Of such a parameter the ones here, as views."""
        if not key.startswith("in_proj_"):
            return {f"{key.removesuffix('_weight')}.weight": stack}
        local = key.removeprefix("in_proj_")
        return {f"{name}.{local}": part for name, part in zip(_PROJECTIONS, stack.chunk(3), strict=True)}

    def joined(self, key: str, tensor: Tensor) -> Tensor:
        """A parameter as checkpoints of ours have it: as it is here."""
        return tensor

    def ask_for_gradients(self) -> None:
        """As the parameters do that the ones here are views of."""
        for key in self.stacks:
            stack = self.folded.get_parameter(key)
            for path in self.split(key, stack):
                self.get_parameter(path).requires_grad_(stack.requires_grad)

    def __getattr__(self, name: str) -> Any:
        """What else it has: models read its number of heads."""
        is_in_parts = name in _STACKS and "folded" in self.__dict__  # it is not while it is copied
        return self._whole(name) if is_in_parts else attribute_of_either(self, name)

    def _whole(self, name: str) -> Tensor | None:
        """The values of a parameter that is in parts here, for code that reads it."""
        stack = self.folded._parameters[name]
        if stack is None:
            return None
        parts: list[Tensor] = [self.get_parameter(path) for path in self.split(name, stack)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`, by the steps of `torch.nn.functional.multi_head_attention_forward`."""
        is_batched = query.ndim == 3
        moved = {id(each): self._batch_first(each) for each in (query, key, value)}  # equal ones stay one
        q, k, v = self.q_proj(moved[id(query)]), self.k_proj(moved[id(key)]), self.v_proj(moved[id(value)])
        if key_padding_mask is not None and not is_batched:
            key_padding_mask = key_padding_mask[None]
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        num_rows = q.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, bias.expand(num_rows, 1, -1)], 1) for x, bias in ((k, self.bias_k), (v, self.bias_v)))
        if self.folded.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.unflatten(-1, (self.folded.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = self._mask(q, k.shape[2], attn_mask, key_padding_mask)
        dropout = self.folded.dropout if self.training else 0.0
        if need_weights:
            products = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
            weights = functional.softmax(products if mask is None else products + mask, dim=-1)
            weights = functional.dropout(weights, dropout, training=dropout > 0)
            y = weights @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v, mask, dropout)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        found = (weights.mean(1) if average_attn_weights else weights) if need_weights else None
        if not is_batched:
            return y[0], None if found is None else found[0]
        return (y if self.folded.batch_first else y.transpose(0, 1)), found

    def _batch_first(self, x: Tensor) -> Tensor:
        """[B, L, C]."""
        if x.ndim == 2:
            return x[None]
        return x if self.folded.batch_first else x.transpose(0, 1)

    def _mask(
        self, q: Tensor, num_keys: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """What is added to the products [B, H, L, S], of masks [L, S] or [B H, L, S] and [B, S]."""
        total = None
        if attn_mask is not None:
            total = _added(attn_mask, q.dtype, num_keys)
            total = total if total.ndim == 2 else total.unflatten(0, (q.shape[0], -1))
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, q.dtype, num_keys)[:, None, None]
            total = padding if total is None else total + padding
        return total


def is_plain(folded: nn.MultiheadAttention) -> bool:
    """Whether it computes what its class says, of parameters of its own: none is made of others (spectral_norm)."""
    return has_forward_of(folded, nn.MultiheadAttention) and all(name in folded._parameters for name in _STACKS)


def _stacks_of(folded: nn.MultiheadAttention) -> tuple[str, ...]:
    return tuple(name for name in _STACKS if folded._parameters[name] is not None)


def _added(mask: Tensor, dtype: torch.dtype, num_keys: int) -> Tensor:
    """A mask [..., S] as what is added, for all keys: those that were appended are seen by all."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return functional.pad(mask.to(dtype), (0, num_keys - mask.shape[-1]))
