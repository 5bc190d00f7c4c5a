"""The live-storage tracker counts storages, not tensors, while they live."""

import pytest
import torch

from lightning_compress.memory import tracker
from lightning_compress.memory.tracker import LiveMemory, held_bytes, peak_bytes, reset_peak


def test_storages_are_counted_while_they_live() -> None:
    with LiveMemory() as memory:
        x = torch.zeros(100)
        y = x + 1
        assert memory.live_bytes == 800
        del x
        assert memory.live_bytes == 400
        assert memory.peak_bytes == 800
        memory.reset_peak()
        assert memory.peak_bytes == 400
        del y
    assert memory.live_bytes == 0


def test_views_and_in_place_results_are_not_counted_again() -> None:
    with LiveMemory() as memory:
        x = torch.zeros(10, 10)
        views = [x.view(100), x[0], x.t()]
        x.add_(1)
        assert memory.live_bytes == 400
        del x
        assert memory.live_bytes == 400, "a view keeps its storage alive"
        del views
    assert memory.live_bytes == 0


def test_what_was_there_before_counts_if_asked_for() -> None:
    old, ignored = torch.zeros(100), torch.zeros(50)
    with LiveMemory() as memory:
        memory.ignore(ignored)
        assert memory.live_bytes == 0
        memory.track(old)
        memory.track(old)
        memory.track(ignored)
        assert memory.live_bytes == 400


def test_a_temporary_inside_an_expression_counts_for_the_peak() -> None:
    with LiveMemory() as memory:
        x = torch.zeros(100)
        x = (x + 1) * 2
        assert (memory.live_bytes, memory.peak_bytes) == (400, 1200)


def test_process_peak() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reset_peak(device)
    assert peak_bytes(device) >= 0
    assert peak_bytes(torch.device("cpu")) > 50e6, "importing torch alone takes more"


def test_a_run_on_a_cpu_holds_the_buffers_of_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: without them, and with as many on a device."""
    monkeypatch.setattr(tracker, "resident_bytes", lambda: 10**9)
    assert held_bytes(torch.device("cpu")) == 10**9 + (20 + 12 * torch.get_num_threads()) * 10**6
    assert held_bytes(torch.device("cuda")) == 10**9
