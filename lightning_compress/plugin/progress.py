"""How far a compression has come, as Lightning's own checkpoints carry it.

Such a checkpoint holds no weights: they are in the shards of `output_dir`, whose manifest is the truth. What is saved
here says which run that was, so that `ckpt_path=` continues that one and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_compress.errors import OutputDirectoryError

STATE_KEY = "CompressionCallback"
_SCHEMA = 1


@dataclass(frozen=True)
class Progress:
    """The state of a run between two subgraphs.

    Attributes:
        fingerprints: see `calibration.resume.fingerprints`.
        next_subgraph: how many subgraphs were finished.
        output_dir: where they are.
    """

    fingerprints: Mapping[str, str]
    next_subgraph: int
    output_dir: str

    def to_state(self) -> dict[str, Any]:
        """For the callback's state: primitives only, so that `torch.load(weights_only=True)` reads it."""
        return {
            "schema": _SCHEMA,
            "fingerprints": dict(self.fingerprints),
            "next_subgraph": self.next_subgraph,
            "output_dir": self.output_dir,
        }


def from_state(state: Mapping[str, Any]) -> Progress:
    """What `Progress.to_state` made.

    Raises:
        OutputDirectoryError: another release of this package made it.
    """
    if state.get("schema") != _SCHEMA:
        raise OutputDirectoryError(
            "The checkpoint is of a compression by another release of lightning_compress. Start it again without "
            "`ckpt_path`."
        )
    return Progress(state["fingerprints"], state["next_subgraph"], state["output_dir"])


def saved_progress(checkpoint: Mapping[str, Any]) -> Progress | None:
    """The progress in a Lightning checkpoint that was saved during a compression; None in any other."""
    state = (checkpoint.get("callbacks") or {}).get(STATE_KEY)
    return from_state(state) if state else None


def check_continues(
    saved: Progress, fingerprints: Mapping[str, str], output_dir: str, num_finished: int, resume: bool
) -> None:
    """Refuse to continue anything but the run that a checkpoint was saved in.

    Args:
        saved: from the checkpoint.
        fingerprints: of the run that is about to start.
        output_dir: of that run.
        num_finished: subgraphs that the manifest there says are finished.
        resume: whether the run may continue another at all.

    Raises:
        OutputDirectoryError: it is another run, or its shards are not there.
    """
    if not resume:
        raise OutputDirectoryError(
            "`ckpt_path` continues a compression, and resume='never' starts over. Leave one of them out."
        )
    differing = [name for name, digest in fingerprints.items() if saved.fingerprints.get(name) != digest]
    if differing:
        raise OutputDirectoryError(
            f"The checkpoint in `ckpt_path` is of another compression, which differs in {' and '.join(differing)} and "
            f"was written to {saved.output_dir}. Leave `ckpt_path` out to start this one."
        )
    if num_finished < saved.next_subgraph:
        raise OutputDirectoryError(
            f"The checkpoint in `ckpt_path` was saved when {saved.next_subgraph} subgraphs were in {saved.output_dir}, "
            f"and {output_dir} holds {num_finished} of an unfinished run. Give the output_dir of that run, if it was "
            "moved; if it has been removed since, leave `ckpt_path` out."
        )
