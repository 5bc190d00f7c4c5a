"""The files of a checkpoint folder beside weights and index: configurations, tokenizers, and which of all are ours."""

import json
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from lightning_compress.calibration.resume import MANIFEST, replace_file
from lightning_compress.distributed.bars import no_bars
from lightning_compress.errors import UnsupportedModelError, listed
from lightning_compress.export.checkpoint import MARKER
from lightning_compress.graph.restore import assigned
from lightning_compress.memory.files import INDEX, READABLE

_PARTLY = re.compile(r"\..*\.partial|\.tmp[A-Za-z0-9]{6}")
FILES = "files"
"""Where the marker has the names of files that others wrote for us."""


def config_files(root: nn.Module, folder: Path) -> tuple[dict[str, object], list[str]]:
    """Let transformers write what it writes beside the weights.

    Returns:
        The content of config.json, which waits, and the names of the others.
    """
    if not isinstance(root, PreTrainedModel):
        return {}, []
    config: dict[str, object] = {}

    def save_generation(temporary: str, **_: object) -> None:
        if isinstance(generation, GenerationConfig):
            generation.to_json_file(Path(temporary) / "generation_config.json", keys_to_pop=["compile_config"])

    def save(temporary: str) -> None:
        # as it is: published ones have values that are of no use, which some versions refuse to save
        saves = SimpleNamespace(save_pretrained=save_generation)
        with nullcontext() if generation is None else assigned(root, generation_config=saves):
            root.save_pretrained(temporary, state_dict={})
        written = Path(temporary) / "config.json"
        if written.is_file():  # on rank 0
            config.update(json.loads(written.read_text(encoding="utf-8")))
        for file in (written, *Path(temporary).glob("*.safetensors")):
            file.unlink(missing_ok=True)

    generation = getattr(root, "generation_config", None)
    before = {name: getattr(root.config, name, None) for name in ("dtype", "architectures")}
    try:
        return config, copied(save, folder)
    finally:
        for name, value in before.items():
            setattr(root.config, name, value)


def check_exported(root: nn.Module) -> None:
    """
    Raises:
        UnsupportedModelError: a model's state dict, by which the checkpoint is written, is without some parameters, or
            has tensors of a type that such files cannot hold; or transformers does not write its configuration.
    """
    state = root.state_dict(keep_vars=True)
    missing = [name for name, _ in root.named_parameters() if name not in state]
    if missing:
        raise UnsupportedModelError(
            f"`state_dict` of {type(root).__name__} leaves out, or names otherwise, {len(missing)} parameters "
            f"({listed(missing, 3)}), and what is exported is its state. Let it return all of them by the "
            "names that `named_parameters` has (without wrappers around layers, as of activation checkpointing); what "
            "checkpoints of the training are not to hold can be taken out in `on_save_checkpoint`."
        )
    types = {name: tensor.dtype for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if unknown := [f"{name} ({dtype})" for name, dtype in types.items() if dtype not in READABLE]:
        raise UnsupportedModelError(
            f"A safetensors checkpoint cannot hold {listed(unknown, 3)}. Register what can be computed anew with "
            "persistent=False, or convert it, a torch.complex128 to torch.complex64."
        )
    with tempfile.TemporaryDirectory() as temporary, no_bars():
        try:
            config_files(root, Path(temporary))
        except Exception as error:  # at the end, when it is needed, would be late
            raise UnsupportedModelError(
                f"transformers cannot write the configuration of {type(root).__name__}: {type(error).__name__}: {error}"
            ) from error


def copied(save: Callable[[str], object], folder: Path) -> list[str]:
    """Put what `save` writes into the folder that it is given into `folder`, each file whole or not at all, and return
    their names there."""
    with tempfile.TemporaryDirectory() as temporary:
        save(temporary)
        files = [path for path in sorted(Path(temporary).rglob("*")) if path.is_file()]
        names = [str(path.relative_to(temporary)) for path in files]
        for name, path in zip(names, files, strict=True):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            replace_file(folder / name, path.read_bytes())
    return names


def written_before(folder: Path) -> list[Path]:
    """The files that an earlier run left in its folder; others are the user's."""
    names = [MARKER, INDEX, MANIFEST, "report.json", "report.html"]
    with suppress(OSError, ValueError):
        given = map(Path, json.loads((folder / MARKER).read_text(encoding="utf-8")).get(FILES, ()))
        names += [str(path) for path in given if not path.is_absolute() and ".." not in path.parts]
    shards = folder.glob("model-[0-9]*-of-[0-9]*.safetensors")
    return [*(folder / name for name in names), *shards, *partly_written(folder)]


def partly_written(folder: Path) -> list[Path]:
    """Files that a run was writing when it died: ours, and those of safetensors."""
    return [path for path in folder.iterdir() if _PARTLY.fullmatch(path.name) and path.is_file()]
