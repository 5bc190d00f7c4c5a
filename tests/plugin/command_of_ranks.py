"""The command, as `test_planned_ranks.py` starts it on each rank: OTHER_LEFT, then its arguments.

Rank 1 finds so many GiB of free host memory; what is free on rank 0 is no test's to say.
"""

import os
import sys

from lightning_compress.plugin import cli, planned_run


def main() -> None:
    left = int(sys.argv.pop(1)) << 30
    if os.environ["RANK"] == "1":
        planned_run.available_bytes = lambda: left  # type: ignore[attr-defined]
    cli.main()


if __name__ == "__main__":
    main()
