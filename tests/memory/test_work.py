"""Work counted operator by operator, against formulas written down here."""

import pytest
import torch
from torch import nn
from torch.nn.functional import grouped_mm, scaled_dot_product_attention, silu

from lightning_compress.graph.fakes import fake_like, new_fake_mode, replace_by_fakes
from lightning_compress.memory.heap import LARGEST_IN_HEAP
from lightning_compress.memory.work import WorkMeter


@pytest.mark.parametrize("is_fake", [False, True])
@torch.no_grad()
def test_products_attention_and_all_else(is_fake: bool) -> None:
    """Seen to fail: with views counted, with attention's causal half not left out, and with grouped products taken for
    element-wise operators."""
    model = nn.Linear(32, 48)
    x, query = torch.randn(5, 7, 32), torch.randn(2, 4, 9, 16)
    mode = new_fake_mode(symbolic=False)
    if is_fake:
        replace_by_fakes(model, mode)
        x, query = fake_like(mode, x), fake_like(mode, query)
    meter = WorkMeter()
    with meter:
        y = model(x)
    assert meter.work["product float32"] == 2 * 35 * 32 * 48  # some releases of torch add the bias by itself
    meter.work.clear()
    with meter:
        z = silu(y.transpose(0, 1)) * y.view(7, 5, 48)
    assert dict(meter.work) == {"call": 2, "elementwise": (2 + 3) * z.nbytes}
    meter.work.clear()
    with meter:
        scaled_dot_product_attention(query, query, query, is_causal=True)
        scaled_dot_product_attention(query, query, query)
    assert meter.work["attention float32"] == (2 + 4) * 2 * 4 * 9 * 9 * 16
    meter.work.clear()
    with meter:
        x.bfloat16() @ x.bfloat16().transpose(1, 2)
    assert meter.work["product bfloat16"] == 5 * 2 * 7 * 32 * 7
    meter.work.clear()
    given = torch.randn(7, 48).bfloat16(), torch.randn(3, 48, 16).bfloat16(), torch.tensor([3, 3, 7]).int()
    rows, weights, ends = (fake_like(mode, each) for each in given)
    with meter:
        grouped_mm(rows, weights, offs=ends)
    assert dict(meter.work) == {"call": 1, "product bfloat16": 2 * 7 * 48 * 16}
    meter.work.clear()
    with meter:
        torch.mm(rows, weights[0], out_dtype=torch.float32)
    assert dict(meter.work) == {"call": 1, "product bfloat16": 2 * 7 * 48 * 16}, "as tensor cores make it"


@torch.no_grad()
def test_blocks_that_the_heap_has_no_room_for() -> None:
    """Of a CPU: new ones, each once. Seen to fail: with small ones counted, and with what is written in place."""
    small, large = torch.empty(LARGEST_IN_HEAP // 4 - 1), torch.empty(LARGEST_IN_HEAP // 4)
    for on_cpu in (True, False):
        meter = WorkMeter(on_cpu=on_cpu)
        with meter:
            small + small
            large + large
            large.add_(1)
            large.view(2, -1)
        assert meter.work["mapping"] == (LARGEST_IN_HEAP if on_cpu else 0)


def test_backward_of_grouped_products_in_float32() -> None:
    """transformers' own, of the rows and of the matrices. Seen to fail: as an element-wise operator."""
    rows, weights = torch.randn(7, 48, requires_grad=True), torch.randn(3, 48, 16, requires_grad=True)
    out = torch.ops.transformers.grouped_mm_fallback(rows, weights, torch.tensor([3, 3, 7]).int())
    meter = WorkMeter()
    with meter:
        out.backward(torch.ones_like(out))
    assert meter.work["product float32"] == 2 * 2 * 7 * 48 * 16


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_attention_of_cuda(is_causal: bool, keeps: bool) -> None:
    """Memory-efficient attention has another flag before that. Seen to fail: half of it where a training keeps its
    sums, all of it where nothing is trained."""
    query = torch.empty(2, 4, 9, 16, device="meta")
    meter = WorkMeter()
    with meter:
        torch.ops.aten._scaled_dot_product_efficient_attention(query, query, query, None, keeps, 0.0, is_causal)
        torch.ops.aten._scaled_dot_product_flash_attention(query, query, query, 0.0, is_causal)
    assert meter.work["attention float32"] == 2 * 4 * 2 * 4 * 9 * 9 * 16 / (2 if is_causal else 1)


def test_backward_of_attention_and_optimizers_in_place() -> None:
    """Five products of which the forward has two; lists that an operator changes are read and written.

    Seen to fail: with the forward's two products; with operators that return nothing left out.
    """
    query = torch.randn(2, 4, 9, 16, requires_grad=True)
    out = scaled_dot_product_attention(query, query, query, is_causal=True)
    meter = WorkMeter()
    with meter:
        out.sum().backward()
    assert meter.work["attention float32"] == 10 * 2 * 4 * 9 * 9 * 16 / 2
    meter.work.clear()
    tensors = [torch.zeros(8), torch.zeros(3)]
    with meter:
        torch._foreach_add_(tensors, tensors)
    assert dict(meter.work) == {"call": 1, "elementwise": 3 * 4 * 11}


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.parametrize("groups", [1, 8])
def test_backward_of_a_convolution(kind: type[nn.Conv1d], groups: int) -> None:
    """As much for the inputs as for the weight as forward. Seen to fail: by torch's formula, which raises where it is
    given the first tensor alone, and multiplies by the number of groups."""
    convolution, inputs = kind(8, 8, 3, groups=groups), torch.randn(2, 8, 11, requires_grad=True)
    meter = WorkMeter()
    with meter:
        out = convolution(inputs)
    forward = meter.work["product float32"]
    assert forward == 2 * 2 * 8 * (9 if kind is nn.Conv1d else 11) * 3 * 8 // groups
    meter.work.clear()
    with meter:
        out.backward(torch.ones_like(out))
    assert meter.work["product float32"] == 2 * forward
