"""Memory outside of the C heap, and the heap itself."""

import ctypes
import resource

import pytest
import torch

from lightning_compress.memory.buffers import keeping_heap, outside_heap


def test_what_lives_long_is_copied_out_of_the_heap() -> None:
    large, small = torch.randn(1024, 512), torch.randn(8)
    copy = outside_heap(large)
    assert copy.data_ptr() != large.data_ptr()
    assert copy.dtype == large.dtype
    assert torch.equal(copy, large)
    assert outside_heap(small) is small, "a few bytes leave no hole that matters"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_what_a_batch_frees_serves_the_next_without_page_faults() -> None:
    """Seen to fail without the threshold for trimming: 6,113 faults in every other round."""
    x = torch.randn(1 << 21)

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        a = x * x
        b = a + x
        c = a * b
        d = c + a
        del a, b, c, d
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with keeping_heap():
        for _ in range(4):
            faults()
        assert sum(faults() for _ in range(4)) < 500
