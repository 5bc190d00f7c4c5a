"""How well `Gptq.costs` tells what solves of other shapes take, from the rate of the one that `probe` measures.

    python benchmarks/solve_costs.py [--device cpu] [--repeats 3] [--methods searched corrected ...]

Seconds (the least of the repeats; on a CPU one core's processor time) of weights as language models have them, random,
GPTQ to 4 bits: with searched scales, without, corrected (with sums as a calibration makes them, or of what outputs
lack; strength and ridge chosen), by GPTAQ, and with rounds of refitting; and how much of that is foreseen: on a CPU at
the rate of the probe's shape, on a GPU at the rates that `probe` finds of calls and products.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.algorithms.tiling import tiling_of
from lightning_compress.foresight.probe import probe
from lightning_compress.statistics import Beside, Drift, InputDrift, InputGram, OutputDrift, Statistic, drift_form

SMALL = (
    (960, 576, 64),
    (576, 576, 64),
    (3072, 576, 64),
    (576, 1536, 64),
    (2304, 768, 128),
    (768, 768, 128),
    (4096, 768, 128),
    (768, 2048, 128),
    (256, 256, 64),
    (4096, 1024, 128),
)
LARGE = ((6144, 4096, 128), (28672, 4096, 128), (4096, 14336, 128), (10240, 8192, 128))
SHAPES = {  # first: the probe's
    "cpu": ((2048, 2048, 128), *SMALL),
    "cuda": ((4096, 4096, 128), *SMALL, (2048, 2048, 128), *LARGE),
}


METHODS: dict[str, tuple[Gptq, type[Drift] | None]] = {
    "searched": (Gptq(), None),
    "min-max": (Gptq(scale_search=False), None),
    "corrected": (Gptq(correct="inputs"), Drift),  # of the form that is less work
    "of outputs": (Gptq(correct="residual"), OutputDrift),
    "gptaq": (Gptq(correct="gptaq"), InputDrift),
    "refit 1": (Gptq(refit=1), None),
    "refit 2": (Gptq(refit=2), None),
    "corrected, refit chosen": (Gptq(correct="inputs", refit=None), Drift),
}


def gathered(
    drift: type[Drift] | None, num_rows: int, num_channels: int, device: torch.device
) -> dict[type[Statistic], Statistic]:
    """Sums over random tokens, of which a half is held out."""
    x = torch.randn(2 * num_channels, num_channels, device=device)
    if drift is None:
        gram = InputGram(num_channels, device)
        gram.update(x)
        return {InputGram: gram}
    drift = drift_form(num_channels, num_rows, is_alone=True) if drift is Drift else drift
    found = drift(num_channels, device, num_rows)
    width = num_channels if drift is InputDrift else num_rows
    for number, part in enumerate(x.chunk(2)):
        found.update(part, Beside(torch.randn(len(part), width, device=device), held_out=number == 1))
    return {drift: found}


def seconds(
    method: str, num_rows: int, num_channels: int, group_size: int, repeats: int, device: torch.device
) -> float:
    """Of the processor, or of a GPU, at least."""
    algorithm, drift = METHODS[method]
    statistics = gathered(drift, num_rows, num_channels, device)
    weight = torch.randn(num_rows, num_channels, device=device)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group_size)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken = []
    for _ in range(1 + repeats):
        start = clock()
        algorithm.solve(weight, statistics, args, torch.bfloat16)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(clock() - start)
    return min(taken[1:])


def how_foreseen(device: torch.device, shape: tuple[int, int, int], repeats: int) -> Callable[[Gptq, int, int], float]:
    """Seconds of a weight [O, I], as plans have them."""
    if device.type == "cpu":
        rate = sum(Gptq().costs(*shape[:2])) / seconds("searched", *shape, repeats, device)
        return lambda algorithm, *sizes: sum(algorithm.costs(*sizes)) / rate
    with tempfile.TemporaryDirectory() as folder:
        machine = probe(device, Path(folder))

    def of_calls_and_products(algorithm: Gptq, num_rows: int, num_channels: int) -> float:
        calls = algorithm.calls(num_rows, num_channels, tiling_of(device))
        return machine.seconds({"call": calls, "product float32": sum(algorithm.costs(num_rows, num_channels))})

    return of_calls_and_products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        print(torch.cuda.get_device_name())
    torch.manual_seed(0)
    shapes = SHAPES[device.type]
    foreseen_s = how_foreseen(device, shapes[0], arguments.repeats)
    print(f"{'method':24}{'rows':>6}{'channels':>10}{'group':>7}{'seconds':>10}{'foreseen/taken':>16}")
    for method in arguments.methods:
        for num_rows, num_channels, group_size in shapes:
            taken = seconds(method, num_rows, num_channels, group_size, arguments.repeats, device)
            ratio = foreseen_s(METHODS[method][0], num_rows, num_channels) / taken
            print(f"{method:24}{num_rows:6}{num_channels:10}{group_size:7}{taken:10.4f}{ratio:16.2f}", flush=True)


if __name__ == "__main__":
    main()
