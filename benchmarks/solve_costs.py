"""How well `Gptq.costs` tells what solves of other shapes take, from the rate of the one that `probe` measures.

    python benchmarks/solve_costs.py [--device cpu] [--repeats 3]

Seconds (the least of the repeats; on a CPU one core's processor time) of weights as language models have them, random,
GPTQ to 4 bits with searched scales and without, and what the costs make of the rate at the probe's shape over what it
took.
"""

import argparse
import time

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.statistics import InputGram

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


def seconds(
    algorithm: Gptq, num_rows: int, num_channels: int, group_size: int, repeats: int, device: torch.device
) -> float:
    """Of the processor, or of a GPU, at least."""
    gram = InputGram(num_channels, device)
    gram.update(torch.randn(2 * num_channels, num_channels, device=device))
    weight = torch.randn(num_rows, num_channels, device=device)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group_size)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken = []
    for _ in range(1 + repeats):
        start = clock()
        algorithm.solve(weight, {InputGram: gram}, args, torch.bfloat16)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(clock() - start)
    return min(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        print(torch.cuda.get_device_name())
    torch.manual_seed(0)
    print(f"{'rows':>6}{'channels':>10}{'group':>7}{'search':>8}{'seconds':>10}{'foreseen/taken':>16}")
    rate = 0.0
    for is_searched in (True, False):
        algorithm = Gptq(scale_search=is_searched)
        for num_rows, num_channels, group_size in SHAPES[device.type]:
            taken = seconds(algorithm, num_rows, num_channels, group_size, arguments.repeats, device)
            units = sum(algorithm.costs(num_rows, num_channels))
            rate = rate or units / taken
            said = "yes" if is_searched else "no"
            print(
                f"{num_rows:6}{num_channels:10}{group_size:7}{said:>8}{taken:10.4f}{units / rate / taken:16.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
