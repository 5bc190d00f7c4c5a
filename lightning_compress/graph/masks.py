"""Which rows of a traced value are tokens, and which are padding."""

from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch import Tensor, fx

from lightning_compress.graph.trace import Traced
from lightning_compress.graph.values import expression

_OTHERS = ("pixel", "global")
"""What masks of something else start with: of pixels that are padding, of tokens that attend to all."""


@dataclass(frozen=True)
class TokenMask:
    """What tells which rows of a value are tokens.

    Attributes:
        node: the padding mask [B, L].
        is_length_first: the value is [L, B, ...].
        is_heads_first: the value is [B, H, L, C].
    """

    node: fx.Node
    is_length_first: bool = False
    is_heads_first: bool = False


def is_token_mask(path: str) -> bool:
    """Whether a field of a batch, by its key path, says which tokens are padding."""
    name = path.rpartition(".")[2]
    return name.endswith("attention_mask") and not name.startswith(_OTHERS)


def token_mask_for(traced: Traced, node: fx.Node) -> TokenMask | None:
    """The padding mask of a value that has rows for each token, or None.

    It has when it is [B, L, ...], [L, B, ...], [B, H, L, C] or [B * L, C] in the symbols of a placeholder whose key
    path ends with `attention_mask`. Encoder and decoder lengths are different symbols, so each value finds its own.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim < 2:
        return None
    leading = [expression(size) for size in value.shape[:2]]
    for mask, sizes in _masks(traced):
        if value.ndim > 2 and leading in (sizes, sizes[::-1]):
            return TokenMask(mask, is_length_first=leading != sizes)
        if value.ndim == 4 and [leading[0], expression(value.shape[2])] == sizes:
            return TokenMask(mask, is_heads_first=True)
        if value.ndim == 2 and leading[0] == sizes[0] * sizes[1]:
            return TokenMask(mask)
    return None


def row_mask_for(traced: Traced, node: fx.Node) -> TokenMask | None:
    """The padding mask of the tokens that experts are given, or None; `node` is a value [B * L, I], or one with as many
    rows for each token as it has experts."""
    num_rows = expression(node.meta["val"].shape[0])
    for mask, sizes in _masks(traced):
        if (num_rows / sizes[0] / sizes[1]).is_integer:
            return TokenMask(mask)
    return None


def masks_of_sounds(traced: Traced) -> Iterator[tuple[str, fx.Node]]:
    """Those with a number for each sample, or row of features, of a floating-point input: paths and nodes."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    named = zip(traced.placeholders, (node.meta["val"] for node in inputs), strict=True)
    sounds = [value for path, value in named if value.is_floating_point() and not path.endswith("inputs_embeds")]
    masks = dict(_masks(traced))
    for path, node in zip(traced.placeholders, inputs, strict=True):
        if node in masks and any(masks[node][1] in map(expression, sound.shape[1:]) for sound in sounds):
            yield path, node


def _masks(traced: Traced) -> Iterator[tuple[fx.Node, list[sympy.Expr]]]:
    """The placeholders of padding masks, with their sizes."""
    inputs: list[fx.Node] = [candidate for candidate in traced.graph.nodes if candidate.op == "placeholder"]
    for path, mask in zip(traced.placeholders, inputs, strict=True):
        sizes = [expression(size) for size in mask.meta["val"].shape]
        if is_token_mask(path) and len(sizes) == 2:
            yield mask, sizes
