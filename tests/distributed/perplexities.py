"""One of several ranks, as `test_perplexity_of_ranks.py` starts it: RANK SIZE STORE; prints every case's perplexity."""

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_compress.data import perplexity
from lightning_compress.distributed.collective import ProcessGroup, closing_all
from lightning_compress.memory.placement import Placement

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import CPU, padded, ragged_batches, tiny_llama, token_batches


def main() -> None:
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=100), rank=rank, world_size=size)
    model = tiny_llama(2)
    with closing_all(ProcessGroup(timedelta(seconds=100))) as ranks:
        for batches in (ragged_batches(), padded(token_batches(5)), token_batches(1)):
            for placement in (None, Placement(CPU)):
                print(repr(perplexity(model, batches, placement, ranks)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
