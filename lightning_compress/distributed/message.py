"""Values as bytes: what is not a tensor is pickled, and refers to the tensors, whose bytes follow, by their numbers.

Alternative not taken: pickling tensors as PyTorch does, which writes an archive of each tensor's whole storage, also
for a view of a few rows, and copies it several times.
"""

import io
import pickle
from math import prod

import torch
from torch import Tensor


def to_bytes(value: object) -> Tensor:
    """A value as uint8 [N]; on any device its tensors."""
    tensors: list[Tensor] = []
    with io.BytesIO() as file:
        pickler = pickle.Pickler(file)
        pickler.persistent_id = lambda found: _number(found, tensors)  # type: ignore[method-assign]
        pickler.dump(value)
        described = pickle.dumps(([(tensor.dtype, tensor.shape) for tensor in tensors], file.getvalue()))
    parts = [torch.frombuffer(bytearray(described), dtype=torch.uint8)]
    parts += [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([torch.tensor([len(described)]).view(torch.uint8), *parts])


def _number(found: object, tensors: list[Tensor]) -> int | None:
    if isinstance(found, Tensor) and found.layout == torch.strided and not found.is_meta:
        tensors.append(found)
        return len(tensors) - 1
    return None


def from_bytes(message: Tensor) -> object:
    """The value; its tensors are in host memory, each with a storage of its own."""
    start = 8 + int(message[:8].view(torch.int64))
    described, pickled = pickle.loads(message[8:start].numpy().tobytes())
    tensors: list[Tensor] = []
    for dtype, shape in described:
        nbytes = dtype.itemsize * prod(shape)
        tensors.append(message[start : start + nbytes].clone().view(dtype).view(shape))
        start += nbytes
    unpickler = pickle.Unpickler(io.BytesIO(pickled))
    unpickler.persistent_load = lambda number: tensors[number]  # type: ignore[method-assign]
    return unpickler.load()
