"""What cuBLAS keeps of a card."""

import pytest
import torch

from lightning_compress.memory.workspaces import cublas_workspace_bytes

CUDA = torch.device("cuda")


def test_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: 32 MiB for all, and the number of buffers left out."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert cublas_workspace_bytes(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cublas_workspace_bytes(CUDA) == 32 << 20, "taken to be new"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, size in (((9, 0), 32 << 20), ((8, 9), 8320 << 10), ((7, 5), 8320 << 10)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert cublas_workspace_bytes(CUDA) == size
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas_workspace_bytes(CUDA) == 32 << 20
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8:64:2")
    assert cublas_workspace_bytes(CUDA) == (16 * 8 + 64 * 2) << 10
