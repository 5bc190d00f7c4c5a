"""Which rows of a traced value are tokens, and which are padding."""

from torch import Tensor, fx

from lightning_compress.graph.trace import Traced
from lightning_compress.graph.values import expression


def is_token_mask(path: str) -> bool:
    """Whether a field of a batch, by its key path, says which tokens are padding; not which pixels are."""
    name = path.rpartition(".")[2]
    return name.endswith("attention_mask") and not name.startswith("pixel")


def token_mask_for(traced: Traced, node: fx.Node) -> fx.Node | None:
    """The padding mask [B, L] that tells which rows of a value are tokens, or None.

    A value has one row per token when it is [B, L, ...] or [B * L, C] in the same symbols as a placeholder whose key
    path ends with `attention_mask`. Encoder and decoder lengths are different symbols, so each value finds its own.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim < 2:
        return None
    leading = [expression(size) for size in value.shape[:2]]
    inputs: list[fx.Node] = [candidate for candidate in traced.graph.nodes if candidate.op == "placeholder"]
    for path, mask in zip(traced.placeholders, inputs, strict=True):
        sizes = [expression(size) for size in mask.meta["val"].shape]
        if not is_token_mask(path) or len(sizes) != 2:
            continue
        if leading == sizes and value.ndim > 2:
            return mask
        if leading[0] == sizes[0] * sizes[1] and value.ndim == 2:
            return mask
    return None


def row_mask_for(traced: Traced, node: fx.Node) -> fx.Node | None:
    """The padding mask [B, L] of the tokens that experts are given, or None; `node` is a value [B * L, I], or one with
    as many rows for each token as it has experts."""
    num_rows = expression(node.meta["val"].shape[0])
    inputs: list[fx.Node] = [candidate for candidate in traced.graph.nodes if candidate.op == "placeholder"]
    for path, mask in zip(traced.placeholders, inputs, strict=True):
        sizes = [expression(size) for size in mask.meta["val"].shape]
        if is_token_mask(path) and len(sizes) == 2 and (num_rows / sizes[0] / sizes[1]).is_integer:
            return mask
    return None
