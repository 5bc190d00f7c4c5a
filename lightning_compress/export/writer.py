"""The checkpoint folder, written while the run goes on: for each subgraph a safetensors shard, or some if it is large,
then shards of what no subgraph holds, then the index, then config.json.

Ranks pack and write different shards of a subgraph. Which shards there are does not depend on them. Where nodes have
folders of their own, the ranks of each node write a whole checkpoint: all have all codes, so nothing need be sent.

A shard is written under another name, synced, read back and compared, and renamed; then the manifest gets its line
(`calibration.resume`). `config.json` and the index come last and a file INCOMPLETE is there until then, so no loader
takes an unfinished folder for a checkpoint, and a run that is started again continues it. Only one subgraph's tensors
are in memory, or one shard's of what no subgraph holds.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import final

from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightning_compress.calibration.boundary import FOLDER as ACTIVATIONS
from lightning_compress.calibration.boundary import forget_boundaries
from lightning_compress.calibration.layout import packed_bytes, shard_keys
from lightning_compress.calibration.quantized import QuantizedModule, Restored
from lightning_compress.calibration.records import SubgraphRecord
from lightning_compress.calibration.resume import (
    MANIFEST,
    Begun,
    Finished,
    Shard,
    append_finished,
    differences,
    read_manifest,
    replace_file,
    replacing,
    start_manifest,
    sync,
)
from lightning_compress.calibration.static_inputs import StaticInput
from lightning_compress.distributed.collective import Collective, SingleProcess
from lightning_compress.distributed.folder import shared_folder
from lightning_compress.errors import CompressionError, OutputDirectoryError, listed
from lightning_compress.export.beside import FILES, config_files, copied, partly_written, written_before
from lightning_compress.export.checkpoint import INCOMPLETE, MARKER, PLAN, SavesPretrained, check_output_dir
from lightning_compress.export.packing import (
    PACKED_NAMES,
    PackedModule,
    checkpoint_names,
    nbytes,
    own_names,
    pack,
    packed_names,
    quantization_config,
    unpack,
)
from lightning_compress.export.shards import write_shards, writing
from lightning_compress.graph.stages import Subgraph
from lightning_compress.graph.unfold import Unfolding
from lightning_compress.memory.files import INDEX, free_bytes
from lightning_compress.memory.store import WeightStore
from lightning_compress.recipe.resolve import ResolvedRecipe

_NOTICE = (
    "This folder holds an unfinished run of lightning_compress and is no checkpoint yet.\n"
    "Start the same run again to continue it where it stopped (manifest.jsonl says where), or delete the folder.\n"
)


_NOTHING_CHOSEN = Begun()
_PIECE = 32 << 20  # bytes of a file that are sent at a time


@final
class Unwritten:
    """The output of a run that leaves no more than the model in memory: everything is packed, measured, and dropped."""

    finished: tuple[SubgraphRecord, ...] = ()

    def restore(self, index: int, module: str) -> Restored:
        raise AssertionError("nothing is finished")

    def pack(self, quantized: QuantizedModule) -> int:
        return nbytes(pack(quantized))

    def commit(self, subgraph: Subgraph, record: SubgraphRecord) -> SubgraphRecord:
        return record


@final
class CheckpointWriter:
    """Writes what `calibrate` quantizes; knows what an interrupted run has written already.

    Args:
        folder: the checkpoint; created if needed. A finished one of ours in it is replaced when the first subgraph is,
            unless it is of this very run.
        root: the model.
        resolved: its recipe.
        subgraphs: of the run.
        store: brings what no subgraph has brought.
        fingerprints: see `calibration.resume.fingerprints`.
        resume: continue a run that is the same, also one that was finished but for what comes behind it (reading it
            back, the report); otherwise start over.
        collective: the ranks. All do the same calls; the manifest and what comes at the end are written by the first
            rank of those that share the folder.
        begun: what this run has chosen; one that continues it does the same.

    Raises:
        OutputDirectoryError: the folder is not ours, is neither one for all ranks nor one on each node, or holds an
            unfinished run of something else.
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
        begun: Begun = _NOTHING_CHOSEN,
    ) -> None:
        check_output_dir(folder)
        self._collective = collective or SingleProcess()
        self.shared = shared_folder(folder, self._collective)
        self._is_writing = self.shared.is_first
        self.folder = folder
        self._root = root
        self._resolved = resolved
        self._store = store
        self._parts = shard_keys(root, subgraphs, resolved)
        names = [(part, piece) for part, pieces in enumerate(self._parts) for piece in range(len(pieces))]
        self._names = {
            place: f"model-{count:05d}-of-{len(names):05d}.safetensors" for count, place in enumerate(names, 1)
        }
        self._owners = {key: self._owner(part, piece) for part, piece in names for key in self._parts[part][piece]}
        self._packed: dict[str, PackedModule] = {}
        self._stored = packed_names(root)
        self._own = own_names(root, resolved.assignments, chain.from_iterable(self._parts))
        self._fingerprints, self._now = fingerprints, begun
        holds_finished = (folder / MARKER).is_file() and not (folder / INCOMPLETE).is_file()
        # as the first rank sees it, for what others see of a file system may be older
        self._is_begun, self._lines = self._agreed(self._begun() if resume and self._is_writing else None)
        self.replaces_finished = holds_finished and not self._is_begun
        if self._is_writing:
            self._check_room()
        self._collective.meet(f"looking for room in {folder}")  # what was copied is in place for all

    def _begun(self) -> list[Finished] | None:
        """What is there of this run; None: it has not begun."""
        if not (self.folder / MANIFEST).is_file():
            return None
        is_finished = not (self.folder / INCOMPLETE).is_file()
        if is_finished and differences(self.folder, self._fingerprints):
            return None
        lines = read_manifest(self.folder, self._fingerprints, self._now)
        if is_finished and len(lines) != len(self._parts):  # shards were removed: what is behind them is made anew
            with writing(self.folder, "its first files"):
                self._mark_unfinished([self.folder / name for name in ("report.json", "report.html")])
        for leftover in partly_written(self.folder):
            leftover.unlink(missing_ok=True)  # another rank may be removing its own, see `shared_folder`
        return lines

    def _agreed(self, mine: list[Finished] | None) -> tuple[bool, list[Finished]]:
        """Whether the run has begun in any of the ranks' folders, and what is finished there; others are given it."""
        what = f"reading {self.folder / MANIFEST}"
        lengths = self._collective.gather(-1 if mine is None else len(mine), what)
        longest = max(lengths)
        if longest < 0:
            return False, []
        source = lengths.index(longest)
        lines = self._collective.broadcast(mine or [], what, source)
        if self._is_writing and mine is None:
            with writing(self.folder, "its first files"):
                self._begin()
        num_here = len(mine or []) if self._is_writing else longest
        fewest = min(self._collective.gather(num_here, what))
        for number, line in enumerate(lines[fewest:], fewest):
            for shard in line.shards:
                self._copy(shard, source, is_missing=number >= num_here)
            if number >= num_here:
                with writing(self.folder, MANIFEST):
                    append_finished(self.folder, line)
        return True, lines

    def _copy(self, shard: Shard, source: int, is_missing: bool) -> None:
        """Send a shard from rank `source` to the ranks in whose folders it `is_missing`."""
        path = self.folder / shard.name
        with writing(self.folder, path.name), ExitStack() as stack:
            read = stack.enter_context(path.open("rb")) if self._collective.rank == source else None
            written = stack.enter_context(stack.enter_context(replacing(path)).open("wb")) if is_missing else None
            for _ in range(0, shard.nbytes, _PIECE):
                piece = b"" if read is None else read.read(_PIECE)
                piece = self._collective.broadcast(piece, f"copying {path.name} from rank {source}", source)
                if written is not None:
                    written.write(piece)

    @property
    def finished(self) -> tuple[SubgraphRecord, ...]:
        """The subgraphs that an earlier, interrupted run has finished."""
        return tuple(line.record for line in self._lines if line.record is not None)

    def pack(self, quantized: QuantizedModule) -> int:
        """Pack a module of the subgraph that is being solved, if this rank writes it, and return its packed bytes."""
        if self._owners[f"{quantized.module}.weight"] != self._collective.rank:
            return 0
        self._packed[quantized.module] = pack(quantized)
        return nbytes(self._packed[quantized.module])

    def restore(self, index: int, module: str) -> Restored:
        """A module of subgraph `index` as its shard holds it."""
        named = {local: f"{self._stored.get(module, module)}.{local}" for local in PACKED_NAMES}
        name = next(shard.name for shard in self._lines[index].shards if not set(named.values()).isdisjoint(shard.keys))
        with safe_open(self.folder / name, framework="pt") as file:
            stored = set(file.keys())
            packed = {local: file.get_tensor(key) for local, key in named.items() if key in stored}
        weight = unpack(packed, self._resolved.assignments[module].scheme)
        return Restored(weight, StaticInput.of(packed))

    def commit(self, subgraph: Subgraph, record: SubgraphRecord) -> SubgraphRecord:
        """Write the subgraph's shards, while its weights are at hand, and add it to the manifest.

        Returns:
            The record with the packed bytes of all ranks, and the seconds that this took.
        """
        begin = time.perf_counter()
        part = len(self._lines)
        assert record.index == part
        if not self._is_begun:
            if self._is_writing:
                with writing(self.folder, "its first files"):
                    self._begin()
            self._collective.meet(f"emptying {self.folder}")  # else what others write is removed along with the rest
            self._is_begun = True
        mine = [piece for piece in range(len(self._parts[part])) if self._owner(part, piece) == self._collective.rank]
        shards = self._written(part, mine)
        sizes = {module.module: module.bytes_after for module in record.modules if module.module in self._packed}
        self._packed.clear()
        all_shards: dict[int, Shard] = {}
        for written, packed in self._collective.gather((shards, sizes), f"writing {subgraph.name}"):
            all_shards |= written
            sizes |= packed
        modules = tuple(replace(module, bytes_after=sizes[module.module]) for module in record.modules)
        record = replace(record, modules=modules, write_s=time.perf_counter() - begin)
        line = Finished(record, tuple(all_shards[piece] for piece in sorted(all_shards)))
        line = self._collective.broadcast(line, f"writing {subgraph.name}")  # with the seconds of rank 0
        self._append(line)
        assert line.record is not None
        return line.record

    def close(self, tokenizer: SavesPretrained | None = None) -> None:
        """Write what no subgraph holds, shard by shard; then the index, the tokenizer and, last, config.json."""
        if self._is_writing:
            for part in range(len(self._lines), len(self._parts)):
                with self._store.onload((), list(chain(*self._parts[part]))):
                    shards = self._written(part, range(len(self._parts[part])))
                self._append(Finished(None, tuple(shards.values())))
        what = "writing what no subgraph holds"
        self._collective.meet(what)
        names = self._write_beside(tokenizer) if self._collective.rank == 0 else []  # transformers does so on rank 0
        if self.shared.num_copies > 1:
            files = self._collective.broadcast({name: (self.folder / name).read_bytes() for name in names}, what)
            with writing(self.folder, "index and configuration"):
                for name, content in files.items() if self._is_writing else ():
                    (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    replace_file(self.folder / name, content)
        if self._is_writing:
            with writing(self.folder, f"its state ({INCOMPLETE})"):
                forget_boundaries(self.folder / ACTIVATIONS)
                (self.folder / INCOMPLETE).unlink(missing_ok=True)
                (self.folder / PLAN).unlink(missing_ok=True)
                sync(self.folder)
        self._collective.meet(what)

    def _write_beside(self, tokenizer: SavesPretrained | None) -> list[str]:
        """The files beside the weights, config.json last; returns their names."""
        shards = tuple(shard for line in self._lines for shard in line.shards)
        weight_map = {key: shard.name for shard in shards for key in shard.keys}
        total = sum(shard.nbytes for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with writing(self.folder, "index and configuration"):
            _write_json(self.folder / INDEX, index)
            others = [] if tokenizer is None else copied(tokenizer.save_pretrained, self.folder)
            config, beside = config_files(self._root, self.folder)
            others = sorted({*others, *beside})
            _write_json(self.folder / MARKER, {"recipe": self._resolved.recipe.to_dict(), FILES: others})
            names = checkpoint_names(self._root)
            config["quantization_config"] = quantization_config(self._resolved, self._root, names)
            _write_json(self.folder / "config.json", config)
        return [INDEX, *others, MARKER, "config.json"]

    def _check_room(self) -> None:
        """Refuse to begin what cannot be finished."""
        state = self._root.state_dict(keep_vars=True)
        missing = chain.from_iterable(chain(*self._parts[len(self._lines) :]))
        needed = sum(packed_bytes(key, state[key], self._resolved) for key in missing)
        free = free_bytes(self.folder)
        if self.folder.is_dir() and not self._is_begun:  # a finished checkpoint is replaced
            free += sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())
        if needed > free:
            raise OutputDirectoryError(
                f"The checkpoint needs about {needed / 1e6:.1f} MB, and {self.folder} has {free / 1e6:.1f} MB left. "
                "Make room, or give an output_dir elsewhere."
            )

    def _begin(self) -> None:
        """Make the folder an unfinished one, without anything of an earlier run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        before = written_before(self.folder)
        (self.folder / MANIFEST).unlink(missing_ok=True)  # first: a finished run's is not that of an unfinished one
        self._mark_unfinished(before)
        forget_boundaries(self.folder / ACTIVATIONS)
        start_manifest(self.folder, self._fingerprints, self._now)

    def _mark_unfinished(self, removed: Sequence[Path]) -> None:
        """Let no loader take the folder for a checkpoint, and remove these files."""
        replace_file(self.folder / INCOMPLETE, _NOTICE.encode())
        for path in (self.folder / "config.json", *removed):
            path.unlink(missing_ok=True)

    def _owner(self, part: int, piece: int) -> int:
        """The rank that packs and writes a shard, of those that share this one's folder."""
        return self.shared.ranks[(part + piece) % len(self.shared.ranks)]

    def _written(self, part: int, pieces: Sequence[int]) -> dict[int, Shard]:
        """Write shards of a part."""
        paths = {piece: self.folder / self._names[part, piece] for piece in pieces}
        shards = write_shards({path: self._state(self._parts[part][piece]) for piece, path in paths.items()})
        return dict(zip(paths, shards, strict=True))

    def _append(self, line: Finished) -> None:
        if self._is_writing:
            with writing(self.folder, MANIFEST):
                append_finished(self.folder, line)
        self._lines.append(line)

    def _state(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """The checkpoint's tensors of these keys of the state dict, under their names in the original checkpoint, or,
        where those would lead to no module (`packed_names`), their own."""
        as_it_is: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        taken: list[tuple[int, int]] = []
        for key in keys:
            module, _, name = key.rpartition(".")
            if module in self._packed and name == "weight":
                stored = self._stored.get(module, module)
                as_it_is.update({f"{stored}.{local}": tensor for local, tensor in self._packed[module].items()})
            else:
                owner = self._root.get_submodule(module)
                tensor = getattr(owner, name).detach().cpu()
                tensor = (owner.joined(name, tensor) if isinstance(owner, Unfolding) else tensor).contiguous()
                first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                is_taken = any(first < end and begin < last for begin, end in taken)
                names = as_it_is if key in self._own else state
                names[key] = tensor.clone() if is_taken else tensor  # safetensors stores no memory twice
                taken.append((first, last))
        if isinstance(self._root, PreTrainedModel):
            try:
                state = revert_weight_conversion(self._root, state)
            except Exception as error:  # whatever a conversion makes of tensors that it was not written for
                raise CompressionError(
                    f"transformers cannot give the tensors of {type(self._root).__name__} ({listed(state)}) the names "
                    f"that its checkpoints have: {type(error).__name__}: {error}. Add their modules to `ignore`."
                ) from error
        return dict(sorted((state | as_it_is).items()))


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
