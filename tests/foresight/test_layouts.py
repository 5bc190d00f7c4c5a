"""What ranks hold, against the formulas of the papers."""

from typing import Any

import pytest

from lightning_compress.errors import CompressionError
from lightning_compress.foresight.jobs import Phase
from lightning_compress.foresight.layouts import Layout, per_rank, worst_shares

GB = 10**9
STEP = Phase("step", 15 * GB, 15 * GB, 90 * GB, working=8 * GB, stepping=12 * GB)
"""Of a model of 7.5 billion parameters: half-precision weights and gradients, Adam's states with a full-precision copy,
as in ZeRO's figure 1."""


@pytest.mark.parametrize(
    ("zero", "figure"),
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
)
def test_zero(zero: int, figure: float) -> None:
    """Figure 1 of arXiv 1910.02054, with 64 replicas."""
    share, on_host = per_rank(STEP, Layout(data=64, zero=zero), largest_layer=0)
    assert (share.weights + share.gradients + share.optimizer) / GB == pytest.approx(figure, abs=0.05)
    assert share.working == STEP.working
    assert share.stepping == (12 * GB if zero == 0 else 12 * GB // 64)
    assert on_host.peak == 0


def test_replicas_have_gradients_in_buckets_too() -> None:
    """All the time, those of `DistributedDataParallel`. Seen to fail: without them in the forward."""
    forward = Phase("forward", 15 * GB, working=8 * GB)
    for layout, buckets in ((Layout(), 0), (Layout(data=2), 15), (Layout(data=2, zero=1), 0), (Layout(2, tensor=3), 5)):
        shares = worst_shares([forward, STEP], layout, largest_layer=0)
        assert shares["forward"][0].gradients == buckets * GB, layout
        assert shares["step"][0].gradients == 15 * GB // layout.tensor + buckets * GB


def test_zero_3_gathers_layers() -> None:
    share, _ = per_rank(STEP, Layout(data=64, zero=3), largest_layer=GB)
    assert share.weights == 15 * GB // 64 + 2 * GB
    alone, _ = per_rank(STEP, Layout(data=1, zero=3), largest_layer=GB)
    assert alone.weights == STEP.weights, "never more than there are"


def test_offload() -> None:
    """The host has what the CPU's optimizer reads and writes: parameters, gradients and states. Seen to fail: without
    parameters, and under ZeRO-1 without gradients."""
    for zero, gradients in ((1, 15 * GB), (2, 0), (3, 0)):
        share, on_host = per_rank(STEP, Layout(data=4, zero=zero, offload=True), largest_layer=0, trained=15 * GB)
        assert (share.gradients, share.optimizer, share.stepping) == (gradients, 0, 0)
        assert on_host.peak == (15 + 15 + 90 + 12) * GB // 4


def test_what_heads_share_is_whole_on_every_tensor_rank() -> None:
    """Stages of a pipeline have their layers' part of it. Seen to fail: divided like the rest."""
    decode = Phase("decode", 0, cache=12 * GB, undivided_cache=4 * GB)
    for layout, gigabytes in ((Layout(), 12), (Layout(tensor=4), 2 + 4), (Layout(tensor=4, pipeline=2), 1 + 2)):
        share, _ = per_rank(decode, layout, largest_layer=0)
        assert share.cache == gigabytes * GB, layout


def test_tensor_and_pipeline() -> None:
    """A pipeline's stages have fewer layers, and more micro-batches."""
    share, _ = per_rank(STEP, Layout(tensor=2, pipeline=4), largest_layer=0)
    assert (share.weights, share.optimizer, share.working) == (15 * GB // 8, 90 * GB // 8, 8 * GB // 2)


@pytest.mark.parametrize(
    "wrong", [{"zero": True}, {"zero": 1.0}, {"data": 0}, {"zero": 4}, {"tensor": -1}, {"data": 1.5}, {"data": "two"}]
)
def test_what_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(CompressionError, match="numbers of ranks are at least 1, and ZeRO's stages are 0 to 3"):
        Layout(**wrong)
