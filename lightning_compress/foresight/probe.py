"""Measure this machine once: products, attention, element-wise operators, calls, solving, packing, the disk, the link.

Each rate is of the fastest of a few rounds (whatever else goes on can only slow them) of what a run does itself: its
solver, its packing, its writer, its reader, its scratch file. Alternative not taken: deriving them from one product and
one copy; on CPUs they are not in proportion. Not measured: how long a GPU's libraries take to load; the first time they
come from the disk, which would be twice what later runs take.
"""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.calibration.quantized import QuantizedModule
from lightning_compress.export.packing import pack
from lightning_compress.export.shards import write_shards
from lightning_compress.foresight.machine import STARTS, Machine, Rate
from lightning_compress.memory.files import read_tensor, stored_tensors
from lightning_compress.memory.heap import heap_kept, trim_heap
from lightning_compress.memory.scratch import ScratchFile
from lightning_compress.statistics import InputGram

_BLOCK = 16 << 20  # well within what the C heap has room for
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def probe(device: torch.device, folder: Path, rounds: int = 5) -> Machine:
    """Measure.

    Args:
        device: where subgraphs will run.
        folder: on the disk that weights, output and activations are on; 256 MiB are written there for a moment.
        rounds: of each measurement.

    Raises:
        OSError: there is no room, or no such folder.
    """
    is_cuda = device.type == "cuda"

    def rate(amount: float, run: Callable[[], object]) -> Rate:
        run()
        _wait(device)
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            _wait(device)
            seconds.append(time.perf_counter() - start)
        return Rate(amount / min(seconds), "measured")

    tokens, width = (8192, 4096) if is_cuda else (2048, 1024)
    rates: dict[str, Rate] = {}
    with torch.no_grad(), heap_kept():
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            x, weight = (torch.randn(size, width, device=device, dtype=dtype) for size in (tokens, 2 * width))
            rates[f"product {name}"] = rate(2 * tokens * width * 2 * width, lambda x=x, w=weight: linear(x, w))  # type: ignore[misc]
            query = torch.randn(4, 8, tokens // 4, 64, device=device, dtype=dtype)
            flops = 4 * query.numel() * query.shape[2] / 2
            rates[f"attention {name}"] = rate(
                flops,
                lambda q=query: scaled_dot_product_attention(q, q, q, is_causal=True),  # type: ignore[misc]
            )
        # of a CPU within what its heap has room for, beyond which each result is mapped, which is a rate of its own
        gate, up = (torch.randn(tokens, 4 * width if is_cuda else width, device=device) for _ in range(2))
        rates["elementwise"] = rate(5 * gate.nbytes, lambda: silu(gate) * up)
        few = torch.ones(16, device=device)
        rates["call"] = rate(1000, lambda: [few + few for _ in range(1000)])
        if not is_cuda:
            rates["mapping"] = rate(_BLOCK, _mapped_anew)
        rates |= _of_solving(device, rate)
        rates |= _of_disk(folder, rate)
        if is_cuda:
            rates |= {**_of_link(device, rate), **STARTS}
    total = torch.cuda.get_device_properties(device).total_memory if is_cuda else None
    return Machine(socket.gethostname(), device.type, rates, total)


def _mapped_anew() -> None:
    """A block of the C heap that is written to, and given back to the system."""
    torch.empty(_BLOCK, dtype=torch.uint8).fill_(1)
    trim_heap()


Measure = Callable[[float, Callable[[], object]], Rate]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _of_solving(device: torch.device, rate: Measure) -> dict[str, Rate]:
    size = 4096 if device.type == "cuda" else 2048
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=generator).to(device)
    gram = InputGram(size, device)
    gram.update(torch.randn(2 * size, size, generator=generator).to(device))
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128)
    algorithm = Gptq()

    def solve() -> object:
        return algorithm.solve(weight, {InputGram: gram}, args, torch.bfloat16, [size])

    solved = algorithm.solve(weight, {InputGram: gram}, args, torch.bfloat16, [size])
    module = QuantizedModule("probe", QuantizationScheme(targets=["Linear"], weights=args), solved)
    packing = {"packing": rate(weight.numel(), lambda: pack(module))}
    if device.type == "cuda":
        return packing  # a solve is calls and products there
    return {"solve": rate(sum(algorithm.costs(size, size)), solve), **packing}


def _of_disk(folder: Path, rate: Measure) -> dict[str, Rate]:
    large = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8)
    shard = {str(number): large[: 8 << 20].clone() for number in range(8)}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path, *others = (Path(temporary) / f"probe{number}.safetensors" for number in range(4))
        found = {"writing": rate(large.numel(), lambda: write_shards({path: shard}))}
        half = {key: shard[key] for key in [*shard][:4]}
        together = dict.fromkeys((path, *others), half)
        found["writing shards"] = rate(2 * large.numel(), lambda: write_shards(together))
        for other in others:
            other.unlink()
        save_file({"large": large}, path)
        stored = stored_tensors(path)["large"]
        with path.open("rb") as file:
            os.fsync(file.fileno())

            def read() -> Tensor:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                return read_tensor(stored)

            found["disk_read"] = rate(large.numel(), read)
    scratch = ScratchFile(folder)
    pieces = list(large.split(4 << 20))

    def spill() -> None:
        for place in [scratch.write(piece) for piece in pieces]:
            scratch.free(place)
        scratch.read(place).result()  # behind all that is written

    written = [scratch.write(piece) for piece in pieces]
    found["disk_write"] = rate(large.numel(), spill)
    found["scratch_read"] = rate(large.numel(), lambda: [scratch.read(place).result() for place in written])
    return found


def _of_link(device: torch.device, rate: Measure) -> dict[str, Rate]:
    """Between pinned memory and the device, one way and both at once; and of pinning."""
    size = 256 << 20
    start = time.perf_counter()
    here = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pinning = Rate(len(here) * size / (time.perf_counter() - start), "measured")
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def to_device(number: int) -> None:
        with _on(streams[number]):
            there[0].copy_(here[0], non_blocking=True)

    def to_host(number: int) -> None:
        with _on(streams[number]):
            here[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        to_device(0)
        to_host(1)

    return {
        "to_device": rate(size, lambda: to_device(0)),
        "to_host": rate(size, lambda: to_host(1)),
        "duplex": rate(2 * size, both),
        "pinning": pinning,
    }


@contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.stream(stream):
        yield
