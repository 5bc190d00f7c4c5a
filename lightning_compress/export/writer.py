"""The checkpoint folder, written while the run goes on: one safetensors shard per subgraph, then shards of what no
subgraph holds, then the index, then config.json.

A shard is written under another name, synced, read back and compared, and renamed; then the manifest gets its line
(`calibration.resume`). `config.json` and the index come last and a file INCOMPLETE is there until then, so no loader
takes an unfinished folder for a checkpoint, and a run that is started again continues it. Only one shard's tensors are
in memory.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import final
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightning_compress.calibration.records import SubgraphRecord
from lightning_compress.calibration.resume import (
    MANIFEST,
    Finished,
    append_finished,
    read_manifest,
    replace_file,
    replacing,
    start_manifest,
    sync,
)
from lightning_compress.calibration.solve import QuantizedModule, Restored
from lightning_compress.distributed.collective import Collective, SingleProcess
from lightning_compress.errors import OutputDirectoryError
from lightning_compress.export.checkpoint import INCOMPLETE, MARKER, SavesPretrained, check_output_dir
from lightning_compress.export.packing import (
    PACKED_NAMES,
    PackedModule,
    checkpoint_names,
    nbytes,
    pack,
    quantization_config,
    unpack,
)
from lightning_compress.export.verify import read_back
from lightning_compress.graph.stages import Subgraph
from lightning_compress.memory.files import INDEX
from lightning_compress.memory.store import WeightStore
from lightning_compress.recipe.resolve import ResolvedRecipe

_SHARD_BYTES = 1 << 28
"""Of what no subgraph holds, this much is in memory at a time, or one layer if that is more."""
_NOTICE = (
    "This folder holds an unfinished run of lightning_compress and is no checkpoint yet.\n"
    "Start the same run again to continue it where it stopped (manifest.jsonl says where), or delete the folder.\n"
)


@final
class Unwritten:
    """The output of a run that leaves no more than the model in memory: everything is packed, measured, and dropped."""

    finished: tuple[SubgraphRecord, ...] = ()

    def restore(self, index: int, module: str) -> Restored:
        raise AssertionError("nothing is finished")

    def pack(self, quantized: QuantizedModule) -> int:
        return nbytes(pack(quantized))

    def commit(self, subgraph: Subgraph, record: SubgraphRecord) -> None:
        pass


@final
class CheckpointWriter:
    """Writes what `calibrate` quantizes; knows what an interrupted run has written already.

    Args:
        folder: the checkpoint; created if needed. A finished checkpoint of ours in it is replaced when the first
            subgraph is.
        root: the model.
        resolved: its recipe.
        subgraphs: of the run.
        store: brings what no subgraph has brought.
        fingerprints: see `calibration.resume.fingerprints`.
        resume: continue an unfinished run that is the same; otherwise start over.
        collective: the ranks. Rank 0 writes; all do the same calls, and have to see the folder.

    Raises:
        OutputDirectoryError: the folder is not ours, is not one folder for all ranks, or holds an unfinished run of
            something else.
    """

    def __init__(
        self,
        folder: Path,
        root: nn.Module,
        resolved: ResolvedRecipe,
        subgraphs: Sequence[Subgraph],
        store: WeightStore,
        fingerprints: Mapping[str, str],
        resume: bool = True,
        collective: Collective | None = None,
    ) -> None:
        check_output_dir(folder)
        self._collective = collective or SingleProcess()
        self._is_writing = self._collective.rank == 0
        _check_shared(folder, self._collective)
        self.folder = folder
        self._root = root
        self._resolved = resolved
        self._store = store
        self._parts = _parts(root, subgraphs)
        numbered = [number for number, keys in enumerate(self._parts) if keys]
        self._shards = {
            number: f"model-{count:05d}-of-{len(numbered):05d}.safetensors" for count, number in enumerate(numbered, 1)
        }
        self._packed: dict[str, PackedModule] = {}
        self._fingerprints = fingerprints
        self._lines: list[Finished] = []
        self._is_begun = resume and (folder / INCOMPLETE).is_file() and (folder / MANIFEST).is_file()
        if self._is_begun and self._is_writing:
            self._lines = read_manifest(folder, fingerprints)
            for leftover in folder.glob(".*.partial"):
                leftover.unlink()
        self._check_room()
        self._lines = self._collective.broadcast(self._lines, f"reading {folder / MANIFEST}")

    @property
    def finished(self) -> tuple[SubgraphRecord, ...]:
        """The subgraphs that an earlier, interrupted run has finished."""
        return tuple(line.record for line in self._lines if line.record is not None)

    def pack(self, quantized: QuantizedModule) -> int:
        """Pack a module of the subgraph that is being solved; returns its packed bytes."""
        self._packed[quantized.module] = pack(quantized)
        return nbytes(self._packed[quantized.module])

    def restore(self, index: int, module: str) -> Restored:
        """A module of subgraph `index` as its shard holds it."""
        with safe_open(self.folder / self._shards[index], framework="pt") as file:
            stored = set(file.keys())
            named = {local: _stored_key(self._root, f"{module}.{local}") for local in PACKED_NAMES}
            packed = {local: file.get_tensor(key) for local, key in named.items() if key in stored}
        weight = unpack(packed, self._resolved.assignments[module].scheme)
        return Restored(weight, packed.get("input_scale"), packed.get("input_zero_point"))

    def commit(self, subgraph: Subgraph, record: SubgraphRecord) -> None:
        """Write the subgraph's shard, while its weights are at hand, and add it to the manifest."""
        assert record.index == len(self._lines)
        if self._is_writing and not self._is_begun:
            with self._writing("its first files"):
                self._begin()
        line = self._written(record) if self._is_writing else None
        self._lines.append(self._collective.broadcast(line, f"writing {subgraph.name}"))  # type: ignore[arg-type]
        self._packed.clear()

    def close(self, tokenizer: SavesPretrained | None = None) -> None:
        """Write what no subgraph holds, shard by shard; then the index, the tokenizer and, last, config.json."""
        if self._is_writing:
            self._finish(tokenizer)
        self._collective.broadcast(None, "writing what no subgraph holds")

    def _finish(self, tokenizer: SavesPretrained | None) -> None:
        for number in range(len(self._lines), len(self._parts)):
            with self._store.onload((), self._parts[number]):
                self._lines.append(self._written(None))
        weight_map = {key: line.shard for line in self._lines for key in line.keys}
        total = sum(line.nbytes for line in self._lines)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with self._writing("index and configuration"):
            _write_json(self.folder / INDEX, index)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(self.folder))
            _write_json(self.folder / MARKER, {"recipe": self._resolved.recipe.to_dict()})
            config = _config_files(self._root, self.folder)
            names = checkpoint_names(self._root)
            config["quantization_config"] = quantization_config(self._resolved, self._root, names)
            _write_json(self.folder / "config.json", config)
            (self.folder / INCOMPLETE).unlink()
            sync(self.folder)

    def _check_room(self) -> None:
        """Refuse to begin what cannot be finished."""
        state = self._root.state_dict(keep_vars=True)
        needed = sum(self._packed_bytes(key, state[key]) for keys in self._parts[len(self._lines) :] for key in keys)
        existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if self.folder.is_dir() and not self._is_begun:  # a finished checkpoint is replaced
            free += sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())
        if needed > free:
            raise OutputDirectoryError(
                f"The checkpoint needs about {needed / 1e6:.1f} MB, and {self.folder} has {free / 1e6:.1f} MB left. "
                "Make room, or give an output_dir elsewhere."
            )

    def _packed_bytes(self, key: str, tensor: Tensor) -> int:
        """About what a tensor takes in its shard: codes, and scales if there are many."""
        module, _, name = key.rpartition(".")
        if name != "weight" or module not in self._resolved.assignments:
            return tensor.nbytes
        args = self._resolved.assignments[module].weights
        scales = tensor.nbytes // args.group_size if args.group_size and args.group_size > 0 else 0
        return int(tensor.numel() * args.num_bits // 8 + scales)

    def _begin(self) -> None:
        """Make the folder an empty, unfinished one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / INCOMPLETE, _NOTICE.encode())
        for entry in sorted(self.folder.iterdir(), key=lambda path: path.name != "config.json"):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != INCOMPLETE:
                entry.unlink()
        start_manifest(self.folder, self._fingerprints)
        self._is_begun = True

    def _written(self, record: SubgraphRecord | None) -> Finished:
        """Write the next part's shard, if it has one, and its line in the manifest."""
        number = len(self._lines)
        line = Finished(record, None, "", 0, ())
        if number in self._shards:
            path = self.folder / self._shards[number]
            state = self._state(self._parts[number])
            size = sum(tensor.nbytes for tensor in state.values())
            with self._writing(f"{path.name} ({size / 1e6:.1f} MB)"), replacing(path) as partial:
                save_file(state, partial, metadata={"format": "pt"})
                digest = read_back(partial, state)
            line = Finished(record, path.name, digest, path.stat().st_size, tuple(state))
        with self._writing(MANIFEST):
            append_finished(self.folder, line)
        return line

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Say what a disk's error means.

        Raises:
            OutputDirectoryError: in place of what the operating system says.
        """
        try:
            yield
        except (OSError, SafetensorError) as error:
            existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
            free = shutil.disk_usage(existing).free
            raise OutputDirectoryError(
                f"{self.folder}: {what} could not be written, {free / 1e6:.1f} MB are free there: {error}. Make room "
                "and start the same run again: it continues where this one failed."
            ) from error

    def _state(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """The checkpoint's tensors of these keys of the state dict, under their names in the original checkpoint."""
        state: dict[str, Tensor] = {}
        for key in keys:
            module, _, name = key.rpartition(".")
            if module in self._packed and name == "weight":
                state.update({f"{module}.{local}": tensor for local, tensor in self._packed[module].items()})
            else:
                tensor = getattr(self._root.get_submodule(module), name)
                state[key] = tensor.detach().cpu().contiguous()
        if isinstance(self._root, PreTrainedModel):
            state = revert_weight_conversion(self._root, state)
        return dict(sorted(state.items()))


def _check_shared(folder: Path, collective: Collective) -> None:
    """All ranks read what rank 0 writes."""
    if collective.size == 1:
        return
    collective.gather(None, f"looking for {folder}")  # all have looked at what was there before
    probe = ""
    if collective.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        probe = f".{uuid4().hex}.partial"
        (folder / probe).touch()
    probe = collective.broadcast(probe, f"looking for {folder}")
    seen = collective.gather((folder / probe).is_file(), f"looking for {folder}")
    if collective.rank == 0:
        (folder / probe).unlink()
    if not all(seen):
        blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
        raise OutputDirectoryError(
            f"{folder.absolute()} on rank 0 is not what ranks {blind} find there. Give an output_dir on a file system "
            "that all nodes share."
        )


def _parts(root: nn.Module, subgraphs: Sequence[Subgraph]) -> list[list[str]]:
    """The keys of the state dict that each subgraph's shard holds, and after them, in as many parts as it takes, those
    that no subgraph has.

    A tied tensor is written once, with its first name that is not declared to be tied to another.
    """
    ignored = set(getattr(root, "_keys_to_ignore_on_save", None) or ())
    tied = set(getattr(root, "all_tied_weights_keys", None) or ())
    solved_by = {module: number for number, subgraph in enumerate(subgraphs) for module in subgraph.solved}
    by_tensor: dict[object, list[str]] = {}
    state = root.state_dict(keep_vars=True)
    for key, tensor in state.items():
        if isinstance(tensor, Tensor) and key not in ignored:
            by_tensor.setdefault(_identity(tensor), []).append(key)
    names = (next((key for key in keys if key not in tied), keys[0]) for keys in by_tensor.values())
    waiting = {key: state[key].nbytes for key in names}
    parts: list[list[str]] = []
    for number, subgraph in enumerate(subgraphs):
        prefixes = tuple(f"{module}." for module in subgraph.modules)
        reached = [key for key in waiting if key in subgraph.tensors or (prefixes and key.startswith(prefixes))]
        mine = [key for key in reached if solved_by.get(key.rpartition(".")[0], number) == number]
        parts.append(mine)
        for key in mine:
            del waiting[key]
    return [*parts, *_rest(waiting)]


def largest_rest(root: nn.Module, subgraphs: Sequence[Subgraph]) -> tuple[int, int]:
    """Of what no subgraph holds the bytes of the largest shard, and of the largest tensor."""
    state = root.state_dict(keep_vars=True)
    parts = [[state[key].nbytes for key in keys] for keys in _parts(root, subgraphs)[len(subgraphs) :]]
    return max(map(sum, parts), default=0), max((max(part) for part in parts), default=0)


def _rest(sizes: Mapping[str, int]) -> Iterable[list[str]]:
    """Keys in parts of at most `_SHARD_BYTES`, or of one unit.

    Units are what transformers may store as one tensor, or rename together: a layer (up to the first number in the
    name), and of what is in none the branches (`lm_head`, `model.norm`).
    """
    units: dict[str, list[str]] = {}
    for key in sizes:
        names = key.split(".")
        first_number = next((place for place, name in enumerate(names) if name.isdigit()), 1)
        units.setdefault(".".join(names[: first_number + 1]), []).append(key)
    part: list[str] = []
    for unit in units.values():
        if part and sum(sizes[key] for key in (*part, *unit)) > _SHARD_BYTES:
            yield part
            part = []
        part += unit
    if part:
        yield part


def _identity(tensor: Tensor) -> object:
    """Equal for tensors that are one in memory: safetensors stores no memory twice."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _stored_key(root: nn.Module, key: str) -> str:
    """The name in the checkpoint of a key of the state dict."""
    if not isinstance(root, PreTrainedModel):
        return key
    return str(next(iter(revert_weight_conversion(root, {key: torch.empty(0)}))))


def _config_files(root: nn.Module, folder: Path) -> dict[str, object]:
    """Let transformers write what it writes beside the weights, and return the content of config.json, which waits."""
    if not isinstance(root, PreTrainedModel):
        return {}
    dtype = root.config.dtype
    with tempfile.TemporaryDirectory() as temporary:
        root.save_pretrained(temporary, state_dict={})
        root.config.dtype = dtype
        config: dict[str, object] = json.loads((Path(temporary) / "config.json").read_text())
        for file in Path(temporary).iterdir():
            if file.name != "config.json" and file.suffix != ".safetensors":
                replace_file(folder / file.name, file.read_bytes())
    return config


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
