"""Memory outside of the C heap."""

import torch
from helpers import CPU

from lightning_compress.memory.activations import ActivationCache
from lightning_compress.memory.buffers import outside_heap


def test_what_lives_long_is_copied_out_of_the_heap() -> None:
    large, small = torch.randn(1024, 512), torch.randn(8)
    copy = outside_heap(large)
    assert copy.data_ptr() != large.data_ptr()
    assert copy.dtype == large.dtype
    assert torch.equal(copy, large)
    assert outside_heap(small) is small, "a few bytes leave no hole that matters"


def test_activations_are_outside_of_the_heap_where_room_is_short() -> None:
    """And as they were computed, without a copy, where nobody limits them."""
    graph, value = torch.fx.Graph(), torch.randn(1024, 512)
    node = graph.placeholder("x")
    for budget in (None, 1 << 30):
        cache = ActivationCache([{}], device=CPU, budget=budget)
        cache.store(0, {node: value})
        loaded = cache.load(0, {node})[node]
        assert isinstance(loaded, torch.Tensor)
        assert torch.equal(loaded, value)
        assert (loaded.data_ptr() == value.data_ptr()) == (budget is None)
