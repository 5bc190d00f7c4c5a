"""Work counted operator by operator, against formulas written down here."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from lightning_compress.graph.compat import fake_like, new_fake_mode, replace_by_fakes
from lightning_compress.memory.work import WorkMeter


@pytest.mark.parametrize("is_fake", [False, True])
@torch.no_grad()
def test_products_attention_and_all_else(is_fake: bool) -> None:
    """Seen to fail: with views counted, and with attention's causal half not left out."""
    model = nn.Linear(32, 48)
    x, query = torch.randn(5, 7, 32), torch.randn(2, 4, 9, 16)
    mode = new_fake_mode(symbolic=False)
    if is_fake:
        replace_by_fakes(model, mode)
        x, query = fake_like(mode, x), fake_like(mode, query)
    meter = WorkMeter()
    with meter:
        y = model(x)
    assert dict(meter.work) == {"call": 1, "product float32": 2 * 35 * 32 * 48}
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
