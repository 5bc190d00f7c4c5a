"""One of two ranks, as `test_ranks.py` starts it: the first fails and ends, and the board with it; the second takes its
time to read what is there, or to come at all."""

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_compress.distributed.collective import ProcessGroup, closing_all


class Slow:
    """A board that is looked at late."""

    def __init__(self, board: dist.Store) -> None:
        self._board = board

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)

    def check(self, names: list[str]) -> bool:
        time.sleep(0.5)
        return self._board.check(names)


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2)
    ranks = ProcessGroup(timedelta(seconds=30))
    if ranks.rank == 0:
        try:
            with closing_all(ranks):
                raise ArithmeticError("of the rank that holds the board")
        finally:
            os._exit(1)
    if sys.argv[3] == "reads":
        ranks._board = Slow(ranks._board)  # type: ignore[assignment]
    else:
        time.sleep(8)
    ranks.meet("the meeting")
