"""What cuBLAS keeps of a CUDA device for each thread that multiplies there, in tensors of PyTorch's allocator."""

import os
import re

import torch

_OF_HOPPER, _OF_OTHERS = 32 << 20, (2 * 4096 + 8 * 16) << 10


def cublas_workspace_bytes(device: torch.device) -> int:
    """Of one thread; 0 on a CPU. After aten/src/ATen/cuda/CublasHandlePool.cpp: what `CUBLAS_WORKSPACE_CONFIG` says,
    else 32 MiB from Hopper on, and 8 1/8 MiB on cards before. Where the card is not here it is taken to be new."""
    if device.type != "cuda":
        return 0
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(number) for size, number in pairs) << 10
    is_new = not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 9
    return _OF_HOPPER if is_new else _OF_OTHERS
