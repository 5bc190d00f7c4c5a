"""Real processes: the same number, to the last bit, whatever the number of ranks."""

from pathlib import Path

import pytest
from processes import Script

SCRIPT = Path(__file__).with_name("perplexities.py")


@pytest.mark.slow
def test_the_same_at_every_world_size(tmp_path: Path) -> None:
    """Batches of all lengths, padded ones, and fewer than ranks; in memory and layer by layer. Seen to fail: with the
    sums of each rank's own batches; with the sums of ranks added as float32."""
    found = {}
    for size in (1, 2, 3, 4):
        store = str(tmp_path / f"store-{size}")
        ranks = [Script(SCRIPT, str(rank), str(size), store) for rank in range(size)]
        ends = [rank.wait(100) for rank in ranks]
        assert all(end.returncode == 0 for end in ends), "\n".join(end.stderr for end in ends)
        (found[size],) = {end.stdout for end in ends}
    assert len(found[1].split()) == 6
    assert len(set(found[1].split())) == 3
    assert found[1] == found[2] == found[3] == found[4]
