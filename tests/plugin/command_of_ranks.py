"""The command, as `test_planned_ranks.py` starts it on each rank: OTHER_LEFT, then its arguments.

Rank 1 finds so many GiB of free host memory; what is free on rank 0 is no test's to say. With STOPS_AFTER in its
environment it dies when so many subgraphs are written.
"""

import os
import signal
import sys

from lightning_compress.calibration.records import SubgraphRecord
from lightning_compress.command import cli, planned_run
from lightning_compress.export.writer import CheckpointWriter
from lightning_compress.graph.stages import Subgraph


def dying(number: int) -> None:
    """Let this process be killed in the place of writing a subgraph, when so many are written."""
    commit = CheckpointWriter.commit

    def committed(writer: CheckpointWriter, subgraph: Subgraph, record: SubgraphRecord) -> SubgraphRecord:
        if record.index == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(writer, subgraph, record)

    CheckpointWriter.commit = committed  # type: ignore[method-assign]


def main() -> None:
    left = int(sys.argv.pop(1)) << 30
    if os.environ["RANK"] == "1":
        planned_run.available_bytes = lambda: left  # type: ignore[attr-defined]
    if "STOPS_AFTER" in os.environ:
        dying(int(os.environ["STOPS_AFTER"]))
    cli.main()


if __name__ == "__main__":
    main()
