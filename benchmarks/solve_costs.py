"""How well `Gptq.costs` tells what solves of other shapes take, from the rate of the one that `probe` measures.

    python benchmarks/solve_costs.py [--repeats 3]

Seconds of one core's processor time (the least of the repeats) of weights as small language models have them, random,
GPTQ to 4 bits with searched scales and without, and what the costs make of the rate at 2048 x 2048 over what it took.
"""

import argparse
import time

import torch
from compressed_tensors.quantization import QuantizationArgs

from lightning_compress.algorithms.gptq import Gptq
from lightning_compress.statistics import InputGram

SHAPES = (
    (2048, 2048, 128),  # first: the probe's
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


def seconds(algorithm: Gptq, num_rows: int, num_channels: int, group_size: int, repeats: int) -> float:
    """Of the processor, at least."""
    gram = InputGram(num_channels, "cpu")
    gram.update(torch.randn(2 * num_channels, num_channels))
    weight = torch.randn(num_rows, num_channels)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group_size)
    taken = []
    for _ in range(1 + repeats):
        start = time.process_time()
        algorithm.solve(weight, {InputGram: gram}, args, torch.bfloat16)
        taken.append(time.process_time() - start)
    return min(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'rows':>6}{'channels':>10}{'group':>7}{'search':>8}{'seconds':>9}{'foreseen/taken':>16}")
    rate = 0.0
    for is_searched in (True, False):
        algorithm = Gptq(scale_search=is_searched)
        for num_rows, num_channels, group_size in SHAPES:
            taken = seconds(algorithm, num_rows, num_channels, group_size, repeats)
            units = sum(algorithm.costs(num_rows, num_channels))
            rate = rate or units / taken
            said = "yes" if is_searched else "no"
            print(
                f"{num_rows:6}{num_channels:10}{group_size:7}{said:>8}{taken:9.3f}{units / rate / taken:16.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
