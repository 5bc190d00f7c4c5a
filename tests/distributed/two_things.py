"""One of two ranks that were given different things to do, as `test_ranks.py` starts it."""

import sys
from datetime import timedelta

import torch.distributed as dist

from lightning_compress.distributed.collective import ProcessGroup

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)
    ranks = ProcessGroup(timedelta(seconds=5))
    if ranks.rank == 0:
        ranks.gather(None, "comparing apples")
    else:
        ranks.broadcast(None, "looking for pears")
