"""Attention and dropout are what PyTorch makes of them on CUDA, on fake tensors of a CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_compress.graph.cuda import AsOnCuda, as_on_cuda, temporary_bytes
from lightning_compress.graph.fakes import new_fake_mode
from lightning_compress.memory.tracker import LiveMemory

FLASH = "aten._scaled_dot_product_flash_attention.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
FORMULA = "aten._safe_softmax.default"


class Called(TorchDispatchMode):
    """Operators, and what they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found[str(func)] = out
        return out


@pytest.fixture
def fakes() -> Iterator[None]:
    with new_fake_mode(symbolic=False):
        yield


def attended(
    dtype: torch.dtype = torch.bfloat16, *, key_heads: int = 4, width: int = 32, mask: bool = False, **options: Any
) -> tuple[str, Tensor]:
    """Which kind it is, and the result."""
    query, key = torch.empty(2, 4, 24, width, dtype=dtype), torch.empty(2, key_heads, 24, width, dtype=dtype)
    given = {"attn_mask": torch.ones(2, 1, 24, 24, dtype=torch.bool)} if mask else {"is_causal": True}
    with AsOnCuda(), Called() as called:
        found = functional.scaled_dot_product_attention(
            query, key, key, **{"enable_gqa": key_heads < 4, **given, **options}
        )
    (kind,) = {FLASH, EFFICIENT, FORMULA} & set(called.found)
    return kind, found


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (FLASH, {}),
        (FLASH, {"key_heads": 2}),
        (FLASH, {"width": 20}),
        (EFFICIENT, {"mask": True}),
        (EFFICIENT, {"dtype": torch.float32}),
        (EFFICIENT, {"width": 264}),
        (FORMULA, {"dtype": torch.float32, "key_heads": 2}),
        (FORMULA, {"dtype": torch.float32, "width": 33}),
        (FORMULA, {"mask": True, "key_heads": 2}),
        (FORMULA, {"dtype": torch.float64}),
    ],
)
def test_which_attention(expected: str, options: dict[str, Any]) -> None:
    kind, found = attended(**options)
    assert kind == expected
    assert found.shape == (2, 4, 24, options.get("width", 32))
    assert found.dtype == options.get("dtype", torch.bfloat16)


@pytest.mark.usefixtures("fakes")
def test_as_a_graph_calls_it() -> None:
    """Seen to fail: with the function of Python alone."""
    x = torch.empty(2, 4, 24, 32, dtype=torch.bfloat16)
    with AsOnCuda(), Called() as called:
        torch.ops.aten.scaled_dot_product_attention.default(x, x, x, None, 0.0, True, scale=None, enable_gqa=False)
    assert FLASH in called.found


@pytest.mark.usefixtures("fakes")
def test_temporaries_beside_results() -> None:
    """Of a softmax: which scores are masked; in its backward the product of both arguments, too."""
    query, key = torch.empty(1, 4, 16, 33, requires_grad=True), torch.empty(1, 4, 16, 33)
    peaks = []
    for on_cuda in (False, True):
        with AsOnCuda(), LiveMemory(on_cuda=on_cuda) as memory:
            found = functional.scaled_dot_product_attention(query, key, key)
            memory.reset_peak()
            found.sum().backward()
        peaks.append(memory.peak_bytes)
        query.grad = None
    scores = 4 * 16 * 16
    assert 3 * scores < peaks[1] - peaks[0] <= 4 * scores
    assert temporary_bytes(torch.ops.aten._safe_softmax.default, [torch.empty(scores)]) == scores
    assert temporary_bytes(torch.ops.aten.add.Tensor, [torch.empty(scores)]) == 0


@pytest.mark.usefixtures("fakes")
def test_autocast_comes_first() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert attended(torch.float32, key_heads=2)[0] == FLASH


@pytest.mark.usefixtures("fakes")
def test_in_a_backward_too() -> None:
    """A checkpointed layer is computed anew there, where there are no modes. Seen to fail: with the mode alone."""

    def layer(x: Tensor) -> Tensor:
        found: Tensor = functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return found

    x = torch.empty(2, 4, 24, 32, requires_grad=True)
    with as_on_cuda(), Called() as called:
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        called.found.clear()
        assert isinstance(y, Tensor)
        y.sum().backward()
    assert EFFICIENT in called.found
    assert x.grad is not None


@pytest.mark.usefixtures("fakes")
def test_dropout_keeps_a_mask_of_bytes() -> None:
    x = torch.empty(64, 32, requires_grad=True)
    with as_on_cuda(), Called() as called:
        nn.Dropout(0.1)(x).sum().backward()
    _, mask = called.found["aten.native_dropout.default"]
    assert (mask.dtype, x.grad is not None) == (torch.bool, True)
    with as_on_cuda(), Called() as called:
        nn.Dropout(0.1).eval()(x)
        nn.Dropout(0.1, inplace=True)(x.detach())
    assert "aten.native_dropout.default" not in called.found


def test_says_so_inside_alone() -> None:
    x, before = torch.zeros(1), (functional.dropout, functional.scaled_dot_product_attention)
    with AsOnCuda(), as_on_cuda():
        assert x.is_cuda
    assert not x.is_cuda
    assert (functional.dropout, functional.scaled_dot_product_attention) == before
